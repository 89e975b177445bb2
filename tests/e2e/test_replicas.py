"""Two replicas behind one address, as one server: the same answers, errors and headers, one state, and no end with one.

Needs the extra `cluster`.
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.networks import mlp_policy
from tests.support.replicas import replica_pids, wait_ready
from tests.support.servers import ServerProcess, ours, running
from tests.unit.test_adapters import written

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

PROMPT = {"model": "default", "prompt": "the king and the", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def limited_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    path.write_text(json.dumps({"few": {"key": "few-requests", "requests_per_minute": 6}}))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def two(tiny_folder: Path, limited_key: Path) -> Iterator[ServerProcess]:
    flags = ["--replicas", "2", "--no-ssd", "--api-key", "user", "--admin-key", "admin"]
    flags += ["--keys-file", str(limited_key)]
    with running(ours(str(tiny_folder), flags, fork=False)) as server:
        yield server


@pytest.fixture
def client(two: ServerProcess) -> Iterator[httpx.Client]:
    wait_ready(two.url, 2)
    with httpx.Client(base_url=two.url, timeout=60, headers={"Authorization": "Bearer admin"}) as client:
        yield client


def text_of(client: httpx.Client, **fields: object) -> str:
    answer = client.post("/v1/completions", json={**PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def each(client: httpx.Client, name: str) -> list[float]:
    """A metric of each replica."""
    lines = client.get("/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(f"mlx_parallm_replica_{name}{{")]


def test_limits_of_a_key_are_those_of_all_replicas_together(two: ServerProcess, client: httpx.Client) -> None:
    def ask(number: int) -> int:
        headers = {"Authorization": "Bearer few-requests"}
        body = {**PROMPT, "prompt": f"{number} different words"}
        return httpx.post(f"{two.url}/v1/completions", json=body, headers=headers, timeout=60).status_code

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(16)))
    assert sorted(found) == [200] * 6 + [429] * 10


def test_the_dashboard_shows_all_replicas(two: ServerProcess, client: httpx.Client) -> None:
    """To somebody who has signed in, on whichever replica that was; signing out holds on all."""
    for number in range(6):
        text_of(client, prompt=f"story number {number}, which is")
    with httpx.Client(base_url=two.url, timeout=60) as browser:
        assert browser.get("/dashboard/snapshot").status_code == 401
        assert browser.get("/dashboard/events").status_code == 401
        assert browser.get("/dashboard").status_code == 200
        assert browser.post("/dashboard/login", json={"key": "admin"}).status_code == 200
        snapshot = browser.get("/dashboard/snapshot").json()
        parts = snapshot["replicas"].values()
        assert len(parts) == 2
        assert snapshot["totals"]["requests"] == sum(part["requests"] for part in parts) >= 6
        assert snapshot["slots"] == sum(part["slots"] for part in parts)
        notes = browser.get("/dashboard/requests").json()["requests"]
        assert len({note["replica"] for note in notes}) == 2
        assert [note["time"] for note in notes] == sorted((note["time"] for note in notes), reverse=True)
        newer = browser.get("/dashboard/requests", params={"after": notes[2]["number"]}).json()["requests"]
        assert [note["number"] for note in newer][-2:] == [note["number"] for note in notes[:2]]
        with browser.stream("GET", "/dashboard/events") as stream:
            events = [line for line, _ in zip(stream.iter_lines(), range(12), strict=False)]
        kinds = [line for line in events if line.startswith("event: ")]
        assert kinds[:3] == ["event: history", "event: snapshot", "event: snapshot"]
        shown = [json.loads(line[6:]) for line in events if line.startswith('data: {"')]
        assert all(len(one["replicas"]) == 2 for one in shown)
        cookie = dict(browser.cookies)
        assert browser.post("/dashboard/logout").status_code == 200
    for _ in range(4):
        answer = httpx.get(f"{two.url}/dashboard/session", cookies=cookie, timeout=60)
        assert answer.json()["role"] is None


def test_it_is_one_server(client: httpx.Client, tiny_server: ServerProcess) -> None:
    single = httpx.post(f"{tiny_server.url}/v1/completions", json=PROMPT, timeout=60).json()
    assert text_of(client) == single["choices"][0]["text"]
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "healthy")
    assert health.json()["replicas"] == {"ready": 2, "expected": 2}
    named = client.get("/v1/models", headers={"X-Request-Id": "mine"})
    assert named.headers["X-Request-Id"] == "mine"
    assert set(named.json()["data"][0]["replicas"].values()) == {"ready"}
    with client.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as stream:
        events = [line for line in stream.iter_lines() if line]
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert len(stream.headers["X-Request-Id"]) == 32
    assert events[-1] == "data: [DONE]"
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]) == text_of(client)


def test_errors_are_those_of_one_process(client: httpx.Client, tiny_server: ServerProcess) -> None:
    for path, body in (
        ("/v1/completions", {**PROMPT, "model": "nobody"}),
        ("/v1/completions", {**PROMPT, "temperature": -1}),
        ("/v1/messages", {"model": "nobody", "max_tokens": 1, "messages": []}),
        ("/nowhere", {}),
    ):
        ours_, theirs = client.post(path, json=body), httpx.post(f"{tiny_server.url}{path}", json=body, timeout=60)
        assert ours_.status_code == theirs.status_code >= 400
        mine, other = ours_.json(), theirs.json()
        mine.pop("request_id", None), other.pop("request_id", None)
        assert mine == other
    assert client.post("/v1/completions", json=PROMPT, headers={"Authorization": "Bearer x"}).status_code == 401
    assert client.post("/pause", headers={"Authorization": "Bearer user"}).status_code == 403
    assert client.get("/debug/metrics", headers={"Authorization": "Bearer user"}).status_code == 403
    large = client.post("/v1/completions", content=b" " * (40 << 20), headers={"Content-Type": "application/json"})
    assert large.status_code == 413


def test_replicas_answer_only_to_the_front(two: ServerProcess) -> None:
    ports = {
        line.split()[3].rpartition(":")[2]
        for line in subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=False).stdout.splitlines()
        if any(f"pid={pid}," in line for pid in replica_pids(two.process.pid))
    }
    refused = 0
    for port in ports:
        try:
            refused += httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).status_code == 403
        except httpx.HTTPError:  # Ray's own
            continue
    assert not ports or refused == 2


def test_a_conversation_stays_where_it_is_cached(client: httpx.Client) -> None:
    cached = []
    messages = [{"role": "user", "content": "once upon a time " * 20}]
    for _ in range(4):
        body = {"model": "default", "messages": messages, "max_tokens": 4, "ignore_eos": True}
        answer = client.post("/v1/chat/completions", json=body).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "and then " * 10}]
    assert cached[0] < min(cached[1:])
    assert cached[1:] == sorted(cached[1:])


def test_a_client_that_leaves_frees_its_row(client: httpx.Client) -> None:
    body = {**PROMPT, "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        chunks = stream.iter_bytes()
        next(chunks)
        assert sum(each(client, "running")) == 1
    deadline = time.monotonic() + 5
    while sum(each(client, "running")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sum(each(client, "running")) == 0


def test_changes_reach_every_replica(client: httpx.Client, two: ServerProcess, tmp_path: Path) -> None:
    folder = written(tmp_path, "few")
    loaded = client.post("/v1/adapters/load", json={"name": "few", "path": str(folder)})
    assert (loaded.status_code, loaded.json()["policy_version"]) == (200, 1), loaded.text
    assert each(client, "policy_version") == [1, 1]
    headers, weights = {"Content-Type": "application/octet-stream"}, (folder / "adapters.safetensors").read_bytes()
    again = client.post("/update_adapter_weights", params={"name": "few"}, content=weights, headers=headers)
    assert again.json()["policy_version"] == 2, again.text
    wrong = client.post("/update_adapter_weights", params={"name": "few"}, content=weights[:-9], headers=headers)
    assert wrong.status_code == 400
    assert each(client, "policy_version") == [2, 2]
    assert client.post("/v1/adapters/rollback", json={"name": "few"}).json()["policy_version"] == 1
    assert client.post("/v1/adapters/pin", json={"name": "few", "version": 1}).status_code == 200
    assert client.post("/model/switch-lora", json={"version": "few"}).json()["serves"] == {"few": 1.0}
    expected = text_of(client, lora_adapter="few")
    assert {text_of(client) for _ in range(6)} == {expected}
    assert client.post("/pause", json={"mode": "wait"}).json() == {"status": "paused"}
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.post("/resume").json() == {"status": "resumed"}

    os.kill(replica_pids(two.process.pid)[0], signal.SIGKILL)
    time.sleep(1)
    newest = client.post("/update_adapter_weights", params={"name": "few"}, content=weights, headers=headers)
    assert newest.json()["policy_version"] == 3
    wait_ready(two.url, 2)
    assert each(client, "policy_version") == [3, 3]
    assert {text_of(client) for _ in range(6)} == {expected}  # the same weights
    assert client.post("/model/switch-lora", json={"version": "base"}).status_code == 200
    assert client.post("/v1/adapters/unload", json={"name": "few"}).status_code == 200


def test_background_responses_are_found_and_cancelled(client: httpx.Client) -> None:
    body = {"model": "default", "input": "hello", "max_output_tokens": 1900, "background": True, "ignore_eos": True}
    with ThreadPoolExecutor(6) as threads:
        made = list(
            threads.map(lambda n: client.post("/v1/responses", json={**body, "input": f"{n}"}).json(), range(6))
        )
    assert {one["status"] for one in made} <= {"queued", "in_progress"}
    for one in made:
        assert client.get(f"/v1/responses/{one['id']}").json()["id"] == one["id"]
    cancelled = [client.post(f"/v1/responses/{one['id']}/cancel").json()["status"] for one in made]
    assert cancelled == ["cancelled"] * 6
    assert client.get(f"/v1/responses/{made[0]['id']}").json()["status"] == "cancelled"


def act(client: httpx.Client, seed: int) -> tuple[int, list[float]]:
    """The version of the policy that acted, and log-probabilities of its actions."""
    body = {"model_id": "actor", "observations": [[0.1, 0.2, 0.3, 0.4]] * 3, "seed": seed}
    answer = client.post("/v1/rl/act", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["policy_version"], found["action_log_probs"]


def test_the_weights_of_a_policy_reach_every_replica(client: httpx.Client, two: ServerProcess, tmp_path: Path) -> None:
    headers = {"Content-Type": "application/octet-stream"}

    def update(seed: int) -> httpx.Response:
        folder = mlp_policy(tmp_path / f"{seed}", seed=seed)
        weights = next(folder.glob("*.safetensors")).read_bytes()
        return client.post("/update_adapter_weights", params={"name": "actor"}, content=weights, headers=headers)

    def everywhere() -> tuple[int, list[float]]:
        with ThreadPoolExecutor(8) as threads:  # so many at once that both are asked
            found = list(threads.map(lambda _: act(client, 3), range(24)))
        assert all(one == found[0] for one in found)
        return found[0]

    loaded = client.post("/v1/models/load", json={"model": "actor", "path": str(mlp_policy(tmp_path / "actor"))})
    assert loaded.status_code == 200, loaded.text
    before = everywhere()
    assert before[0] == 1
    assert update(1).json()["policy_version"] == 2
    second = everywhere()
    assert second[0] == 2
    assert second[1] != before[1]
    wrong = client.post("/update_adapter_weights", params={"name": "actor"}, content=b"no weights", headers=headers)
    assert wrong.status_code == 400, wrong.text
    assert everywhere() == second
    assert client.post("/v1/adapters/rollback", json={"name": "actor"}).json()["policy_version"] == 1
    assert everywhere() == before

    os.kill(replica_pids(two.process.pid)[0], signal.SIGKILL)
    time.sleep(1)
    assert update(2).json()["policy_version"] == 3
    wait_ready(two.url, 2)
    third = everywhere()
    assert third[0] == 3
    assert third[1] not in (before[1], second[1])
    assert client.post("/v1/adapters/rollback", json={"name": "actor", "version": 2}).status_code == 200
    assert everywhere() == second, "the replica that came back has it too"
    assert client.post("/v1/models/unload", json={"model": "actor"}).status_code == 200


def test_a_queue_adds_a_replica_which_ends_when_it_is_not_needed(tiny_folder: Path) -> None:
    flags = ["--max-replicas", "2", "--scale-down-seconds", "15", "--max-batch-size", "2", "--no-ssd"]
    with running(ours(str(tiny_folder), flags, fork=False)) as server:

        def ready() -> int:
            found: int = httpx.get(f"{server.url}/health", timeout=30).json()["replicas"]["ready"]
            return found

        assert ready() == 1
        stop = time.monotonic() + 180
        statuses: list[int] = []

        def ask(number: int) -> None:
            body = {**PROMPT, "prompt": f"{number} and", "max_tokens": 400, "ignore_eos": True}
            while time.monotonic() < stop:
                statuses.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        try:
            wait_ready(server.url, 2)
            assert len(replica_pids(server.process.pid)) == 2
            time.sleep(3)
        finally:
            stop = 0
            for thread in threads:
                thread.join()
        deadline = time.monotonic() + 90
        while ready() > 1:
            assert time.monotonic() < deadline, "the replica has not ended"
            time.sleep(0.5)
        assert httpx.post(f"{server.url}/v1/completions", json=PROMPT, timeout=60).status_code == 200
    assert set(statuses) == {200}


def test_a_kill_loses_nothing_that_had_not_begun_to_stream(client: httpx.Client, two: ServerProcess) -> None:
    outcomes: list[str] = []

    def whole(number: int) -> None:
        body = {**PROMPT, "prompt": f"{number} and", "max_tokens": 400, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
        outcomes.append("answered" if answer.json()["usage"]["completion_tokens"] == 400 else answer.text)

    def streamed(number: int) -> None:
        body = {**PROMPT, "prompt": f"{number} in", "max_tokens": 1500, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            text = "".join(answer.iter_text())
        assert text.endswith("data: [DONE]\n\n")
        outcomes.append("cut off" if '"code":"replica_lost"' in text else "streamed")

    threads = [threading.Thread(target=(whole, streamed)[n % 2], args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    os.kill(replica_pids(two.process.pid)[0], signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert outcomes.count("answered") == 4
    assert outcomes.count("cut off") + outcomes.count("streamed") == 4
    assert "cut off" in outcomes
    wait_ready(two.url, 2)


def test_background_responses_of_a_killed_replica_have_failed(client: httpx.Client, two: ServerProcess) -> None:
    body = {"model": "default", "max_output_tokens": 1900, "background": True, "ignore_eos": True}
    made = [client.post("/v1/responses", json={**body, "input": f"{n}"}).json()["id"] for n in range(6)]
    os.kill(replica_pids(two.process.pid)[0], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while "in_progress" in (found := [client.get(f"/v1/responses/{one}").json()["status"] for one in made]):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    assert set(found) == {"incomplete", "failed"}  # incomplete: as long as was asked for
    wait_ready(two.url, 2)


def test_sigterm_drains_and_leaves_no_process(tiny_folder: Path) -> None:
    server = ours(str(tiny_folder), ["--replicas", "2", "--no-ssd"], fork=False)
    with running(server):
        results: list[int] = []
        body = {**PROMPT, "max_tokens": 800, "ignore_eos": True}
        asking = threading.Thread(
            target=lambda: results.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code)
        )
        asking.start()
        time.sleep(0.3)
        below = children(server.process.pid)
        assert len(below) > 3
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        asking.join()
    assert results == [200]
    deadline = time.monotonic() + 5
    while (left := [pid for pid in below if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def children(pid: int) -> list[int]:
    """Of a process, and theirs."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    own = [int(one) for one in found.split()]
    return [*own, *(other for child in own for other in children(child))]


def test_a_model_that_is_not_there_is_an_error_in_one_line(tmp_path: Path) -> None:
    server = ours(str(tmp_path), ["--replicas", "2"], fork=False)
    assert server.process.wait(120) == 1
    last = server.log().splitlines()[-1]
    server.output.close()
    server.scratch.cleanup()
    assert last.startswith("error: ")
