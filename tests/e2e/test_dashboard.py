"""The dashboard's routes, without a browser: page, files, event stream, recent requests and rollouts, bad input."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from mlx_parallm.server.api.dashboard import RequestNotes, RolloutNotes, ServerSnapshot
from mlx_parallm.server.http.schema import Error
from tests.support.servers import ServerProcess
from tests.support.shapes import read_as


@pytest.fixture
def client(tiny_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as found:
        yield found


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, orjson.loads(line.removeprefix("data: "))


def test_the_page_runs_nothing_but_its_own_files(client: httpx.Client) -> None:
    page = client.get("/dashboard")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", page.text)  # nothing inline
    addresses = re.findall(r"""(?:src|href)="(dashboard/[^"]+)\"""", page.text)
    assert len(addresses) >= 6
    for address in addresses:
        file = client.get(f"/{address}")
        assert (file.status_code, file.headers["content-security-policy"]) == (200, policy)


def test_files_are_asked_for_again_and_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/dashboard/static/app.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = client.get("/dashboard/static/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "name", ["", "nothing.js", "../feed.py", "..%2ffeed.py", "%2e%2e/feed.py", "/etc/passwd", "x" * 9000, "%00"]
)
def test_there_are_no_other_files(client: httpx.Client, name: str) -> None:
    answer = client.get(f"/dashboard/static/{name}")
    assert answer.status_code == 404
    read_as(Error, answer.json())


def test_every_viewer_gets_the_same_snapshots(client: httpx.Client, tiny_server: ServerProcess) -> None:
    address = f"{tiny_server.url}/dashboard/events"
    with httpx.stream("GET", address, timeout=30) as one, httpx.stream("GET", address, timeout=30) as other:
        assert one.headers["content-type"].startswith("text/event-stream")
        first, second = events(one), events(other)
        assert next(first)[0] == next(second)[0] == "history"
        client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 8})
        seen = [[next(stream) for _ in range(3)] for stream in (first, second)]
    assert {name for stream in seen for name, _ in stream} == {"snapshot"}
    times = [[snapshot["time"] for _, snapshot in stream] for stream in seen]
    assert set(times[0]) & set(times[1]), "each viewer has snapshots of its own"
    assert max(snapshot["viewers"] for stream in seen for _, snapshot in stream) >= 2
    newest = seen[0][-1][1]
    read_as(ServerSnapshot, newest)
    assert newest["rates"]["generated"] is not None
    assert 0 <= newest["rates"]["idle"] <= 1


def test_one_snapshot_as_json(client: httpx.Client) -> None:
    client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4})
    found = client.get("/dashboard/snapshot").json()
    read_as(ServerSnapshot, found)
    assert found["totals"]["generated"] > 0
    assert found["first_token"]["p50"] > 0
    assert found["memory"]["limit"] >= found["memory"]["weights"] > 0


def test_recent_requests_tell_everything_but_what_was_said(client: httpx.Client) -> None:
    before = client.get("/dashboard/requests", params={"limit": 1}).json()["requests"]
    last = before[0]["number"] if before else 0
    body = {"prompt": "a secret that nobody may see", "max_tokens": 6, "ignore_eos": True, "stream": True}
    answer = client.post("/v1/completions", json=body, headers={"X-Request-Id": "named"})
    assert answer.status_code == 200
    assert client.post("/v1/completions", json={"prompt": 3}).status_code == 400
    client.get("/v1/models")
    shown = client.get("/dashboard/requests", params={"after": last})
    read_as(RequestNotes, shown.json())
    assert "secret" not in shown.text
    wrong, right = shown.json()["requests"]
    assert (wrong["status"], wrong["model"], wrong["completion_tokens"]) == (400, None, None)
    assert (right["request_id"], right["path"], right["status"]) == ("named", "/v1/completions", 200)
    assert (right["model"], right["adapter"], right["completion_tokens"]) == ("tiny-llama", None, 6)
    assert right["prompt_tokens"] > 5
    assert 0 < right["first_token_seconds"] <= right["seconds"]


@pytest.mark.parametrize(
    "query",
    ["requests?limit=0", "requests?limit=-1", "requests?limit=501", "requests?limit=x", "requests?limit=1e3",
     "requests?after=-1", "requests?after=99999999999999999999", "requests?after=NaN", "rollouts?limit=0",
     "rollouts?limit=49", "rollouts?limit="],
)  # fmt: skip
def test_bad_queries_are_named(client: httpx.Client, query: str) -> None:
    answer = client.get(f"/dashboard/{query}")
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in ("limit", "after")


def test_a_server_that_does_not_train_has_no_rollouts(client: httpx.Client) -> None:
    found = client.get("/dashboard/rollouts").json()
    read_as(RolloutNotes, found)
    assert found == {"adapters": [], "groups": []}
