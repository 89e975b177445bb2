"""Calls that users were promised from the start, as they type them, but for the port and a tiny model."""

import asyncio
import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlx_lm.tuner.utils import load_adapters

from tests.engine.harness import Bare
from tests.support.servers import ServerProcess, free_port, ours, running
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


SCORE = """
def shorter(prompts, completions, metadata):
    return [-float(len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def training_flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("trains")
    (folder / "scores.py").write_text(SCORE)
    flags = ["--enable-rl-training", "--lora-rank", "4", "--learning-rate", "1e-2", "--update-frequency", "0"]
    return [*flags, "--scoring-function", f"shorter={folder}/scores.py:shorter", "--max-kl", "100"]


def learn(client: httpx.Client, seed: int, **more: Any) -> dict[str, Any]:
    """One update of the policy."""
    body = {"prompts": [PROMPT], "n": 8, "max_tokens": 8, "seed": seed, "scoring_function": "shorter"}
    model = more.pop("model", "default")
    answer = client.post("/v1/rl/rollout", json=body | {"submit": True, "model": model})
    assert answer.status_code == 200, answer.text
    updated = client.post("/v1/training/update", json=more | ({} if model == "default" else {"adapter": model}))
    assert updated.status_code == 200, updated.text
    found: dict[str, Any] = updated.json()
    return found


def tokens(client: httpx.Client, **fields: Any) -> list[float]:
    """What a policy gives: the log-probabilities of a greedy answer, and its tokens."""
    answer = client.post("/generate", json={"prompt": PROMPT, "step_id": 1, "logprobs_mode": "raw"} | GREEDY | fields)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return [*found["completion_ids"], *(round(value, 3) for value in found["logprobs"])]


def test_a_checkpoint_is_an_adapters_name(
    tiny_folder: Path, training_flags: list[str], folders: dict[str, Path], tmp_path: Path
) -> None:
    flags = [*training_flags, "--checkpoint-dir", str(tmp_path / "checkpoints")]
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        learn(client, 1, checkpoint_name="manual-update-1")
        first = tokens(client)
        learn(client, 2)
        second = tokens(client)
        # By curl, without a Content-Type.
        assert client.post("/training/checkpoint").json()["checkpoint"] == "step-00000002"
        learn(client, 3)
        third = tokens(client)
        assert len({tuple(one) for one in (first, second, third)}) == 3
        for fields in ({"lora_adapter": "manual-update-1"}, {"model": "manual-update-1"}):
            assert tokens(client, **fields) == first
        for name in ("checkpoint-2", "step-00000002", "policy/checkpoint-2"):
            assert tokens(client, lora_adapter=name) == second, name
        assert tokens(client, lora_adapter="latest") == third
        assert tokens(client) == third
        switched = client.post("/model/switch-lora", content=b'{"version": "checkpoint-2"}')
        assert switched.status_code == 200, switched.text
        assert tokens(client) == second
        assert client.get("/metrics", headers={"Accept": "application/json"}).json()["current_policy_version"] == 3
        assert learn(client, 4, model="policy")["policy_version"] == 5  # training goes on, beside what is served
        assert tokens(client) == second
        assert tokens(client, lora_adapter="policy") not in (first, second, third)
        assert tokens(client, lora_adapter="latest") == tokens(client, lora_adapter="policy")
        debug = client.get("/debug/training").json()
        assert debug["updates"] == 4
        assert client.post("/load_adapter", json={"name": "latest", "path": str(folders["few"])}).is_success
        assert tokens(client, lora_adapter="latest") != third  # a loaded adapter's name wins
        for name in ("checkpoint-9", "nobody", "policy/nobody", "../policy", "policy/..", "checkpoint-" + "9" * 40):
            answer = client.post("/generate", json={"prompt": PROMPT, "lora_adapter": name, "step_id": 1})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), name


def test_among_several_trained_adapters_a_checkpoint_has_its_adapters_name(
    tiny_folder: Path, training_flags: list[str], tmp_path: Path
) -> None:
    flags = [*training_flags, "--checkpoint-dir", str(tmp_path / "checkpoints")]
    flags += ["--train-adapter", "one", "--train-adapter", "two"]
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for name in ("one", "two"):
            learn(client, 1, model=name, checkpoint_name="shared")
        answer = client.post("/generate", json={"prompt": PROMPT, "lora_adapter": "shared", "step_id": 1})
        assert answer.status_code == 400
        assert "one/shared, two/shared" in answer.json()["error"]["message"]
        assert tokens(client, lora_adapter="one/shared") == tokens(client, lora_adapter="one")
        assert tokens(client, lora_adapter="two/shared") == tokens(client, lora_adapter="two")


YAML = """
server: {{mode: inference_and_training, max_batch_size: 128}}
model: {{base_model_path: {model}, lora_rank: 16, lora_alpha: 32, lora_target_modules: [q_proj, v_proj]}}
rl_training:
  {{enabled: true, trajectory_buffer_size: 1000, update_frequency: 100, scoring_batch_size: 32, environment: gsm8k}}
checkpointing: {{interval: 500, keep_n_checkpoints: 10, checkpoint_dir: {folder}/checkpoints}}
cache:
  {{default_temperature: 0.0, default_max_tokens: 7, sequence_cache_size: 2, prefill_batch_size: 1, ssd_enabled: false}}
"""


def test_by_yaml(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(YAML.format(model=tiny_folder, folder=tmp_path))
    with (
        running(ours(None, ["--config", str(file)])) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        status = client.get("/v1/training/status").json()
        assert status["training_enabled"]
        assert "gsm8k" in status["scoring_functions"]
        first, second = (client.post("/generate", json={"prompt": PROMPT, "step_id": 1}).json() for _ in range(2))
        assert first["completion_ids"] == second["completion_ids"]  # the default temperature is 0
        assert len(first["completion_ids"]) <= 7
        drawn = [
            client.post("/generate", json={"prompt": PROMPT, "step_id": 1, "temperature": 2.0}).json() for _ in range(4)
        ]
        assert len({tuple(one["completion_ids"]) for one in drawn}) > 1
        sampled = {"text": "hello", "sampling_params": {"temperature": 2.0, "max_new_tokens": 8}}
        assert len({client.post("/generate", json=sampled).json()["text"] for _ in range(4)}) > 1
        assert client.get("/debug/metrics").json()["slots_total"] == 128


def test_one_batch_ahead(server: ServerProcess, folders: dict[str, Path]) -> None:
    """The next batch is submitted while the last one is learnt from; stale answers are told by their version."""
    from mlx_parallm import InferenceClient

    async def train() -> list[tuple[int, int]]:
        seen = []
        async with InferenceClient(server.url) as client:

            def submit(step: int) -> "asyncio.Future[Any]":
                return asyncio.ensure_future(
                    asyncio.gather(*(client.generate(prompt=PROMPT, step_id=step, **GREEDY) for _ in range(4)))
                )

            ahead = submit(0)
            for step, name in enumerate(("few", "all", "dora")):
                batch = await ahead
                ahead = submit(step + 1)
                current = int(await client.load_adapter(str(folders[name])))  # what was learnt from `batch`
                assert {sample["step_id"] for sample in batch} == {step}
                seen += [(current, sample["policy_version"]) for sample in batch]
            last = await ahead
            assert {sample["policy_version"] for sample in last} <= {2, 3}
        return seen

    found = asyncio.run(train())
    assert all(current - version in (1, 2) for current, version in found), found  # one batch behind, or two


def test_training_with_atropos_by_flags(tiny_folder: Path, tmp_path: Path) -> None:
    """`--atropos-url` names a server that may come later: this one answers meanwhile."""
    flags = ["--enable-rl-training", "--lora-rank", "16", "--atropos-url", f"http://127.0.0.1:{free_port()}"]
    with running(ours(str(tiny_folder), [*flags, "--checkpoint-dir", str(tmp_path)])) as found:
        status = httpx.get(f"{found.url}/v1/training/status").json()
        assert status["training_enabled"]
        answer = httpx.post(f"{found.url}/generate", json={"prompt": PROMPT, "step_id": 1} | GREEDY, timeout=60)
        assert (answer.status_code, answer.json()["policy_version"]) == (200, 1)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_by_curl_without_a_content_type(tiny_folder: Path, training_flags: list[str], tmp_path: Path) -> None:
    flags = [*training_flags, "--checkpoint-dir", str(tmp_path), "--checkpoint-interval", "1"]
    with running(ours(str(tiny_folder), flags)) as found, httpx.Client(base_url=found.url, timeout=60) as client:

        def curl(*arguments: str) -> dict[str, Any]:
            done = subprocess.run(["curl", "-sS", "--fail-with-body", *arguments], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            answer: dict[str, Any] = json.loads(done.stdout)
            return answer

        learn(client, 1)
        assert "checkpoint" in json.dumps(curl("-X", "POST", f"{found.url}/training/checkpoint"))
        learn(client, 2)
        switched = curl("-X", "POST", f"{found.url}/model/switch-lora", "-d", '{"version": "checkpoint-1"}')
        assert switched["status"] == "success"
        assert curl(f"{found.url}/debug/training")["trainer_bytes"] > 0
