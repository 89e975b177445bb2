"""Requests that are never finished: each is closed after a while, and others are answered meanwhile."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from mlx_parallm.server.http import http_protocol
from mlx_parallm.server.http.http_protocol import uvicorn_config

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"


async def app(
    scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    if body == b"be slow...":
        await asyncio.sleep(1.0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def talk(*pieces: tuple[float, bytes], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What the server says to these pieces, each sent after so many seconds, until it closes or a second has passed."""
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 0.4)

    async def run() -> bytes:
        server = uvicorn.Server(uvicorn_config(app, lifespan="off", host="127.0.0.1", port=0))
        serving = asyncio.ensure_future(server.serve())
        while not server.started:  # noqa: ASYNC110  (uvicorn has no event for it)
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for seconds, piece in pieces:
            await asyncio.sleep(seconds)
            writer.write(piece)
        answer = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.5):
                while data := await reader.read(4096):
                    answer += data
                answer += b"<closed>"
        writer.close()
        server.should_exit = True
        await serving
        return bytes(answer)

    return asyncio.run(run())


def test_headers_that_never_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = talk((0, b"GET / HTTP/1.1\r\nX: "), (0.1, b"a"), (0.1, b"b"), monkeypatch=monkeypatch)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert (
        "within 0.3 seconds" in json.loads(answer.removesuffix(b"<closed>").split(b"\r\n\r\n")[1])["error"]["message"]
    )


def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch=monkeypatch) == b"<closed>"


def test_a_body_that_stops_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert b" 408 " in talk((0, HEAD), (0.1, b"12345"), monkeypatch=monkeypatch)


def test_slow_pieces_and_slow_answers_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [(0.3, bytes([byte])) for byte in b"be slow..."]
    answer = talk((0, HEAD), *pieces, monkeypatch=monkeypatch)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"ok")


def test_a_connection_that_is_kept_waits_for_its_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = talk((0, GET), (0.8, GET), (0.8, GET[:10]), monkeypatch=monkeypatch)
    assert answer.count(b" 200 ") == 2
    assert b" 408 " in answer
