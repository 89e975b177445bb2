"""What is wrong with parameters and token ids, whoever sends them. The server, `LLM` and the engine's admission ask."""

from collections.abc import Sequence

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.types import INT64, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOPS, SamplingParams

# (field, lowest, highest, whether it must be a whole number)
BOUNDS: tuple[tuple[str, float, float, bool], ...] = (
    ("max_tokens", 0, INT64, True),
    ("min_tokens", 0, INT64, True),
    ("temperature", 0, 2, False),
    ("top_p", 1e-9, 1, False),
    ("top_k", 0, INT64, True),
    ("min_p", 0, 1, False),
    ("presence_penalty", -2, 2, False),
    ("frequency_penalty", -2, 2, False),
    ("repetition_penalty", 1e-9, 10, False),
    ("seed", -INT64 - 1, INT64, True),
    ("n", 1, INT64, True),
    ("logprobs", 0, MAX_LOGPROBS, True),
    ("prompt_logprobs", 0, MAX_LOGPROBS, True),
)
MAX_BIAS = 100.0


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises what is wrong with parameters, whoever made them: a request's body or a user of `LLM`."""
    for name, low, high, whole in BOUNDS:
        value = getattr(sampling, name)
        if value is None and name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            continue
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise InvalidRequestError(f"{name} must be a {'whole ' * whole}number, not {value!r}", param=name)
        if not low <= value <= high:
            raise InvalidRequestError(f"{name} must be between {low:g} and {high:g}, not {value}", param=name)
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


def check_choices(n: int, max_rows: int) -> None:
    if not 1 <= n <= max_rows:
        raise InvalidRequestError(f"n must be between 1 and {max_rows}, not {n}", param="n")


def check_ids(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises when a text has an id that is not the model's; `param` is the field that it came in."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        at = next(place for place, token in enumerate(tokens) if not 0 <= token < vocab_size)
        message = f"{param}.{at}: token {tokens[at]} is not in the vocabulary, whose ids go from 0 to {vocab_size - 1}"
        raise InvalidRequestError(message, param=f"{param}.{at}")


def _check_token(token: object, vocab_size: int, param: str) -> None:
    if type(token) is not int or not 0 <= token < vocab_size:
        message = f"{param}: token {token!r} is not in the vocabulary, whose ids go from 0 to {vocab_size - 1}"
        raise InvalidRequestError(message, param=param)
