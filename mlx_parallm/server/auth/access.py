"""Who may call the server: keys with roles, and which pages in a browser. Pure ASGI, made by `server.http.app`.

`OriginGuard` refuses what a web page sends without leave: a foreign `Host` (DNS rebinding), a foreign `Origin`, or a
body of a type that browsers send across sites without asking. `Authentication` asks for a key, as a bearer token or by
the cookie of a login: a user's for all routes but probes, a trainer's for adapters and training, an admin's for what
changes the server for everybody; and counts what a key with limits uses. It notes in the scope
whether the caller may do that (`is_admin`), for routes of which only a part changes the server.
"""

import ipaddress
import logging
import socket
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import (
    AuthenticationError,
    ConfigError,
    InvalidRequestError,
    ParallmError,
    PermissionDeniedError,
    RateLimitError,
)
from mlx_parallm.server.auth.audit import AuditLog
from mlx_parallm.server.auth.caller import ANYBODY, Caller, current_caller
from mlx_parallm.server.auth.keys import Key, KeyRing, Role
from mlx_parallm.server.auth.logins import COOKIE, Logins
from mlx_parallm.server.auth.rates import RateLimits
from mlx_parallm.server.http.http_errors import error_response
from mlx_parallm.server.http.request_state import enter
from mlx_parallm.server.http.route_table import CHANGING_METHODS, JSON_WANTED, RouteTable, Uploads
from mlx_parallm.server.http.sockets import check_certificate

log = logging.getLogger(__name__)

FORM_TYPE = "application/x-www-form-urlencoded"
LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})


@dataclass(slots=True)
class AccessControl:
    """The keys, what they have used, who has signed in, and the audit log."""

    ring: KeyRing
    rates: RateLimits = field(default_factory=RateLimits)
    audit: AuditLog | None = None
    login_secret: bytes | None = None  # that replicas have in common, so that a session holds on all of them
    logins: Logins = field(init=False)

    def __post_init__(self) -> None:
        self.logins = Logins(self.ring) if self.login_secret is None else Logins(self.ring, self.login_secret)

    @classmethod
    def of(cls, config: ServeConfig, login_secret: bytes | None = None) -> "AccessControl":
        path = config.http.audit_log
        audit = None if path is None else AuditLog(Path(path).expanduser())
        return cls(KeyRing.of(config), audit=audit, login_secret=login_secret)

    def reload(self) -> None:
        """Reads the keys again and opens the audit log anew, on SIGHUP."""
        self.ring.reload()
        if self.audit is not None:
            self.audit.reopen()

    def find(self, method: str, headers: Headers) -> Key | None:
        """The key that a request brings: in a header, or by the cookie of a login where it has none in a header."""
        secrets = _secrets(headers)
        found = [key for secret in secrets if (key := self.ring.find(secret)) is not None]
        if secrets:
            return found[0] if found else None
        return self._signed_in(method, headers)

    def _signed_in(self, method: str, headers: Headers) -> Key | None:
        """Finds a key by a login's cookie, which counts for pages of this very server, whatever other pages call it."""
        origin = headers.get("origin")
        if method in CHANGING_METHODS and origin is not None and not is_own_origin(origin, headers.get("host", "")):
            return None
        token = session_token(headers)
        return None if token is None else self.logins.find(token)

    def caller(self, key: Key) -> Caller:
        return Caller(key, self.rates.usage(key) if key.limits else None)

    def role_of_anybody(self) -> Role | None:
        """Returns what may be done without a key; None: nothing."""
        if self.ring.guards("user"):
            return None
        return "user" if self.ring.guards("admin") else "admin"


class Authentication:
    """A key for all routes but probes, of the role that the route needs; `--admin-key` alone leaves users' open.

    A key comes as a bearer token, as `x-api-key` from Anthropic's clients, or by the cookie of a login.
    """

    def __init__(self, app: ASGIApp, access: AccessControl, routes: RouteTable) -> None:
        self.app = app
        self._access = access
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self._access.ring.refresh()
        caller, error = self._identify(scope)
        enter(scope, self._routes).caller = caller
        token = current_caller.set(caller)
        try:
            await self._serve(caller, error, scope, receive, send if caller.usage is None else _telling(caller, send))
        finally:
            current_caller.reset(token)

    async def _serve(
        self, caller: Caller, error: ParallmError | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """What asks a model for work counts; reading, probes, and cancelling stored responses do not. What runs on in
        the background leaves when it has ended."""
        state = enter(scope, self._routes)
        counts = state.route.is_counted
        if counts:
            try:
                caller.admit()
            except RateLimitError as refused:
                await error_response(refused)(scope, receive, send)
                return
        try:
            await (self.app if error is None else error_response(error))(scope, receive, send)
        finally:
            if counts and not state.runs_on:
                caller.leave()

    def _identify(self, scope: Scope) -> tuple[Caller, ParallmError | None]:
        """Who calls, and why not."""
        state = enter(scope, self._routes)
        headers = Headers(scope=scope)
        needed = state.route.role
        key = self._access.find(scope["method"], headers)
        state.is_admin = not self._access.ring.guards("admin") or (key is not None and key.may("admin"))
        caller = ANYBODY if key is None else self._access.caller(key)
        if needed is None or not self._access.ring.guards(needed):
            return caller, None
        if key is None and not _secrets(headers):
            return caller, AuthenticationError("this server needs a key: send it as 'Authorization: Bearer KEY'")
        if key is None:
            return caller, AuthenticationError("the key is wrong")
        if not key.may(needed):
            flag = "--admin-key sets one" if needed == "admin" else "'parallm keys add NAME --role trainer' makes one"
            article = "an" if needed == "admin" else "a"
            return caller, PermissionDeniedError(f"this route needs {article} {needed} key: {flag}")
        return caller, None


def _secrets(headers: Headers) -> list[str]:
    """The keys that a request brings, in either header."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return [one for one in (token if kind.lower() == "bearer" else "", headers.get("x-api-key", "")) if one]


def session_token(headers: Headers) -> str | None:
    return cookie_parser(headers.get("cookie", "")).get(COOKIE) or None


def _telling(caller: Caller, send: Send) -> Send:
    """Adds to every response what is left of the key's limits."""

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            MutableHeaders(scope=message).update(caller.headers())
        await send(message)

    return told


class OriginGuard:
    """Refuses requests that a web page makes a browser send.

    `hosts`: the names that this server answers to; None: any, since it does not listen on loopback alone.
    `origins`: pages elsewhere that may call it; `*` is all.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str], routes: RouteTable
    ) -> None:
        self.app = app
        self._routes = routes
        self._hosts = None if hosts is None or "*" in hosts else frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        app = self.app if error is None else error_response(error)
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ParallmError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._hosts is not None and not self._is_ours(host):
            name = _host_name(host)
            return PermissionDeniedError(
                f"this server listens on this machine only and does not answer to {name!r}: "
                f"--allowed-host {name} changes that",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and scope["method"] != "OPTIONS" and not self._may_call(origin, host):
            return PermissionDeniedError(
                f"a page of {origin[:200]!r} may not call this server: --cors-allow-origin {origin[:200]} changes that",
                code="origin_not_allowed",
            )
        if scope["method"] not in CHANGING_METHODS:
            return None
        state = enter(scope, self._routes)
        uploads = state.route.uploads
        if _reads_as_json(uploads, headers):
            state.media_type_error = _media_type_error(uploads, headers)  # to be said if it is no JSON
            MutableHeaders(scope=scope)["content-type"] = "application/json"
            return None
        return _media_type_error(uploads, headers)

    def _is_ours(self, host: str) -> bool:
        assert self._hosts is not None
        name = _host_name(host)
        return not name or name in self._hosts or name in LOOPBACK_NAMES or is_loopback_address(name)

    def _may_call(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin.lower() in self._origins:
            return True
        return is_own_origin(origin, host)


def is_own_origin(origin: str, host: str) -> bool:
    return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _reads_as_json(uploads: Uploads | None, headers: Headers) -> bool:
    """A body of another type, as curl -d sends it: it is read as JSON, but for types that the route reads itself, and
    never from a browser, whose pages may send such bodies anywhere without asking."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json") or kind.startswith("multipart/"):
        return False
    if uploads is not None and (kind in uploads.types or not uploads.reads_json):
        return False
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return has_body and not _is_from_browser(headers)


def _is_from_browser(headers: Headers) -> bool:
    return any(name in ("cookie", "origin", "referer") or name.startswith("sec-fetch-") for name in headers)


def _media_type_error(uploads: Uploads | None, headers: Headers) -> ParallmError | None:
    """What browsers send across sites without asking first is no JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if (not kind and not has_body) or kind == "application/json" or kind.endswith("+json"):
        return None
    if uploads is not None and kind in uploads.types:
        return None
    message = JSON_WANTED if uploads is None else uploads.wanted
    if kind == FORM_TYPE:
        message += f"; it came as a form ({kind}), which is what curl -d and --data-binary send unless told otherwise"
    elif kind:
        message += f"; it came as {kind[:100]}"
    return InvalidRequestError(message, code="unsupported_media_type")


def _host_name(host: str) -> str:
    """The name in a Host header, without its port: 'localhost', '127.0.0.1', '::1'."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return host.lower()


def is_loopback_address(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Returns whether listening there is heard by this machine alone."""
    if is_loopback_address(host):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(is_loopback_address(address.partition("%")[0]) for address in found)


def answered_hosts(config: ServeConfig) -> list[str] | None:
    """The names that the server answers to beside loopback's; None: any."""
    if not config.http.allowed_host and not is_loopback(config.http.host):
        return None
    return [config.http.host, *config.http.allowed_host]


def check_exposure(config: ServeConfig) -> None:
    """A server that other machines can reach has keys, unless somebody says that it need not."""
    if config.http.insecure or config.http.has_keys or is_loopback(config.http.host):
        return
    raise ConfigError(
        f"--host {config.http.host} lets other machines use this server, and no key is set. Either give it keys:\n"
        f'  mlx_parallm_serve --host {config.http.host} --api-key "$(openssl rand -hex 24)" --admin-key '
        f'"$(openssl rand -hex 24)"\n'
        f"or let anybody use and change it:\n  mlx_parallm_serve --host {config.http.host} --insecure"
    )


def check_access(config: ServeConfig) -> None:
    """What is wrong with keys, files and certificates is known before a model is loaded."""
    check_exposure(config)
    access = AccessControl.of(config)
    if access.audit is not None:
        access.audit.close()
    if plain := access.ring.plain_names:
        log.warning(
            "keys file %s holds keys as plain text: %s; 'parallm keys add' writes hashes",
            config.http.keys_file,
            ", ".join(plain),
        )
    if config.http.tls_cert is not None and config.http.tls_key is not None:
        check_certificate(config.http.tls_cert, config.http.tls_key)
