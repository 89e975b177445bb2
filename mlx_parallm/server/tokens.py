"""`/tokenize`, `/detokenize` and the list of models."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.engine.admission import check_ids
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.lora.registry import Entry
from mlx_parallm.server import answers, params
from mlx_parallm.server.errors import JSONResponse
from mlx_parallm.server.models import ModelTable, ServedModel
from mlx_parallm.server.openai import TokenizerPool
from mlx_parallm.server.routing import JSONRoute
from mlx_parallm.server.schemas import DetokenizeBody, TokenizeBody


class ModelRoutes:
    """Routes that look at the models without running them."""

    def __init__(self, table: ModelTable, workers: TokenizerPool) -> None:
        self._table = table
        self._workers = workers

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JSONRoute)
        listed: dict[str, Any] = dict(methods=["GET"], response_model=None, tags=["OpenAI"])
        for path in ("/v1/models", "/models"):
            router.add_api_route(
                path,
                self.models,
                summary="The served models",
                responses=answers.responses(answers.ModelList),
                operation_id=path.strip("/").replace("/", "_"),
                **listed,
            )
        router.add_api_route(
            "/v1/models/{model_id:path}",
            self.model,
            summary="One served model",
            responses=answers.responses(answers.Model),
            **listed,
        )
        counted: dict[str, Any] = dict(methods=["POST"], response_model=None, tags=["Tokens"])
        router.add_api_route(
            "/tokenize",
            self.tokenize,
            summary="Text or messages to tokens",
            responses=answers.responses(answers.Tokens),
            **counted,
        )
        router.add_api_route(
            "/detokenize",
            self.detokenize,
            summary="Tokens to text",
            responses=answers.responses(answers.Text),
            **counted,
        )
        return router

    async def models(self) -> Response:
        """Every model this server answers for; `default` names the first of them."""
        data = [_describe(served) for served in self._table]
        data += [_describe_adapter(served, entry) for served in self._table for entry in served.engine.adapters]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, model_id: str) -> Response:
        """One of them by its id."""
        served = self._table.find(model_id)
        entry = next((entry for entry in served.engine.adapters if entry.name == model_id), None)
        return JSONResponse(_describe(served) if entry is None else _describe_adapter(served, entry))

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        """Splits a prompt, or the prompt that messages make, as the completion routes would."""
        served = self._table.find(body.model)
        tokens = await self._tokens(body, served)
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": served.context_length, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = served.model.tokenizer.convert_ids_to_tokens(tokens)
        return JSONResponse(answer)

    async def _tokens(self, body: TokenizeBody, served: ServedModel) -> list[int]:
        if body.prompt is not None and body.messages is not None:
            raise InvalidRequestError("give a prompt or messages, not both", param="messages")
        if body.prompt is not None:
            return await self._workers.encode(served, body.prompt, body.add_special_tokens is not False)
        if body.messages is None:
            raise InvalidRequestError("give a prompt or messages", param="prompt", code="missing_required_parameter")
        conversation = params.conversation(
            body.messages,
            body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
        )
        return (await self._workers.render(served, conversation, body.add_special_tokens is True)).tokens

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """Joins tokens into text, special ones included."""
        served = self._table.find(body.model)
        check_ids(body.tokens, served.model.vocab_size, "tokens")
        return JSONResponse({"prompt": await self._workers.run(lambda: served.vocabulary.decode(body.tokens))})


def _describe(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "mlx-parallm",
        "root": served.model.source,
        "parent": None,
        "max_model_len": served.context_length,
    }


def _describe_adapter(served: ServedModel, entry: Entry) -> dict[str, Any]:
    version = entry.versions[entry.current]
    return _describe(served) | {
        "id": entry.name,
        "created": int(version.created),
        "root": version.source,
        "parent": served.name,
    }
