"""`/api/chat` and `/api/generate`: conversations and prompts, as lines of JSON unless `stream` is false."""

from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.server.api.ollama.bodies import OllamaBody, OllamaChatBody, OllamaGenerateBody
from mlx_parallm.server.api.ollama.calls import chat_call, generate_call
from mlx_parallm.server.api.ollama.names import ModelNames
from mlx_parallm.server.api.ollama.response_types import (
    OllamaChatResponse,
    OllamaGenerateResponse,
    OllamaResponse,
    OllamaSaid,
)
from mlx_parallm.server.api.ollama.writer import ChatLines, PromptLines, RequestTimes, now
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.generation.preparation import completion_name
from mlx_parallm.server.generation.responses import respond
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.model_table import ServedModel


class OllamaGeneration:
    def __init__(self, context: ServerContext, names: ModelNames) -> None:
        self._models = context.models
        self._service = context.service
        self._names = names

    async def chat(self, body: OllamaChatBody, request: Request) -> Response:
        """Answers the conversation, a line for each piece; with `stream` false, in one object. Without messages the
        model is loaded, or with a `keep_alive` of 0 unloaded."""
        if not body.messages:
            message = OllamaSaid(role="assistant", content="")
            empty = OllamaChatResponse(model=body.model, created_at=now(), message=message, done=True)
            return await self._load(body, request, empty)
        watch = RequestTimes()
        model, served = await self._use(body, request, watch)
        generation = await self._service.prepare(
            chat_call(body, served, model), request, completion_name("chat-", request)
        )
        watch.mark_submitted()
        return await respond(generation, ChatLines(body.model, generation, watch, body.logprobs), request)

    async def generate(self, body: OllamaGenerateBody, request: Request) -> Response:
        """Answers the prompt, in the model's chat template unless `raw` is set. Without a prompt the model is loaded,
        or with a `keep_alive` of 0 unloaded."""
        if not body.prompt and not body.images:
            empty = OllamaGenerateResponse(model=body.model, created_at=now(), response="", done=True)
            return await self._load(body, request, empty)
        watch = RequestTimes()
        model, served = await self._use(body, request, watch)
        generation = await self._service.prepare(
            generate_call(body, served, model), request, completion_name("generate-", request)
        )
        watch.mark_submitted()
        return await respond(generation, PromptLines(body.model, generation, watch, body.logprobs), request)

    async def _use(self, body: OllamaBody, request: Request, watch: RequestTimes) -> tuple[str, ServedModel]:
        """The model, held until the request is answered."""
        model = self._names.own(body.model)
        await self._models.use(model, request)
        watch.mark_loaded()
        served = self._models.find(model)
        self._names.keep_alive(served.name, body.keep_alive, request)
        return model, served

    async def _load(self, body: OllamaBody, request: Request, answer: OllamaResponse) -> Response:
        if body.keep_alive == 0:
            await self._names.unload(self._names.status(body.model).name, request)
            answer["done_reason"] = "unload"
        else:
            watch = RequestTimes()
            await self._use(body, request, watch)
            answer["done_reason"] = "load"
            watch.add_to(answer)
        answer["created_at"] = now()
        return JSONResponse(answer, media_type="application/x-ndjson" if body.stream else None)
