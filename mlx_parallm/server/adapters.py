"""Adapters over HTTP: what there is, load from a folder, unload, roll back. vLLM's names and bodies work as well."""

import asyncio
import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mlx_parallm.adapters.files import MAX_CONFIG_BYTES, parse, parse_config, read_folder, usual_config
from mlx_parallm.adapters.registry import Version
from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server import answers
from mlx_parallm.server.errors import JSONResponse
from mlx_parallm.server.models import ModelTable, ServedModel
from mlx_parallm.server.routing import JSONRoute
from mlx_parallm.server.schemas import (
    LoadAdapterBody,
    RollbackBody,
    UnloadAdapterBody,
    UpdateWeightsBody,
    VllmLoadBody,
    VllmUnloadBody,
)

UPLOADS = ("/v1/adapters/upload", "/upload_adapter")
UPLOAD_FORM = {
    "type": "object",
    "required": ["name", "weights"],
    "example": {"name": "math", "weights": "adapters.safetensors", "config": "adapter_config.json"},
    "properties": {
        "name": {"type": "string"},
        "weights": {"type": "string", "format": "binary"},
        "config": {"type": "string", "format": "binary"},
    },
}


class Adapters:
    def __init__(self, table: ModelTable, config: ServeConfig) -> None:
        self._table = table
        self._config = config

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JSONRoute, tags=["Adapters"])
        for path, endpoint, answer, summary in (
            ("/v1/adapters/load", self.load, answers.AdapterChanged, "Load an adapter from a folder"),
            ("/load_adapter", self.load, answers.AdapterChanged, "Load an adapter from a folder"),
            ("/v1/adapters/unload", self.unload, answers.AdapterChanged, "Unload an adapter"),
            ("/unload_adapter", self.unload, answers.AdapterChanged, "Unload an adapter"),
            ("/update_adapter_weights", self.update, answers.AdapterChanged, "Publish weights that come in the body"),
            ("/v1/adapters/rollback", self.rollback, answers.AdapterChanged, "Back to an earlier version"),
            ("/v1/load_lora_adapter", self.vllm_load, None, "Load an adapter, as vLLM does"),
            ("/v1/unload_lora_adapter", self.vllm_unload, None, "Unload an adapter, as vLLM does"),
        ):
            responses = answers.responses(answer or answers.Answer)
            if answer is None:
                responses[200]["content"] = {"text/plain": {"example": "Success"}}
            router.add_api_route(
                path, endpoint, methods=["POST"], summary=summary, response_model=None, responses=responses
            )
        for path in UPLOADS:
            router.add_api_route(
                path,
                self.upload,
                methods=["POST"],
                summary="Publish an adapter from uploaded files",
                response_model=None,
                responses=answers.responses(answers.AdapterChanged),
                openapi_extra={"requestBody": {"content": {"multipart/form-data": {"schema": UPLOAD_FORM}}}},
            )
        router.add_api_route(
            "/v1/adapters",
            self.adapters,
            methods=["GET"],
            summary="The adapters there are",
            response_model=None,
            responses=answers.responses(answers.AdapterList),
        )
        return router

    async def adapters(self) -> Response:
        """Every adapter, with its versions."""
        data = [
            _describe(served, version, entry.current)
            for served in self._table
            for entry in served.engine.adapters
            for version in list(entry.versions.values())
        ]
        return JSONResponse({"object": "list", "data": data})

    async def load(self, body: LoadAdapterBody) -> Response:
        """Publishes what a folder holds, in mlx-lm's or PEFT's format: a known name gets a new version."""
        served = self._table.find(body.model)
        version = await self._load(served, body.name, body.path, body.version)
        return _changed(version, f"{version.label} is what {version.name!r} means now")

    async def upload(self, request: Request) -> Response:
        """A form of `name`, `weights` (safetensors or npz) and `config` (adapter_config.json): a new version."""
        async with request.form(max_files=4, max_fields=8, max_part_size=MAX_CONFIG_BYTES) as form:
            fields = {key: await _content(value) for key, value in form.multi_items()}
        for needed in ("name", "weights"):
            if needed not in fields:
                raise InvalidRequestError(
                    f"the form has no field {needed!r}", param=needed, code="missing_required_parameter"
                )
        name = fields["name"].decode(errors="replace")
        config = parse_config(fields["config"]) if "config" in fields else None
        version = await self._publish(self._table.default, name, fields["weights"], config, None)
        return _changed(version, f"{version.label} is what {version.name!r} means now")

    async def update(self, body: UpdateWeightsBody) -> Response:
        """Weights as a safetensors file in base64, without any file on disk: a new version of `name`. Without a
        `config`, that of the version before holds, or a scale of 1."""
        served = self._table.find(body.model)
        try:
            data = base64.b64decode(body.tensors, validate=True)
        except binascii.Error as error:
            raise InvalidRequestError(f"tensors is not base64: {error}", param="tensors") from error
        version = await self._publish(served, body.name, data, body.config, body.version)
        return _changed(version, f"{version.label} is what {version.name!r} means now")

    async def unload(self, body: UnloadAdapterBody) -> Response:
        """Forgets an adapter and all its versions; running requests finish with it."""
        served = self._table.with_adapter(body.name)
        version = served.engine.adapters.find(body.name)
        await asyncio.to_thread(served.engine.unload, body.name)
        return _changed(version, f"{body.name!r} is unloaded")

    async def rollback(self, body: RollbackBody) -> Response:
        """Lets the name mean an earlier version again; without `version`, the one before."""
        served = self._table.with_adapter(body.name)
        version = await asyncio.to_thread(served.engine.rollback, body.name, body.version)
        return _changed(version, f"{version.label} is what {version.name!r} means now")

    async def vllm_load(self, body: VllmLoadBody) -> Response:
        """A name that is loaded already is an error, unless `load_inplace` is true."""
        served = self._table.default
        if body.lora_name in served.engine.adapters and not body.load_inplace:
            raise InvalidRequestError(
                f"adapter {body.lora_name!r} is loaded already; load_inplace replaces it", param="lora_name"
            )
        await self._load(served, body.lora_name, body.lora_path, None)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def vllm_unload(self, body: VllmUnloadBody) -> Response:
        """Forgets an adapter and all its versions; running requests finish with it."""
        served = self._table.with_adapter(body.lora_name)
        await asyncio.to_thread(served.engine.unload, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _publish(
        self, served: ServedModel, name: str, data: bytes, config: Mapping[str, Any] | None, number: int | None
    ) -> Version:
        self._table.check_free(name)
        registry, limit = served.engine.adapters, self._config.max_lora_bytes
        if config is None and name in registry:
            config = registry.find(name).config

        def publish() -> Version:
            known = config if config is not None else usual_config(data, limit)
            return served.engine.publish(name, parse(known, data, limit), "upload", number, known)

        return await asyncio.to_thread(publish)

    async def _load(self, served: ServedModel, name: str, path: str, number: int | None) -> Version:
        self._table.check_free(name)
        return await asyncio.to_thread(load_folder, served.engine, name, path, self._config, number)


def load_folder(engine: Engine, name: str, path: str, config: ServeConfig, number: int | None = None) -> Version:
    folder = Path(path).expanduser()
    adapter, its_config = read_folder(folder, config.max_lora_bytes)
    return engine.publish(name, adapter, str(folder), number, its_config)


async def _content(value: UploadFile | str) -> bytes:
    return value.encode() if isinstance(value, str) else await value.read()


def _describe(served: ServedModel, version: Version, current: int) -> dict[str, Any]:
    return {
        "name": version.name,
        "version": version.number,
        "current": version.number == current,
        "parent": served.name,
        "rank": version.packed.rank,
        "bytes": version.packed.nbytes,
        "pinned_requests": version.rows,
        "source": version.source,
        "created": int(version.created),
    }


def _changed(version: Version, message: str) -> Response:
    return JSONResponse(
        {"status": "success", "name": version.name, "policy_version": version.number, "message": message}
    )
