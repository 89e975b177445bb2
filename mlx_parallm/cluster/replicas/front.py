"""The application at the server's own address: chooses a replica for each request, and passes its response on.

Requests go to replicas by HTTP, over connections that are kept; Ray starts replicas and looks after them, and is not on
the way of a request. A request whose replica dies before its response has begun is sent to another, unless it changes
the server; a stream that has begun ends with an error in its dialect. A client that leaves closes the way to the
replica, which frees its row.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from xxhash import xxh3_64_intdigest
from yarl import URL

from mlx_parallm.cluster.replicas.affinity import PromptPrefix
from mlx_parallm.cluster.replicas.joined_dashboard import send_merged
from mlx_parallm.cluster.replicas.links import PREFIX_HEADER, SECRET_HEADER, login_secret, pack_hashes
from mlx_parallm.cluster.replicas.members import Member, Members
from mlx_parallm.cluster.replicas.prompt_hashes import STICKY, PromptDigest, prompt_digest
from mlx_parallm.cluster.replicas.response_owners import ResponseOwners
from mlx_parallm.cluster.replicas.views import VIEWS, View
from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ParallmError, PayloadTooLargeError, UnavailableError
from mlx_parallm.server.api import route_table
from mlx_parallm.server.auth.access import AccessControl
from mlx_parallm.server.auth.keys import KeyRing
from mlx_parallm.server.http.disconnect import unless_left
from mlx_parallm.server.http.error_shapes import Failure
from mlx_parallm.server.http.http_errors import ClientLeft, JSONResponse, error_response
from mlx_parallm.server.http.middleware import usable_request_id
from mlx_parallm.server.http.request_state import enter, state_of
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.model_table import BASE, DEFAULT

log = logging.getLogger(__name__)

# Of one connection alone, or made anew by the next server.
HOP_HEADERS = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"expect", b"upgrade", b"date", b"server"}
)
LARGEST_HASHED = 8 << 20  # bytes of a body; a larger one goes where there is least to do
LOST = (aiohttp.ClientError, ConnectionError, OSError)


class ReplicaLost(Exception):
    """A replica has gone before it answered."""

    def __init__(self, reached: bool) -> None:
        super().__init__()
        self.reached = reached  # whether the request may have begun there


@dataclass(slots=True)
class Exchange:
    """A request on its way, and how much of its response the client has."""

    scope: Scope
    body: bytes | AsyncIterator[bytes]
    digest: PromptDigest
    send: Send
    started: bool = False

    @property
    def route(self) -> Route:
        return state_of(self.scope).route

    @property
    def can_repeat(self) -> bool:
        """What changes the server is done once or not at all."""
        return isinstance(self.body, bytes) and not self.route.is_audited


class Front:
    def __init__(self, members: Members, config: ServeConfig, secret: str) -> None:
        self.draining = False
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.session: aiohttp.ClientSession | None = None
        self.join_route: ASGIApp | None = None  # where other machines may join
        self._members = members
        self._owners = ResponseOwners()
        self._routes = route_table()
        self._limit = config.http.max_body_size
        self._secret = secret
        self.access = AccessControl(KeyRing.of(config), login_secret=login_secret(secret))
        self._everywhere = frozenset({DEFAULT, BASE, *config.named_models()})  # models that every replica has

    async def open(self) -> None:
        """Opens the HTTP client's session; to be called within the event loop that the front serves in."""
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=300),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        assert self.session is not None
        await self.session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        state = enter(scope, self._routes)
        state.id = identity = usable_request_id(Headers(scope=scope).get("x-request-id"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = identity
                if state.route.error_shape.id_header is not None:
                    headers[state.route.error_shape.id_header] = identity
            await send(message)

        self.in_flight += 1
        self.idle.clear()
        try:
            await self._answer(scope, receive, send_with_id)
        except ParallmError as error:
            await error_response(error)(scope, receive, send_with_id)
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = state_of(scope).route
        if route.replicas == "health":
            await self._health()(scope, receive, send)
            return
        if self.draining:
            raise UnavailableError("the server is shutting down")
        if route.replicas == "join" and self.join_route is not None:
            await self.join_route(scope, receive, send)
            return
        view = VIEWS.get(route.replicas)
        if view is not None:
            await self._view(view, scope, receive, send)
            return
        if route.replicas == "events":
            await self._while_connected(self._events(scope, send), receive)
            return
        headers = Headers(scope=scope)
        if route.uploads is not None and route.uploads.large:  # its key is asked for before it is read
            digest = self._limited_key_digest(scope, headers) or PromptDigest(PromptPrefix(), None)
            await self._pass_on(Exchange(scope, _incoming(receive), digest, send))
            return
        body = await self._read(receive)
        tenant = headers.get("authorization", headers.get("x-api-key", "")).encode()
        hashed = scope["method"] == "POST" and len(body) <= LARGEST_HASHED
        digest = prompt_digest(body, tenant, self._everywhere) if hashed else PromptDigest(PromptPrefix(), None)
        digest = self._limited_key_digest(scope, headers) or digest
        await self._while_connected(self._pass_on(Exchange(scope, body, digest, send)), receive)

    def _limited_key_digest(self, scope: Scope, headers: Headers) -> PromptDigest | None:
        """Routes all requests of a key with limits to one replica, which counts what it uses. None: no such key."""
        self.access.ring.refresh()
        key = self.access.find(scope["method"], headers)
        if key is None or not key.limits:
            return None
        return PromptDigest(PromptPrefix([xxh3_64_intdigest(key.identity.encode())], [STICKY]), None)

    async def _while_connected(self, answering: Coroutine[Any, Any, None], receive: Receive) -> None:
        with suppress(ClientLeft):  # the connection to the replica is closed by then, and its row freed
            await unless_left(receive, answering)

    async def _read(self, receive: Receive) -> bytes:
        parts = []
        size = 0
        async for part in _incoming(receive):
            parts.append(part)
            size += len(part)
            if size > self._limit:
                raise PayloadTooLargeError(f"the body is larger than {self._limit} bytes")
        return b"".join(parts)

    async def _pass_on(self, exchange: Exchange) -> None:
        """Passes the request on to the replica that is best for it; to the next where one dies before it answers."""
        tried: set[str] = set()
        router = self._members.router
        while True:
            name = self._owners.of(exchange.route, exchange.scope["path"])
            if name is None or name not in router.names or name in tried:
                name = router.choose(exchange.digest.prefix, exchange.digest.adapter, avoid=tried)
            if name is None:
                raise UnavailableError(self._why_none(tried))
            member = self._members[name]
            router.note(name, exchange.digest.prefix, exchange.digest.adapter)
            router.begin(name)
            try:
                await self._exchange(exchange, member)
                return
            except ReplicaLost as lost:
                tried.add(name)
                await self._members.remove(name, "its connections broke")
                if lost.reached and not exchange.can_repeat:
                    raise UnavailableError(
                        "the replica that worked on this ended; look at what it has changed before you repeat it"
                    ) from lost
            finally:
                router.end(name)

    def _why_none(self, tried: set[str]) -> str:
        if tried:
            return "the replicas that this was sent to have ended, and no other is ready; try again"
        reason = self._members.failure
        return "no replica is ready" + ("" if reason is None else f": {reason}")

    def _request(self, exchange: Exchange, member: Member) -> Any:
        """The request to a replica, not sent yet: aiohttp's context manager."""
        assert self.session is not None
        scope = exchange.scope
        path = scope.get("raw_path") or scope["path"].encode()
        query = scope["query_string"]
        url = URL(member.url + (path + (b"?" + query if query else b"")).decode("latin-1"), encoded=True)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self._headers(exchange)]
        return self.session.request(
            scope["method"], url, headers=headers, data=exchange.body or None, allow_redirects=False
        )

    async def _exchange(self, exchange: Exchange, member: Member) -> None:
        scope = exchange.scope
        connected = False
        try:
            async with self._request(exchange, member) as response:
                connected = True
                await self._copy(exchange, response, member.name)
        except LOST as error:
            if not exchange.started:
                raise ReplicaLost(connected or not isinstance(error, aiohttp.ClientConnectorError)) from error
            await self._members.remove(member.name, "its connections broke")
            log.warning("a stream of %s was cut off: its replica has ended", scope["path"])

    def _headers(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        left_out = HOP_HEADERS | {SECRET_HEADER, PREFIX_HEADER, b"x-request-id"}
        headers = [(name, value) for name, value in exchange.scope["headers"] if name not in left_out]
        headers += [(SECRET_HEADER, self._secret.encode()), (b"x-request-id", state_of(exchange.scope).id.encode())]
        if hashes := exchange.digest.prefix.hashes:
            headers.append((PREFIX_HEADER, pack_hashes(hashes).encode()))
        return headers

    async def _copy(self, exchange: Exchange, response: aiohttp.ClientResponse, replica: str) -> None:
        headers = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in HOP_HEADERS]
        start: Message = {"type": "http.response.start", "status": response.status, "headers": headers}
        ending = _ending(response.content_type)
        if ending is None:  # whole: until it is here, another replica could be asked
            body = await response.read()
            self._owners.note(exchange.route, response.status, body, replica)
            exchange.started = True
            await exchange.send(start)
            await exchange.send({"type": "http.response.body", "body": body})
            return
        try:
            await self._stream(exchange, response, start, ending)
        except LOST:
            if not exchange.started:
                raise
            await exchange.send({"type": "http.response.body", "body": _cut_off(exchange.scope, ending)})
            raise

    async def _stream(
        self, exchange: Exchange, response: aiohttp.ClientResponse, start: Message, ending: bytes
    ) -> None:
        """Whole events alone, so that an error can follow at any time; those that are there together, together."""
        rest = b""
        async for part in response.content.iter_any():
            rest += part
            place = rest.rfind(ending) + len(ending)
            if place < len(ending):
                continue
            if not exchange.started:
                exchange.started = True
                await exchange.send(start)
            await exchange.send({"type": "http.response.body", "body": rest[:place], "more_body": True})
            rest = rest[place:]
        if not exchange.started:
            exchange.started = True
            await exchange.send(start)
        await exchange.send({"type": "http.response.body", "body": rest})

    def _health(self) -> JSONResponse:
        ready = len(self._members.ready)
        expected = self._members.expected
        replicas = {"ready": ready, "expected": expected}
        if self.draining:
            body: dict[str, Any] = {"status": "draining", "model_loaded": True, "reason": "the server is shutting down"}
            return JSONResponse(body | {"replicas": replicas}, 503)
        if not ready:
            body = {"status": "unhealthy", "model_loaded": False, "reason": self._why_none(set())}
            return JSONResponse(body | {"replicas": replicas}, 503)
        return JSONResponse({"status": "healthy", "model_loaded": True, "replicas": replicas})

    async def _view(self, view: View, scope: Scope, receive: Receive, send: Send) -> None:
        """What all replicas say, as one response; where all refuse, as the first does."""
        digest = PromptDigest(PromptPrefix(), None)
        members = self._members.ready
        if not members:
            raise UnavailableError(self._why_none(set()))
        responses = await asyncio.gather(*(self._ask(Exchange(scope, b"", digest, send), one) for one in members))
        found = [response for response in responses if response is not None]
        if not found:
            raise UnavailableError("no replica has answered; try again")
        good = [response for response in found if response.status == 200]
        if not good:
            await send({"type": "http.response.start", "status": found[0].status, "headers": found[0].headers})
            await send({"type": "http.response.body", "body": found[0].body})
            return
        body = view({response.name: response.body for response in good}, good[0].headers)
        headers = [(name, value) for name, value in good[0].headers if name != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _events(self, scope: Scope, send: Send) -> None:
        """The dashboard's event stream of all replicas as one; where one refuses, so does the front."""
        exchange = Exchange(scope, b"", PromptDigest(PromptPrefix(), None), send)
        async with AsyncExitStack() as stack:
            responses: dict[str, aiohttp.ClientResponse] = {}
            for member in self._members.ready:
                try:
                    response = await stack.enter_async_context(self._request(exchange, member))
                except LOST:
                    continue
                if response.status != 200:
                    await self._copy(exchange, response, member.name)
                    return
                responses[member.name] = response
            if not responses:
                raise UnavailableError(self._why_none(set()))
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send_merged(
                responses, send, lambda: {one.name for one in self._members.ready} == responses.keys(), LOST
            )

    async def _ask(self, exchange: Exchange, member: Member) -> "Asked | None":
        kept: list[Message] = []

        async def keep(message: Message) -> None:
            kept.append(message)

        exchange.send = keep
        try:
            await self._exchange(exchange, member)
        except ReplicaLost:
            await self._members.remove(member.name, "its connections broke")
            return None
        return Asked(member.name, kept[0]["status"], kept[0]["headers"], b"".join(one["body"] for one in kept[1:]))


@dataclass(frozen=True, slots=True)
class Asked:
    """A replica's answer."""

    name: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


async def _incoming(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise UnavailableError("the client has left")
        if body := message.get("body", b""):
            yield body
        more = message.get("more_body", False)


def _ending(content_type: str) -> bytes | None:
    """Returns what ends an event of a stream; None: the response is no stream."""
    return {"text/event-stream": b"\n\n", "application/x-ndjson": b"\n"}.get(content_type)


def _cut_off(scope: Scope, ending: bytes) -> bytes:
    """The end of a stream whose replica has died."""
    error = UnavailableError("the replica that wrote this ended; send the request again", code="replica_lost")
    state = state_of(scope)
    shape = state.route.error_shape
    body = orjson.dumps(shape.body(Failure.of(error), state.id))
    if ending == b"\n":
        return body + b"\n"
    if shape.named_events:
        return b"event: error\ndata: " + body + b"\n\n"
    return b"data: " + body + b"\n\ndata: [DONE]\n\n"
