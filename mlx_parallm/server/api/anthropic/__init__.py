"""Anthropic's dialect: `/v1/messages` and `/v1/messages/count_tokens`, for its SDKs and for Claude Code."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.server.api.anthropic.bodies import CountTokensBody, MessagesBody
from mlx_parallm.server.api.anthropic.errors import ANTHROPIC
from mlx_parallm.server.api.anthropic.response_types import MessageResponse, TokenCount
from mlx_parallm.server.api.anthropic.writer import MessageOptions, MessageWriter
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.generation.call import GenerationCall
from mlx_parallm.server.generation.preparation import completion_name
from mlx_parallm.server.generation.responses import respond
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.http.request_state import state_of
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import router_of

EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}


class MessageRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._models = context.models
        self._service = context.service
        self._tokenizers = context.tokenizers

    async def create(self, body: MessagesBody, request: Request) -> Response:
        """Answers the conversation. With `stream`, events arrive from `message_start` to `message_stop`."""
        generation = await self._service.prepare(body.call(), request, completion_name("msg_", request))
        options = MessageOptions(
            request_id=state_of(request.scope).id,
            max_tokens=body.max_tokens,
            hide_thinking=body.thinking is not None and body.thinking.display == "omitted",
        )
        return await respond(generation, MessageWriter(generation, options), request)

    async def count_tokens(self, body: CountTokensBody, request: Request) -> Response:
        """Counts the tokens of the prompt that these messages make, with their system prompt, tools and images."""
        turn = body.turn()
        await self._models.use(body.model, request)
        served = self._models.find(body.model)
        if turn.images:
            call = GenerationCall(chat=turn, sampling=SamplingParams())
            tokens = (await self._tokenizers.prompts(call, served)).tokens[0]
        else:  # there is no limit to what can be counted
            tokens = (await self._tokenizers.render(served, turn.conversation, False)).tokens
        return JSONResponse(TokenCount(input_tokens=len(tokens)))


ROUTES = (
    Route(
        "/v1/messages",
        "POST",
        MessageRoutes.create,
        MessageResponse,
        "Answer a conversation",
        error_shape=ANTHROPIC,
        content=EVENTS,
    ),
    Route(
        "/v1/messages/count_tokens",
        "POST",
        MessageRoutes.count_tokens,
        TokenCount,
        "Count a prompt's tokens",
        error_shape=ANTHROPIC,
    ),
)


def router(context: ServerContext) -> APIRouter:
    return router_of("Anthropic", ROUTES, MessageRoutes(context))
