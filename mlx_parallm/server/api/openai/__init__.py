"""OpenAI's dialect: chat, completions, embeddings and the list of models."""

from fastapi import APIRouter

from mlx_parallm.server.api.openai.chat import ChatRoutes
from mlx_parallm.server.api.openai.chat_response_types import ChatCompletion
from mlx_parallm.server.api.openai.completions import CompletionResponse, CompletionRoutes
from mlx_parallm.server.api.openai.embeddings import EmbeddingResponse, EmbeddingRoutes
from mlx_parallm.server.api.openai.model_routes import Model, ModelList, ModelRoutes
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import router_of

ROUTES = (
    Route("/v1/completions", "POST", CompletionRoutes.complete, CompletionResponse, "Continue text", streams=True),
    Route("/v1/chat/completions", "POST", ChatRoutes.complete, ChatCompletion, "Answer a conversation", streams=True),
    Route("/v1/embeddings", "POST", EmbeddingRoutes.embed, EmbeddingResponse, "Texts to vectors"),
    Route("/v1/models", "GET", ModelRoutes.models, ModelList, "The served models", replicas="models"),
    Route("/models", "GET", ModelRoutes.models, ModelList, "The served models", replicas="models"),
    Route("/v1/models/{model_id:path}", "GET", ModelRoutes.model, Model, "One served model"),
)


def router(context: ServerContext) -> APIRouter:
    completions = CompletionRoutes(context.service)
    chat = ChatRoutes(context.service)
    embeddings = EmbeddingRoutes(context)
    models = ModelRoutes(context.models, context.runtime.pool)
    return router_of("OpenAI", ROUTES, completions, chat, embeddings, models)
