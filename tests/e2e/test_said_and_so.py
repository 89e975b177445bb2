"""What is said is so: warnings, types of bodies, origins, times, names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers import ServerProcess, ours, running

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
WARNING = "X-Parallm-Warning"


@pytest.fixture(scope="module")
def client(tiny_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as found:
        yield found


def test_an_unknown_field_is_told_of_with_the_nearest_known_one(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=HELLO | {"temprature": 0.5, "max_token": 3})
    assert answer.status_code == 200
    assert answer.headers[WARNING] == (
        "ignored: 'temprature' (did you mean 'temperature'?); 'max_token' (did you mean 'max_tokens'?)"
    )
    streamed = client.post(CHAT, json=HELLO | {"temprature": 0.5, "stream": True})
    assert "'temperature'" in streamed.headers[WARNING]
    long = client.post(CHAT, json=HELLO | {"temprature": 0.5, "note": "x" * 100_000})
    assert "'temperature'" in long.headers[WARNING]


def test_a_warning_is_short_and_ascii(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=HELLO | {f"ünknown\r\nX-Evil: {number}" * 20: 1 for number in range(50)})
    assert answer.status_code == 200
    assert "X-Evil" not in answer.headers
    assert len(answer.headers[WARNING]) <= 512
    assert answer.headers[WARNING].isascii()
    assert "and 45 more" in answer.headers[WARNING] or len(answer.headers[WARNING]) == 512


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO | {"service_tier": "auto", "store": False, "verbosity": "low", "temperature": None, "foo": None}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "user": "me", "suffix": None}),
        ("/v1/messages", HELLO | {"model": "default", "service_tier": "auto", "metadata": {"user_id": "me"}}),
        ("/api/chat", {"model": "default", "messages": HELLO["messages"], "stream": False, "keep_alive": -1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1, "service_tier": "auto"}),
        ("/generate", {"prompt": "a", "max_tokens": 1, "step_id": 1}),
    ],
)
def test_fields_of_a_dialects_own_api_are_no_mistakes(client: httpx.Client, path: str, body: Any) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.headers.get(WARNING)) == (200, None), answer.text


def test_unknown_fields_are_ignored_or_refused_where_that_is_asked_for(tiny_folder: Path) -> None:
    for mode, status in (("refuse", 400), ("ignore", 200)):
        with running(ours(str(tiny_folder), ["--unknown-fields", mode])) as server:
            answer = httpx.post(server.url + CHAT, json=HELLO | {"temprature": 0.5}, timeout=60)
            assert (answer.status_code, WARNING in answer.headers) == (status, False)
            if status == 400:
                error = answer.json()["error"]
                assert (error["param"], error["code"]) == ("temprature", "unknown_field")
                assert "did you mean 'temperature'" in error["message"]
            assert httpx.post(server.url + CHAT, json=HELLO, timeout=60).status_code == 200


BROWSER = [
    {"Cookie": "a=b"},
    {"Origin": "null"},
    {"Origin": "http://evil.example"},
    {"Referer": "http://evil.example/"},
]
BROWSER += [{"Sec-Fetch-Mode": "no-cors"}, {"Sec-Fetch-Site": "cross-site"}]


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/octet-stream"])
def test_a_json_body_of_another_type_is_read_but_from_a_browser(client: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'
    assert client.post(CHAT, content=body, headers=headers).status_code == 200
    for more in BROWSER:
        assert client.post(CHAT, content=body, headers=headers | more).status_code in (400, 403), more
    wrong = client.post(CHAT, content=b"a=b", headers=headers)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "unsupported_media_type")
    assert client.post("/model/switch-lora", content=b'{"version": "base"}', headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/server_info"])
def test_no_foreign_page_reads_anything(client: httpx.Client, path: str) -> None:
    for origin in ("http://evil.example", "null"):
        answer = client.get(path, headers={"Origin": origin})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    own = str(client.base_url).rstrip("/")
    assert client.get(path, headers={"Origin": own}).status_code == 200


def test_ollamas_durations_are_real_without_a_stream(client: httpx.Client) -> None:
    body = {"model": "default", "messages": HELLO["messages"], "options": {"num_predict": 200, "temperature": 0}}
    for stream in (False, True):
        text = client.post("/api/chat", json=body | {"stream": stream}).text
        last = httpx.Response(200, text=text.strip().splitlines()[-1]).json()
        assert last["eval_count"] > 50
        assert last["eval_duration"] > 0.3 * (last["total_duration"] - last["load_duration"]), stream
        assert last["prompt_eval_duration"] + last["eval_duration"] <= last["total_duration"]


def test_the_names_that_were_promised(client: httpx.Client) -> None:
    found = client.get("/metrics").text
    assert 'mlx_parallm_rl_trajectories_collected{adapter=""} 0.0' in found
    assert client.post("/v1/pool", json={"input": "a"}).json() == client.post("/pooling", json={"input": "a"}).json()
