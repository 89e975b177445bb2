"""Which models there are, in Ollama's words: `/api/tags`, `/api/show`, `/api/ps`, `/api/version`."""

import hashlib
from datetime import UTC, datetime, timedelta

from pydantic import ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.ollama.bodies import NamedModelBody
from mlx_parallm.server.api.ollama.names import ModelNames, shown
from mlx_parallm.server.api.ollama.response_types import (
    OllamaDetails,
    OllamaListed,
    OllamaModel,
    OllamaProcesses,
    OllamaRunning,
    OllamaShown,
    OllamaTags,
    OllamaVersion,
)
from mlx_parallm.server.auth.caller import current_caller
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.model_table import GENERATING, ServedModel, adapter_names
from mlx_parallm.types import ModelStatus

API_VERSION = "0.12.6"  # of Ollama's API, by which clients decide what they may ask for
LISTED = (*GENERATING, "embedding")  # kinds of models that its clients can use
FOR_EVER = timedelta(days=365 * 200)


class OllamaShowBody(NamedModelBody):
    model_config = ConfigDict(json_schema_extra={"example": {"model": "default"}})
    verbose: bool = Field(False, description="Accepted: there is no more to say")


class OllamaModels:
    def __init__(self, context: ServerContext, names: ModelNames) -> None:
        self._models = context.models
        self._names = names

    async def root(self) -> Response:
        """Returns what clients look for before they ask for anything."""
        return PlainTextResponse("Ollama is running")

    async def version(self) -> Response:
        """The version of Ollama whose API this is, not this server's own."""
        return JSONResponse(OllamaVersion(version=API_VERSION))

    async def tags(self) -> Response:
        """Every model that chats or embeds, loaded or not, and every adapter; of those that the key may use."""
        return JSONResponse(OllamaTags(models=[_listed(*entry) for entry in self._entries()]))

    async def ps(self) -> Response:
        """Those that are in memory, with how long they stay there."""
        running: list[OllamaRunning] = [
            {
                **_described(name, status, served),
                "size_vram": status.bytes,
                "context_length": status.context_length or 0,
                "expires_at": _time(_leaves_at(status)),
            }
            for name, status, served in self._entries()
            if status.status == "ready"
        ]
        return JSONResponse(OllamaProcesses(models=running))

    async def show(self, body: OllamaShowBody) -> Response:
        """Returns what is known of a model; of one that is not loaded, little."""
        status = self._names.status(body.model)
        served = next((one for one in self._models if one.name == status.name), None)
        architecture = _architecture(status, served)
        answer = OllamaShown(
            modelfile=f"FROM {current_caller.get().visible_source(status.source)}",
            parameters="",
            template="" if served is None else str(getattr(served.tokenizer, "chat_template", None) or ""),
            details=_details(status, served),
            model_info={
                "general.architecture": architecture,
                "general.basename": status.name,
                f"{architecture}.context_length": status.context_length,
            },
            capabilities=_capabilities(status, served),
            modified_at=_time(datetime.fromtimestamp(status.created, UTC)),
        )
        return JSONResponse(answer)

    async def refuse(self) -> Response:
        """Models come from the server's flags."""
        raise InvalidRequestError(
            "this server does not pull, create, copy, push or delete models: --model-path and --model-dir say which it "
            "serves, and POST /v1/models/load loads another one from a folder or a hub id"
        )

    def _entries(self) -> list[tuple[str, ModelStatus, ServedModel | None]]:
        """Name, model and, where it is loaded and generates, its tools; adapters after all models."""
        served = self._models.visible()
        statuses = [one for one in self._models.visible_statuses().values() if one.kind in LISTED]
        found = [(one.name, one, served.get(one.name)) for one in statuses]
        adapters = [
            (name, one, served[one.name])
            for one in statuses
            if one.name in served
            for name in adapter_names(served[one.name].adapters)
        ]
        return [*found, *adapters]


def _listed(name: str, status: ModelStatus, served: ServedModel | None) -> OllamaListed:
    modified = _time(datetime.fromtimestamp(status.created, UTC))
    return {**_described(name, status, served), "modified_at": modified}


def _described(name: str, status: ModelStatus, served: ServedModel | None) -> OllamaModel:
    return {
        "name": shown(name),
        "model": shown(name),
        "size": status.bytes,
        "digest": hashlib.sha256(f"{name} {status.source}".encode()).hexdigest(),
        "details": _details(status, served, status.name if name != status.name else ""),
    }


def _details(status: ModelStatus, served: ServedModel | None, parent: str = "") -> OllamaDetails:
    family = _architecture(status, served)
    return {
        "parent_model": parent,
        "format": "gguf" if status.source.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "" if served is None else served.model.precision,
    }


def _architecture(status: ModelStatus, served: ServedModel | None) -> str:
    return (served.model.architecture if served is not None else "") or status.kind


def _capabilities(status: ModelStatus, served: ServedModel | None) -> list[str]:
    if status.kind == "embedding":
        return ["embedding"]
    found = ["completion"]
    if served is None or served.tokenizer.has_chat_template:
        found.append("tools")
    if status.kind == "vision":
        found.append("vision")
    if served is not None and served.thinking is not None:
        found.append("thinking")
    return found if status.kind in GENERATING else []


def _leaves_at(status: ModelStatus) -> datetime:
    """Ollama's clients read a time far away as for ever."""
    left = FOR_EVER if status.leaves_in is None else timedelta(seconds=status.leaves_in)
    return datetime.now(UTC) + left


def _time(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
