"""Adapters over HTTP: what there is, load, upload, unload, pin, roll back, and what the model's own name serves.

vLLM's names and bodies work as well.
"""

import asyncio
import base64
import binascii
import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ConflictError, InvalidRequestError, ModelNotFoundError
from mlx_parallm.lora.files import MAX_CONFIG_BYTES, parse, parse_config, usual_config
from mlx_parallm.lora.registry import Registry, Route, Version
from mlx_parallm.runtime.startup import load_adapter
from mlx_parallm.server import answers
from mlx_parallm.server.errors import JSONResponse
from mlx_parallm.server.models import BASE, ModelTable, ServedModel, is_number, parse_label
from mlx_parallm.server.routing import JSONRoute, add_routes
from mlx_parallm.server.schemas import (
    LoadAdapterBody,
    PinBody,
    RollbackBody,
    SwitchBody,
    UnloadAdapterBody,
    UpdateWeightsBody,
    VllmLoadBody,
    VllmUnloadBody,
)
from mlx_parallm.training.manager import TrainingManager

RAW_TYPES = ("application/octet-stream", "application/x-safetensors", "application/vnd.safetensors")
RAW_FIELDS = ("name", "lora_name", "adapter_name", "version", "config", "model")
UPLOADS = ("/v1/adapters/upload", "/upload_adapter")
REPLACED = (
    "the next update would replace what is loaded under its name; load it under another name, or start the server with "
    "another --train-adapter"
)
UNLOADED = "it stays while the server runs; start it without this --train-adapter"
UPLOAD_FORM = {
    "type": "object",
    "required": ["name", "weights"],
    "example": {"name": "math", "weights": "adapters.safetensors", "config": "adapter_config.json"},
    "properties": {
        "name": {"type": "string"},
        "version": {"type": "string"},
        "weights": {"type": "string", "format": "binary"},
        "config": {"type": "string", "format": "binary"},
    },
}


class Adapters:
    def __init__(self, table: ModelTable, config: ServeConfig, training: TrainingManager | None = None) -> None:
        self._training = training
        self._table = table
        self._config = config

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JSONRoute, tags=["Adapters"])
        changed = answers.AdapterChanged
        add_routes(
            router,
            ("/v1/adapters", "GET", self.adapters, answers.AdapterList, "The adapters there are"),
            ("/v1/adapters/load", "POST", self.load, changed, "Load an adapter from a folder"),
            ("/load_adapter", "POST", self.load, changed, "Load an adapter from a folder"),
            ("/v1/adapters/unload", "POST", self.unload, changed, "Unload an adapter"),
            ("/unload_adapter", "POST", self.unload, changed, "Unload an adapter"),
            ("/v1/adapters/rollback", "POST", self.rollback, changed, "Back to an earlier version"),
            ("/v1/adapters/pin", "POST", self.pin, changed, "Keep a version"),
            ("/v1/adapters/unpin", "POST", self.unpin, changed, "Keep a version no longer"),
            ("/model/switch-lora", "POST", self.switch, answers.Switched, "What the model's own name serves"),
        )
        for path, endpoint, summary in (
            ("/v1/load_lora_adapter", self.vllm_load, "Load an adapter, as vLLM does"),
            ("/v1/unload_lora_adapter", self.vllm_unload, "Unload an adapter, as vLLM does"),
        ):
            responses = answers.responses(answers.AnswerBody)
            responses[200]["content"] = {"text/plain": {"example": "Success"}}
            router.add_api_route(
                path, endpoint, methods=["POST"], summary=summary, response_model=None, responses=responses
            )
        router.add_api_route(
            "/update_adapter_weights",
            self.update,
            methods=["POST"],
            summary="Publish weights that come in the body",
            response_model=None,
            responses=answers.responses(changed),
            openapi_extra={
                "requestBody": {
                    "content": {
                        "application/json": {"schema": UpdateWeightsBody.model_json_schema(by_alias=False)},
                        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                    }
                }
            },
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
        """A form of `name`, `weights` (safetensors or npz) and `config` (adapter_config.json). A name that running
        requests use is refused, unless a `version` is given: a newer number than the newest, or `next`."""
        async with request.form(max_files=4, max_fields=8, max_part_size=MAX_CONFIG_BYTES) as form:
            fields = {key: await _content(value) for key, value in form.multi_items()}
        for needed in ("name", "weights"):
            if needed not in fields:
                raise InvalidRequestError(
                    f"the form has no field {needed!r}", param=needed, code="missing_required_parameter"
                )
        name = fields["name"].decode(errors="replace")
        config = parse_config(fields["config"]) if "config" in fields else None
        served, number = self._table.default, _version_field(fields.get("version"))
        users = sum(version.rows for version in served.engine.adapters.versions(name))
        if users and number is None:
            raise InvalidRequestError(
                f"{users} running requests use {name!r}: give a version to publish a newer one beside theirs",
                param="name",
                code="adapter_in_use",
            )
        version = await self._publish(served, name, fields["weights"], config, number or None)
        return _changed(version, f"{version.label} is what {version.name!r} means now")

    async def update(self, request: Request) -> Response:
        """Weights as a safetensors file in base64, without any file on disk: a new version of `name`. Without a
        `config`, that of the version before holds, or a scale of 1. Faster: the file itself as the body, with
        `Content-Type: application/octet-stream` and the other fields in the query."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in RAW_TYPES:
            fields: Any = {key: value for key, value in request.query_params.items() if key in RAW_FIELDS}
            for key, read in (("version", int), ("config", orjson.loads)):
                if key in fields:
                    with contextlib.suppress(ValueError):  # then the field is wrong as it is
                        fields[key] = read(fields[key])
            body, data = _validated(fields | {"tensors": "raw"}), await request.body()
        else:
            try:
                fields = await request.json()
            except ValueError as error:
                raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
            body = _validated(fields)
            data = await asyncio.to_thread(_decoded, body.tensors)
        version = await self._publish(self._table.find(body.model), body.name, data, body.config, body.version)
        return _changed(version, f"{version.label} is what {version.name!r} means now")

    async def unload(self, body: UnloadAdapterBody) -> Response:
        """Forgets an adapter and all its versions; running requests finish with it."""
        served = self._table.with_adapter(body.name)
        version = served.engine.adapters.find(body.name)
        self._check_untrained(body.name, UNLOADED)
        await asyncio.to_thread(served.engine.policies.unload, body.name)
        return _changed(version, f"{body.name!r} is unloaded")

    def _check_untrained(self, name: str, remedy: str = REPLACED) -> None:
        if self._training is not None and name in self._training.sessions:
            raise ConflictError(f"{name!r} is being trained here: {remedy}", param="name", code="adapter_in_training")

    async def rollback(self, body: RollbackBody) -> Response:
        """Lets the name mean an earlier version again; without `version`, the one before. The training of an adapter
        goes back too, with its optimiser. Where the version is no longer kept, or a checkpoint is named, it goes on
        from the checkpoint, as a new version."""
        served = self._table.with_adapter(body.name)
        session = None if self._training is None else self._training.sessions.get(body.name)
        if session is not None:
            work = (
                partial(session.rollback, body.version)
                if body.checkpoint is None
                else partial(session.restore, body.checkpoint, body.version)
            )
            message, number = await asyncio.to_thread(work)
            return _changed(served.engine.adapters.find(body.name, number), message)
        if body.checkpoint is not None:
            raise InvalidRequestError(
                f"{body.name!r} is not trained here, so it has no checkpoints", param="checkpoint"
            )
        version = await asyncio.to_thread(served.engine.policies.rollback, body.name, body.version)
        return _changed(version, f"{version.label} is what {version.name!r} means now")

    async def pin(self, body: PinBody) -> Response:
        """However many newer versions come, this one is kept."""
        return await self._pin(body, True)

    async def unpin(self, body: PinBody) -> Response:
        """It goes when newer ones need its place."""
        return await self._pin(body, False)

    async def _pin(self, body: PinBody, pinned: bool) -> Response:
        served = self._table.with_adapter(body.name)
        version = await asyncio.to_thread(served.engine.policies.pin, body.name, body.version, pinned)
        return _changed(version, f"{version.label} is {'kept' if pinned else 'no longer kept'}")

    async def switch(self, body: SwitchBody) -> Response:
        """Requests for the model's own name (and for `default`) get an adapter from now on, or by their shares several:
        `{"split": {"v12": 0.9, "v13": 0.1}}`. `base` is the model alone."""
        served = self._table.find(body.model)
        registry = served.engine.adapters
        shares = [(body.version, 1.0)] if body.version is not None else [*(body.split or {}).items()]
        routes = [
            Route(*_routed(registry, label, body.name, "version" if body.split is None else "split"), share)
            for label, share in shares
        ]
        only_base = all(route.name is None for route in routes)
        await asyncio.to_thread(served.engine.policies.serve, [] if only_base else routes)
        return JSONResponse(
            {
                "status": "success",
                "model": served.name,
                "serves": {route.label: route.share for route in routes},
                "policy_version": 0 if only_base else registry.policy_version,
                "message": f"{served.name!r} serves {', '.join(route.label for route in routes)} now",
            }
        )

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
        self._check_untrained(body.lora_name, UNLOADED)
        await asyncio.to_thread(served.engine.policies.unload, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _publish(
        self, served: ServedModel, name: str, data: bytes, config: Mapping[str, Any] | None, number: int | None
    ) -> Version:
        self._table.check_free(name)
        self._check_untrained(name)
        registry, limit = served.engine.adapters, self._config.max_lora_bytes
        if config is None and name in registry:
            config = registry.find(name).config

        def publish() -> Version:
            known = config if config is not None else usual_config(data, limit)
            return served.engine.policies.publish(name, parse(known, data, limit), "upload", number, known)

        return await asyncio.to_thread(publish)

    async def _load(self, served: ServedModel, name: str, path: str, number: int | None) -> Version:
        self._table.check_free(name)
        self._check_untrained(name)
        return await asyncio.to_thread(load_adapter, served.engine, name, path, self._config, number)


def _validated(fields: Any) -> UpdateWeightsBody:
    try:
        return UpdateWeightsBody.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors(), body=fields) from error


def _decoded(tensors: str) -> bytes:
    try:
        return base64.b64decode(tensors, validate=True)
    except (binascii.Error, ValueError) as error:  # the second for text that is not ASCII
        raise InvalidRequestError(f"tensors is not base64: {error}", param="tensors") from error


def _version_field(value: bytes | None) -> int | None:
    """None: not given; 0: the next."""
    if value is None:
        return None
    text = value.decode(errors="replace").strip()
    if text == "next":
        return 0
    if not is_number(text) or int(text) < 1:
        raise InvalidRequestError(f"version must be a positive number or 'next', not {text[:40]!r}", param="version")
    return int(text)


def _routed(registry: Registry, label: str | int, name: str | None, param: str) -> tuple[str | None, int | None]:
    """The adapter and version that a label means: base, a name, name@version, or a version as 12 or v12."""
    text = str(label)
    if text in ("0", BASE):
        return None, None
    wanted, number = parse_label(text, param)
    if wanted in registry:
        registry.find(wanted, number)
        return wanted, number
    digits = text.removeprefix("v")
    if not is_number(digits):
        raise ModelNotFoundError(f"there is no adapter {wanted!r} here", param=param)
    names = [entry.name for entry in registry] if name is None else [name]
    if len(names) != 1:
        raise InvalidRequestError(
            f"say by `name` which adapter's version {text!r} is: {len(names)} are loaded", param="name"
        )
    registry.find(names[0], int(digits))
    return names[0], int(digits)


async def _content(value: UploadFile | str) -> bytes:
    return value.encode() if isinstance(value, str) else await value.read()


def _describe(served: ServedModel, version: Version, current: int) -> dict[str, Any]:
    return {
        "name": version.name,
        "version": version.number,
        "current": version.number == current,
        "parent": served.name,
        "rank": version.packed.given_rank,
        "bytes": version.packed.given_bytes,
        "pinned_requests": version.rows,
        "pinned": version.pinned,
        "requests": version.requests,
        "generated_tokens": version.tokens,
        "source": version.source,
        "created": int(version.created),
    }


def _changed(version: Version, message: str) -> Response:
    return JSONResponse(
        {"status": "success", "name": version.name, "policy_version": version.number, "message": message}
    )
