"""The front of several replicas: who is asked, what passes on, and what a client hears when a replica dies.

The replicas here are small HTTP servers; `tests/e2e/test_replicas.py` has real ones, started by Ray.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import orjson
import pytest
from starlette.responses import PlainTextResponse

aiohttp = pytest.importorskip("aiohttp")

from aiohttp import web  # noqa: E402

from mlx_parallm.cluster.replicas.front import Front  # noqa: E402
from mlx_parallm.cluster.replicas.links import PREFIX_HEADER, SECRET_HEADER, knows_secret  # noqa: E402
from mlx_parallm.cluster.replicas.members import Member, Members  # noqa: E402
from mlx_parallm.config import ServeConfig  # noqa: E402
from mlx_parallm.server.api.ops import CLUSTER_PATH  # noqa: E402

SECRET = "between us"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CHAT = {"model": "default", "messages": [{"role": "user", "content": "hi " * 200}]}


class Cluster:
    """A front, and replicas that answer by the handlers that they are given."""

    def __init__(self, front: Front, members: Members, calls: httpx.AsyncClient) -> None:
        self.front, self.members, self.calls = front, members, calls
        self.asked: list[str] = []  # replicas, as requests come to them
        self._runners: list[web.AppRunner] = []

    async def add(self, name: str, handler: Handler) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            assert request.headers[SECRET_HEADER.decode()] == SECRET
            self.asked.append(name)
            return await handler(request)

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        assert await self.members.join(Member(name, f"http://127.0.0.1:{port}", 1, "here"), 0) == []
        assert await self.members.make_ready(name, 0, [])

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def cluster(**options: Any) -> AsyncIterator[Cluster]:
    front: Front

    def session() -> Any:
        return front.session

    members = Members(SECRET, 2, session)
    front = Front(members, ServeConfig.of(**options) if options else ServeConfig(), SECRET)
    await front.open()
    transport = httpx.ASGITransport(front)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as calls:
        found = Cluster(front, members, calls)
        try:
            yield found
        finally:
            await front.close()
            await found.close()


async def hello(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    told = {"method": request.method, "path": request.raw_path, "headers": dict(request.headers), "size": len(body)}
    return web.json_response(told, headers={"X-Own": "yes"})


async def dies(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def breaks_off(kind: str, event: bytes) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": kind})
        await answer.prepare(request)
        await answer.write(event + b"half of an ev")
        assert request.transport is not None
        request.transport.abort()
        return answer

    return handler


async def test_health_tells_of_replicas() -> None:
    async with cluster() as it:
        answer = await it.calls.get("/health")
        assert answer.status_code == 503
        assert answer.json() == {
            "status": "unhealthy",
            "model_loaded": False,
            "reason": "no replica is ready",
            "replicas": {"ready": 0, "expected": 2},
        }
        answer = await it.calls.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no replica is ready")
        await it.add("left", hello)
        answer = await it.calls.get("/health")
        assert (answer.status_code, answer.json()["replicas"]) == (200, {"ready": 1, "expected": 2})
        it.front.draining = True
        answer = await it.calls.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        answer = await it.calls.get("/v1/models/x")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is shutting down")
        assert it.asked == []


async def test_a_request_is_passed_on_whole_and_its_answer_comes_back() -> None:
    async with cluster() as it:
        await it.add("left", hello)
        headers = {"X-Request-Id": "mine", "X-Mine": "1", "Expect": "nothing", SECRET_HEADER.decode(): "guessed"}
        answer = await it.calls.post("/v1/chat/completions?a=%2F&b", json=CHAT, headers=headers)
        told = answer.json()
        assert (answer.status_code, answer.headers["x-own"], answer.headers["x-request-id"]) == (200, "yes", "mine")
        assert "request-id" not in answer.headers
        assert (told["method"], told["path"]) == ("POST", "/v1/chat/completions?a=%2F&b")
        assert told["size"] == len(orjson.dumps(CHAT))
        found = {name.lower(): value for name, value in told["headers"].items()}
        assert (found["x-request-id"], found["x-mine"]) == ("mine", "1")
        assert found[SECRET_HEADER.decode()] == SECRET
        assert len(found[PREFIX_HEADER.decode()]) % 16 == 0
        assert "expect" not in found
        answer = await it.calls.post("/v1/messages", json=CHAT)
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        assert it.front.in_flight == 0


async def test_a_conversation_goes_where_it_went_before() -> None:
    async with cluster() as it:
        await it.add("left", hello)
        await it.add("right", hello)
        for _ in range(6):
            assert (await it.calls.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert len(set(it.asked)) == 1


async def test_a_body_that_is_too_long_goes_nowhere() -> None:
    async with cluster() as it:
        it.front._limit = 1000
        await it.add("left", hello)
        assert (await it.calls.post("/v1/completions", content=b"x" * 1000)).status_code == 200
        answer = await it.calls.post("/v1/completions", content=b"x" * 1001)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
        assert len(it.asked) == 1
        answer = await it.calls.post("/upload_adapter", content=b"x" * 5000)  # the replica has a limit of its own
        assert (answer.status_code, answer.json()["size"]) == (200, 5000)


async def test_another_replica_answers_for_one_that_has_died() -> None:
    async with cluster() as it:
        await it.add("left", dies)
        await it.add("right", hello)
        for _ in range(4):
            answer = await it.calls.post("/v1/completions", json={"prompt": f"{len(it.asked)}"})
            assert answer.status_code == 200
        assert it.asked.count("left") <= 1
        assert [member.name for member in it.members.ready] in (["right"], ["left", "right"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/adapters/load", "/upload_adapter"])
async def test_what_changes_the_server_is_not_done_twice(path: str) -> None:
    async with cluster() as it:
        await it.add("left", dies)
        answer = await it.calls.post(path, json={})
        said = answer.json()["error"]["message"]
        assert answer.status_code == 503
        assert it.members.ready == []
        if path == "/v1/completions":
            assert said.startswith("the replicas that this was sent to have ended")
        else:
            assert "look at what it has changed" in said
        answer = await it.calls.post(path, json={})
        assert answer.json()["error"]["message"] == "no replica is ready: its connections broke"


@pytest.mark.parametrize(
    ("path", "kind", "event", "ending"),
    [
        ("/v1/chat/completions", "text/event-stream", b"data: {}\n\n", b"\n\ndata: [DONE]\n\n"),
        ("/v1/messages", "text/event-stream", b"event: a\ndata: {}\n\n", b"}\n\n"),
        ("/v1/responses", "text/event-stream", b"event: a\ndata: {}\n\n", b"}\n\n"),
        ("/api/chat", "application/x-ndjson", b"{}\n", b"}\n"),
    ],
)
async def test_a_stream_that_is_cut_off_ends_with_an_error(path: str, kind: str, event: bytes, ending: bytes) -> None:
    async with cluster() as it:
        await it.add("left", breaks_off(kind, event))
        answer = await it.calls.post(path, json={})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == kind
        assert answer.content.startswith(event)
        rest = answer.content.removeprefix(event)
        assert b"half of an ev" not in rest
        assert b"the replica that wrote this ended" in rest
        assert rest.endswith(ending)
        assert rest.startswith(b"event: error\ndata: ") == (path in ("/v1/messages", "/v1/responses"))
        if path == "/v1/messages":
            assert b'"type":"error"' in rest
        assert it.members.ready == []


@pytest.mark.parametrize("whole", [b"data: {}\n\ndata: [DO", b"data: [DONE]", b""])
async def test_a_stream_ends_as_the_replica_s_does(whole: bytes) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=whole, headers={"Content-Type": "text/event-stream"})

    async with cluster() as it:
        await it.add("left", handler)
        answer = await it.calls.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert (answer.status_code, answer.content) == (200, whole)


async def test_lists_are_those_of_all_replicas() -> None:
    def with_models(*names: str) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            return web.json_response({"object": "list", "data": [{"id": name} for name in names]})

        return handler

    async with cluster() as it:
        await it.add("left", with_models("chat"))
        await it.add("right", with_models("chat", "late"))
        await it.add("dead", dies)
        answer = await it.calls.get("/v1/models")
        assert answer.status_code == 200
        assert {one["id"] for one in answer.json()["data"]} >= {"chat"}
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert set(it.asked) == {"dead", "left", "right"}
        assert {member.name for member in it.members.ready} == {"left", "right"}


async def test_where_all_replicas_refuse_so_does_the_front() -> None:
    async def refuses(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no key"}}, status=401)

    async with cluster() as it:
        await it.add("left", refuses)
        for path in ("/debug/metrics", "/dashboard/events"):
            answer = await it.calls.get(path)
            assert (answer.status_code, answer.json()) == (401, {"error": {"message": "no key"}})


async def test_the_dashboard_s_events_are_those_of_all_replicas() -> None:
    async def events(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"retry: 2000\nevent: history\ndata: []\n\n")
        return answer

    async with cluster() as it:
        await it.add("left", events)
        await it.add("right", events)
        answer = await it.calls.get("/dashboard/events")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
        assert answer.content == b"retry: 2000\nevent: history\ndata: []\n\n"
        assert sorted(it.asked) == ["left", "right"]


async def test_a_background_response_is_asked_of_the_replica_that_makes_it() -> None:
    def creates(name: str) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            return web.json_response({"id": f"resp_{name}", "background": True})

        return handler

    async with cluster() as it:
        await it.add("left", creates("left"))
        await it.add("right", creates("right"))
        made = (await it.calls.post("/v1/responses", json={"input": "hi", "background": True})).json()["id"]
        maker = it.asked.pop()
        assert made == f"resp_{maker}"
        for _ in range(5):
            await it.calls.get(f"/v1/responses/{made}")
        await it.calls.post(f"/v1/responses/{made}/cancel")
        assert set(it.asked) == {maker}


async def test_a_machine_that_wants_to_join_is_answered_by_the_front_itself() -> None:
    async def where_ray_is(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("here")(scope, receive, send)

    async with cluster() as found:
        await found.add("a", hello)
        found.front.join_route = where_ray_is
        assert (await found.calls.get(CLUSTER_PATH)).text == "here"
        assert found.asked == []


def test_the_secret_is_the_front_s_and_the_replicas_own() -> None:
    assert knows_secret([(b"x", b"y"), (SECRET_HEADER, SECRET.encode())], SECRET)
    for wrong in ([], [(SECRET_HEADER, b"")], [(SECRET_HEADER, b"guess")], [(b"authorization", SECRET.encode())]):
        assert not knows_secret(wrong, SECRET)
