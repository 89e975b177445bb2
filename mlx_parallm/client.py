"""`InferenceClient`: what a trainer needs of a server, as coroutines. `parallm adapters` uses it too.

    async with InferenceClient("http://127.0.0.1:8000") as client:
        await client.upload_adapter("policy", weights, config)
        sample = await client.generate("2 + 2 =", adapter="policy", max_tokens=16)
        sample.completion_ids, sample.logprobs, sample.policy_spans

No MLX here: it runs wherever the trainer does. A server whose queue is full is asked again, so that nothing is lost;
every other refusal is raised as the error that the server named.
"""

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import httpx
import numpy as np
from safetensors.numpy import save

from mlx_parallm.errors import (
    AuthenticationError,
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
    ParallmError,
    PayloadTooLargeError,
    PermissionDeniedError,
    QueueFullError,
    RequestTimeoutError,
    UnavailableError,
    UnprocessableError,
)
from mlx_parallm.http_client import tls_context

Tensors = Mapping[str, Any]  # names to arrays of NumPy, MLX or PyTorch
Weights = Tensors | bytes | str | Path  # arrays, a safetensors file's bytes, a file, or an adapter's folder
Version = int | Literal["next"]
WEIGHT_FILES = ("adapters.safetensors", "adapter_model.safetensors", "adapters.npz")
ERRORS: dict[int, type[ParallmError]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    413: PayloadTooLargeError,
    422: UnprocessableError,
    503: UnavailableError,
    504: RequestTimeoutError,
}


@dataclass(frozen=True, slots=True)
class Sample:
    """What the policy has answered. `completion_ids` ends with the token that ended it; `logprobs` has one for each."""

    request_id: str
    policy_version: int
    step_id: int | str | None
    prompt_ids: list[int]
    completion_ids: list[int]
    text: str
    logprobs: list[float] | None
    finish_reason: str
    policy_spans: list[tuple[int, int, int]]  # (first token, the one after the last, version)
    metadata: dict[str, Any]
    mixed_policy: bool = False  # several versions made it: each log-probability is of the one that its span names
    logprobs_mode: str | None = None  # processed: after temperature, penalties and cuts such as top_p; raw: before them
    index: int | None = None  # which of several prompts it answers

    def __getitem__(self, name: str) -> Any:
        """`sample["text"]` is `sample.text`: as in the server's answer."""
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def keys(self) -> list[str]:
        return [field.name for field in fields(self)]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self.keys() else default


class PublishedVersion(int):
    """The number of a version that was published; its other facts are there by their names in the server's answer."""

    facts: Mapping[str, Any]

    @classmethod
    def of(cls, response: Mapping[str, Any]) -> "PublishedVersion":
        version = cls(response["policy_version"])
        version.facts = response
        return version

    def __getitem__(self, name: str) -> Any:
        """`["policy_version"]`, `["name"]`, `["status"]`, `["message"]`."""
        return self.facts[name]


class InferenceClient:
    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float = 600.0,  # seconds, of each call
        max_connections: int = 256,
        ca: str | None = None,  # PEM file of certificates to trust; None: the system's
        insecure: bool = False,  # the server's certificate is not checked
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(timeout, connect=10.0),
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            verify=tls_context(ca, insecure) or True,
        )

    async def __aenter__(self) -> "InferenceClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    @overload
    async def generate(self, prompt: str | Sequence[int], **fields: Any) -> Sample: ...
    @overload
    async def generate(self, prompt: Sequence[str] | Sequence[Sequence[int]], **fields: Any) -> list[Sample]: ...
    async def generate(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        adapter: str | None = None,  # name or name@version; None: what the model's own name serves
        policy_version: int | None = None,
        step_id: int | str | None = None,
        request_id: str | None = None,
        follow_policy: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
        **sampling: Any,  # temperature, top_p, max_tokens, stop, seed, logprobs, … as /generate takes them
    ) -> Sample | list[Sample]:
        """One sample; for a list of prompts a list. A `policy_version` selects nothing: `adapter="name@version"` does.
        It comes back in `metadata`, and the sample's own says what made it."""
        body = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "lora_adapter": adapter,
            "policy_version": policy_version,
            "step_id": step_id,
            "request_id": request_id or uuid.uuid4().hex,
            "follow_policy": follow_policy,
            "metadata": metadata,
            **sampling,
        }
        for name in ("stream", "n", "best_of", "prompt_logprobs"):
            if name in sampling:
                raise InvalidRequestError(f"{name} is not for generate: it answers with one sample", param=name)
        sent = {key: value for key, value in body.items() if value is not None}
        response = (await self._send("POST", "/generate", json=sent)).json()
        return [_sample(one) for one in response] if isinstance(response, list) else _sample(response)

    async def rollout(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        model: str = "default",  # the model, or an adapter of it
        **sampling: Any,  # n, temperature, top_p, max_tokens, seed, … as /v1/rl/rollout takes them
    ) -> list[list[Sample]]:
        """A group of `n` samples for each prompt."""
        asked = [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        response = await self._post("/v1/rl/rollout", {"model": model, "prompts": asked, **sampling})
        return [
            [_rollout_sample(group["prompt_ids"], sample) for sample in group["samples"]]
            for group in response["groups"]
        ]

    async def load_adapter(
        self, name: str | Path, path: str | Path | None = None, *, version: int | None = None
    ) -> PublishedVersion:
        """Publishes an adapter from a folder on the server. Returns the new version, as do the other ways to publish.

        `load_adapter(path)` gives it no name: it is the next version of `adapter`, and the model's own name serves it.
        """
        body = {"path": str(name)} if path is None else {"name": str(name), "path": str(path)}
        return PublishedVersion.of(await self._post("/load_adapter", body | {"version": version}))

    async def upload_adapter(
        self, name: str, weights: Weights, config: Mapping[str, Any] | None = None, *, version: Version | None = None
    ) -> PublishedVersion:
        """Publishes an adapter from here. A name in use is refused, unless a version is given: a number, or "next"."""
        data, found = await _read(weights)
        config = config if config is not None else found
        files: dict[str, Any] = {"weights": ("adapters.safetensors", data)}
        if config is not None:
            files["config"] = ("adapter_config.json", json.dumps(config).encode())
        form = {"name": name} | ({"version": str(version)} if version is not None else {})
        response = await self._send("POST", "/v1/adapters/upload", data=form, files=files)
        return PublishedVersion.of(response.json())

    async def update_adapter_weights(
        self, name: str, weights: Weights, config: Mapping[str, Any] | None = None, *, version: int | None = None
    ) -> PublishedVersion:
        """A new version of `name`, while requests go on with theirs. The config of the version before holds."""
        data, found = await _read(weights)
        config = config or found
        fields = {
            "name": name,
            "version": version,
            "config": None if config is None else json.dumps(config, separators=(",", ":")),
        }
        response = await self._send(
            "POST",
            "/update_adapter_weights",
            params={key: value for key, value in fields.items() if value is not None},
            content=data,
            headers={"Content-Type": "application/octet-stream"},
        )
        return PublishedVersion.of(response.json())

    async def unload_adapter(self, name: str) -> None:
        await self._post("/v1/adapters/unload", {"name": name})

    async def rollback(self, name: str, version: int | None = None) -> int:
        return int((await self._post("/v1/adapters/rollback", {"name": name, "version": version}))["policy_version"])

    async def pin(self, name: str, version: int | None = None) -> None:
        await self._post("/v1/adapters/pin", {"name": name, "version": version})

    async def unpin(self, name: str, version: int | None = None) -> None:
        await self._post("/v1/adapters/unpin", {"name": name, "version": version})

    async def switch(
        self, version: str | int | Mapping[str, float], name: str | None = None, **rule: Any
    ) -> dict[str, float]:
        """What the model's own name serves: one adapter, or several with their shares. Gives what it serves now.

        `rule`: `auto=True`, `confidence=`, `min_rewards=`: the better of several gets all requests once that is proven.
        """
        way = "split" if isinstance(version, Mapping) else "version"
        response = await self._post("/model/switch-lora", {way: version, "name": name, **rule})
        return dict(response["serves"])

    async def adapters(self) -> list[dict[str, Any]]:
        return list((await self._get("/v1/adapters"))["data"])

    async def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        await self._send("POST", "/pause", params={"mode": mode})

    async def resume(self) -> None:
        await self._send("POST", "/resume")

    async def is_paused(self) -> bool:
        return bool((await self._get("/is_paused"))["is_paused"])

    async def flush_cache(self) -> int:
        """Forgets cached prompts, and says how many blocks."""
        return int((await self._send("POST", "/flush_cache")).json()["flushed_blocks"])

    async def server_info(self) -> dict[str, Any]:
        return await self._get("/server_info")

    async def metrics(self) -> dict[str, Any]:
        """The server's summary: current_policy_version, queue_depth, and its limits."""
        return await self._get("/metrics")

    async def health(self) -> dict[str, Any]:
        """`{"status": "healthy", …}`; a server that is not healthy says so here, one that is not there raises."""
        response = await self._http.get("/health")
        return dict(response.json())

    async def _get(self, path: str) -> dict[str, Any]:
        return dict((await self._send("GET", path, headers={"Accept": "application/json"})).json())

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return dict((await self._send("POST", path, json=body)).json())

    async def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        while True:
            try:
                response = await self._http.request(method, path, **content)
            except httpx.TimeoutException as error:
                raise RequestTimeoutError(f"{self.url}{path}: no response within {self._timeout:g} s") from error
            except httpx.TransportError as error:
                raise UnavailableError(f"{self.url}{path}: {error or type(error).__name__}") from error
            if response.status_code < 300:
                return response
            error_ = _error(response)
            if not isinstance(error_, QueueFullError) or loop.time() + error_.retry_after > deadline:
                raise error_
            await asyncio.sleep(error_.retry_after)


def _sample(response: Mapping[str, Any]) -> Sample:
    known = {name: value for name, value in response.items() if name in Sample.__slots__}  # a newer server tells more
    return Sample(**{**known, "policy_spans": [tuple(span) for span in response["policy_spans"]]})


def _rollout_sample(prompt_ids: list[int], sample: Mapping[str, Any]) -> Sample:
    spans = [tuple(span) for span in sample["policy_spans"]]
    return Sample(
        request_id=sample["request_id"],
        policy_version=sample["policy_version"],
        step_id=None,
        prompt_ids=prompt_ids,
        completion_ids=sample["completion_ids"],
        text=sample["text"],
        logprobs=sample["logprobs"],
        finish_reason=sample["finish_reason"],
        policy_spans=[(first, end, version) for first, end, version in spans],
        metadata={"reward": sample["reward"]},
        mixed_policy=len({version for _, _, version in spans}) > 1,
    )


def _error(response: httpx.Response) -> ParallmError:
    try:
        told = response.json()["error"]
        message = told["message"]
        param = told.get("param")
        code = told.get("code")
    except (ValueError, KeyError, TypeError):
        message = response.text[:300] or response.reason_phrase
        param = None
        code = None
    if response.status_code == 429:
        wait = response.headers.get("retry-after", "1")
        return QueueFullError(message, retry_after=int(wait) if wait.isdecimal() else 1)
    kind = ModelNotFoundError if code == "model_not_found" else ERRORS.get(response.status_code, ParallmError)
    return kind(message, param=param, code=code)


async def _read(weights: Weights) -> tuple[bytes, dict[str, Any] | None]:
    """The bytes of a safetensors (or npz) file, and the config beside it where there is one."""
    if isinstance(weights, bytes):
        return weights, None
    if isinstance(weights, str | Path):
        return await asyncio.to_thread(_read_file, weights)
    # On this thread: what MLX computes belongs to the thread that asked for it.
    return save({name: _array(tensor) for name, tensor in weights.items()}), None


def _read_file(given: str | Path) -> tuple[bytes, dict[str, Any] | None]:
    path = Path(given).expanduser()
    if path.is_dir():
        path = next((path / name for name in WEIGHT_FILES if (path / name).exists()), path / WEIGHT_FILES[0])
    try:
        data = path.read_bytes()
        config = path.parent / "adapter_config.json"
        return data, json.loads(config.read_bytes()) if config.exists() else None
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{path}: {error}", param="weights") from error


def _array(tensor: Any) -> "np.ndarray[Any, Any]":
    """Converts an array of NumPy, MLX or PyTorch to NumPy; to float32 where NumPy has no such type."""
    try:
        array = np.asarray(tensor)
    except (TypeError, RuntimeError, ValueError):  # bfloat16, or a tensor that has a gradient
        tensor = tensor.detach().float().cpu().numpy() if hasattr(tensor, "detach") else tensor.tolist()
        array = np.asarray(tensor, np.float32)
    return np.ascontiguousarray(array)
