"""Adapters behind a real server: named at start and over HTTP, in one batch with the base, refused when wrong."""

import base64
import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters
from safetensors.numpy import load_file, save_file

from tests.engine.harness import Bare
from tests.support import forked
from tests.support.servers import ours, running
from tests.tiny import tiny
from tests.unit.test_adapters import ADAPTERS, written

PROMPT = list(range(20, 50))
NAMES = [None, "few", "all", "dora", "embedding"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("adapters")
    return {name: written(base, name) for name in ADAPTERS}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str | None, list[int]]:
    """What mlx-lm gives with each adapter."""
    found: dict[str | None, list[int]] = {}
    for name in NAMES:
        model = tiny()
        if name:
            load_adapters(model.module, str(folders[name]))
        found[name] = Bare(model).greedy(PROMPT, 10, ignore_eos=True)[0]
    assert len({tuple(tokens) for tokens in found.values()}) == len(NAMES)
    return found


@pytest.fixture(scope="module")
def client(tiny_folder: Path, folders: dict[str, Path]) -> Iterator[httpx.Client]:
    flags = ["--lora-path", f"few={folders['few']}", "--adapter-path", f"all={folders['all']}", "--max-loras", "3"]
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


def ask(client: httpx.Client, model: str = "default", **fields: Any) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "ignore_eos": True, **fields}
    answer = client.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def test_adapters_of_the_command_line(
    client: httpx.Client, expected: dict[str | None, list[int]], folders: dict[str, Path]
) -> None:
    models = client.get("/v1/models").json()["data"]
    assert [(entry["id"], entry["parent"]) for entry in models] == [
        ("tiny-llama", None),
        ("few", "tiny-llama"),
        ("all", "tiny-llama"),
    ]
    assert client.get("/v1/models/few").json()["root"] == str(folders["few"])
    assert ask(client) == expected[None]
    assert ask(client, "few") == ask(client, lora_adapter="few") == ask(client, lora_adapter="few@1") == expected["few"]
    assert ask(client, "all") == expected["all"]


def test_training_metrics_are_there_before_any_event(client: httpx.Client) -> None:
    """On a server that does not train, too: a graph should not have to wait."""
    found = client.get("/metrics").text
    for name in ("trajectories_collected", "trajectories_dropped", "updates", "updates_refused", "rollbacks"):
        assert f'mlx_parallm_rl_{name}_total{{adapter=""}} 0.0' in found


def test_load_serve_unload(
    client: httpx.Client, expected: dict[str | None, list[int]], folders: dict[str, Path]
) -> None:
    loaded = client.post("/load_adapter", json={"name": "d", "path": str(folders["dora"])})
    assert loaded.status_code == 200, loaded.text
    assert (loaded.json()["status"], loaded.json()["policy_version"]) == ("success", 1)
    vllm = client.post("/v1/load_lora_adapter", json={"lora_name": "e", "lora_path": str(folders["embedding"])})
    assert (vllm.status_code, vllm.text) == (200, "Success: LoRA adapter 'e' added successfully.")
    names = {"default": None, "few": "few", "all": "all", "d": "dora", "e": "embedding"}
    with ThreadPoolExecutor(10) as pool:  # five kinds of rows on three places
        rows = [*names] * 4
        for row, tokens in zip(rows, pool.map(lambda name: ask(client, name), rows), strict=True):
            assert tokens == expected[names[row]], row
    again = client.post("/v1/adapters/load", json={"name": "d", "path": str(folders["few"])})
    assert again.json()["policy_version"] == 2
    assert ask(client, "d") == expected["few"]
    assert ask(client, lora_adapter="d@1") == expected["dora"]
    assert client.post("/v1/adapters/rollback", json={"name": "d"}).json()["policy_version"] == 1
    assert ask(client, "d") == expected["dora"]
    listed = {(entry["name"], entry["version"]): entry for entry in client.get("/v1/adapters").json()["data"]}
    assert listed["d", 1]["current"]
    assert not listed["d", 2]["current"]
    assert listed["d", 1]["pinned_requests"] == 0
    assert listed["d", 1]["rank"] == 8
    held = sum(array.nbytes for array in load_file(folders["few"] / "adapters.safetensors").values())
    assert listed["few", 1]["bytes"] == held, "what it came with, and nothing that fills it up"
    assert client.post("/v1/adapters/unload", json={"name": "d"}).status_code == 200
    gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "e"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'e' removed successfully.")
    missing = client.post("/v1/completions", json={"model": "d", "prompt": "x"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert client.post("/flush_cache").json()["success"]


def test_uploads(client: httpx.Client, expected: dict[str | None, list[int]], folders: dict[str, Path]) -> None:
    def files(name: str) -> tuple[bytes, bytes]:
        return tuple((folders[name] / file).read_bytes() for file in ("adapters.safetensors", "adapter_config.json"))  # type: ignore[return-value]

    def raw(data: bytes, **fields: str) -> httpx.Response:
        headers = {"Content-Type": "application/octet-stream"}
        return client.post("/update_adapter_weights", content=data, params=fields, headers=headers)

    weights, config = files("few")
    form = {"weights": ("adapters.safetensors", weights), "config": ("adapter_config.json", config)}
    first = client.post("/v1/adapters/upload", data={"name": "up"}, files=form)
    assert (first.status_code, first.json()["policy_version"]) == (200, 1), first.text
    assert ask(client, "up") == expected["few"]
    dora, dora_config = files("dora")
    body = {"name": "up", "tensors": base64.b64encode(dora).decode(), "config": json.loads(dora_config), "version": 7}
    second = client.post("/update_adapter_weights", json=body)
    assert (second.status_code, second.json()["policy_version"]) == (200, 7), second.text
    assert ask(client, "up") == expected["dora"]
    body = {"name": "up", "tensors": base64.b64encode(dora).decode()}  # the config is known
    third = raw(dora, name="up", version="8")
    assert (third.status_code, third.json()["policy_version"]) == (200, 8), third.text
    assert ask(client, "up") == expected["dora"]
    for answer, param in (
        (client.post("/upload_adapter", data={"name": "up"}), None),
        (client.post("/upload_adapter", data={"name": "up"}, files={"config": form["config"]}), "weights"),
        (client.post("/upload_adapter", content=b"garbage", headers={"Content-Type": "multipart/form-data"}), None),
        (client.post("/upload_adapter", data={"name": "a b"}, files=form), "name"),
        (client.post("/upload_adapter", data={"name": "up"}, files={**form, "config": ("c", b"[]")}), None),
        (client.post("/upload_adapter", data={"name": "up"}, files={**form, "weights": ("w", weights[:-9])}), None),
        (client.post("/update_adapter_weights", json={**body, "tensors": "?"}), "tensors"),
        (client.post("/update_adapter_weights", json={**body, "tensors": "üS"}), "tensors"),
        (client.post("/update_adapter_weights", content=b"{", headers={"Content-Type": "application/json"}), None),
        (client.post("/update_adapter_weights", json=[1]), None),
        (raw(dora[:-9], name="up"), None),
        (raw(b"", name="up"), None),
        (raw(dora), "name"),
        (raw(dora, name="up", version="x"), "version"),
        (raw(dora, name="up", config="{"), "config"),
        (client.post("/update_adapter_weights", json={**body, "version": 8}), "version"),
        (client.post("/update_adapter_weights", json={**body, "config": {"fine_tune_type": "full"}}), None),
    ):
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, answer.text
    assert ask(client, "up") == expected["dora"]
    assert client.post("/v1/adapters/unload", json={"name": "up"}).status_code == 200


def test_an_adapter_of_too_large_numbers_harms_its_own_requests_alone(
    client: httpx.Client, expected: dict[str | None, list[int]], folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["few"], tmp_path / "huge")
    file = next((tmp_path / "huge").glob("*.safetensors"))
    save_file({name: np.full_like(array, 1e30) for name, array in load_file(file).items()}, file)
    loaded = client.post("/v1/adapters/load", json={"name": "huge", "path": str(tmp_path / "huge")})
    assert loaded.status_code == 200, loaded.text
    body = {"model": "huge", "prompt": PROMPT, "max_tokens": 10, "temperature": 0}
    with ThreadPoolExecutor(8) as threads:
        right = [threads.submit(ask, client, "few") for _ in range(4)]
        wrong = [threads.submit(client.post, "/v1/completions", json=body) for _ in range(4)]
        assert [one.result() for one in right] == [expected["few"]] * 4
        for one in wrong:
            assert (one.result().status_code, one.result().json()["error"]["code"]) == (422, "not_finite")
    assert client.post("/v1/adapters/unload", json={"name": "huge"}).status_code == 200


def test_what_is_refused_changes_nothing(
    client: httpx.Client, expected: dict[str | None, list[int]], folders: dict[str, Path], tmp_path: Path
) -> None:
    before = client.get("/v1/adapters").json()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"scale": 1.0}}))
    (broken / "adapters.safetensors").write_bytes((folders["few"] / "adapters.safetensors").read_bytes()[:-100])
    good = str(folders["few"])
    for path, body, status, param in (
        ("/load_adapter", {"name": "x", "path": str(broken)}, 400, None),
        ("/load_adapter", {"name": "x", "path": str(tmp_path)}, 400, "lora_path"),
        ("/load_adapter", {"name": "x", "path": "~nobody-of-that-name/x"}, 400, "path"),
        ("/load_adapter", {"name": "x", "path": "x" * 300}, 400, "path"),
        ("/load_adapter", {"name": "x", "path": "\0"}, 400, "lora_path"),
        ("/load_adapter", {"name": "../x", "path": good}, 400, "name"),
        ("/load_adapter", {"name": "tiny-llama", "path": good}, 400, "name"),
        ("/load_adapter", {"name": "default", "path": good}, 400, "name"),
        ("/load_adapter", {"name": "few", "path": good, "version": 1}, 400, "version"),
        ("/load_adapter", {"name": "x"}, 400, "path"),
        ("/load_adapter", {"name": 5, "path": good}, 400, "name"),
        ("/load_adapter", {"name": "x", "path": good, "model": "nobody"}, 404, "model"),
        ("/v1/load_lora_adapter", {"lora_name": "few", "lora_path": good}, 400, "lora_name"),
        ("/v1/unload_lora_adapter", {"lora_name": "nobody"}, 404, "name"),
        ("/v1/adapters/unload", {"name": "nobody"}, 404, "name"),
        ("/v1/adapters/rollback", {"name": "few"}, 400, "version"),
        ("/v1/adapters/rollback", {"name": "few", "version": 9}, 404, None),
        ("/v1/completions", {"prompt": "x", "lora_adapter": "nobody"}, 404, "lora_adapter"),
        ("/v1/completions", {"prompt": "x", "lora_adapter": "few@new"}, 400, "lora_adapter"),
        ("/v1/completions", {"prompt": "x", "lora_adapter": "few@7"}, 404, None),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == status, (path, body, answer.text)
        assert answer.json()["error"]["param"] == param, (path, body, answer.text)
    assert client.get("/v1/adapters").json() == before
    assert ask(client, "few") == expected["few"]


def test_a_wrong_adapter_at_start_ends_the_server_with_its_reason(tiny_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlx_parallm", "serve", "--model-path", str(tiny_folder), "--port", "0"]
    ended = forked.run([*command, "--lora-path", f"x={tmp_path}"], 120)
    assert ended.returncode != 0
    assert "holds no adapter_config.json" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_trainer_pauses_loads_and_resumes(
    client: httpx.Client, expected: dict[str | None, list[int]], folders: dict[str, Path]
) -> None:
    """What TRL's asynchronous trainer sends to a vLLM server."""

    def load(name: str, kind: str) -> None:
        answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folders[kind])})
        assert answer.status_code == 200, answer.text

    load("X-v1", "few")
    long = {"model": "X-v1", "prompt": PROMPT, "max_tokens": 600, "temperature": 0, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=long | {"return_token_ids": True}) as stream:
        lines = stream.iter_lines()
        chunks = [json.loads(next(line for line in lines if line.startswith("data: "))[6:])]
        assert client.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
        assert client.get("/is_paused").json() == {"is_paused": True}
        load("X-v2", "all")
        assert client.post("/resume").json() == {"status": "resumed"}
        assert ask(client, "X-v2") == expected["all"]
        unloaded = client.post("/v1/unload_lora_adapter", json={"lora_name": "X-v1"})
        assert unloaded.status_code == 200
        chunks += [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or []]
    assert len(tokens) == 600
    assert tokens[:10] == expected["few"]
    assert client.get("/is_paused").json() == {"is_paused": False}
    assert client.post("/pause", params={"mode": "never"}).status_code == 400
    for path, body in (("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {})):
        assert client.post(path, json=body).status_code == 200
    client.post("/v1/unload_lora_adapter", json={"lora_name": "X-v2"})
