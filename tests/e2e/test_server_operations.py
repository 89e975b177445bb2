"""What surrounds the routes: ids, keys, limits, CORS, probes, metrics, docs, disconnects, start and shutdown."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from mlx_parallm.server import api
from mlx_parallm.server.api.openai.model_routes import Model, ModelList
from mlx_parallm.server.api.ops import DebugMetrics, MetricsSummary
from mlx_parallm.server.api.tokens import Tokens
from mlx_parallm.server.http.route_docs import EXAMPLES
from tests.e2e.test_openapi_examples import REFUSED
from tests.support import forked
from tests.support.servers import ServerProcess, free_port, ours, running
from tests.support.shapes import read_as

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
LONG = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(tiny_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def guarded(tiny_folder: Path) -> Iterator[httpx.Client]:
    """A server with keys, a small body limit, CORS, and JSON logs."""
    flags = ["--api-key", "open", "--admin-key", "sesame", "--max-body-size", "2000", "--log-json"]
    flags += ["--cors-allow-origin", "https://example.com", "--log-level", "INFO", "--request-timeout-seconds", "2"]
    flags += ["--max-batch-size", "2", "--max-queue-size", "2"]
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        client.server = server  # type: ignore[attr-defined]
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def free_slots(client: httpx.Client, **headers: Any) -> bool:
    counts = client.get("/debug/metrics", **headers).json()
    return bool(counts["slots_free"] == counts["slots_total"])


def test_every_answer_has_a_request_id(client: httpx.Client) -> None:
    assert client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert len(client.get("/nowhere").headers["x-request-id"]) == 32
    assert client.get("/health", headers={"X-Request-Id": "x" * 500}).headers["x-request-id"] != "x" * 500
    answer = client.post("/v1/chat/completions", json=HELLO, headers={"X-Request-Id": "mine-2"})
    assert answer.json()["id"] == "chatcmpl-mine-2"


def test_models(client: httpx.Client) -> None:
    for path in ("/v1/models", "/models"):
        listed = read_as(ModelList, client.get(path).json())
        assert [model["id"] for model in listed["data"]] == ["tiny-llama"]
        assert listed["data"][0]["max_model_len"] == 2048
    for name in ("tiny-llama", "default"):
        assert read_as(Model, client.get(f"/v1/models/{name}").json())["id"] == "tiny-llama"
    missing = client.get("/v1/models/some/body")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_tokens_there_and_back(client: httpx.Client) -> None:
    text = "Hello, wörld 日本 👋"
    found = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    tokens = read_as(Tokens, found)
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = client.post("/tokenize", json={"messages": HELLO["messages"], "add_generation_prompt": False}).json()
    longer = client.post("/tokenize", json={"messages": HELLO["messages"]}).json()
    assert longer["tokens"][: chat["count"]] == chat["tokens"]
    assert longer["count"] > chat["count"]


def test_health_and_metrics(client: httpx.Client) -> None:
    client.post("/v1/chat/completions", json=HELLO)
    assert client.get("/health").json() == {"status": "healthy", "model_loaded": True}
    text = client.get("/metrics").text
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert all(name.startswith("mlx_parallm_") for name in names)
    assert {"mlx_parallm_queue_depth", "mlx_parallm_generated_tokens_total"} <= names
    assert "mlx_parallm_time_to_first_token_seconds_bucket" in names
    assert 'mlx_parallm_requests_finished_total{model="tiny-llama",reason=' in text
    assert 'mlx_parallm_step_start_seconds_total{kind="decode",model="tiny-llama"}' in text
    for name in ("lora_swaps_total", "lora_resident_bytes", "policy_version"):
        assert f'mlx_parallm_{name}{{model="tiny-llama"}}' in text
    summary = client.get("/metrics", headers={"Accept": "application/json"}).json()
    assert read_as(MetricsSummary, summary)["max_batch_size"] == 32
    debug = read_as(DebugMetrics, client.get("/debug/metrics").json())
    assert debug["batches_processed"] > 0
    assert len(debug["batch_fill_hist"]) == 10
    assert debug["decode_tps_avg"] > 0
    for steps in (debug["decode"], debug["prefill"]):
        assert steps["count"] > 0
        assert steps["start_seconds"] > 0


def test_a_server_alone_has_no_cluster_to_join(client: httpx.Client) -> None:
    answer = client.get("/debug/cluster")
    assert (answer.status_code, "--share-model" in answer.json()["error"]["message"]) == (404, True)


def test_keys(guarded: httpx.Client) -> None:
    assert guarded.get("/health").status_code == 200
    assert guarded.get("/metrics").status_code == 200
    for headers in ({}, bearer("wrong"), {"Authorization": "open"}, {"Authorization": "Basic open"}):
        refused = guarded.get("/v1/models", headers=headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert refused.headers["www-authenticate"] == "Bearer"
    assert guarded.get("/v1/models", headers=bearer("open")).status_code == 200
    assert guarded.get("/v1/models", headers=bearer("sesame")).status_code == 200
    refused = guarded.get("/debug/metrics", headers=bearer("open"))
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    assert guarded.get("/debug/metrics", headers=bearer("sesame")).status_code == 200


def test_body_limit_with_and_without_a_length(guarded: httpx.Client) -> None:
    body = json.dumps(HELLO | {"user": "x" * 3000}).encode()
    chunks = [body[at : at + 500] for at in range(0, len(body), 500)]
    headers = bearer("open") | {"Content-Type": "application/json"}
    for content in (body, iter(chunks)):
        refused = guarded.post("/v1/chat/completions", content=content, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "payload_too_large")
    assert guarded.post("/v1/chat/completions", json=HELLO, headers=bearer("open")).status_code == 200


def test_cors(guarded: httpx.Client) -> None:
    asked = {"Origin": "https://example.com", "Access-Control-Request-Method": "POST"}
    preflight = guarded.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://example.com"
    refused = guarded.get("/v1/models", headers={"Origin": "https://example.com"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://example.com"
    assert "access-control-allow-origin" not in guarded.get("/health", headers={"Origin": "https://evil.com"}).headers


def test_timeout_is_504_or_an_event(guarded: httpx.Client) -> None:
    slow = LONG | {"max_tokens": 2040, "n": 2, "logprobs": 20, "frequency_penalty": 1, "guided_regex": "(a|b)*"}
    late = guarded.post("/v1/completions", json=slow, headers=bearer("open"))
    if late.status_code == 200:
        pytest.skip("this machine is too fast to be late")
    assert (late.status_code, late.json()["error"]["code"]) == (504, "request_timeout")
    with guarded.stream("POST", "/v1/completions", json=slow | {"stream": True}, headers=bearer("open")) as response:
        assert response.status_code == 200
        events = [line for line in response.iter_lines() if line]
    assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "timeout_error"
    assert events[-1] == "data: [DONE]"
    eventually(lambda: free_slots(guarded, headers=bearer("sesame")))


def test_full_queue_is_429_with_retry_after(guarded: httpx.Client) -> None:
    results: list[httpx.Response] = []

    def ask() -> None:
        results.append(httpx.post(f"{guarded.base_url}/v1/completions", json=LONG, headers=bearer("open"), timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [response for response in results if response.status_code == 429]
    assert refused
    assert int(refused[0].headers["retry-after"]) >= 1
    assert refused[0].json()["error"]["code"] == "queue_full"
    assert {response.status_code for response in results} <= {200, 429, 504}


def test_logs_are_json_with_the_request_id(guarded: httpx.Client) -> None:
    guarded.get("/v1/models", headers=bearer("open") | {"X-Request-Id": "find-me"})
    eventually(lambda: "find-me" in guarded.server.tail())  # type: ignore[attr-defined]
    lines = guarded.server.tail().splitlines()  # type: ignore[attr-defined]
    line = json.loads(next(line for line in lines if "find-me" in line))
    assert (line["request_id"], line["path"], line["status"]) == ("find-me", "/v1/models", 200)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(client: httpx.Client, tiny_server: ServerProcess, stream: bool) -> None:
    finished = dict(client.get("/debug/metrics").json()["requests_finished"])
    with socket.create_connection(("127.0.0.1", httpx.URL(tiny_server.url).port or 0)) as raw:
        body = json.dumps(LONG | {"stream": stream, "n": 3}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}"
        raw.sendall(f"{head}\r\n\r\n".encode() + body)
        eventually(lambda: not free_slots(client))
    eventually(lambda: free_slots(client), 2)
    after = client.get("/debug/metrics").json()["requests_finished"]
    assert after.get("length", 0) == finished.get("length", 0), "the rows ran to their end"


def test_one_bad_prompt_of_many_cancels_the_rest(client: httpx.Client) -> None:
    prompts = [[5] * 10, [5] * 3000]
    refused = client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1000, "ignore_eos": True})
    assert refused.status_code == 400
    eventually(lambda: free_slots(client), 2)


def test_openai_client(tiny_server: ServerProcess) -> None:
    with OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as openai:
        assert [model.id for model in openai.models.list()] == ["tiny-llama"]
        answer = openai.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "hi"}], max_tokens=4, n=2, logprobs=True
        )
        assert len(answer.choices) == 2
        stream = openai.completions.create(model="default", prompt="hi", max_tokens=4, stream=True)
        assert sum(len(chunk.choices) for chunk in stream) >= 1


def test_port_in_use_is_said_before_the_model_loads(tiny_server: ServerProcess, tiny_folder: Path) -> None:
    port = str(httpx.URL(tiny_server.url).port)
    command = [sys.executable, "-m", "mlx_parallm", "serve", "--port", port, "--model-path", str(tiny_folder)]
    ended = forked.run(command, 60)
    assert ended.returncode == 2
    assert f"can't listen on 127.0.0.1:{port}" in ended.stderr


def test_start_prints_the_model_and_a_port_of_its_own(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "mlx_parallm", "serve", "--port", "0", "--model-path", f"one={tiny_folder}"]
    command += ["--model-path", f"two={tiny_folder}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or "URL" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "the server ended"
        url = lines[-1].split()[1]
        assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["one", "two"]
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "model": "two", "max_tokens": 2}, timeout=60)
        assert answer.json()["model"] == "two"
        assert set(httpx.get(f"{url}/debug/metrics").json()["models"]) == {"one", "two"}
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert any("device" in line for line in lines)


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(tiny_folder: Path) -> None:
    with running(ours(str(tiny_folder), ["--drain-timeout-seconds", "60"], free_port())) as server:
        results: list[httpx.Response] = []
        body = LONG | {"max_tokens": 1500, "n": 4}
        thread = threading.Thread(
            target=lambda: results.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=120))
        )
        with httpx.Client(base_url=server.url) as other:
            thread.start()
            eventually(lambda: not free_slots(other))
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: other.get("/health").status_code == 503)
            assert other.get("/health").json()["status"] == "draining"
            refused = other.post("/v1/completions", json=LONG)
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable")
        thread.join()
        assert results[0].status_code == 200
        assert results[0].json()["usage"]["completion_tokens"] == 6000
        assert server.process.wait(30) == 0


def test_a_second_signal_ends_at_once(tiny_folder: Path) -> None:
    with running(ours(str(tiny_folder), ["--drain-timeout-seconds", "60"], free_port())) as server:

        def ask() -> None:
            with pytest.raises(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/completions", json=LONG | {"n": 8}, timeout=60)

        thread = threading.Thread(target=ask)
        thread.start()
        with httpx.Client(base_url=server.url) as other:
            eventually(lambda: not free_slots(other))
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)  # the same, by way of its process group
        time.sleep(1.0)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 128 + signal.SIGTERM
        thread.join()


def test_flushing_the_prefix_cache(tiny_server: ServerProcess) -> None:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        body = {"prompt": list(range(20, 80)), "max_tokens": 2}
        client.post("/v1/completions", json=body)
        details = client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] > 16
        before = client.get("/debug/metrics").json()["prefix"]
        assert before["hits"] > 0
        assert before["blocks_cached"] > 0
        for path in ("/flush_cache", "/reset_prefix_cache"):
            answer = client.post(path)
            assert (answer.status_code, answer.json()["success"]) == (200, True)
        assert client.get("/debug/metrics").json()["prefix"]["blocks_cached"] == 0
        assert "mlx_parallm_prefix_cache_hit_tokens_total" in client.get("/metrics").text
        details = client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == 0


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def has_example(document: dict[str, Any], content: dict[str, Any]) -> bool:
    for media in content.values():
        schema = resolved(document, media.get("schema", {}))
        variants = [schema, *(resolved(document, one) for key in ("anyOf", "oneOf") for one in schema.get(key, []))]
        if "example" in media or any("example" in one for one in variants):
            return True
    return False


def test_every_route_has_a_description_and_examples(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    missing = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body, answer = operation.get("requestBody"), operation["responses"].get("200")
            if body is not None and not has_example(document, body["content"]):
                missing.append(f"{method} {path}: no example of a body")
            if answer is None:
                assert path in REFUSED, path
            elif not has_example(document, answer.get("content", {})):
                missing.append(f"{method} {path}: no example of an answer")
            assert {"400", "401"} <= set(operation["responses"]), path
            if not operation.get("description") or not operation.get("summary"):
                missing.append(f"{method} {path}: no description")
    assert missing == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_what_is_documented(name: str) -> None:
    routes = {f"{route.method} {route.name}": route for route in api.route_table().routes}
    read_as(routes[name].answer, EXAMPLES[name])


def test_the_docs_load_nothing_from_elsewhere(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    addresses = re.findall(r"""(?:src|href)=["']([^"']+)["']""", page.text)
    assert len(addresses) >= 3
    for address in addresses:
        assert address.startswith("/"), f"{address} comes from another server"
        assert client.get(address).status_code == 200
    assert not re.findall(r"https?://", page.text)


def log_lines(client: httpx.Client) -> list[dict[str, Any]]:
    server: ServerProcess = client.server  # type: ignore[attr-defined]
    return [json.loads(line) for line in server.tail().splitlines() if line.startswith("{")]


def outcome_of(client: httpx.Client, identity: str) -> dict[str, Any]:
    def found() -> list[dict[str, Any]]:
        return [line for line in log_lines(client) if line.get("request_id") == identity and "outcome" in line]

    eventually(lambda: bool(found()))
    return found()[0]


def test_a_stream_that_was_cut_is_logged_as_such(guarded: httpx.Client) -> None:
    """Its status is 200, sent long before its end: the log says how it ended."""
    body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    headers = bearer("open") | {"X-Request-Id": "cut-1"}
    with guarded.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        assert guarded.post("/pause?mode=keep", headers=bearer("sesame")).status_code == 200  # until its time is up
        text = "".join(lines)
    assert guarded.post("/resume", headers=bearer("sesame")).status_code == 200
    assert "request_timeout" in text
    line = outcome_of(guarded, "cut-1")
    assert (line["status"], line["level"], line["outcome"]) == (200, "WARNING", "cut off: request_timeout")
    headers["X-Request-Id"] = "left-1"
    with guarded.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        next(response.iter_lines())
    assert outcome_of(guarded, "left-1")["outcome"] == "the client left"


def test_head_is_answered(client: httpx.Client) -> None:
    answer = client.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")


def test_another_server_on_all_addresses_is_noticed(tiny_folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "mlx_parallm", "serve", "--port", str(port), "--model-path", str(tiny_folder)]
        ended = forked.run(command, 60)
    assert ended.returncode == 2
    assert f"can't listen on 127.0.0.1:{port}" in ended.stderr


def test_a_start_says_what_is_on(tiny_folder: Path, tmp_path: Path) -> None:
    flags = ["--ssd-cache-dir", str(tmp_path / "kv"), "--api-key", "open", "--enable-rl-training"]
    flags += ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--lora-rank", "4"]
    with running(ours(str(tiny_folder), flags)) as server:
        said = server.tail()
    assert said.startswith("MLX ParaLLM")
    assert said.index("is starting") < said.index("loading tiny-llama") < said.index("is ready")
    for words in (
        f"on SSD in {tmp_path / 'kv'}",
        "training   on: policy learns by GRPO",
        "adapters   policy;",
        "needed for every request; admin routes are closed",
        "continuous: new requests join",
        "/docs)",
    ):
        assert words in said, words
    with running(ours(str(tiny_folder), ["--ssd-cache-dir", "/proc/1/nowhere", "--num-blocks", "64"])) as server:
        said = server.tail()
    assert "not on SSD: can't use /proc/1/nowhere" in said
    assert "training   off (--enable-rl-training turns it on)" in said
    assert "none: everybody on this machine" in said
