"""One model over several processes: the tokens are those of a single process, and a rank that dies is told of."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.groups import RankGroup, running_group
from tests.support.servers import free_port, ours, running
from tests.tiny import save_tiny, tiny
from tests.unit.test_adapters import written

# Heads divide by two, and the qwen3's by three as well; layers are for three ranks. mlx-lm does not shard Gemma 3.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 192, "num_hidden_layers": 3},
    "gemma3": {"num_hidden_layers": 4},
}
WAYS = {
    ("llama", 2): "tensor parallel",
    ("llama", 3): "pipeline",
    ("qwen3", 2): "tensor parallel",
    ("qwen3", 3): "tensor parallel",
    ("gemma3", 2): "pipeline",
    ("gemma3", 3): "pipeline",
}
ADAPTERS = ("few", "all", "all-dora")
PROMPT = list(range(20, 90))
DRAWN = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 7}


@dataclass(frozen=True)
class Folders:
    model: Path
    adapters: dict[str, Path]

    @property
    def flags(self) -> list[str]:
        return [part for name, folder in self.adapters.items() for part in ("--lora-path", f"{name}={folder}")]


def made(folder: Path, kind: str) -> Folders:
    model = folder / f"tiny-{kind}"
    model.mkdir()
    save_tiny(tiny(kind, **MODELS[kind]), model)
    return Folders(model, {name: written(folder, name, kind=kind, **MODELS[kind]) for name in ADAPTERS})


def ask(client: httpx.Client, prompt: list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    body = {"model": "default", "prompt": prompt, "max_tokens": 10, "temperature": 0, "ignore_eos": True, **fields}
    answer = client.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def tokens(client: httpx.Client, prompt: list[int] = PROMPT, **fields: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in ask(client, prompt, **fields)["choices"]]


def together(client: httpx.Client) -> list[list[list[int]]]:
    """Rows of different lengths, with different adapters and draws, which join and leave one by one."""
    asked: list[dict[str, Any]] = [
        {"prompt": PROMPT[start : start + 7 + 3 * start], "max_tokens": 4 + 3 * start, "model": model, **fields}
        for start, (model, fields) in enumerate(
            [("default", {}), ("few", DRAWN), ("all", {}), ("all-dora", {}), ("default", DRAWN), ("all", DRAWN)]
        )
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda fields: tokens(client, **fields), asked))


def everything(client: httpx.Client) -> dict[str, Any]:
    return {
        "greedy": tokens(client),
        "drawn": tokens(client, **DRAWN),
        "choices": tokens(client, n=3, **DRAWN),
        "penalties": tokens(client, **DRAWN, presence_penalty=0.7, repetition_penalty=1.2, logit_bias={"40": 2.0}),
        "grammar": tokens(client, guided_regex="[a-c]{5}", ignore_eos=False, **DRAWN),
        "adapters": [tokens(client, model=name) for name in ADAPTERS],
        "drawn with an adapter": tokens(client, model="all", **DRAWN),
        "together": together(client),
        "longer than the window": tokens(client, max_tokens=40),
        "prompt": ask(client, prompt_logprobs=1, max_tokens=1)["choices"][0]["token_ids"],
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return made(tmp_path_factory.mktemp("parallel"), "llama")


@pytest.fixture(scope="module")
def pair(llama: Folders) -> Iterator[RankGroup]:
    with running_group(llama.model, 2, llama.flags) as group:
        yield group


@pytest.fixture(scope="module")
def client(pair: RankGroup) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pair.server.url, timeout=60) as found:
        yield found


def single(folders: Folders) -> dict[str, Any]:
    with running(ours(str(folders.model), folders.flags)) as server, httpx.Client(base_url=server.url) as found:
        return everything(found)


@pytest.fixture(scope="module")
def expected(llama: Folders) -> dict[str, Any]:
    return single(llama)


def test_two_ranks_give_the_tokens_of_one_process(
    pair: RankGroup, client: httpx.Client, expected: dict[str, Any]
) -> None:
    assert "tensor parallel" in pair.server.log()
    assert everything(client) == expected
    assert len({str(found) for found in (expected["greedy"], *expected["adapters"])}) == 1 + len(ADAPTERS)


def test_a_cached_prefix(client: httpx.Client, expected: dict[str, Any]) -> None:
    ask(client)
    again = ask(client)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert again["choices"][0]["token_ids"] == expected["greedy"][0]
    assert client.post("/flush_cache").status_code == 200
    afresh = ask(client)
    assert afresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert afresh["choices"][0]["token_ids"] == expected["greedy"][0]


def test_a_new_version_of_an_adapter(client: httpx.Client, llama: Folders, expected: dict[str, Any]) -> None:
    """It comes by a load after the start; the old one leaves nothing behind."""
    for name, wanted in (("few", 0), ("all", 1)):
        path = str(llama.adapters[name])
        assert client.post("/v1/adapters/load", json={"name": "new", "path": path}).status_code == 200
        assert tokens(client, model="new") == expected["adapters"][wanted]
    assert client.post("/v1/adapters/unload", json={"name": "new"}).status_code == 200
    assert tokens(client) == expected["greedy"]


def test_a_pause(client: httpx.Client, expected: dict[str, Any]) -> None:
    assert client.post("/pause", json={"mode": "keep"}).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(tokens, client)
        time.sleep(0.3)
        assert not waiting.done()
        assert client.post("/resume").status_code == 200
        assert waiting.result(timeout=30) == expected["greedy"]


def test_what_a_group_refuses(client: httpx.Client, llama: Folders) -> None:
    other = client.post("/v1/models/load", json={"model": "other", "path": str(llama.model)})
    assert other.status_code == 400
    assert "one model" in other.json()["error"]["message"]
    unload = client.post("/v1/models/unload", json={"model": llama.model.name})
    assert unload.status_code == 409
    assert tokens(client, max_tokens=1)


def test_a_killed_rank_is_told_of_within_five_seconds(llama: Folders) -> None:
    flags = ["--no-exit-on-engine-failure"]
    with running_group(llama.model, 2, flags) as group, httpx.Client(base_url=group.server.url, timeout=30) as client:
        assert tokens(client, max_tokens=2)
        errors: list[Any] = []

        def long() -> None:
            body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True}
            errors.append(client.post("/v1/completions", json=body))

        asking = threading.Thread(target=long)
        asking.start()
        time.sleep(0.5)
        assert not errors
        killed_at = time.monotonic()
        group.followers[0].process.kill()
        health = client.get("/health")
        while health.status_code == 200 and time.monotonic() - killed_at < 10:
            time.sleep(0.05)
            health = client.get("/health")
        assert time.monotonic() - killed_at < 5
        assert health.status_code == 503
        assert "rank 1 of 2" in health.json()["reason"]
        asking.join(5)
        assert errors[0].status_code == 503
        assert "rank 1 of 2" in errors[0].json()["error"]["message"]
        late = client.post("/v1/completions", json={"prompt": PROMPT})
        assert late.status_code == 503


@pytest.mark.slow
def test_a_rank_that_hangs_is_told_of_within_five_seconds(llama: Folders) -> None:
    """As a machine that is cut off: its connection stays, and nothing comes."""
    with running_group(llama.model, 2) as group, httpx.Client(base_url=group.server.url, timeout=30) as client:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.post, "/v1/completions", json={"prompt": PROMPT, "max_tokens": 1900})
            time.sleep(0.5)
            stopped_at = time.monotonic()
            group.followers[0].process.send_signal(signal.SIGSTOP)
            while client.get("/health").status_code == 200 and time.monotonic() - stopped_at < 10:
                time.sleep(0.05)
            assert time.monotonic() - stopped_at < 5
            assert "rank 1 of 2 has not been heard of" in client.get("/health").json()["reason"]
            assert asked.result(timeout=5).status_code == 503
        group.followers[0].process.kill()
        assert group.exit_codes(30)[0] == 1  # a supervisor starts the group again


@pytest.mark.slow
def test_the_others_end_with_rank_0(llama: Folders) -> None:
    with running_group(llama.model, 2) as group:
        group.server.process.kill()
        assert group.exit_codes(10)[1] == 1


def children(pid: int) -> list[int]:
    """Of all threads of a process."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def rank_of(pid: int) -> int:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(int(one.partition(b"=")[2]) for one in variables if one.startswith(b"MLX_RANK="))


def wait_healthy(client: httpx.Client, patience: float = 120) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError("the group did not come up")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks' processes in /proc")
def test_a_supervisor_starts_the_group_of_mlx_launch_again(llama: Folders, expected: dict[str, Any]) -> None:
    port, launch = free_port(), Path(sys.executable).with_name("mlx.launch")
    command = [str(launch), "-n", "2", "--backend", "ring", "--starting-port", str(free_port()), "--"]
    command += [sys.executable, "-m", "mlx_parallm", "serve", "--port", str(port), "--model-path", str(llama.model)]
    supervisor = subprocess.Popen([sys.executable, "-m", "mlx_parallm.cluster.parallel.supervisor", *command])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            wait_healthy(client)
            assert tokens(client) == expected["greedy"]
            (launcher,) = children(supervisor.pid)
            ranks = sorted(children(launcher), key=rank_of)
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGKILL)
            while Path(f"/proc/{ranks[0]}").exists():
                time.sleep(0.1)
            wait_healthy(client)
            assert tokens(client) == expected["greedy"]
    finally:
        supervisor.terminate()
        supervisor.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), [case for case in WAYS if case != ("llama", 2)])
def test_every_kind_gives_the_tokens_of_one_process(tmp_path: Path, kind: str, ranks: int) -> None:
    folders = made(tmp_path, kind)
    expected = single(folders)
    with (
        running_group(folders.model, ranks, folders.flags) as group,
        httpx.Client(base_url=group.server.url, timeout=60) as client,
    ):
        assert WAYS[kind, ranks] in group.server.log()
        assert everything(client) == expected
        again = ask(client)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        assert again["choices"][0]["token_ids"] == expected["greedy"][0]
    assert group.exit_codes(10) == [0] * ranks
