"""Ollama's dialect: chats, prompts, embeddings, and which models there are, for clients that know Ollama alone."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.server.api.ollama.answers import (
    OllamaChatAnswer,
    OllamaEmbedAnswer,
    OllamaEmbeddingAnswer,
    OllamaError,
    OllamaGenerateAnswer,
    OllamaProcesses,
    OllamaShown,
    OllamaTags,
    OllamaVersion,
)
from mlx_parallm.server.api.ollama.embeddings import OllamaEmbeddings
from mlx_parallm.server.api.ollama.generation import OllamaGeneration
from mlx_parallm.server.api.ollama.models import OllamaModels
from mlx_parallm.server.api.ollama.names import ModelNames
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.routing import JSONRoute, add_routes

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


def router(context: ServerContext) -> APIRouter:
    routes, names = APIRouter(route_class=AnyTypeRoute, tags=["Ollama"]), ModelNames(context)
    generation, embeddings = OllamaGeneration(context, names), OllamaEmbeddings(context, names)
    models = OllamaModels(context, names)
    add_routes(
        routes,
        ("/api/chat", "POST", generation.chat, OllamaChatAnswer, "Answer a conversation"),
        ("/api/generate", "POST", generation.generate, OllamaGenerateAnswer, "Answer a prompt"),
        answer=LINES,
        error=OllamaError,
    )
    add_routes(
        routes,
        ("/api/embed", "POST", embeddings.embed, OllamaEmbedAnswer, "Texts to vectors"),
        ("/api/embeddings", "POST", embeddings.embeddings, OllamaEmbeddingAnswer, "A text to its vector"),
        ("/api/tags", "GET", models.tags, OllamaTags, "The served models"),
        ("/api/show", "POST", models.show, OllamaShown, "One served model"),
        ("/api/ps", "GET", models.ps, OllamaProcesses, "The models in memory"),
        ("/api/version", "GET", models.version, OllamaVersion, "The version of Ollama's API"),
        error=OllamaError,
    )
    for path, method in REFUSED:
        routes.add_api_route(path, models.refuse, methods=[method], include_in_schema=False, response_model=None)
    for path, endpoint in (("/", models.root), ("/api/tags", models.tags), ("/api/version", models.version)):
        methods = ["GET", "HEAD"] if path == "/" else ["HEAD"]
        routes.add_api_route(path, endpoint, methods=methods, include_in_schema=False, response_model=None)
    return routes
