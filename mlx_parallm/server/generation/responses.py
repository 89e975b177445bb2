"""How a generation is answered: as a stream of events, or whole. Dialects call `respond` with their writer.

Streams are lean: bytes are made where a delta arrives, and sent by one task per stream. Nothing is sent before the
first update, so that an error until then has its own HTTP status; later ones are an event. A client that disconnects
cancels its rows at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_parallm.errors import ParallmError
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate, Collected
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.http.disconnect import unless_left, when_left
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.http.request_state import state_of

HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not wait for more
]
DONE = b"data: [DONE]\n\n"
NEXT_LINE = "\u0085".encode()
SEPARATORS = "\u2028".encode()[:2]  # how those of lines and of paragraphs begin


def one_line(content: object) -> bytes:
    """JSON as a line of a stream. Readers such as httpx also end lines at three characters that JSON leaves alone."""
    found = orjson.dumps(content)
    if NEXT_LINE in found or SEPARATORS in found:
        found = found.replace(NEXT_LINE, b"\\u0085")
        found = found.replace(SEPARATORS + b"\xa8", b"\\u2028").replace(SEPARATORS + b"\xa9", b"\\u2029")
    return found


def event(content: object) -> bytes:
    return b"data: " + one_line(content) + b"\n\n"


class StreamWriter(Protocol):
    """How a dialect writes a stream."""

    @property
    def ending(self) -> bytes: ...  # after all else
    @property
    def media_type(self) -> bytes: ...
    def opening(self) -> bytes: ...
    def chunk(self, choice: ChoiceStream, update: ChoiceUpdate) -> bytes: ...
    def closing(self) -> bytes: ...
    def failure(self, error: ParallmError) -> bytes: ...


class DialectWriter(StreamWriter, Protocol):
    """How a dialect answers: whole, and in chunks."""

    def answer(self, results: Sequence[Collected]) -> Any: ...


BeforeEnd = Callable[[ParallmError | None], Awaitable[None]]


async def respond(
    generation: Generation, writer: DialectWriter, request: Request, before_end: BeforeEnd | None = None
) -> Response:
    """Runs a generation: as a stream where the call asks for one, else until the response is whole.

    `before_end` is awaited when the response is complete or has failed, before the client is told so."""
    if generation.call.stream:
        return EventStream(generation, writer, before_end)
    answer = writer.answer(await Collector(generation).collect(request.receive))
    if before_end is not None:
        await before_end(None)
    return JSONResponse(answer)


class EventStream(Response):
    """Listens to a generation and writes it out."""

    def __init__(self, generation: Generation, writer: StreamWriter, before_end: BeforeEnd | None = None) -> None:
        self.status_code = 200
        self.background = None
        self._generation = generation
        self._writer = writer
        self._before_end = before_end
        self._pending: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._ended = self._left = False
        self._error: ParallmError | None = None

    def on_update(self, choice: ChoiceStream, update: ChoiceUpdate) -> None:
        if data := self._writer.chunk(choice, update):
            self._pending.append(data)
            self._wake()

    def on_end(self, error: ParallmError | None) -> None:
        self._error = error
        self._ended = True
        self._wake()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with when_left(receive, self._on_left):
                self._generation.start(self)
                await self._more()
                if self._error is not None and not self._pending:
                    raise self._error
                if not self._left:
                    headers = [(b"content-type", self._writer.media_type), *HEADERS]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    self._pending.insert(0, self._writer.opening())
                    await self._write(send)
        finally:
            self._generation.cancel()
            if self._error is not None:
                state_of(scope).outcome = f"cut off: {self._error.code or self._error.message}"
            elif self._left and not self._ended:
                state_of(scope).outcome = "the client left"

    async def _write(self, send: Send) -> None:
        while not self._left:
            if self._ended and self._before_end is not None:
                await self._before_end(self._error)
            data, more = self._take()
            await send({"type": "http.response.body", "body": data, "more_body": more})
            if not more:
                return
            await self._more()

    def _take(self) -> tuple[bytes, bool]:
        """All that waits to be sent, and whether more will come."""
        if self._ended:
            self._pending.append(self._writer.closing() if self._error is None else self._writer.failure(self._error))
            self._pending.append(self._writer.ending)
        data = b"".join(self._pending)
        self._pending.clear()
        return data, not self._ended

    async def _more(self) -> None:
        if self._pending or self._ended or self._left:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_left(self) -> None:
        self._left = True
        self._generation.cancel()
        self._wake()


class Collector:
    """Waits for the whole response, unless the client leaves before it is there."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.results = [Collected() for _ in generation.choices]

    async def collect(self, receive: Receive) -> list[Collected]:
        try:
            self._generation.start(self)
            await unless_left(receive, self._done)
        finally:
            self._generation.cancel()
        return self.results

    def on_update(self, choice: ChoiceStream, update: ChoiceUpdate) -> None:
        self.results[choice.index].add(update)

    def on_end(self, error: ParallmError | None) -> None:
        if self._done.done():
            return
        if error is not None:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)
