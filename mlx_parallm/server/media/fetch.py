"""Fetches what an http(s) URL points to, within limits, and from public addresses alone.

A name is resolved once, its addresses are checked, and one of them is connected to: a response that changes between
check and connection (DNS rebinding) changes nothing. TLS goes by the URL's name all the same. Every redirect is
taken in the same way.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import httpcore
import httpx

from mlx_parallm import __version__
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.media.addresses import is_public

MAX_BYTES = 20 << 20
MAX_REDIRECTS = 3
SECONDS = 10.0  # for all of it
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = [
    (b"User-Agent", f"mlx-parallm/{__version__}".encode()),
    (b"Accept", b"image/*"),
    (b"Accept-Encoding", b"identity"),  # what is compressed could be a bomb
]

Resolver = Callable[[str, int], Awaitable[list[str]]]  # a name and a port to addresses


async def resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Refused(Exception):
    """An address that must not be connected to."""


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were checked, whatever the name means later."""

    def __init__(self, resolver: Resolver, allowed: Callable[[str, int], bool]) -> None:
        self._resolver = resolver
        self._allowed = allowed
        self._sockets = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  (as httpcore calls it)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            addresses = await self._resolver(host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"its name can't be resolved: {error}") from error
        if not addresses:
            raise httpcore.ConnectError("its name has no address")
        if not all(map(is_public, addresses)) and not self._allowed(host, port):
            raise _Refused(f"{host} has no public address (--allowed-media-host allows a host)")
        return await self._sockets.connect_tcp(addresses[0], port, timeout, local_address, socket_options)


class Fetcher:
    """`allowed_hosts`: host or host:port that may be anywhere."""

    def __init__(
        self,
        allowed_hosts: Iterable[str] = (),
        *,
        resolver: Resolver = resolve,
        max_bytes: int = MAX_BYTES,
        seconds: float = SECONDS,
    ) -> None:
        self._allowed = frozenset(host.lower() for host in allowed_hosts)
        self._resolver = resolver
        self.max_bytes = max_bytes
        self._seconds = seconds

    async def fetch(self, url: str) -> bytes:
        """What a URL points to; InvalidRequestError says why it can't be had."""
        try:
            async with asyncio.timeout(self._seconds), self._pool() as pool:
                return await self._follow(pool, url)
        except TimeoutError:
            raise InvalidRequestError(f"the image did not come within {self._seconds:g} seconds") from None
        except _Refused as error:
            raise InvalidRequestError(f"the image can't be fetched: {error}") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(f"the image can't be fetched: {reason}") from error

    def _pool(self) -> httpcore.AsyncConnectionPool:
        backend = _CheckedBackend(self._resolver, self._may_be_anywhere)
        return httpcore.AsyncConnectionPool(network_backend=backend, max_connections=1)

    def _may_be_anywhere(self, host: str, port: int) -> bool:
        host = host.lower()
        return host in self._allowed or f"{host}:{port}" in self._allowed

    async def _follow(self, pool: httpcore.AsyncConnectionPool, url: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            parts = _checked(url)
            async with AsyncExitStack() as stack:
                answer = await stack.enter_async_context(pool.stream("GET", _target(parts), headers=HEADERS))
                if answer.status not in REDIRECTS:
                    return await self._body(answer)
                location = _header(answer, b"location")
            if not location:
                raise InvalidRequestError(f"the image can't be fetched: status {answer.status} without a location")
            url = urljoin(url, location)
        raise InvalidRequestError(f"the image can't be fetched: more than {MAX_REDIRECTS} redirects")

    async def _body(self, answer: httpcore.Response) -> bytes:
        if answer.status != 200:
            raise InvalidRequestError(f"the image can't be fetched: the server answered with status {answer.status}")
        announced = _header(answer, b"content-length")
        data = bytearray()
        too_large = announced.isascii() and announced.isdigit() and int(announced) > self.max_bytes
        if not too_large:
            async for chunk in answer.aiter_stream():
                data += chunk
                if too_large := len(data) > self.max_bytes:
                    break
        if too_large:
            raise InvalidRequestError(f"the image has more than {self.max_bytes:,} bytes, the largest that is taken")
        return bytes(data)


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (raises when it is none)
    except ValueError as error:
        raise InvalidRequestError(f"the image's URL is wrong: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise InvalidRequestError(f"an image is fetched by http or https, not by {parts.scheme[:20]!r}")
    if not parts.hostname:
        raise InvalidRequestError("the image's URL names no host")
    if parts.username is not None or parts.password is not None:
        raise InvalidRequestError("the image's URL has a name or a password in it, which is not supported")
    return parts


def _target(parts: SplitResult) -> httpcore.URL:
    """The URL in ASCII: names as IDNA, other characters percent-encoded."""
    try:
        url = httpx.URL(parts.geturl())
    except httpx.InvalidURL as error:
        raise InvalidRequestError(f"the image's URL is wrong: {error}") from error
    return httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)


def _header(answer: httpcore.Response, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in answer.headers if key.lower() == name), "")
