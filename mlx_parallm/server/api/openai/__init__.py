"""OpenAI's dialect: chat, completions, embeddings and the list of models."""

from fastapi import APIRouter

from mlx_parallm.server.api.openai.chat import ChatRoutes
from mlx_parallm.server.api.openai.chat_answers import ChatCompletion
from mlx_parallm.server.api.openai.completions import CompletionAnswer, CompletionRoutes
from mlx_parallm.server.api.openai.embeddings import EmbeddingAnswer, EmbeddingRoutes
from mlx_parallm.server.api.openai.models import Model, ModelList, ModelRoutes
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.routing import JSONRoute, add_routes


def router(context: ServerContext) -> APIRouter:
    routes = APIRouter(route_class=JSONRoute, tags=["OpenAI"])
    completions, chat = CompletionRoutes(context.service), ChatRoutes(context.service)
    embeddings, models = EmbeddingRoutes(context), ModelRoutes(context.models, context.runtime.pool)
    add_routes(
        routes,
        ("/v1/completions", "POST", completions.complete, CompletionAnswer, "Continue text"),
        ("/v1/chat/completions", "POST", chat.complete, ChatCompletion, "Answer a conversation"),
        streams=True,
    )
    add_routes(
        routes,
        ("/v1/embeddings", "POST", embeddings.embed, EmbeddingAnswer, "Texts to vectors"),
        ("/v1/models", "GET", models.models, ModelList, "The served models"),
        ("/models", "GET", models.models, ModelList, "The served models"),
        ("/v1/models/{model_id:path}", "GET", models.model, Model, "One served model"),
    )
    return routes
