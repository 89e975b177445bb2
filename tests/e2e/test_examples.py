"""Calls that users were promised from the start, as they type them, but for the port and a tiny model."""

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlx_lm.tuner.utils import load_adapters

from tests.engine.harness import Bare
from tests.support.servers import ServerProcess, ours, running
from tests.tiny import tiny
from tests.unit.test_adapters import written

PROMPT = [5, 6, 7, 8, 9]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("adapters")
    return {name: written(base, name) for name in ("few", "all", "dora")}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str | None, list[int]]:
    found: dict[str | None, list[int]] = {}
    for name in (None, *folders):
        model = tiny()
        if name is not None:
            load_adapters(model.module, str(folders[name]))
        found[name] = Bare(model).greedy(PROMPT, 10, ignore_eos=True)[0]
    return found


@pytest.fixture
def server(tiny_folder: Path) -> Iterator[ServerProcess]:
    with running(ours(str(tiny_folder))) as found:
        yield found


def test_a_trainer_beside_the_server(
    server: ServerProcess, folders: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    from mlx_parallm import InferenceClient as Same
    from mlx_parallm.inference_client import InferenceClient

    assert InferenceClient is Same

    async def train() -> None:
        async with InferenceClient(server.url) as client:
            result = await client.generate(
                prompt="Hello", temperature=0.7, max_tokens=100, policy_version=1, step_id=100
            )
            assert result["text"] == result.text
            assert result["logprobs"] == result.logprobs
            assert (result["step_id"], result["policy_version"]) == (100, 1)
            assert result["metadata"]["requested_policy_version"] == 1
            for number, name in enumerate(("few", "all"), start=1):
                adapter = await client.load_adapter(str(folders[name]))
                assert adapter["policy_version"] == int(adapter) == number
                result = await client.generate(prompt=PROMPT, policy_version=7, **GREEDY)
                assert (result["completion_ids"], result["policy_version"]) == (expected[name], number)
                assert result["metadata"]["current_policy_version"] == number
                assert (await client.metrics())["current_policy_version"] == number
            assert await client.load_adapter("named", folders["dora"]) == 1
            assert (await client.generate(prompt=PROMPT, **GREEDY))["policy_version"] == 2
            several = await client.generate(prompt=["a", "b"], max_tokens=2)
            assert [one["index"] for one in several] == [0, 1]

    asyncio.run(train())


def test_raw_requests(server: ServerProcess, folders: dict[str, Path], expected: dict[str | None, list[int]]) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "top_p": 0.95, "logprobs": 1, "policy_version": 42, "step_id": 1000}
    body |= GREEDY
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def generate(**more: Any) -> Any:
            answer = client.post("/generate", json=body | {"request_id": uuid.uuid4().hex} | more)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def serves(name: str | None, version: int) -> None:
            found = generate()
            assert (found["completion_ids"], found["policy_version"], found["step_id"]) == (
                expected[name],
                version if name is not None or version else 0,
                1000,
            )
            summary = client.get("/metrics", headers={"Accept": "application/json"}).json()
            assert summary["current_policy_version"] == (version if name is not None else 0)

        assert generate()["policy_version"] == 42  # no adapter is loaded: it is the client's own
        loaded = client.post("/load_adapter", json={"adapter_path": str(folders["few"])}).json()
        assert (loaded["status"], loaded["policy_version"], bool(loaded["message"])) == ("success", 1, True)
        serves("few", 1)
        weights = (folders["all"] / "adapters.safetensors").read_bytes()
        uploaded = client.post("/upload_adapter", files={"file": ("adapters.safetensors", weights)}).json()
        assert uploaded["policy_version"] == 2
        assert generate()["policy_version"] == 2
        several = generate(prompt=["one", "two", "three"])
        assert [one["index"] for one in several] == [0, 1, 2]
        assert generate(prompt=["one"])[0]["text"] == several[0]["text"]
        assert generate(lora_adapter="base")["completion_ids"] == expected[None]
        assert client.post(
            "/v1/load_lora_adapter", json={"lora_name": "v", "lora_path": str(folders["dora"])}
        ).is_success
        assert generate()["policy_version"] == 2  # vLLM's routes change nothing for others
        assert generate(lora_adapter="v")["completion_ids"] == expected["dora"]
        assert client.post("/v1/adapters/unload", json={"name": "adapter"}).is_success
        serves(None, 0)
        assert client.post("/load_adapter", json={"path": str(folders["few"])}).json()["policy_version"] == 3
        serves("few", 3)


def test_an_explicit_choice_is_not_displaced(
    server: ServerProcess, folders: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def serves() -> list[int]:
            return list(
                client.post("/generate", json={"prompt": PROMPT, "step_id": 1} | GREEDY).json()["completion_ids"]
            )

        assert client.post("/load_adapter", json={"name": "mine", "path": str(folders["all"])}).is_success
        assert serves() == expected[None]
        assert client.post("/model/switch-lora", json={"version": "mine"}).is_success
        assert client.post("/load_adapter", json={"adapter_path": str(folders["few"])}).is_success
        assert serves() == expected["all"]
        assert client.post("/v1/adapters/unload", json={"name": "mine"}).status_code == 400
        assert client.post("/model/switch-lora", json={"version": "base"}).is_success
        assert client.post("/load_adapter", json={"adapter_path": str(folders["few"])}).is_success
        assert serves() == expected[None]


def test_the_server_by_flags(
    tiny_folder: Path, folders: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    flags = ["--api-key", "k", "--max-batch", "5", "--flush-interval-ms", "10", "--max-tokens", "10"]
    flags += ["--adapter-path", str(folders["few"]), "--log-level", "CRITICAL", "--host", "0.0.0.0"]
    flags += ["--mode", "inference_only"]
    with running(ours(str(tiny_folder), flags)) as found:
        headers = {"Authorization": "Bearer k"}
        with httpx.Client(base_url=found.url, headers=headers, timeout=60) as client:
            body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "step_id": 1}
            answer = client.post("/generate", json=body).json()
            assert (answer["completion_ids"], answer["policy_version"]) == (expected["few"], 1)
            summary = client.get("/metrics", headers={"Accept": "application/json"}).json()
            assert (summary["current_policy_version"], summary["max_batch_size"]) == (1, 5)
            assert summary["flush_interval_ms"] == 10
            refused = client.post("/load_adapter", json={"adapter_path": str(folders["all"])})
            assert refused.status_code == 403
