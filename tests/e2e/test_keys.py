"""Named keys in front of a real server: limits, models, caches, sign-in, and keys that come and go."""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mlx_parallm.server.auth.key_files import changing
from mlx_parallm.server.auth.keys import KeyLimits, Role, entry_of, new_key
from tests.support import forked
from tests.support.servers import ServerProcess, ours, running
from tests.unit.test_adapters import written

CLIENTS = 32


@dataclass
class Tenants:
    """A server with a file of keys; each test adds the keys that it needs, and so has limits of its own."""

    server: ServerProcess
    file: Path
    audit: Path
    clients: contextlib.ExitStack  # all that tests have opened

    def add(self, name: str, role: Role = "user", **bounds: Any) -> httpx.Client:
        """A client with a new key."""
        secret, key = new_key(name, role, **bounds)
        with changing(self.file) as document:
            document[name] = entry_of(key)
        self.server.process.send_signal(signal.SIGHUP)
        return self.client(secret)

    def client(self, secret: str | None) -> httpx.Client:
        """Waits until the key is known: at most a second."""
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        client = self.clients.enter_context(httpx.Client(base_url=self.server.url, headers=headers, timeout=60))
        deadline = time.monotonic() + 10
        while client.get("/v1/models").status_code != 200 and secret is not None:
            assert time.monotonic() < deadline, "the file was not read anew"
            time.sleep(0.1)
        return client


@pytest.fixture(scope="module")
def tenants(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("keys")
    file, audit = folder / "keys.json", folder / "audit.jsonl"
    with changing(file) as document:
        document["first"] = entry_of(new_key("first", "user")[1])
    adapters = [f"{name}={written(folder, name)}" for name in ("few", "all")]
    flags = ["--model-path", f"small={tiny_folder}", "--model-path", f"other={tiny_folder}"]
    flags += ["--lora-path", adapters[0], "--lora-path", adapters[1], "--api-key", "everybody's"]
    flags += ["--api-keys-file", str(file), "--audit-log", str(audit)]
    with running(ours(None, flags)) as server, contextlib.ExitStack() as clients:
        yield Tenants(server, file, audit, clients)


def complete(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0, "ignore_eos": True, **fields}
    return client.post("/v1/completions", json=body)


def left(answer: httpx.Response, unit: str) -> int:
    return int(answer.headers[f"x-ratelimit-remaining-{unit}"])


def test_requests_are_limited_to_the_very_one(tenants: Tenants) -> None:
    """20 of 96, sent by 32 clients at once."""
    limited = tenants.add("limited", limits=KeyLimits(requests_per_minute=20))
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda _: complete(limited), range(3 * CLIENTS)))
    admitted = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert (len(admitted), len(refused)) == (20, 76)
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"20"}
    assert min(left(answer, "requests") for answer in admitted) == 0
    for answer in refused:
        assert left(answer, "requests") == 0
        assert 1 <= int(answer.headers["retry-after"]) <= 61
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert limited.get("/v1/models").status_code == 200, "reading does not count"
    assert complete(tenants.client("everybody's")).status_code == 200


def test_the_openai_package_sees_the_limit(tenants: Tenants) -> None:
    secret, key = new_key("sdk", "user", limits=KeyLimits(requests_per_minute=1, tokens_per_minute=100))
    with changing(tenants.file) as document:
        document["sdk"] = entry_of(key)
    tenants.server.process.send_signal(signal.SIGHUP)
    tenants.client(secret)
    with openai.OpenAI(base_url=f"{tenants.server.url}/v1", api_key=secret, max_retries=0) as client:
        raw = client.completions.with_raw_response.create(model="small", prompt=[5, 6], max_tokens=2)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        assert 96 <= int(raw.headers["x-ratelimit-remaining-tokens"]) <= 97
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="small", prompt=[5, 6], max_tokens=2)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert caught.value.code == "rate_limit_exceeded"


def test_tokens_are_charged_before_and_after(tenants: Tenants) -> None:
    client = tenants.add("metered", limits=KeyLimits(tokens_per_minute=60))
    first = complete(client, prompt=list(range(5, 15)), max_tokens=5)
    assert (first.status_code, left(first, "tokens")) == (200, 45)
    with client.stream("POST", "/v1/completions", json={"prompt": [5] * 10, "max_tokens": 4, "stream": True}) as stream:
        assert left(stream, "tokens") == 35, "the answer is not known when it begins"  # type: ignore[arg-type]
        tokens = sum(b'"text":"' in line.encode() for line in stream.iter_lines())
        assert tokens
    now = left(client.get("/v1/models"), "tokens")
    assert 31 <= now < 35
    assert complete(client, prompt=[5] * (now + 1)).status_code == 429
    assert left(client.get("/v1/models"), "tokens") == now, "what is refused is not charged"
    over = complete(client, prompt=[5] * now, max_tokens=3)
    assert (over.status_code, left(over, "tokens")) == (200, 0)
    refused = complete(client)
    assert refused.status_code == 429
    assert "tokens within the last minute" in refused.json()["error"]["message"]
    huge = complete(tenants.add("metered too", limits=KeyLimits(tokens_per_minute=60)), prompt=[5] * 61)
    assert huge.status_code == 429
    assert "more than this key may use in a minute" in huge.json()["error"]["message"]


@pytest.mark.slow
def test_a_full_queue_charges_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    secret, key = new_key("busy", "user", limits=KeyLimits(tokens_per_minute=100_000))
    with changing(tmp_path / "keys.json") as document:
        document["busy"] = entry_of(key)
    flags = ["--keys-file", str(tmp_path / "keys.json"), "--max-batch-size", "1", "--max-queue-size", "1"]
    headers = {"Authorization": f"Bearer {secret}"}
    with (
        running(ours(str(tiny_folder), flags)) as server,
        httpx.Client(base_url=server.url, headers=headers, timeout=60) as client,
    ):
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: complete(client, prompt=[5] * 50, max_tokens=150), range(8)))
        served = [answer for answer in answers if answer.status_code == 200]
        full = [answer for answer in answers if answer.status_code == 429]
        assert {answer.json()["error"]["code"] for answer in full} == {"queue_full"}
        assert left(client.get("/v1/models"), "tokens") == 100_000 - 200 * len(served)


def test_so_many_at_once(tenants: Tenants) -> None:
    """While nothing goes on, 2 of 32 wait, and they are answered."""
    client, trainer = tenants.add("narrow", limits=KeyLimits(concurrency=2)), tenants.add("holder", "trainer")
    assert trainer.post("/pause", json={"mode": "keep"}).status_code == 200
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [pool.submit(complete, client) for _ in range(CLIENTS)]
        deadline = time.monotonic() + 30
        while sum(answer.done() for answer in answers) < CLIENTS - 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert trainer.post("/resume").status_code == 200
    found = [answer.result() for answer in answers]
    assert sorted(answer.status_code for answer in found) == [200, 200] + [429] * (CLIENTS - 2)
    assert "2 at once" in next(answer for answer in found if answer.status_code == 429).json()["error"]["message"]
    with client.stream("POST", "/v1/completions", json={"prompt": [5], "max_tokens": 2000, "stream": True}) as stream:
        next(stream.iter_lines())
    deadline = time.monotonic() + 10
    while {complete(client).status_code for _ in range(2)} != {200}:  # a client that leaves makes room
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_runs_in_the_background_counts_until_it_has_ended(tenants: Tenants) -> None:
    client, trainer = tenants.add("one", limits=KeyLimits(concurrency=1)), tenants.add("stopper", "trainer")
    body = {"input": "hello", "max_output_tokens": 4, "background": True}
    assert trainer.post("/pause", json={"mode": "keep"}).status_code == 200
    first = client.post("/v1/responses", json=body).json()
    assert first["status"] in ("queued", "in_progress")
    assert client.post("/v1/responses", json=body).status_code == 429
    assert complete(client).status_code == 429
    cancelled = client.post(f"/v1/responses/{first['id']}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    second = client.post("/v1/responses", json=body).json()
    assert complete(client).status_code == 429
    assert trainer.post("/resume").status_code == 200
    deadline = time.monotonic() + 20
    while client.get(f"/v1/responses/{second['id']}").json()["status"] == "in_progress":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert complete(client).status_code == 200


def test_a_key_sees_its_models_alone(tenants: Tenants) -> None:
    bound = tenants.add("bound", models=frozenset({"other"}), adapters=frozenset({"few"}))
    assert [entry["id"] for entry in bound.get("/v1/models").json()["data"]] == ["other"]
    assert [entry["id"] for entry in bound.get("/server_info").json()["models"]] == ["other"]
    assert bound.get("/v1/adapters").json()["data"] == []
    for model in ("small", "few", "all", "nobody"):
        answer = complete(bound, model=model)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert answer.json()["error"]["message"] == f"there is no model {model!r} here; there is other, default"
        assert bound.get(f"/v1/models/{model}").status_code == 404
        assert bound.post("/tokenize", json={"model": model, "prompt": "x"}).status_code == 404
    for model in ("other", "default"):
        assert complete(bound, model=model).json()["model"] == "other"
        assert bound.post("/api/show", json={"model": model}).status_code == 200
    for path in ("/api/tags", "/api/ps"):
        assert [entry["name"] for entry in bound.get(path).json()["models"]] == ["other:latest"]
    for model in ("small", "small:latest", "few", "all"):
        assert bound.post("/api/show", json={"model": model}).status_code == 404
        body = {"model": model, "prompt": "x", "stream": False, "options": {"num_predict": 1}}
        assert bound.post("/api/generate", json=body).status_code == 404


def test_a_key_sees_its_adapters_alone(tenants: Tenants) -> None:
    bound = tenants.add("few alone", adapters=frozenset({"few"}))
    assert [entry["id"] for entry in bound.get("/v1/models").json()["data"]] == ["small", "other", "few"]
    assert {entry["name"] for entry in bound.get("/v1/adapters").json()["data"]} == {"few"}
    assert complete(bound, model="few").status_code == 200
    assert complete(bound, lora_adapter="few@1").status_code == 200
    for fields in ({"model": "all"}, {"lora_adapter": "all"}, {"lora_adapter": "all@1"}):
        answer = complete(bound, **fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert complete(tenants.client("everybody's"), model="all").status_code == 200


def test_a_trainer_changes_its_adapters_alone(tenants: Tenants, tmp_path: Path) -> None:
    trainer = tenants.add("coach", "trainer", adapters=frozenset({"mine"}))
    folder = str(written(tmp_path, "dora"))
    refused = trainer.post("/v1/adapters/load", json={"name": "few", "path": folder})
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    assert trainer.post("/v1/adapters/unload", json={"name": "few"}).status_code == 404
    unnamed = tenants.add("free", "trainer").post("/v1/adapters/load", json={"path": folder})
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (403, "name")
    assert "is what the model's own name serves" in unnamed.json()["error"]["message"]
    assert trainer.post("/v1/adapters/load", json={"name": "mine", "path": folder}).status_code == 200
    assert trainer.post("/v1/adapters/unload", json={"name": "mine"}).status_code == 200
    assert trainer.post("/model/switch-lora", json={"version": "mine"}).status_code == 403


def cached(client: httpx.Client, number: int, **fields: Any) -> int:
    answer = complete(client, prompt=[number, *range(10, 70)], **fields).json()
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_no_tenant_can_tell_what_another_has_sent(tenants: Tenants) -> None:
    """A cached prompt is answered sooner: how much of it was cached tells the same, and exactly."""
    alice, bob = tenants.add("alice"), tenants.add("bob")
    assert cached(alice, 1) == 0
    assert cached(alice, 1) > 40, "its own prompts are cached"
    assert cached(bob, 1) == 0
    anybody = tenants.client("everybody's")
    assert cached(anybody, 1) == 0
    for salt in ('key:["alice", ""]', "alice", "key:alice"):
        assert cached(anybody, 1, cache_salt=salt) == 0
        assert cached(bob, 1, cache_salt=salt) == 0
    assert cached(alice, 1, cache_salt="mine") == 0
    assert cached(alice, 1, cache_salt="mine") > 40
    assert cached(bob, 1, cache_salt="mine") == 0


def test_keys_may_share_their_cache(tenants: Tenants) -> None:
    one, two = tenants.add("one", shared_cache=True), tenants.add("two", shared_cache=True)
    assert cached(one, 2) == 0
    assert cached(two, 2) > 40
    assert cached(tenants.client("everybody's"), 2) > 40


def test_keys_come_and_go_while_it_runs(tenants: Tenants) -> None:
    command = [sys.executable, "-m", "mlx_parallm", "keys", "add", "temp", "--file", str(tenants.file)]
    added = forked.run([*command, "--role", "trainer"], 60)
    assert added.returncode == 0, added.stderr
    secret = added.stdout.strip()
    assert secret not in tenants.file.read_text()
    assert tenants.file.stat().st_mode & 0o777 == 0o600
    client = tenants.client(secret)
    assert client.post("/resume").status_code == 200
    with changing(tenants.file) as document:
        del document["temp"]
    tenants.server.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 5
    while client.get("/v1/models").status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert tenants.server.process.poll() is None


def test_a_file_that_is_broken_meanwhile_locks_nobody_out(tenants: Tenants) -> None:
    client, before = tenants.add("steady"), tenants.file.read_bytes()
    for text in (b'{"steady": [', before):
        tenants.file.write_bytes(text)
        tenants.server.process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert client.get("/v1/models").status_code == 200
    assert "can't be read" in tenants.server.log()


def test_signing_in_from_a_browser(tenants: Tenants) -> None:
    secret, key = new_key("hanna", "trainer")
    with changing(tenants.file) as document:
        document["hanna"] = entry_of(key)
    tenants.server.process.send_signal(signal.SIGHUP)
    tenants.client(secret)
    browser = tenants.clients.enter_context(httpx.Client(base_url=tenants.server.url))
    own = {"Origin": tenants.server.url}
    assert browser.get("/dashboard/session").json() == {"name": None, "role": None, "needs_key": True}
    assert browser.post("/dashboard/login", json={"key": "guess"}, headers=own).status_code == 401
    answer = browser.post("/dashboard/login", json={"key": secret}, headers=own)
    assert answer.json() == {"name": "hanna", "role": "trainer", "needs_key": True}
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secure" not in cookie, "over http"
    assert secret.lower() not in cookie
    assert browser.get("/dashboard/session").json()["role"] == "trainer"
    assert browser.post("/resume", headers=own).status_code == 200
    assert browser.get("/debug/metrics").status_code == 403
    for origin in ("https://evil.example", "http://127.0.0.1:1", "null"):
        assert browser.post("/resume", headers={"Origin": origin}).status_code == 403
    token = dict(browser.cookies)
    assert browser.post("/dashboard/logout", headers=own).status_code == 200
    assert not browser.cookies
    assert httpx.get(f"{tenants.server.url}/v1/models", cookies=token).status_code == 401


@pytest.mark.parametrize("body", [{}, [], {"key": 5}, {"key": ""}, {"key": None}, {"key": "x" * 5000}, {"key": ["x"]}])
def test_sign_ins_that_are_none(tenants: Tenants, body: Any) -> None:
    answer = httpx.post(f"{tenants.server.url}/dashboard/login", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("key", None)


def test_changes_stand_in_the_audit_log(tenants: Tenants) -> None:
    trainer = tenants.add("auditor", "trainer")
    before = len(tenants.audit.read_text().splitlines())
    trainer.post("/resume", headers={"X-Request-Id": "change-1"})
    trainer.post("/model/switch-lora", json={"version": "few"})
    httpx.post(f"{tenants.server.url}/pause")
    trainer.post("/pause/home/someone/secret.txt")
    complete(trainer)
    trainer.get("/v1/adapters")
    lines = [json.loads(line) for line in tenants.audit.read_text().splitlines()[before:]]
    told = [tuple(line[name] for name in ("key", "role", "method", "path", "status")) for line in lines]
    assert told == [
        ("auditor", "trainer", "POST", "/resume", 200),
        ("auditor", "trainer", "POST", "/model/switch-lora", 403),
        (None, None, "POST", "/pause", 401),
        ("auditor", "trainer", "POST", "(no such route)", 404),
    ]
    assert lines[0]["request_id"] == "change-1"
    assert lines[0]["time"].endswith("+00:00")
    assert tenants.audit.stat().st_mode & 0o777 == 0o600


def test_users_see_names_and_no_paths(tenants: Tenants, tiny_folder: Path) -> None:
    user, admin = tenants.add("path-user"), tenants.add("path-admin", "admin")
    for path, post in (("/v1/models", None), ("/server_info", None), ("/api/show", {"model": "small"})):
        seen = {
            name: (client.get(path) if post is None else client.post(path, json=post)).text
            for name, client in (("user", user), ("admin", admin))
        }
        assert str(tiny_folder.parent) in seen["admin"], path
        assert "/tiny-llama" not in seen["user"], path
        assert str(tiny_folder.parent) not in seen["user"], path
    assert "/" not in user.get("/v1/models/few").json()["root"]
