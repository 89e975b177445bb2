"""TRL's own server protocol, as `trl vllm-serve` speaks it: `/generate/`, `/chat/`, `/get_world_size/`, `/health/`.

Several prompts come in one call, and tokens with their log-probabilities go back. TRL's clients push weights over NCCL,
which this server does not speak: those routes say what to use instead.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NoReturn, NotRequired

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, PlainValidator, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.sampling_params import INT64, MAX_LOGPROBS
from mlx_parallm.server.api.openai.completions import CompletionBody, completion_call
from mlx_parallm.server.api.ops import Flushed, Health, Operations
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.generation.chat_messages import ChatMessages, ToolDefinition, conversation
from mlx_parallm.server.generation.choices import Collected
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.generation.preparation import completion_name
from mlx_parallm.server.generation.responses import Collector
from mlx_parallm.server.generation.sampling_fields import SampledBody, samples, sampling_field
from mlx_parallm.server.generation.token_logprobs import finite
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import router_of
from mlx_parallm.server.http.schema import MAX_PROMPTS, MAX_TOOLS, read_prompt, response_body
from mlx_parallm.types import TokenLogprob

TRL_TOKENS = 16  # unless a body says how many
NO_PUSH = (
    "this server takes no weights over NCCL. Push an adapter's weights with POST /update_adapter_weights, or train "
    "inside the server: mlx_parallm_serve --enable-rl-training"
)


SENT = ("repetition_penalty", "temperature", "top_p", "min_p")  # the others come as generation_kwargs


@samples(
    *SENT,
    n=("n", sampling_field("n")),
    top_k=("top_k", sampling_field("top_k", default=-1)),
    max_tokens=("max_tokens", sampling_field("max_tokens", default=TRL_TOKENS, ge=1)),
)
class TrlBody(SampledBody):
    """What TRL's two routes have in common."""

    api_fields: ClassVar = frozenset("chat_template guided_decoding_regex images structured_outputs_regex".split())
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="So many of the likeliest tokens at each place"
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=INT64, description="Keep so many from the end; -1: what fits"
    )
    structured_outputs_regex: str | None = Field(None, min_length=1, max_length=10_000)
    guided_decoding_regex: str | None = Field(None, min_length=1, max_length=10_000)
    generation_kwargs: dict[str, Any] = Field(default_factory=dict, description="Other sampling parameters, as vLLM's")

    def completion(self, prompts: list[Any], context: int, **fields: Any) -> CompletionBody:
        """The same as a completion of all the prompts. Log-probabilities are those that tokens were sampled from."""
        for name in self.generation_kwargs:
            if name not in CompletionBody.model_fields or name in ("prompt", "stream", "echo"):
                message = f"generation_kwargs: {name!r} is no sampling parameter here"
                raise InvalidRequestError(message, param="generation_kwargs")
        keep = context - 1 if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        try:
            return CompletionBody.model_validate(
                {
                    **{name: getattr(self, own) for name, own in self.sampling_names.items()},
                    "prompt": prompts,
                    "truncate_prompt_tokens": keep,
                    "guided_regex": self.structured_outputs_regex or self.guided_decoding_regex,
                    "logprobs": self.logprobs or 0,
                    "logprobs_mode": "processed",
                    "return_token_ids": True,
                    **fields,
                    **self.generation_kwargs,
                }
            )
        except ValidationError as error:
            raise RequestValidationError(error.errors(), body=self.model_dump()) from error


def _read_prompts(value: Any) -> list[Any]:
    prompts: list[Any] = read_prompt(value if isinstance(value, list) else [])
    if value and isinstance(value[0], int):
        raise ValueError("Expected a list of prompts, each text or token ids")
    return prompts


class TrlGenerateBody(TrlBody):
    model_config = ConfigDict(json_schema_extra={"example": {"prompts": ["The capital of France is"], "max_tokens": 8}})
    prompts: Annotated[list[Any], PlainValidator(_read_prompts, json_schema_input_type=list[str] | list[list[int]])] = (
        Field(description="Texts, or lists of token ids")
    )
    images: list[Any] | None = Field(None, description="Not supported: this model reads text only")


class TrlChatBody(TrlBody):
    model_config = ConfigDict(
        json_schema_extra={"example": {"messages": [[{"role": "user", "content": "Hello"}]], "max_tokens": 8}}
    )
    messages: list[ChatMessages] = Field(min_length=1, max_length=MAX_PROMPTS, description="Conversations")
    tools: list[ToolDefinition] = Field(default_factory=list, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


@response_body
class TrlGenerated(TypedDict):
    prompt_ids: list[list[int]]
    completion_ids: Annotated[
        list[list[int]], Field(description="All completions of the first prompt, then of the next")
    ]
    logprobs: Annotated[
        list[list[float | None]] | list[list[list[float | None]]],
        Field(description="Of each token; where `logprobs` was sent, of the likeliest at each place"),
    ]
    logprob_token_ids: NotRequired[
        Annotated[list[list[list[int]]], Field(description="Whose they are, where `logprobs` was sent")]
    ]


@response_body
class WorldSize(TypedDict):
    world_size: int


class Trl:
    def __init__(self, context: ServerContext) -> None:
        self._service = context.service
        self._tokenizers = context.tokenizers
        self._models = context.models

    async def generate(self, body: TrlGenerateBody, request: Request) -> Response:
        """`prompts` are texts or lists of token ids, `n` completions of each."""
        if body.images and any(image is not None for image in body.images):
            raise InvalidRequestError("images: this model reads text only", param="images")
        return await self._respond(body, body.completion(body.prompts, self._context), request)

    async def chat(self, body: TrlChatBody, request: Request) -> Response:
        """`messages` is a list of conversations, `n` responses to each."""
        prompts = []
        for messages in body.messages:
            rendered = conversation(
                messages,
                body.tools,
                add_generation_prompt=messages[-1:] == [] or messages[-1].role != "assistant",
                continue_final_message=messages[-1:] != [] and messages[-1].role == "assistant",
                template_kwargs=body.chat_template_kwargs,
            )
            prompts.append((await self._tokenizers.render(self._models.default, rendered, False)).tokens)
        return await self._respond(body, body.completion(prompts, self._context, add_special_tokens=False), request)

    @property
    def _context(self) -> int:
        return self._models.default.context_length

    async def _respond(self, body: TrlBody, completion: CompletionBody, request: Request) -> Response:
        generation = await self._service.prepare(
            completion_call(completion, TRL_TOKENS), request, completion_name("trl-", request)
        )
        results = await Collector(generation).collect(request.receive)
        return JSONResponse(_generated(body, generation, results))

    async def world_size(self) -> Response:
        """One: a model here is in one process."""
        return JSONResponse(WorldSize(world_size=1))

    async def no_push(self, request: Request) -> NoReturn:
        """Always an error, which says what to use instead."""
        raise InvalidRequestError(NO_PUSH, code="weight_push_unsupported")


def _generated(body: TrlBody, generation: Generation, results: Sequence[Collected]) -> TrlGenerated:
    """A number for each token; for newer clients, which send `logprobs`, a list of the likeliest with their ids."""
    answer = TrlGenerated(
        prompt_ids=generation.prompts, completion_ids=[result.tokens for result in results], logprobs=[]
    )
    if "logprobs" not in body.model_fields_set:
        answer["logprobs"] = [[finite(score.logprob) for score in result.scores] for result in results]
        return answer
    tops = [[_likeliest(score, body.logprobs or 0) for score in result.scores] for result in results]
    answer["logprobs"] = [[[finite(logprob) for _, logprob in top] for top in one] for one in tops]
    answer["logprob_token_ids"] = [[[token for token, _ in top] for top in one] for one in tops]
    return answer


def _likeliest(score: TokenLogprob, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens, and the one that was sampled where it is not among them."""
    top = list(score.top[:count])
    return top if any(token == score.token for token, _ in top) else [*top, (score.token, score.logprob)]


UNSUPPORTED = "Not supported: weights over NCCL"
ROUTES = (
    Route("/generate/", "POST", Trl.generate, TrlGenerated, "Complete prompts, as TRL's server"),
    Route("/chat/", "POST", Trl.chat, TrlGenerated, "Answer conversations, as TRL's server"),
    Route("/get_world_size/", "GET", Trl.world_size, WorldSize, "How many processes hold the model"),
    Route("/health/", "GET", Operations.health, Health, "Whether the engine is alive", role=None, probe=True),
    Route("/reset_prefix_cache/", "POST", Operations.flush_cache, Flushed, "Forget cached prompts", role="trainer"),
    Route("/init_communicator/", "POST", Trl.no_push, NoReturn, UNSUPPORTED, role="trainer"),
    Route("/update_named_param/", "POST", Trl.no_push, NoReturn, UNSUPPORTED, role="trainer"),
    Route("/batch_update_named_params/", "POST", Trl.no_push, NoReturn, UNSUPPORTED, role="trainer"),
    Route("/close_communicator/", "POST", Trl.no_push, NoReturn, UNSUPPORTED, role="trainer"),
)


def router(context: ServerContext) -> APIRouter:
    return router_of("TRL", ROUTES, Trl(context), Operations(context))
