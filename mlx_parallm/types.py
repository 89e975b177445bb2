"""What crosses the border between the edges and the engine: plain dataclasses, no MLX.

A caller builds a `Request`, hands it to `engine.submit`, and receives `Delta`s. `SamplingParams` is
public: users of `LLM` build it by hand, the server builds it from a validated body.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mlx_parallm.errors import ParallmError

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 20  # likeliest tokens beside each
MAX_STOPS = 16
INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. `temperature=0` is greedy."""

    max_tokens: int | None = None  # None: as many as the context allows
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # on generated tokens
    frequency_penalty: float = 0.0  # on generated tokens
    repetition_penalty: float = 1.0  # on prompt and generated tokens; 1: off
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()  # matched on text, by text.detokenize, not on the engine thread
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: the chosen token's; k: the k likeliest too
    processed_logprobs: bool = False  # of generated tokens: as they were drawn, after temperature, penalties and cuts
    prompt_logprobs: int | None = None  # the same, for every prompt token but the first
    grammar: str | None = None  # an llguidance grammar that the output must follow

    def __post_init__(self) -> None:
        """A single stop string, and lists where tuples are kept, are what users write."""
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                object.__setattr__(self, name, (value,) if isinstance(value, kind) else tuple(value))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def penalized(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model, and the likeliest beside it."""

    token: int
    logprob: float
    rank: int  # 1: the likeliest
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a model's part of the process may hold, in bytes; `limit` and `kept` are the whole process's."""

    limit: int = 0  # all together
    weights: int = 0
    rows: int = 0  # keys and values of running rows
    blocks: int = 0  # cached blocks
    adapters: int = 0  # on the device
    training: int = 0  # parameters, optimiser and the activations of a piece of an update
    kept: int = 0  # freed memory that MLX keeps for what comes next


@dataclass(slots=True)
class Delta:
    """News of one choice of one request: tokens since the last news, or its end, or both.

    `tokens` never holds the end-of-sequence token or a stop id that ended the choice: that one is
    `stop_token`. `prompt_logprobs` and `cached_tokens` come with a choice's first delta. `versions` says of all its
    tokens so far which adapter version made them: (the first token's number, version), 0 for none.
    """

    request_id: str
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    stop_logprob: TokenLogprob | None = None
    versions: tuple[tuple[int, int], ...] = ()
    error: "ParallmError | None" = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0


@dataclass(slots=True)
class Request:
    """One prompt on its way to the engine. `on_delta` is called by whoever dispatches deltas."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    on_delta: Callable[[Delta], None]
    stream: bool = False
    priority: int = 0  # lower goes first
    timeout: float | None = None  # seconds from submission
    cache_salt: str = ""
    adapter: str | None = None
    adapter_version: int | None = None  # None: what the name means when the request arrives
    record: bool = False  # keep the log-probabilities of what is drawn
    label: str = ""  # what the client calls it
    first: int = 0  # the number of its first choice among those of its call
    follow: bool = False  # goes on with a newer version from the step after it is published
