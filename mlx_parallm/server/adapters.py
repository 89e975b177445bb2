"""Adapters over HTTP: what there is, load from a folder, unload, roll back. vLLM's names and bodies work as well."""

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from mlx_parallm.adapters.files import read_folder
from mlx_parallm.adapters.registry import Version
from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server import answers
from mlx_parallm.server.errors import JSONResponse
from mlx_parallm.server.models import ModelTable, ServedModel
from mlx_parallm.server.routing import JSONRoute
from mlx_parallm.server.schemas import LoadAdapterBody, RollbackBody, UnloadAdapterBody, VllmLoadBody, VllmUnloadBody


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

    async def _load(self, served: ServedModel, name: str, path: str, number: int | None) -> Version:
        self._table.check_free(name)
        return await asyncio.to_thread(load_folder, served.engine, name, path, self._config, number)


def load_folder(engine: Engine, name: str, path: str, config: ServeConfig, number: int | None = None) -> Version:
    folder = Path(path).expanduser()
    adapter = read_folder(folder, config.max_lora_bytes)
    return engine.publish(name, adapter, str(folder), number)


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
