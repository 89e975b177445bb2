"""The one way from a call to a model, whatever dialect the call came in.

A dialect builds a `GenerationCall`. `prepare` finds the model and the adapter, renders and tokenises the prompt, checks
it against the model, and returns a `Generation` that has not begun; `respond` runs it, and the dialect's writer turns
what comes of it into bytes.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.runtime.client import TrainingClient
from mlx_parallm.server.call import GenerationCall
from mlx_parallm.server.constraints import grammar_of
from mlx_parallm.server.errors import JSONResponse
from mlx_parallm.server.generation import ChoiceStream, Collected, Collector, Generation
from mlx_parallm.server.models import ModelTable, ServedModel
from mlx_parallm.server.sse import EventStream, StreamWriter
from mlx_parallm.server.tokenizers import TokenizerPool
from mlx_parallm.text.detokenize import TextStream
from mlx_parallm.text.parsers.chat import Parser, chat_parser
from mlx_parallm.types import Collection, SamplingParams
from mlx_parallm.validation import check_choices, check_ids, check_sampling


class AnswerWriter(StreamWriter, Protocol):
    """How a dialect answers: whole, and in chunks."""

    def answer(self, results: Sequence[Collected]) -> Any: ...


class GenerationService:
    def __init__(
        self, models: ModelTable, config: ServeConfig, tokenizers: TokenizerPool, training: TrainingClient
    ) -> None:
        self._models = models
        self._config = config
        self._tokenizers = tokenizers
        self._training = training

    async def prepare(self, call: GenerationCall, request: Request, kind: str) -> Generation:
        """What a call asks for, not handed to a model yet. `kind` begins its requests' names."""
        served, version = self._models.version_of(call.model, call.lora_adapter, call.policy_version)
        prompts, inside_thinking = await self._prompts(call, served)
        grammar = await self._grammar(call, served, inside_thinking)
        sampling = [self._sampling(call, served, len(prompt), grammar) for prompt in prompts]
        check_choices(call.sampling.n, self._config.batch.max_batch_size)  # before anything is made for each of them
        if call.collect_trajectory:
            adapter = None if version is None else version.name
            self._training.check_collects(served.name, adapter, call.scoring_function)

        def make_choice(index: int, number: int) -> ChoiceStream:
            stream = _text_stream(call, served, prompts[number])
            parser = _parser(call, served, inside_thinking)
            return ChoiceStream(index, number, stream, parser, call.sampling.stop_token_ids, call.exact_tokens)

        request_id: str = request.scope["request_id"]
        generation = Generation(
            served,
            call,
            version,
            prompts,
            sampling,
            make_choice,
            name=f"{kind}-{request_id}",
            label=call.request_id or request_id,
            timeout=self._config.batch.request_timeout_seconds or None,
        )
        if call.collect_trajectory and call.scoring_function is not None:  # else its reward comes later, as feedback
            generation.score = partial(self._score, generation, call.scoring_function)
        return generation

    async def _prompts(self, call: GenerationCall, served: ServedModel) -> tuple[list[list[int]], bool]:
        """Token ids, and whether the last prompt ends inside the model's thinking."""
        # A prompt of which only the end is kept may be of any length.
        limit = served.context_length if call.truncate_prompt_tokens is None else None
        if call.chat is not None:
            prompt = await self._tokenizers.render(served, call.chat.conversation, call.add_special_tokens, limit)
            return [_truncated(prompt.tokens, call.truncate_prompt_tokens)], prompt.inside_thinking
        prompts: list[list[int]] = []
        for text in call.prompts:
            if isinstance(text, str):
                tokens = await self._tokenizers.encode(served, text, call.add_special_tokens, limit)
            else:
                tokens = text
            prompts.append(_truncated(tokens or _beginning(served), call.truncate_prompt_tokens))
        for number, prompt_ids in enumerate(prompts):
            if len(prompt_ids) >= served.context_length:
                raise ContextLengthError.of(served.context_length, len(prompt_ids))
            check_ids(prompt_ids, served.model.vocab_size, "prompt" if len(prompts) == 1 else f"prompt.{number}")
        return prompts, False

    async def _grammar(self, call: GenerationCall, served: ServedModel, inside_thinking: bool) -> str | None:
        structure = grammar_of(call, served, inside_thinking=inside_thinking)
        if structure is None:
            return None
        await self._tokenizers.run(partial(served.client.check_grammar, structure.grammar, structure.param))
        return structure.grammar

    def _sampling(
        self, call: GenerationCall, served: ServedModel, prompt_tokens: int, grammar: str | None
    ) -> SamplingParams:
        vocab_size, top_k = served.model.vocab_size, call.sampling.top_k
        default = self._config.batch.max_tokens or call.default_max_tokens
        max_tokens = completion_length(
            served,
            prompt_tokens,
            asked=call.sampling.max_tokens,
            default=default,
            prompt="prompt" if call.chat is None else "messages",
            param=call.max_tokens_field,
        )
        sampling = replace(
            call.sampling, max_tokens=max_tokens, top_k=0 if top_k >= vocab_size else max(top_k, 0), grammar=grammar
        )
        check_sampling(sampling, vocab_size)
        return sampling

    def _score(self, generation: Generation, scoring_function: str) -> "asyncio.Future[dict[int, float]]":
        collection = Collection(generation.recorded(), scoring_function, generation.call.metadata)
        return asyncio.wrap_future(self._training.collect(collection))


async def respond(generation: Generation, writer: AnswerWriter, request: Request) -> Response:
    """Runs a generation: as a stream where the call asks for one, else until the answer is whole."""
    if generation.call.stream:
        return EventStream(generation, writer)
    return JSONResponse(writer.answer(await Collector(generation).collect(request.receive)))


def completion_length(
    served: ServedModel, prompt_tokens: int, *, asked: int | None, default: int | None, prompt: str, param: str
) -> int | None:
    """The most tokens to generate; None leaves it to the context. What was asked for must fit, as in vLLM."""
    context = served.context_length
    room = context - prompt_tokens
    if room < 1:
        raise ContextLengthError.of(context, prompt_tokens, param=prompt)
    if asked is not None and asked > room:
        error = ContextLengthError.of(context, prompt_tokens, asked, param=prompt)
        error.param = param
        raise error
    return asked if asked is not None else (min(default, room) if default is not None else None)


def _truncated(tokens: list[int], keep: int | None) -> list[int]:
    return tokens if keep is None else tokens[-keep:]


def _beginning(served: ServedModel) -> list[int]:
    """What an empty text begins with: a model can't continue nothing at all."""
    token = served.tokenizer.bos_token_id
    if token is None:
        raise InvalidRequestError("the prompt is empty, and this model has no token to begin with", param="prompt")
    return [token]


def _text_stream(call: GenerationCall, served: ServedModel, prompt: list[int]) -> TextStream:
    return TextStream(
        served.vocabulary,
        call.sampling.stop,
        include_stop=call.include_stop,
        min_tokens=call.sampling.min_tokens,
        skip_special=call.skip_special_tokens,
        visible=served.marks if call.chat is not None else (),
        trim=call.chat is not None,
        prompt_tail=prompt[-8:],
    )


def _parser(call: GenerationCall, served: ServedModel, inside_thinking: bool) -> Parser | None:
    """None where answers are only text."""
    if call.chat is None:
        return None
    return chat_parser(
        served.tool_format,
        thinking=served.thinking,
        inside_thinking=inside_thinking,
        tools=call.chat.conversation.tools,
        parallel=call.chat.parallel_calls,
        separate_reasoning=call.chat.separate_reasoning,
        drop=served.tokenizer.structural_markers,
    )
