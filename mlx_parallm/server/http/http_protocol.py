"""How uvicorn serves: HTTP/1.1 as httptools reads it, with a limit on what comes before a body, and errors as JSON.

httptools itself takes headers of any size, and joins the pieces of one in quadratic time, on the event loop; uvicorn
waits for the rest of a request for good.
"""

import asyncio
from http import HTTPStatus
from typing import Any, Literal

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mlx_parallm.server.http.error_shapes import Failure, openai_error

MAX_HEAD_BYTES = 64 << 10  # of a request: its first line and its headers; and of what may stand behind its body


HEAD_SECONDS = 20.0  # for a request's first line and headers, from the connection or from its first byte on
BODY_SECONDS = 60.0  # between two pieces of its body


class LimitedProtocol(HttpToolsProtocol):
    _unfinished = 0  # bytes since the last headers or piece of a body were complete
    _begun = False  # a request is being received
    _timer: asyncio.TimerHandle | None = None  # runs meanwhile, and before the first

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        super().connection_lost(exc)

    def _wait(self, seconds: float | None) -> None:
        """Starts to wait for what comes next, at most so long; None: for nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._give_up, seconds)

    def _give_up(self, seconds: float) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is we who are slow
            self._wait(seconds)
        elif not self._begun:
            self.transport.close()
        else:
            self._refuse(408, f"the rest of the request did not come within {seconds:g} seconds")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unfinished += len(data)
        super().data_received(data)
        if self._unfinished > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the headers of a request may have {MAX_HEAD_BYTES} bytes, and these have more")

    def on_message_begin(self) -> None:
        self._unfinished = 0
        self._begun = True
        if self._timer is None:  # else it is the connection's first request, whose time runs already
            self._wait(HEAD_SECONDS)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unfinished = 0
        self._wait(BODY_SECONDS)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        self._wait(BODY_SECONDS)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfinished = 0
        self._begun = False
        self._wait(None)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"this is no HTTP request that could be read: {msg}")

    def _refuse(self, status: int, message: str) -> None:
        body = orjson.dumps(openai_error(Failure(status, "invalid_request_error", message)))
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


def uvicorn_config(app: Any, *, lifespan: Literal["on", "off"] = "on", **more: Any) -> uvicorn.Config:
    """Returns how every HTTP server of ours is run: uvicorn writes no log and installs no handlers of its own."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=LimitedProtocol,
        ws="none",
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        server_header=False,
        **more,
    )
