"""How a request's tokens are chosen: every sampling parameter with its default, its bounds and its meaning.

The bodies of all dialects, the flags of `parallm chat`, the dashboard's playground and the table in docs/GUIDE.md are
made of this. A new parameter is declared here, computed in `compute.sampling`, and said in plain NumPy in
`tests/unit/reference_sampler.py`. `SamplingParams` is public: users of `LLM` build it by hand. No MLX.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_args, get_type_hints

from mlx_parallm.errors import InvalidRequestError

INT64 = 2**63 - 1
MAX_LOGPROBS = 20  # likeliest tokens beside each
MAX_STOPS = 16
MAX_STOP_CHARS = 1024  # of one stop string
MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers that a parameter may be."""

    low: float
    high: float = INT64
    above: bool = False  # `low` itself is not allowed
    below: bool = False  # `high` itself is not allowed

    def allow(self, value: float) -> bool:
        high_enough = self.low < value if self.above else self.low <= value
        return high_enough and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        if not self.above and not self.below:
            return f"between {self.low:g} and {self.high:g}"
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        return f"{low} and {'below' if self.below else 'at most'} {self.high:g}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of `SamplingParams`: what its declaration says."""

    name: str
    default: Any  # what leaves it off, or leaves the choice to the server
    meaning: str
    bounds: Bounds | None  # None: it is not a number
    shared: bool  # every dialect that has such parameters takes it
    whole: bool
    optional: bool

    def check(self, value: object) -> None:
        """Raises what is wrong with a value."""
        if self.bounds is None or (value is None and self.optional):
            return
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            kind = "a whole number" if self.whole else "a number"
            raise InvalidRequestError(f"{self.name} must be {kind}, not {value!r}", param=self.name)
        if not self.bounds.allow(value):
            raise InvalidRequestError(f"{self.name} must be {self.bounds}, not {value}", param=self.name)


def parameter(default: Any, meaning: str, bounds: Bounds | None = None, *, shared: bool = False) -> Any:
    """A field of `SamplingParams`; a `default` that can be called makes a new value for each."""
    metadata = {"meaning": meaning, "bounds": bounds, "shared": shared}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. `temperature=0` is greedy."""

    max_tokens: int | None = parameter(None, "Most tokens of a completion; none: as many as fit", Bounds(0))
    min_tokens: int = parameter(0, "Fewest tokens before the completion may end", Bounds(0))
    temperature: float = parameter(1.0, "How far sampling spreads; 0 is greedy", Bounds(0, 2), shared=True)
    top_p: float = parameter(
        1.0, "Sample from the likeliest tokens that reach this share together", Bounds(0, 1, above=True), shared=True
    )
    top_k: int = parameter(0, "Sample from the k likeliest tokens; 0 or -1: off", Bounds(-1), shared=True)
    min_p: float = parameter(0.0, "Drop tokens less likely than this share of the likeliest", Bounds(0, 1), shared=True)
    presence_penalty: float = parameter(
        0.0, "Subtracted from the logit of each token that was generated", Bounds(-2, 2), shared=True
    )
    frequency_penalty: float = parameter(
        0.0, "The same, once for each time that it was generated", Bounds(-2, 2), shared=True
    )
    repetition_penalty: float = parameter(
        1.0, "Divides the logits of tokens of prompt and completion; 1: off", Bounds(0, 10, above=True), shared=True
    )
    logit_bias: dict[int, float] = parameter(dict, "Token id to a number added to its logit", shared=True)
    seed: int | None = parameter(None, "Same seed and prompt: same tokens", Bounds(-INT64 - 1), shared=True)
    n: int = parameter(1, "How many completions of each prompt", Bounds(1))
    # Matched on text by text.detokenize, not on the engine thread.
    stop: tuple[str, ...] = parameter((), "Text that ends the completion and is not part of it", shared=True)
    stop_token_ids: tuple[int, ...] = parameter((), "Tokens that end the completion and are not part of it")
    ignore_eos: bool = parameter(False, "Go on after the end-of-sequence token", shared=True)
    logprobs: int | None = parameter(
        None, "Log-probabilities of the sampled token and of so many of the likeliest", Bounds(0, MAX_LOGPROBS)
    )
    # As tokens were sampled, after temperature, penalties and cuts; else the model's own.
    processed_logprobs: bool = parameter(False, "Log-probabilities as tokens were sampled, not the model's own")
    prompt_logprobs: int | None = parameter(
        None, "The same for every token of the prompt but the first", Bounds(0, MAX_LOGPROBS)
    )
    grammar: str | None = parameter(None, "An llguidance grammar that the completion follows")

    def __post_init__(self) -> None:
        """A single stop string, lists where tuples are kept, and -1 for no top_k are what users write."""
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                object.__setattr__(self, name, (value,) if isinstance(value, kind) else tuple(value))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def penalized(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


def _read(declared: "Field[Any]", hint: Any) -> Parameter:
    types = set(get_args(hint)) or {hint}
    default = declared.default_factory() if declared.default_factory is not MISSING else declared.default
    whole = int in types
    optional = type(None) in types
    return Parameter(declared.name, default, whole=whole, optional=optional, **declared.metadata)


_HINTS = get_type_hints(SamplingParams)
PARAMETERS: Mapping[str, Parameter] = {one.name: _read(one, _HINTS[one.name]) for one in fields(SamplingParams)}
SHARED = tuple(name for name, one in PARAMETERS.items() if one.shared)
# The numbers among them, and how long a completion may be: what people set by hand.
ADJUSTABLE = tuple(name for name in ("max_tokens", *SHARED) if PARAMETERS[name].bounds is not None)


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises what is wrong with parameters, whoever made them: a request's body or a user of `LLM`."""
    for name, one in PARAMETERS.items():
        one.check(getattr(sampling, name))
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        message = f"min_tokens is {sampling.min_tokens}, over the limit of {sampling.max_tokens} tokens"
        raise InvalidRequestError(message, param="min_tokens")
    if sampling.max_tokens == 0 and sampling.prompt_logprobs is None:
        raise InvalidRequestError("max_tokens is 0, and no prompt_logprobs are asked for", param="max_tokens")
    _check_stops(sampling, vocab_size)
    for token, bias in sampling.logit_bias.items():
        _check_token(token, vocab_size, "logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            message = f"logit_bias must be between {-MAX_BIAS:g} and {MAX_BIAS:g}, not {bias!r}"
            raise InvalidRequestError(message, param="logit_bias")


def _check_stops(sampling: SamplingParams, vocab_size: int) -> None:
    if not all(isinstance(stop, str) and stop for stop in sampling.stop):
        raise InvalidRequestError("stop must hold strings that are not empty", param="stop")
    if len(sampling.stop) > MAX_STOPS:
        raise InvalidRequestError(f"at most {MAX_STOPS} stop strings are allowed", param="stop")
    if any(len(stop) > MAX_STOP_CHARS for stop in sampling.stop):
        raise InvalidRequestError(f"a stop string has at most {MAX_STOP_CHARS} characters", param="stop")
    for token in sampling.stop_token_ids:
        _check_token(token, vocab_size, "stop_token_ids")


def _check_token(token: object, vocab_size: int, param: str) -> None:
    if type(token) is not int or not 0 <= token < vocab_size:
        message = f"{param}: token {token!r} is not in the vocabulary, whose ids go from 0 to {vocab_size - 1}"
        raise InvalidRequestError(message, param=param)
