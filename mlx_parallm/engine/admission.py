"""The last look at a request before it enters the engine; what is wrong with it is said on the caller's thread."""

import secrets
from collections.abc import Callable, Sequence

from mlx_parallm.engine.rows import Row, row_seed
from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.text.grammar import GrammarCompiler
from mlx_parallm.types import INT64, MAX_LOGPROBS, MAX_STOPS, Request, SamplingParams

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


class Admission:
    def __init__(
        self, model: LanguageModel, grammars: GrammarCompiler, max_length: Callable[[int], int], max_rows: int
    ) -> None:
        self._model = model
        self._grammars = grammars
        self._max_length = max_length  # the longest that so many rows may get in the memory there is
        self._max_rows = max_rows

    def rows(self, request: Request) -> list[Row]:
        """A row for each choice, or an error that says what is wrong."""
        sampling = request.sampling
        check_sampling(sampling, self._model.vocab_size)
        check_choices(sampling.n, self._max_rows)
        room = self._room(request)
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= self._model.eos_token_ids
        rows = [
            Row(
                request.prompt,
                sampling,
                request.priority,
                row_seed(seed, index),
                max_tokens,
                stop_ids,
                follows=request.follow,
            )
            for index in range(sampling.n)
        ]
        if sampling.grammar is not None:
            for row in rows:
                row.matcher, row.end_ids = self._grammars.matcher(sampling.grammar), self._grammars.end_ids
        return rows

    def _room(self, request: Request) -> int:
        """How many tokens may follow the prompt."""
        length, model = len(request.prompt), self._model
        if not length:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if length >= model.context_length:
            raise ContextLengthError.of(model.context_length, length)
        check_ids(request.prompt, model.vocab_size, "prompt")
        fitting = self._max_length(request.sampling.n)
        if length >= fitting:
            raise ContextLengthError(
                f"the prompt has {length} tokens, and the memory for keys and values holds {fitting}"
                f" for each of {request.sampling.n}",
                param="prompt",
            )
        return min(model.context_length, fitting) - length
