"""Request ids, the access log and the body limit, without a server: requests go through ASGI straight to them."""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_parallm import heap
from mlx_parallm.errors import PayloadTooLargeError
from mlx_parallm.server.api import route_table
from mlx_parallm.server.auth.caller import Caller
from mlx_parallm.server.auth.keys import Key
from mlx_parallm.server.http import freed_memory
from mlx_parallm.server.http.http_errors import CLIENT_LEFT
from mlx_parallm.server.http.logs import request_id
from mlx_parallm.server.http.middleware import BodyLimit, RequestLog
from mlx_parallm.server.http.request_state import state_of

ROUTES = route_table()


def client(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=("10.1.2.3", 5)), base_url="http://localhost")


async def echo_id(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the id that the route sees and the one that log lines get."""
    await PlainTextResponse(f"{state_of(scope).id} {request_id.get()}")(scope, receive, send)


async def test_a_request_keeps_its_own_id() -> None:
    async with client(RequestLog(echo_id, ROUTES)) as calls:
        answer = await calls.get("/v1/models", headers={"X-Request-Id": "my-id/7"})
    assert (answer.text, answer.headers["x-request-id"]) == ("my-id/7 my-id/7", "my-id/7")
    assert request_id.get() == "-"


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129, "tab\tbed"])
async def test_a_request_without_a_usable_id_gets_one(given: str | None) -> None:
    async with client(RequestLog(echo_id, ROUTES)) as calls:
        headers = {} if given is None else {"X-Request-Id": given}
        first, second = [await calls.get("/", headers=headers) for _ in range(2)]
    identity = first.headers["x-request-id"]
    assert (len(identity), identity.isalnum(), first.text) == (32, True, f"{identity} {identity}")
    assert identity != second.headers["x-request-id"]


async def test_an_id_of_128_characters_is_usable() -> None:
    async with client(RequestLog(echo_id, ROUTES)) as calls:
        assert (await calls.get("/", headers={"X-Request-Id": "x" * 128})).headers["x-request-id"] == "x" * 128


async def test_every_request_is_logged_once_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlx_parallm.access")
    async with client(RequestLog(PlainTextResponse("no", 418), ROUTES)) as calls:
        await calls.post("/v1/completions")
        await calls.get("/health")
    (record,) = [one for one in caplog.records if one.name == "mlx_parallm.access"]
    assert record.levelno == logging.INFO
    assert (record.method, record.path, record.status, record.client) == ("POST", "/v1/completions", 418, "10.1.2.3")
    assert 0 <= record.seconds < 5
    assert record.getMessage().startswith("POST /v1/completions 418 0.0")
    assert record.getMessage().endswith("s from 10.1.2.3")


@pytest.mark.parametrize(
    ("outcome", "level"), [("cut off: the engine died", logging.WARNING), ("the client left", logging.INFO)]
)
async def test_the_log_names_the_key_and_how_a_stream_ended(
    caplog: pytest.LogCaptureFixture, outcome: str, level: int
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        state = state_of(scope)
        state.caller, state.outcome = Caller(Key.of("bob", "user", "sk-bob")), outcome
        await PlainTextResponse("yes")(scope, receive, send)

    caplog.set_level(logging.INFO, "mlx_parallm.access")
    async with client(RequestLog(app, ROUTES)) as calls:
        await calls.post("/v1/completions")
    (record,) = [one for one in caplog.records if one.name == "mlx_parallm.access"]
    assert (record.key, record.outcome, record.levelno) == ("bob", outcome, level)
    assert record.getMessage().endswith(f"from 10.1.2.3 as bob ({outcome})")


async def test_probes_are_logged_for_those_who_look_closely(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mlx_parallm.access")
    async with client(RequestLog(PlainTextResponse("yes"), ROUTES)) as calls:
        await calls.get("/metrics")
    assert [one.levelno for one in caplog.records if one.name == "mlx_parallm.access"] == [logging.DEBUG]


async def test_an_exception_becomes_an_answer_and_goes_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("the secret reason")

    caplog.set_level(logging.INFO, "mlx_parallm.access")
    async with client(RequestLog(fail, ROUTES)) as calls:
        answer = await calls.get("/v1/models", headers={"X-Request-Id": "abc"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "abc")
    error = answer.json()["error"]
    assert error["message"] == "the server has failed at this request; its log says why"
    assert "secret" not in answer.text
    failed, ended = [one for one in caplog.records if one.name == "mlx_parallm.access"]
    assert (failed.getMessage(), ended.status) == ("GET /v1/models has failed", 500)
    assert failed.exc_info is not None
    assert request_id.get() == "-"


async def test_an_exception_after_the_answer_has_begun_adds_nothing_to_it(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[str] = []

    async def half(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def note(message: dict[str, str]) -> None:
        sent.append(message["type"])

    caplog.set_level(logging.INFO, "mlx_parallm.access")
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    await RequestLog(half, ROUTES)(scope, None, note)  # type: ignore[arg-type]
    assert sent == ["http.response.start"]
    (ended,) = [one for one in caplog.records if getattr(one, "status", None)]
    assert (ended.status, ended.client) == (200, "-")


async def test_a_client_that_has_left_without_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        return

    caplog.set_level(logging.INFO, "mlx_parallm.access")
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": None}
    await RequestLog(silent, ROUTES)(scope, None, None)  # type: ignore[arg-type]
    (ended,) = [one for one in caplog.records if getattr(one, "status", None)]
    assert (ended.status, ended.client) == (CLIENT_LEFT, "-")


async def test_the_route_gets_the_request_s_own_body() -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse((await receive())["body"])(scope, receive, send)

    async with client(RequestLog(BodyLimit(echo, 10, 10, ROUTES), ROUTES)) as calls:
        assert (await calls.post("/v1/completions", content=b"hello")).text == "hello"


async def test_what_is_no_http_passes() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        assert (receive, send) == ("receive", "send")

    scope = {"type": "lifespan"}
    for middleware in (RequestLog(app, ROUTES), BodyLimit(app, 1, 1, ROUTES)):
        await middleware(scope, "receive", "send")  # type: ignore[arg-type]
    assert seen == [scope, scope]
    assert scope == {"type": "lifespan"}


def limited(limit: int, upload_limit: int) -> BodyLimit:
    """In front of an application that reads the whole body and says how long it is."""

    async def length(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    async def refused(request: Request, error: Exception) -> PlainTextResponse:
        assert isinstance(error, HTTPException)
        assert isinstance(error.__cause__, PayloadTooLargeError)
        return PlainTextResponse(error.__cause__.message, error.status_code)

    routes = [Route("/{path:path}", length, methods=["POST"])]
    return BodyLimit(Starlette(routes=routes, exception_handlers={HTTPException: refused}), limit, upload_limit, ROUTES)


async def parts(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 5):
        yield b"x" * 5


@pytest.mark.parametrize(
    ("path", "size", "limit"),
    [
        ("/v1/completions", 10, None),
        ("/v1/completions", 15, 10),
        ("/upload_adapter", 100, None),
        ("/upload_adapter", 105, 100),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_body_may_be_as_long_as_the_limit(path: str, size: int, limit: int | None, streamed: bool) -> None:
    async with client(limited(10, 100)) as calls:
        answer = await calls.post(path, content=parts(size) if streamed else b"x" * size)
    if limit is None:
        assert (answer.status_code, answer.text) == (200, str(size))
    else:
        assert answer.status_code == 413
        assert f"the body is larger than {limit} bytes" in answer.text


async def test_an_upload_may_be_at_least_as_long_as_any_body() -> None:
    async with client(limited(50, 20)) as calls:
        assert (await calls.post("/upload_adapter", content=b"x" * 50)).status_code == 200


async def test_a_body_that_is_announced_too_long_is_not_read() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it was let in")

    async with client(BodyLimit(app, 10, 10, ROUTES)) as calls:
        answer = await calls.post("/x", headers={"Content-Length": "11"}, content=b"")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


async def test_a_length_that_is_no_number_is_counted_as_it_comes() -> None:
    async with client(limited(10, 10)) as calls:
        answer = await calls.post("/x", headers={"Content-Length": "many"}, content=parts(15))
    assert answer.status_code == 413


async def test_what_long_bodies_leave_behind_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(heap, "trim", lambda: trims.append(1))
    monkeypatch.setattr(freed_memory, "SECONDS", 0.01)
    async with client(limited(freed_memory.BYTES, 0)) as calls:
        for expected in (1, 2):
            await calls.post("/x", content=b"x" * (freed_memory.BYTES // 2))
            await asyncio.sleep(0.1)
            assert len(trims) == expected - 1
            for _ in range(3):  # together they are trimmed once
                await calls.post("/x", content=b"x" * (freed_memory.BYTES // 2))
            await asyncio.sleep(0.2)
            assert len(trims) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="other allocators hand memory back themselves")
def test_freed_memory_of_a_thread_goes_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def work() -> None:
        parts = [bytes(1500) for _ in range(40_000)]
        kept.append(parts.pop())  # on top of all that is freed

    kept: list[bytes] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before = resident()
    heap.trim()
    assert before - resident() > 40 << 20
