"""What crosses the border between the edges and the engine: plain dataclasses, no MLX.

A caller builds a `Request`, submits it with a handler, and the handler receives `Delta`s.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mlx_parallm.arms import ArmStats
from mlx_parallm.policy_spans import Spans
from mlx_parallm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlx_parallm.errors import ParallmError

FinishReason = Literal["stop", "length", "abort", "error"]
UNNAMED_ADAPTER = "adapter"  # what an adapter is called that is loaded without a name
MAX_VERSION = 10**15  # that a client may give to an adapter: there are always newer ones


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model, and the likeliest beside it."""

    token: int
    logprob: float
    rank: int  # 1: the likeliest
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), likeliest first


@dataclass(slots=True)
class Delta:
    """A change of one choice of one request: tokens since the last delta, or its end, or both.

    `tokens` never holds the end-of-sequence token or a stop id that ended the choice: that one is
    `stop_token`. `prompt_logprobs` and `cached_tokens` come with a choice's first delta. `spans` says of all its
    tokens so far, and of those that the device was asked for, which adapter version makes them.
    """

    request_id: str
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    stop_logprob: TokenLogprob | None = None
    spans: Spans = ()
    error: "ParallmError | None" = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    begun: float | None = None  # by time.perf_counter, when its first token was there
    drafted: int = 0  # tokens so far, by speculation
    accepted: int = 0  # of those, tokens that were sampled too


@dataclass(slots=True, kw_only=True)
class ModelInfo:
    """A served model, as every process may know it."""

    name: str
    source: str  # the path or hub id it came from
    precision: str  # "float32", "bfloat16", "4-bit" …: what start-up prints
    context_length: int
    vocab_size: int  # the width of the logits, at least the tokenizer's
    kind: str = "chat"  # "vision": its prompts may hold images
    architecture: str = ""  # model_type of its config.json: "llama", "qwen3", …


UNKNOWN = "unknown"  # the kind of a model of the hub, before it is downloaded
ModelState = Literal["unloaded", "loading", "ready", "unloading", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A model of the pool, loaded or not."""

    name: str
    kind: str
    status: ModelState
    source: str
    created: int  # seconds since the epoch
    progress: float = 0.0  # of loading, up to 1
    error: str | None = None  # why it has failed
    pinned: bool = False  # stays in memory
    users: int = 0  # requests that use it
    loads: int = 0  # how often it was loaded
    bytes: int = 0  # of its weights; of one that is not loaded, what they will be, where that is known
    context_length: int | None = None
    signature: Mapping[str, Any] | None = None
    leaves_in: float | None = None  # seconds until it leaves memory, if nobody asks for it; None: it stays


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorInfo:
    """A served model that predicts, as every process may know it. Kinds with more to say extend it."""

    kind: str  # "embedding", "classifier", "reward", "network", "policy": what /v1/models says
    source: str = ""  # the path or hub id it came from
    precision: str = "float32"
    weight_bytes: int = 0
    context_length: int | None = None  # most tokens of an input, where inputs are texts
    vocab_size: int | None = None
    signature: Mapping[str, Any] | None = None  # names, shapes and dtypes of inputs and outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingInfo(PredictorInfo):
    dimensions: int
    trained_dimensions: tuple[int, ...] = ()  # sizes that a vector may be cut to
    prompts: Mapping[str, str] = field(default_factory=dict)  # what stands before an input, by name
    default_prompt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierInfo(PredictorInfo):
    """Its outputs are logits. Kind "reward": one label on a decoder, the usual form of reward models."""

    labels: tuple[str, ...]
    problem: Literal["single_label", "multi_label", "regression"] = "single_label"
    per_token: bool = False  # a label for each token, not for the whole text
    activation: Literal["softmax", "sigmoid", "identity"] = "softmax"  # what makes probabilities of the logits
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token and others that the template names


@dataclass(frozen=True, slots=True)
class TextTokens:
    """A text or a pair of texts on its way to a model that predicts."""

    tokens: Sequence[int]
    segments: Sequence[int] | None = None  # of a pair: 0 for the first text's tokens, 1 for the second's


@dataclass(slots=True, eq=False, kw_only=True)
class AdapterVersion:
    """One set of an adapter's weights, with what has become of it since it was published."""

    name: str
    number: int
    source: str
    rank: int
    bytes: int  # as it came
    config: Mapping[str, Any] | None = None  # as it came: for weights that come later without one
    created: float = field(default_factory=time.time)
    rows: int = 0  # that use it, or wait to
    requests: int = 0  # since it was published
    tokens: int = 0  # that it made
    pinned: bool = False  # kept, however many newer ones there are
    digest: str = ""  # of its weights as they are served; equal weights have equal ones
    stats: ArmStats = field(default_factory=ArmStats)

    @property
    def label(self) -> str:
        return f"{self.name}@{self.number}"


@dataclass(frozen=True, slots=True)
class AdapterRoute:
    """An adapter that requests for the model's own name get; without a name, the model alone."""

    name: str | None
    number: int | None  # None: what the name means
    share: float

    @property
    def label(self) -> str:
        if self.name is None:
            return "base"
        return self.name if self.number is None else f"{self.name}@{self.number}"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ImageInput:
    """An image as a model's image encoder takes it, in NumPy arrays."""

    digest: bytes  # of its pixels
    arrays: Mapping[str, Any]
    tokens: Sequence[int]  # that stand for it in a prompt; some of them are replaced by its features


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt, in their order: what the engine needs beside its tokens."""

    images: Sequence[ImageInput]
    places: Sequence[Any]  # of each image, (N,): the numbers of the tokens that its features replace
    content: list[int]  # the prompt as the prefix cache knows it: at those tokens, what names the image
    positions: Any = None  # (3, T), where the model's RoPE has three axes
    shift: int = 0  # what is added to a token's number behind the prompt to get its position

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(image.digest for image in self.images)


PauseMode = Literal["keep", "wait", "abort"]  # what becomes of running requests
OnDelta = Callable[[Delta], None]  # takes a request's deltas, wherever the events of a step are delivered


@dataclass(frozen=True, slots=True)
class CompletionNames:
    """What a completion may be called, beside the engine's own name of its request: feedback finds it by any of
    them."""

    client: str = ""  # the client's own name for its request, or the X-Request-Id
    dialect: str = ""  # what the completion calls itself
    http: str = ""  # the X-Request-Id

    @property
    def all(self) -> tuple[str, str, str]:
        return self.client, self.dialect, self.http


@dataclass(slots=True)
class Request:
    """One prompt on its way to the engine: plain values, which could be sent to another process."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    stream: bool = False
    priority: int = 0  # lower goes first
    timeout: float | None = None  # seconds from submission
    cache_salt: str = ""
    adapter: str | None = None
    adapter_version: int | None = None  # None: what the name means when the request arrives
    record: bool = False  # keep the log-probabilities of what is sampled
    names: CompletionNames = CompletionNames()
    owner: str = ""  # the name of the key that it came with
    first: int = 0  # the number of its first choice among those of its call
    rollout: bool = False  # gives way to requests that wait for a place
    follow: bool = False  # goes on with a newer version from the step after it is published
    images: PromptImages | None = None
    compiled_grammar: Any = None  # a CompiledGrammar, by `check_grammar`; None: compiled when it is submitted


@dataclass(frozen=True, slots=True)
class Collection:
    """A call whose completions are to be learnt from: the engine's names of its choices, and how many tokens each
    gave."""

    choices: Sequence[tuple[str, int, int]]  # (request, index of the choice in the call, tokens)
    scoring_function: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryInput:
    """A completion with its reward, as a trainer sends it. Ids and log-probabilities of a completion that this server
    gave may be left out: its `request_id` stands for them."""

    reward: float
    group_id: str = ""
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    logprobs: list[float] | None = None
    policy_version: int | None = None
    request_id: str | None = None
    index: int | None = None
    temperature: float = 1.0
    mask: list[bool] | None = None
    advantage: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What an update that was not refused has done."""

    policy_version: int
    published: bool
    used: int
    skipped: int
    rolled_back: str | None
    checkpoint: str | None
    saved: bool
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FeedbackReport:
    adapter: str
    buffered: int
    ready: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCall:
    """Prompts to sample from the current policy, to be scored, and perhaps to be learnt from."""

    prompts: Sequence[list[int]]
    sampling: SamplingParams
    adapter: str | None
    seed: int | None = None
    scoring_function: str | None = None
    metadata: Sequence[Mapping[str, Any]] | None = None  # one for each prompt
    submit: bool = False
    cache_salt: str = ""
    owner: str = ""  # the name of the key that it came with
    timeout: float | None = None  # seconds for all of it


@dataclass(frozen=True, slots=True)
class RolloutSample:
    request_id: str
    index: int
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    text: str
    logprobs: Sequence[float]
    reward: float | None
    finish_reason: str
    policy_spans: Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentSample:
    """A completion with its reward that came in lately; of a long one, its first tokens."""

    request_id: str | None
    reward: float
    completion_ids: Sequence[int]
    logprobs: Sequence[float] | None  # of the policy that sampled it; None: nobody knows
    policy_spans: Spans
    length: int  # in tokens, before it was cut


@dataclass(slots=True, kw_only=True)
class RecentGroup:
    """Completions that are compared with each other, and what has become of them."""

    group_id: str
    time: float  # seconds since the epoch
    prompt_ids: Sequence[int]  # of a long one, its last tokens
    samples: list[RecentSample]
    state: Literal["waiting", "learnt", "refused"] = "waiting"
    updates: int | None = None  # that stood after the one which took it
