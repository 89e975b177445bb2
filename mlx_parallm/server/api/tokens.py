"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from typing import Annotated, Any, NotRequired

from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.generation.chat_messages import ChatMessages, ToolDefinition, conversation
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import router_of
from mlx_parallm.server.http.schema import MAX_TOOLS, Body, TokenId, few, response_body
from mlx_parallm.server.model_table import ServedModel
from mlx_parallm.validation import check_ids

MAX_TEXT = 1 << 20  # characters to tokenise at once: about a second's work


class TokenizeBody(Body):
    """Text, or a conversation, to split into tokens."""

    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "Hello, world!"}})
    model: str = "default"
    prompt: str | None = Field(None, max_length=MAX_TEXT)
    messages: ChatMessages | None = Field(None, min_length=1)
    tools: list[ToolDefinition] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool | None = Field(None, description="True for a prompt, false for messages")
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Tokens to join into text."""

    model_config = ConfigDict(json_schema_extra={"example": {"tokens": [72, 101, 108, 108, 111]}})
    model: str = "default"
    tokens: Annotated[list[TokenId], few(1_000_000)]


@response_body
class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


@response_body
class Text(TypedDict):
    prompt: str


class TokenRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._models = context.models
        self._tokenizers = context.tokenizers

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        """Splits a prompt, or the prompt that messages make, as the completion routes would."""
        await self._models.use(body.model, request)
        served = self._models.find(body.model)
        tokens = await self._tokens(body, served)
        answer = Tokens(count=len(tokens), max_model_len=served.context_length, tokens=tokens)
        if body.return_token_strs:
            answer["token_strs"] = await self._tokenizers.run(lambda: served.tokenizer.convert_ids_to_tokens(tokens))
        return JSONResponse(answer)

    async def _tokens(self, body: TokenizeBody, served: ServedModel) -> list[int]:
        if body.prompt is not None and body.messages is not None:
            raise InvalidRequestError("give a prompt or messages, not both", param="messages")
        if body.prompt is not None:
            return await self._tokenizers.encode(served, body.prompt, body.add_special_tokens is not False)
        if body.messages is None:
            raise InvalidRequestError("give a prompt or messages", param="prompt", code="missing_required_parameter")
        rendered = conversation(
            body.messages,
            body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
        )
        return (await self._tokenizers.render(served, rendered, body.add_special_tokens is True)).tokens

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        """Joins tokens into text, special ones included."""
        await self._models.use(body.model, request)
        served = self._models.find(body.model)
        check_ids(body.tokens, served.model.vocab_size, "tokens")
        text = await self._tokenizers.run(lambda: served.vocabulary.decode(body.tokens))
        return JSONResponse(Text(prompt=text))


ROUTES = (
    Route("/tokenize", "POST", TokenRoutes.tokenize, Tokens, "Text or messages to tokens"),
    Route("/detokenize", "POST", TokenRoutes.detokenize, Text, "Tokens to text"),
)


def router(context: ServerContext) -> APIRouter:
    return router_of("Tokens", ROUTES, TokenRoutes(context))
