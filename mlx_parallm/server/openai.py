"""`/v1/completions` and `/v1/chat/completions`: from a body to a generation, and back.

The path of a request: validated by its schema, rendered and tokenised (off the event loop when it is long), checked
against the model, handed to the engine; the format makes bytes of what comes back.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.admission import check_choices
from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.lora.registry import Version
from mlx_parallm.server import answers, params
from mlx_parallm.server.errors import JSONResponse
from mlx_parallm.server.formats import ChatWriter, CompletionWriter, ResponseOptions
from mlx_parallm.server.generation import ChoiceStream, Collected, Collector, Generation
from mlx_parallm.server.models import ModelTable, ServedModel
from mlx_parallm.server.routing import JSONRoute, add_routes
from mlx_parallm.server.schemas import ChatBody, CompletionBody, GenerationBody
from mlx_parallm.server.sse import EventStream, StreamWriter
from mlx_parallm.text.detokenize import TextStream
from mlx_parallm.text.parsers.chat import Parser, chat_parser
from mlx_parallm.text.prompts import Conversation, Prompt
from mlx_parallm.training.manager import NOT_ENABLED, Collection, TrainingManager
from mlx_parallm.types import SamplingParams

LONG_TEXT = 4_000  # characters; about a millisecond of tokenising
COMPLETION_TOKENS = 16  # OpenAI's default

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenizerPool:
    """A few threads for what would hold up the event loop."""

    pool: ThreadPoolExecutor

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    async def encode(
        self, served: ServedModel, text: str, add_special_tokens: bool, limit: int | None = None
    ) -> list[int]:
        def work() -> list[int]:
            return served.prompts.encode(text, add_special_tokens=add_special_tokens, limit=limit)

        return work() if len(text) < LONG_TEXT else await self.run(work)

    async def render(
        self, served: ServedModel, conversation: Conversation, add_special_tokens: bool, limit: int | None = None
    ) -> Prompt:
        def work() -> Prompt:
            return served.prompts.chat(conversation, add_special_tokens=add_special_tokens, limit=limit)

        return work() if conversation.size() < LONG_TEXT else await self.run(work)


class AnswerWriter(StreamWriter, Protocol):
    """How a route answers, whole and in chunks."""

    def answer(self, results: Sequence[Collected]) -> Any: ...


class OpenAI:
    """The two routes over the served models."""

    def __init__(
        self, table: ModelTable, config: ServeConfig, workers: TokenizerPool, training: TrainingManager | None = None
    ) -> None:
        self._table = table
        self._config = config
        self.workers = workers
        self._training = training  # of the first model

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])
        add_routes(
            router,
            ("/v1/completions", "POST", self.completions, answers.CompletionAnswer, "Continue text"),
            ("/v1/chat/completions", "POST", self.chat, answers.ChatCompletion, "Answer a conversation"),
            streams=True,
        )
        return router

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Continues each prompt, `n` times. With `stream`, chunks arrive as server-sent events."""
        served, generation = await self.begin(body, request, "cmpl", COMPLETION_TOKENS)
        wishes = _wishes(body, body.logprobs is not None)
        prompts = generation.prompts
        echo = (
            [_prompt_text(body, served, number, prompt) for number, prompt in enumerate(prompts)] if body.echo else None
        )
        name = f"cmpl-{request.scope['request_id']}"
        form = CompletionWriter(name, served, generation, wishes, _name(body, served), echo)
        return await self.respond(body, request, generation, form)

    async def begin(
        self, body: CompletionBody, request: Request, kind: str, default: int
    ) -> tuple[ServedModel, Generation]:
        """Prompts to be continued, not handed to the engine yet."""
        served, version = self._table.version_of(body.model, body.lora_adapter, body.policy_version)
        prompts = await self._completion_prompts(body, served)
        grammar = await self._grammar(body, served)
        default = self._config.max_tokens or default
        lengths = [
            params.completion_length(
                served, len(prompt), asked=body.max_tokens, default=default, prompt="prompt", param="max_tokens"
            )
            for prompt in prompts
        ]
        sampling = [
            params.sampling_params(body, served, max_tokens=length, logprobs=body.logprobs, grammar=grammar)
            for length in lengths
        ]

        def make_choice(index: int, prompt: int) -> ChoiceStream:
            stream = self._text_stream(body, served, prompts[prompt], chat=False)
            return ChoiceStream(index, prompt, stream, None, body.stop_token_ids, body.return_token_ids)

        return served, self._generation(body, served, version, prompts, sampling, make_choice, request, kind)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answers the conversation, `n` times. With `stream`, chunks arrive as server-sent events."""
        served, version = self._table.version_of(body.model, body.lora_adapter, body.policy_version)
        conversation = params.chat_conversation(body)
        limit = _token_limit(body, served)
        prompt = await self.workers.render(served, conversation, body.add_special_tokens, limit)
        tokens = params.truncated(prompt.tokens, body.truncate_prompt_tokens)
        grammar = await self._grammar(body, served, inside_thinking=prompt.inside_thinking)
        field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
        length = params.completion_length(
            served,
            len(tokens),
            asked=getattr(body, field),
            default=self._config.max_tokens,
            prompt="messages",
            param=field,
        )
        top = (body.top_logprobs or 0) if body.logprobs else None
        sampling = params.sampling_params(body, served, max_tokens=length, logprobs=top, grammar=grammar)

        def make_choice(index: int, number: int) -> ChoiceStream:
            parser = _parser(body, served, prompt.inside_thinking)
            stream = self._text_stream(body, served, tokens, chat=True)
            return ChoiceStream(index, number, stream, parser, body.stop_token_ids, body.return_token_ids)

        generation = self._generation(body, served, version, [tokens], [sampling], make_choice, request, "chatcmpl")
        name = f"chatcmpl-{request.scope['request_id']}"
        form = ChatWriter(name, served, generation, _wishes(body, body.logprobs), _name(body, served))
        return await self.respond(body, request, generation, form)

    async def _completion_prompts(self, body: CompletionBody, served: ServedModel) -> list[list[int]]:
        prompts: list[list[int]] = []
        for prompt in body.prompt:
            if isinstance(prompt, str):
                limit = _token_limit(body, served)
                tokens = await self.workers.encode(served, prompt, body.add_special_tokens, limit)
                prompts.append(tokens or _beginning(served))
            else:
                prompts.append(prompt)
        prompts = [params.truncated(prompt, body.truncate_prompt_tokens) for prompt in prompts]
        for prompt_ids in prompts:
            if len(prompt_ids) >= served.context_length:
                raise ContextLengthError.of(served.context_length, len(prompt_ids))
        params.check_prompt_ids(prompts, served.model.vocab_size)
        return prompts

    async def _grammar(self, body: GenerationBody, served: ServedModel, *, inside_thinking: bool = False) -> str | None:
        found = params.grammar_of(body, served, inside_thinking=inside_thinking)
        if found is None:
            return None
        grammar, param = found
        await self.workers.run(lambda: served.grammars.check(grammar, param))
        return grammar

    def _text_stream(self, body: GenerationBody, served: ServedModel, prompt: list[int], *, chat: bool) -> TextStream:
        return TextStream(
            served.vocabulary,
            body.stop,
            include_stop=body.include_stop_str_in_output,
            min_tokens=body.min_tokens,
            skip_special=body.skip_special_tokens,
            visible=served.marks if chat else (),
            trim=chat,
            prompt_tail=prompt[-8:],
        )

    def _generation(
        self,
        body: GenerationBody,
        served: ServedModel,
        version: Version | None,
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        make_choice: Callable[[int, int], ChoiceStream],
        request: Request,
        kind: str,
    ) -> Generation:
        check_choices(sampling[0].n, self._config.max_batch_size)  # before anything is made for each of them
        collects = self._collects(body, served, version)
        generation = Generation(
            served.engine,
            prompts,
            sampling,
            make_choice,
            name=f"{kind}-{request.scope['request_id']}",
            stream=body.stream,
            priority=body.priority,
            timeout=self._config.request_timeout_seconds or None,
            cache_salt=body.cache_salt or "",
            version=version,
            follow=bool(body.follow_policy),
            label=body.request_id or request.scope["request_id"],
        )
        if collects is not None:
            generation.score = partial(collects, generation)
        return generation

    def _collects(
        self, body: GenerationBody, served: ServedModel, version: Version | None
    ) -> "Callable[[Generation], asyncio.Future[dict[int, float]]] | None":
        """What is done with answers that are to be learnt from."""
        if not body.collect_trajectory:
            return None
        training = self._training
        if training is None or training.engine is not served.engine or not training.enabled:
            raise InvalidRequestError(NOT_ENABLED, param="collect_trajectory", code="training_disabled")
        training.check_trained(None if version is None else version.name)
        name = body.scoring_function
        if name is None:
            return None  # its reward comes later, as feedback
        training.rewards.check(name)
        metadata = body.metadata or {}
        return lambda generation: asyncio.wrap_future(
            training.collect(Collection(generation.recorded(), name, metadata))
        )

    async def respond(
        self, body: GenerationBody, request: Request, generation: Generation, form: AnswerWriter
    ) -> Response:
        if body.stream:
            return EventStream(generation, form)
        return JSONResponse(form.answer(await Collector(generation).collect(request.receive)))


def _token_limit(body: GenerationBody, served: ServedModel) -> int | None:
    """A prompt of which only the end is kept may be of any length."""
    return served.context_length if body.truncate_prompt_tokens is None else None


def _parser(body: ChatBody, served: ServedModel, inside_thinking: bool) -> Parser | None:
    """None for a model that only writes text."""
    return chat_parser(
        served.tool_format,
        thinking=served.thinking,
        inside_thinking=inside_thinking,
        tools=params.tools_of(body) if body.tool_choice != "none" else [],
        parallel=body.parallel_tool_calls,
        separate_reasoning=body.separate_reasoning,
        drop=served.model.tokenizer.structural_markers,
    )


def _wishes(body: GenerationBody, logprobs: bool) -> ResponseOptions:
    options = body.stream_options
    return ResponseOptions(
        logprobs=logprobs,
        token_ids=body.return_token_ids,
        prompt_logprobs=body.prompt_logprobs is not None,
        usage=options is not None and options.include_usage,
        running_usage=options is not None and options.continuous_usage_stats,
        policy=body.of_a_trainer,
        echoed=body.model_dump(include={"step_id", "request_id", "metadata"}, exclude_none=True),
    )


def _name(body: GenerationBody, served: ServedModel) -> str:
    return served.name if body.model == "default" else body.model


def _beginning(served: ServedModel) -> list[int]:
    """What an empty text begins with: a model can't continue nothing at all."""
    token = served.model.tokenizer.bos_token_id
    if token is None:
        raise InvalidRequestError("the prompt is empty, and this model has no token to begin with", param="prompt")
    return [token]


def _prompt_text(body: CompletionBody, served: ServedModel, number: int, tokens: list[int]) -> str:
    prompt = body.prompt[number]
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    return served.vocabulary.decode(tokens, skip_special=True)
