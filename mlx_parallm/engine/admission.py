"""The last look at a request before it enters the engine; what is wrong with it is said on the caller's thread."""

import secrets
from collections.abc import Callable

from mlx_parallm.engine.rows import Row, row_seed
from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.sampling_params import check_sampling
from mlx_parallm.text.compiled_grammar import CompiledGrammar
from mlx_parallm.text.grammar import GrammarCompiler
from mlx_parallm.types import Request
from mlx_parallm.validation import check_choices, check_ids


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
                owner=request.owner,
                rollout=request.rollout,
                follows=request.follow,
                images=request.images,
            )
            for index in range(sampling.n)
        ]
        if sampling.grammar is not None:
            grammar: CompiledGrammar = request.compiled_grammar or self._grammars.compile(sampling.grammar)
            for row in rows:
                row.matcher, row.end_ids = grammar.matcher(), grammar.end_ids
        return rows

    def _room(self, request: Request) -> int:
        """How many tokens may follow the prompt."""
        length, model = len(request.prompt), self._model
        if not length:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if length >= model.context_length:
            raise ContextLengthError.of(model.context_length, length)
        check_ids(request.prompt, model.vocab_size, "prompt")
        if request.images is not None and model.vision is None:
            raise InvalidRequestError(f"{model.name} reads text only", param="messages")
        fitting = self._max_length(request.sampling.n)
        if length >= fitting:
            raise ContextLengthError(
                f"the prompt has {length} tokens, and the memory for keys and values holds {fitting}"
                f" for each of {request.sampling.n}",
                param="prompt",
            )
        return min(model.context_length, fitting) - length
