"""Ollama's dialect: chats, prompts, embeddings, and which models there are, for clients that know Ollama alone."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.server.api.ollama.embed import OllamaEmbeddings
from mlx_parallm.server.api.ollama.errors import OLLAMA
from mlx_parallm.server.api.ollama.generation import OllamaGeneration
from mlx_parallm.server.api.ollama.model_routes import OllamaModels
from mlx_parallm.server.api.ollama.names import ModelNames
from mlx_parallm.server.api.ollama.response_types import (
    OllamaChatResponse,
    OllamaEmbeddingResponse,
    OllamaEmbedResponse,
    OllamaGenerateResponse,
    OllamaProcesses,
    OllamaShown,
    OllamaTags,
    OllamaVersion,
)
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import JSONRoute, router_of

LINES = {"application/x-ndjson": {"schema": {"type": "string"}}}
# What Ollama does with files of models.
REFUSED = (
    ("/api/pull", "POST"), ("/api/push", "POST"), ("/api/create", "POST"), ("/api/copy", "POST"),
    ("/api/delete", "DELETE"), ("/api/blobs/{digest:path}", "POST"), ("/api/blobs/{digest:path}", "HEAD"),
)  # fmt: skip


class AnyTypeRoute(JSONRoute):
    """Reads a body as JSON whatever its Content-Type says, as Ollama does; `access.OriginGuard` refuses most others."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            MutableHeaders(scope=request.scope)["content-type"] = "application/json"
            return await handler(request)

        return handle


ollama = partial(Route, error_shape=OLLAMA)
ROUTES = (
    ollama("/api/chat", "POST", OllamaGeneration.chat, OllamaChatResponse, "Answer a conversation", content=LINES),
    ollama(
        "/api/generate", "POST", OllamaGeneration.generate, OllamaGenerateResponse, "Answer a prompt", content=LINES
    ),
    ollama("/api/embed", "POST", OllamaEmbeddings.embed, OllamaEmbedResponse, "Texts to vectors"),
    ollama("/api/embeddings", "POST", OllamaEmbeddings.embeddings, OllamaEmbeddingResponse, "A text to its vector"),
    ollama("/api/tags", "GET", OllamaModels.tags, OllamaTags, "The served models"),
    ollama("/api/show", "POST", OllamaModels.show, OllamaShown, "One served model"),
    ollama("/api/ps", "GET", OllamaModels.ps, OllamaProcesses, "The models in memory"),
    ollama("/api/version", "GET", OllamaModels.version, OllamaVersion, "The version of Ollama's API"),
    *(ollama(path, method, OllamaModels.refuse) for path, method in REFUSED),
    ollama("/api/tags", "HEAD", OllamaModels.tags),
    ollama("/api/version", "HEAD", OllamaModels.version),
    Route("/", "GET", OllamaModels.root),
    Route("/", "HEAD", OllamaModels.root),
)


def router(context: ServerContext) -> APIRouter:
    names = ModelNames(context)
    owners = OllamaGeneration(context, names), OllamaEmbeddings(context, names), OllamaModels(context, names)
    return router_of("Ollama", ROUTES, *owners, route_class=AnyTypeRoute)
