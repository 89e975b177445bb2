"""What the routes of adapters do."""

import asyncio
import base64
import binascii
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mlx_parallm.arms import AutoSplit
from mlx_parallm.errors import InvalidRequestError, ModelNotFoundError, PermissionDeniedError
from mlx_parallm.runtime.client import AdapterTable
from mlx_parallm.server.api.adapters.bodies import (
    AdapterChanged,
    AdapterInfo,
    AdapterList,
    LoadAdapterBody,
    PinBody,
    RollbackBody,
    SwitchBody,
    Switched,
    UnloadAdapterBody,
    UpdateWeightsBody,
    VllmLoadBody,
    VllmUnloadBody,
)
from mlx_parallm.server.auth.caller import current_caller
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.http_errors import JSONResponse, validated
from mlx_parallm.server.model_table import BASE, GENERATING, ServedModel, adapter_names, is_number, parse_label
from mlx_parallm.signature import WeightsVersion
from mlx_parallm.types import MAX_VERSION, UNNAMED_ADAPTER, AdapterRoute, AdapterVersion

MAX_FIELD_BYTES = 1 << 20  # of a form's field that is no file
RAW_TYPES = ("application/octet-stream", "application/x-safetensors", "application/vnd.safetensors")
RAW_FIELDS = ("name", "lora_name", "adapter_name", "version", "config", "model")


class Adapters:
    def __init__(self, context: ServerContext) -> None:
        self._models = context.models
        self._runtime = context.runtime
        self._predictors = context.predictors
        self._client = context.runtime.adapters

    def _predicts(self, name: str) -> bool:
        """Returns whether it is a model of its own, loaded or not, and no adapter."""
        return any(one.name == name and one.kind not in GENERATING for one in self._runtime.pool.statuses())

    async def adapters(self) -> Response:
        """Every adapter that the key may use, with its versions."""
        data = [
            _describe(served, version, served.adapters.find(name).number)
            for served in self._models.visible().values()
            for name in adapter_names(served.adapters)
            for version in served.adapters.versions(name)
        ]
        return JSONResponse(AdapterList(object="list", data=data))

    async def load(self, body: LoadAdapterBody) -> Response:
        """Publishes what a folder holds, in mlx-lm's or PEFT's format: a known name gets a new version. Without a name
        it is the next version of `adapter`, which the model's own name and `/generate` then serve, unless
        `/model/switch-lora` or training has said what they do."""
        served = self._models.find(body.model)
        self._check_unnamed(body.name)
        version = await self._load(served, body.name, body.path, body.version)
        return _changed(version, _meaning(served, version))

    async def upload(self, request: Request) -> Response:
        """A form of `name`, `weights` (safetensors or npz) and `config` (adapter_config.json). A name that running
        requests use is refused, unless a `version` is given: a newer number than the newest, or `next`. The file alone,
        without a name, is the next version of `adapter`, as for `/load_adapter`."""
        async with request.form(max_files=4, max_fields=8, max_part_size=MAX_FIELD_BYTES) as form:
            entries = form.multi_items()
            fields = {key: await _content(value) for key, value in entries}
            files = [key for key, value in entries if isinstance(value, UploadFile)]
        if "weights" not in fields and len(files) == 1 and files[0] != "config":
            fields["weights"] = fields.pop(files[0])  # whatever its field is called
        if "weights" not in fields:
            raise InvalidRequestError(
                "the form has no field 'weights'", param="weights", code="missing_required_parameter"
            )
        name = fields["name"].decode(errors="replace") if "name" in fields else None
        self._check_unnamed(name)
        served = self._models.default
        number = _version_field(fields.get("version"))
        users = 0 if name is None else sum(version.rows for version in served.adapters.versions(name))
        if users and number is None:
            raise InvalidRequestError(
                f"{users} running requests use {name!r}: give a version to publish a newer one beside theirs",
                param="name",
                code="adapter_in_use",
            )
        version = await self._publish(served, name, fields["weights"], fields.get("config"), number or None)
        return _changed(version, _meaning(served, version))

    async def update(self, request: Request) -> Response:
        """Weights as a safetensors file in base64, without any file on disk: a new version of `name`. Without a
        `config`, that of the version before holds, or a scale of 1. Faster: the file itself as the body, with
        `Content-Type: application/octet-stream` and the other fields in the query. With the name of a served policy its
        weights are replaced, all of them, between two batches."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in RAW_TYPES:
            fields: Any = {key: value for key, value in request.query_params.items() if key in RAW_FIELDS}
            for key, read in (("version", int), ("config", orjson.loads)):
                if key in fields:
                    with contextlib.suppress(ValueError):  # then the field is wrong as it is
                        fields[key] = read(fields[key])
            body = validated(UpdateWeightsBody, fields | {"tensors": "raw"})
            data = await request.body()
        else:
            try:
                fields = await request.json()
            except ValueError as error:
                raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
            body = validated(UpdateWeightsBody, fields)
            data = await asyncio.to_thread(_decoded, body.tensors)
        if self._predicts(body.name):
            async with self._predictors.use(body.name, "policy", request=request, param="name") as model:
                policy = await asyncio.to_thread(model.client.update, model.name, data, body.version)
            return _changed(policy, f"{policy.label} acts from now on")
        version = await self._publish(self._models.find(body.model), body.name, data, body.config, body.version)
        return _changed(version, f"{version.label} is what {version.name!r} means now")

    async def unload(self, body: UnloadAdapterBody) -> Response:
        """Forgets an adapter and all its versions; running requests finish with it."""
        served = self._models.with_adapter(body.name)
        version = await asyncio.to_thread(self._client.unload, served.name, body.name)
        return _changed(version, f"{body.name!r} is unloaded")

    async def rollback(self, body: RollbackBody, request: Request) -> Response:
        """Lets the name mean an earlier version again; without `version`, the one before. The training of an adapter
        goes back too, with its optimiser. Where the version is no longer kept, or a checkpoint is named, it goes on
        from the checkpoint, as a new version. A served policy goes back to earlier weights in the same way."""
        if self._predicts(body.name):
            async with self._predictors.use(body.name, "policy", request=request, param="name") as model:
                policy = await asyncio.to_thread(model.client.rollback, model.name, body.version)
            return _changed(policy, f"{policy.label} acts from now on; {_numbers(policy.kept)} are kept")
        served = self._models.with_adapter(body.name)
        work = partial(self._client.rollback, served.name, body.name, body.version, body.checkpoint)
        version, message = await asyncio.to_thread(work)
        return _changed(version, message)

    async def pin(self, body: PinBody) -> Response:
        """However many newer versions come, this one is kept."""
        return await self._pin(body, True)

    async def unpin(self, body: PinBody) -> Response:
        """It goes when newer ones need its place."""
        return await self._pin(body, False)

    async def _pin(self, body: PinBody, pinned: bool) -> Response:
        served = self._models.with_adapter(body.name)
        version = await asyncio.to_thread(served.adapters.pin, body.name, body.version, pinned)
        return _changed(version, f"{version.label} is {'kept' if pinned else 'no longer kept'}")

    async def switch(self, body: SwitchBody) -> Response:
        """Requests for the model's own name (and for `default`) get an adapter from now on, or by their shares several:
        `{"split": {"v12": 0.9, "v13": 0.1}}`. `base` is the model alone; a checkpoint of training is served by its
        name, beside the policy that trains on. With `auto` the better arm of a split gets all requests once its rewards
        have proven it; that is audited and kept over restarts."""
        served = self._models.find(body.model)
        registry = served.adapters
        shares = [(body.version, 1.0)] if body.version is not None else [*(body.split or {}).items()]
        param = "version" if body.split is None else "split"
        labels = [await self._models.checkpoint(str(label)) or label for label, _ in shares]
        routes = [
            AdapterRoute(*_routed(registry, label, body.name, param), share)
            for label, (_, share) in zip(labels, shares, strict=True)
        ]
        only_base = all(route.name is None for route in routes)
        auto = AutoSplit(body.min_rewards, body.confidence) if body.auto else None
        await asyncio.to_thread(served.adapters.serve, [] if only_base else routes, auto)
        return JSONResponse(
            Switched(
                status="success",
                model=served.name,
                serves={route.label: route.share for route in routes},
                policy_version=0 if only_base else registry.policy_version,
                message=f"{served.name!r} serves {', '.join(route.label for route in routes)} now",
            )
        )

    async def vllm_load(self, body: VllmLoadBody) -> Response:
        """A name that is loaded already is an error, unless `load_inplace` is true."""
        served = self._models.default
        self._models.check_free(body.lora_name)
        if body.lora_name in served.adapters and not body.load_inplace:
            raise InvalidRequestError(
                f"adapter {body.lora_name!r} is loaded already; load_inplace replaces it", param="lora_name"
            )
        await self._load(served, body.lora_name, body.lora_path, None)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def vllm_unload(self, body: VllmUnloadBody) -> Response:
        """Forgets an adapter and all its versions; running requests finish with it."""
        served = self._models.with_adapter(body.lora_name)
        await asyncio.to_thread(self._client.unload, served.name, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _publish(
        self,
        served: ServedModel,
        name: str | None,
        data: bytes,
        config: Mapping[str, Any] | bytes | None,
        number: int | None,
    ) -> AdapterVersion:
        known = UNNAMED_ADAPTER if name is None else name
        self._models.check_free(known)
        work = partial(self._client.publish, served.name, known, data, config, number, own=name is None)
        return await asyncio.to_thread(work)

    async def _load(self, served: ServedModel, name: str | None, path: str, number: int | None) -> AdapterVersion:
        known = UNNAMED_ADAPTER if name is None else name
        self._models.check_free(known)
        return await asyncio.to_thread(partial(self._client.load, served.name, known, path, number, own=name is None))

    def _check_unnamed(self, name: str | None) -> None:
        """It changes what everybody's requests get."""
        key = current_caller.get().key
        if name is None and key is not None and key.role != "admin":
            raise PermissionDeniedError(
                "an adapter without a name is what the model's own name serves, which needs an admin's key: give it a "
                "name",
                param="name",
            )


def _meaning(served: ServedModel, version: AdapterVersion) -> str:
    told = f"{version.label} is what {version.name!r} means now"
    if any(route.name == version.name and route.number is None for route in served.adapters.routes):
        return f"{told}, and {served.name!r} serves it"
    return told


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
    if not is_number(text) or not 1 <= int(text) <= MAX_VERSION:
        raise InvalidRequestError(
            f"version must be 'next' or a number from 1 to {MAX_VERSION}, not {text[:40]!r}", param="version"
        )
    return int(text)


def _routed(registry: AdapterTable, label: str | int, name: str | None, param: str) -> tuple[str | None, int | None]:
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
    names = registry.names if name is None else [name]
    if len(names) != 1:
        raise InvalidRequestError(
            f"say by `name` which adapter's version {text!r} is: {len(names)} are loaded", param="name"
        )
    registry.find(names[0], int(digits))
    return names[0], int(digits)


async def _content(value: UploadFile | str) -> bytes:
    return value.encode() if isinstance(value, str) else await value.read()


def _describe(served: ServedModel, version: AdapterVersion, current: int) -> AdapterInfo:
    return {
        "name": version.name,
        "version": version.number,
        "current": version.number == current,
        "parent": served.name,
        "rank": version.rank,
        "bytes": version.bytes,
        "pinned_requests": version.rows,
        "pinned": version.pinned,
        "requests": version.requests,
        "generated_tokens": version.tokens,
        "digest": version.digest,
        "rewards": version.stats.rewards,
        "reward_mean": version.stats.reward_mean if version.stats.rewards else None,
        "latency_mean": version.stats.seconds_mean if version.stats.ended else None,
        "source": current_caller.get().visible_source(version.source),
        "created": int(version.created),
    }


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _changed(version: AdapterVersion | WeightsVersion, message: str) -> Response:
    return JSONResponse(
        AdapterChanged(status="success", name=version.name, policy_version=version.number, message=message)
    )
