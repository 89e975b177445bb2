"""What `InferenceClient` sends for each of its calls, and what it makes of answers; e2e/test_client.py has a server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.client import InferenceClient
from mlx_parallm.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    ParallmError,
    QueueFullError,
    RequestTimeoutError,
    UnavailableError,
)
from tests.support.recording import RecordingServer, recording_server

ANSWER = {
    "request_id": "r",
    "policy_version": 3,
    "step_id": 7,
    "prompt_ids": [1, 2],
    "completion_ids": [5, 6],
    "text": "hi",
    "logprobs": [-0.5, -0.25],
    "finish_reason": "stop",
    "policy_spans": [[0, 1, 2], [1, 2, 3]],
    "metadata": {"batch_size": 1},
    "mixed_policy": True,
    "of_a_newer_server": "unknown",
}


@pytest.fixture
def server() -> Any:
    with recording_server() as found:
        yield found


@pytest.fixture
async def client(server: RecordingServer) -> AsyncIterator[InferenceClient]:
    async with InferenceClient(f"{server.url}/v1/", api_key="sk-test", timeout=5) as found:
        yield found


async def test_generate(server: RecordingServer, client: InferenceClient) -> None:
    server.answers["POST /generate"] = ANSWER
    assert client.url == server.url
    sample = await client.generate(
        "hello", adapter="math@2", policy_version=3, step_id=7, request_id="r", metadata={"a": 1}, temperature=0.5
    )
    assert server.last.json == {
        "prompt": "hello",
        "lora_adapter": "math@2",
        "policy_version": 3,
        "step_id": 7,
        "request_id": "r",
        "metadata": {"a": 1},
        "temperature": 0.5,
    }
    assert server.last.headers["authorization"] == "Bearer sk-test"
    assert (sample.text, sample["text"], sample.get("text"), sample.get("none", 5)) == ("hi", "hi", "hi", 5)
    assert sample.policy_spans == [(0, 1, 2), (1, 2, 3)]
    assert (sample.mixed_policy, sample.index) == (True, None)
    assert dict(sample)["policy_version"] == 3  # type: ignore[call-overload]
    with pytest.raises(KeyError):
        sample["of_a_newer_server"]
    server.answers["POST /generate"] = [ANSWER, ANSWER]
    assert [one.text for one in await client.generate(["a", "b"])] == ["hi", "hi"]
    body = server.last.json
    assert (body["prompt"], len(body["request_id"])) == (["a", "b"], 32)
    assert body.keys() == {"prompt", "request_id"}
    await client.generate((5, 6), follow_policy=False)
    assert server.last.json["prompt"] == [5, 6]
    assert server.last.json["follow_policy"] is False
    for name in ("stream", "n", "best_of", "prompt_logprobs"):
        with pytest.raises(InvalidRequestError) as found:
            await client.generate("a", **{name: 2})
        assert found.value.param == name


async def test_rollout(server: RecordingServer, client: InferenceClient) -> None:
    sample = {name: ANSWER[name] for name in ("request_id", "policy_version", "completion_ids", "text", "logprobs")}
    sample |= {"finish_reason": "length", "policy_spans": [[0, 2, 3]], "reward": 0.5}
    mixed = sample | {"policy_spans": ANSWER["policy_spans"]}
    server.answers["POST /v1/rl/rollout"] = {"groups": [{"prompt_ids": [1], "samples": [sample, mixed]}]}
    ((first, second),) = await client.rollout(["a", (5, 6)], model="math", n=2)
    assert server.last.json == {"model": "math", "prompts": ["a", [5, 6]], "n": 2}
    assert (first.prompt_ids, first.step_id, first.metadata) == ([1], None, {"reward": 0.5})
    assert (first.policy_spans, first.mixed_policy, second.mixed_policy) == ([(0, 2, 3)], False, True)
    await client.rollout(["a"])
    assert server.last.json["model"] == "default"


async def test_adapters_are_published(server: RecordingServer, client: InferenceClient, tmp_path: Path) -> None:
    told = {"policy_version": 4, "name": "math", "status": "success", "message": "ok"}
    for path in ("/load_adapter", "/v1/adapters/upload", "/update_adapter_weights"):
        server.answers[f"POST {path}"] = told
    version = await client.load_adapter("folder")
    assert server.last.json == {"path": "folder", "version": None}
    assert (version, version["policy_version"], version["message"]) == (4, 4, "ok")
    await client.load_adapter("math", Path("folder"), version=4)
    assert server.last.json == {"name": "math", "path": "folder", "version": 4}
    (tmp_path / "adapter_config.json").write_text('{"rank": 4}')
    with pytest.raises(InvalidRequestError) as found:
        await client.upload_adapter("math", tmp_path)
    assert found.value.param == "weights"
    (tmp_path / "adapter_model.safetensors").write_bytes(b"of PEFT")
    await client.upload_adapter("math", tmp_path)
    assert b"of PEFT" in server.last.body
    assert b'name="version"' not in server.last.body
    assert b'{"rank": 4}' in server.last.body
    await client.upload_adapter("math", b"bytes", {"rank": 8}, version="next")
    for part in (b"bytes", b'{"rank": 8}', b"next", b"adapters.safetensors", b"adapter_config.json"):
        assert part in server.last.body
    tensors = {"a": np.ones((2, 2), np.float32)}
    assert await client.update_adapter_weights("math", tensors, {"rank": 4}, version=5) == 4
    assert server.last.path == "/update_adapter_weights?name=math&version=5&config=%7B%22rank%22%3A4%7D"
    assert server.last.headers["content-type"] == "application/octet-stream"
    assert b'"F32"' in server.last.body
    await client.update_adapter_weights("math", b"more")
    assert server.last.path == "/update_adapter_weights?name=math"


async def test_other_calls(server: RecordingServer, client: InferenceClient) -> None:
    server.answers |= {
        "POST /v1/adapters/unload": {},
        "POST /v1/adapters/rollback": {"policy_version": "2"},
        "POST /v1/adapters/pin": {},
        "POST /v1/adapters/unpin": {},
        "POST /model/switch-lora": {"serves": {"math": 1.0}},
        "GET /v1/adapters": {"data": [{"name": "math"}]},
        "POST /pause": {},
        "POST /resume": {},
        "GET /is_paused": {"is_paused": True},
        "POST /flush_cache": {"flushed_blocks": 9},
        "GET /server_info": {"version": "1"},
        "GET /metrics": {"queue_depth": 0},
        "GET /health": (503, {"status": "unhealthy"}),
    }
    await client.unload_adapter("math")
    assert server.last.json == {"name": "math"}
    assert await client.rollback("math", 2) == 2
    assert server.last.json == {"name": "math", "version": 2}
    await client.pin("math")
    await client.unpin("math", 3)
    assert (server.last.path, server.last.json) == ("/v1/adapters/unpin", {"name": "math", "version": 3})
    assert await client.switch("math@2", auto=True) == {"math": 1.0}
    assert server.last.json == {"version": "math@2", "name": None, "auto": True}
    await client.switch({"math": 0.5, "base": 0.5}, "chat")
    assert server.last.json == {"split": {"math": 0.5, "base": 0.5}, "name": "chat"}
    assert await client.adapters() == [{"name": "math"}]
    await client.pause("abort")
    assert server.last.path == "/pause?mode=abort"
    await client.pause()
    assert server.last.path == "/pause?mode=keep"
    await client.resume()
    assert await client.is_paused() is True
    assert await client.flush_cache() == 9
    assert await client.server_info() == {"version": "1"}
    assert await client.metrics() == {"queue_depth": 0}
    assert server.last.headers["accept"] == "application/json"
    assert await client.health() == {"status": "unhealthy"}


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (400, {"error": {"message": "wrong", "param": "n", "code": "c"}}, InvalidRequestError, "wrong"),
        (404, {"error": {"message": "none", "code": "model_not_found"}}, ModelNotFoundError, "none"),
        (503, {"error": {"message": "down"}}, UnavailableError, "down"),
        (500, "a page of a proxy", ParallmError, "a page of a proxy"),
        (418, {"error": "as Ollama says it"}, ParallmError, "as Ollama says it"),
    ],
)
async def test_errors_keep_their_kind(
    server: RecordingServer, client: InferenceClient, status: int, body: Any, kind: type[ParallmError], said: str
) -> None:
    server.answers["GET /v1/adapters"] = status, body
    with pytest.raises(kind) as found:
        await client.adapters()
    assert said in found.value.message
    if status == 400:
        assert (found.value.param, found.value.code) == ("n", "c")


async def test_a_full_queue_is_waited_for_as_long_as_a_call_may_take(server: RecordingServer) -> None:
    server.answers["GET /v1/adapters"] = 429, {"error": {"message": "full"}}
    async with InferenceClient(server.url, timeout=0.5) as client:
        with pytest.raises(QueueFullError, match="full"):  # told to come again after a second
            await client.adapters()
    assert len(server.sent) == 1
    async with InferenceClient(server.url, timeout=20) as client:
        call = asyncio.ensure_future(client.adapters())
        await asyncio.sleep(0.5)
        server.answers["GET /v1/adapters"] = {"data": []}
        assert await call == []
    assert len(server.sent) == 3


async def test_nobody_there_and_nobody_in_time() -> None:
    async with InferenceClient("http://127.0.0.1:9", timeout=2) as client:
        with pytest.raises(UnavailableError, match=r"http://127\.0\.0\.1:9/v1/adapters: "):
            await client.adapters()
    client_left = asyncio.Event()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        client_left.set()

    async with await asyncio.start_server(never_answer, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        async with InferenceClient(f"http://127.0.0.1:{port}", timeout=0.2) as client:
            with pytest.raises(RequestTimeoutError, match=r"no response within 0\.2 s"):
                await client.adapters()
        await asyncio.wait_for(client_left.wait(), 5)
