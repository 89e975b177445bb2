"""A small HTTP client on asyncio protocols: one request per connection, the response parsed as it arrives.

`bench` and the scripts of benchmarks/ use it. It exists because a load generator shares its machine with
the server it measures: bytes are parsed in the transport's own callback, so that a streamed token wakes no task.
"""

import argparse
import asyncio
import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from mlx_parallm.errors import ConfigError


def tls_context(ca: str | None, insecure: bool = False) -> ssl.SSLContext | None:
    """How a server's certificate is checked: by those of the file `ca`, or not at all; None: as the system does."""
    if not insecure and ca is None:
        return None
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(Path(ca).expanduser()))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ca: {ca} can't be read as PEM certificates: {error.strerror or error}") from None
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def add_tls_flags(parser: "argparse._ActionsContainer") -> None:
    parser.add_argument("--ca", metavar="FILE", help="PEM certificates to trust for https (default: the system's)")
    parser.add_argument(
        "--insecure", action="store_true", help="do not check the server's certificate: for tests alone (default: off)"
    )


class WireError(Exception):
    """The exchange broke before the response was complete; `kind` is a word or two to count it by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address at which a server listens. A base URL with or without /v1 means the same server."""

    host: str
    port: int
    secure: bool
    prefix: str = ""
    api_key: str | None = None
    tls: ssl.SSLContext | None = None  # None: the system's certificates

    @classmethod
    def parse(cls, url: str, api_key: str | None = None, tls: ssl.SSLContext | None = None) -> "Endpoint":
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not an http or https URL")
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"{url!r} has no valid port") from None
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), secure, prefix, api_key, tls)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.prefix}"

    def head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        lines += ["Accept: */*"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass(slots=True)
class HttpResponse:
    status: int
    headers: dict[str, str]
    body: bytes = b""  # empty for an event stream, whose events went to `on_event`


class EventParser:
    """Cuts a byte stream into the data of server-sent events; comments and other fields are dropped."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = self.rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *blocks, self.rest = data.split(b"\n\n")
        return [event for block in blocks if (event := _event_data(block)) is not None]


def _event_data(block: bytes) -> bytes | None:
    if block.startswith(b"data: ") and b"\n" not in block:  # nearly always
        return block[6:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class ChunkedDecoder:
    """Takes the chunk sizes out of a chunked body; `done` after the last chunk."""

    def __init__(self) -> None:
        self.buffer = b""
        self.left = 0  # bytes of the current chunk still to come, with its line end
        self.done = False

    def feed(self, data: bytes) -> bytes:
        self.buffer += data
        out: list[bytes] = []
        while self.buffer and not self.done:
            if self.left == 0 and not self._open_chunk():
                break
            taken = self.buffer[: self.left]
            self.buffer = self.buffer[len(taken) :]
            out.append(taken[: max(0, self.left - 2)])  # the last two bytes of a chunk end its line
            self.left -= len(taken)
        return b"".join(out)

    def _open_chunk(self) -> bool:
        size, found, rest = self.buffer.partition(b"\r\n")
        if not found:
            return False
        length = int(size.split(b";")[0], 16)
        self.buffer = rest
        self.left = length + 2
        self.done = length == 0
        return not self.done


@dataclass(slots=True)
class _Body:
    """How much of the body has come, and how its end is told: by chunks, by length, or by the connection's end."""

    chunks: ChunkedDecoder | None
    length: int | None
    received: int = 0
    parts: list[bytes] = field(default_factory=list)

    def decode(self, data: bytes) -> bytes:
        self.received += len(data)
        return self.chunks.feed(data) if self.chunks else data

    @property
    def complete(self) -> bool:
        if self.chunks:
            return self.chunks.done
        return self.length is not None and self.received >= self.length


class _Exchange(asyncio.Protocol):
    """One request and its response on one connection."""

    def __init__(self, request: bytes, on_event: Callable[[bytes], None] | None) -> None:
        self.request = request
        self.on_event = on_event
        self.done: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        self.head = b""
        self.response: HttpResponse | None = None
        self.body: _Body | None = None
        self.events: EventParser | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        try:
            self._receive(data)
        except Exception as error:  # what a server sends must not break the event loop
            self.done.set_exception(WireError("malformed answer", repr(error)))

    def _receive(self, data: bytes) -> None:
        if self.response is None:
            self.head += data
            head, found, data = self.head.partition(b"\r\n\r\n")
            if not found:
                return
            self._open_response(head)
        assert self.response is not None
        assert self.body is not None
        data = self.body.decode(data)
        if self.events is None:
            self.body.parts.append(data)
        else:
            assert self.on_event is not None
            for event in self.events.feed(data):
                self.on_event(event)
        if self.body.complete:
            self._finish()

    def _open_response(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.response = HttpResponse(int(first.split(" ", 2)[1]), headers)
        chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length")
        self.body = _Body(ChunkedDecoder() if chunked else None, int(length) if length and not chunked else None)
        streamed = headers.get("content-type", "").startswith("text/event-stream")
        if self.on_event and self.response.status == 200 and streamed:
            self.events = EventParser()

    def _finish(self) -> None:
        assert self.response is not None
        assert self.body is not None
        self.response.body = b"".join(self.body.parts)
        self.done.set_result(self.response)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        ended_by_closing = self.body is not None and self.body.chunks is None and self.body.length is None
        if ended_by_closing and error is None:
            self._finish()
        else:
            self.done.set_exception(WireError("disconnected", str(error or "")))


async def send(
    endpoint: Endpoint,
    path: str,
    body: bytes | None = None,
    *,
    on_event: Callable[[bytes], None] | None = None,
    limit: float = 600.0,  # seconds
) -> HttpResponse:
    """POSTs `body`, or GETs without one. Cancelling the task closes the connection at once."""
    request = endpoint.head("GET" if body is None else "POST", path, len(body or b"")) + (body or b"")
    context = (endpoint.tls or ssl.create_default_context()) if endpoint.secure else None
    transport: asyncio.Transport | None = None
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limit):
            transport, exchange = await loop.create_connection(
                lambda: _Exchange(request, on_event), endpoint.host, endpoint.port, ssl=context
            )
            return await exchange.done
    except TimeoutError:
        raise WireError("timeout", f"no complete response within {limit:g} s") from None
    except OSError as error:
        kind = "connection refused" if isinstance(error, ConnectionRefusedError) else "connection failed"
        raise WireError(kind, str(error)) from None
    finally:
        if transport is not None:
            with contextlib.suppress(OSError):
                transport.abort()
