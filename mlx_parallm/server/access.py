"""Who may call the server: keys with roles, and which pages in a browser. Pure ASGI, made by `server.app`.

`OriginGuard` refuses what a web page sends without leave: a foreign `Host` (DNS rebinding), a foreign `Origin`, or a
body of a type that browsers send across sites without asking. `Authentication` asks for a bearer key: a user's for all
routes but probes, an admin's for routes that change the server for everybody.
"""

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import yaml
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_parallm.config import ServeConfig, nearest
from mlx_parallm.errors import (
    AuthenticationError,
    ConfigError,
    InvalidRequestError,
    ParallmError,
    PermissionDeniedError,
)
from mlx_parallm.server.errors import error_response
from mlx_parallm.tensors import SAFETENSORS_TYPES

Role = Literal["user", "admin"]
OPEN_PATHS = frozenset({"/health", "/health/", "/metrics"})  # for probes and scrapers, as vLLM leaves them
UPLOAD_PATHS = frozenset({"/v1/adapters/upload", "/upload_adapter", "/update_adapter_weights"})
UPLOAD_TYPES = frozenset(
    {"multipart/form-data", "application/octet-stream", "application/x-safetensors", "application/vnd.safetensors"}
)
TENSOR_PATHS = frozenset({"/v1/predict", "/v1/rl/act"})
CHANGING_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})
ADMIN_PATHS = frozenset({"/v1/models/load", "/v1/models/unload"})  # GET /v1/models/NAME is for users
ADMIN_PREFIXES = (
    "/debug/",
    "/v1/adapters/",
    "/load_adapter",
    "/unload_adapter",
    "/upload_adapter",
    "/update_adapter_weights",
    "/model/",
    "/pause",
    "/resume",
    "/continue_generation",
    "/flush_cache",
    "/reset_prefix_cache",
    "/v1/load_lora",
    "/v1/unload_lora",
    "/v1/training/update",
    "/training/",
    "/init_communicator",
    "/update_named_param",
    "/batch_update_named_params",
    "/close_communicator",
)


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    role: Role
    digest: bytes  # the key itself is not kept

    @classmethod
    def of(cls, name: str, role: Role, secret: str) -> "Key":
        return cls(name, role, hashlib.sha256(secret.encode()).digest())


def keys_of(config: ServeConfig) -> list[Key]:
    """All keys that a configuration names, on its flags and in its file."""
    given: list[tuple[str | None, Role]] = [(config.http.api_key, "user"), (config.http.admin_key, "admin")]
    keys = [Key.of(role, role, secret) for secret, role in given if secret is not None]
    return keys + (read_keys(Path(config.http.keys_file).expanduser()) if config.http.keys_file is not None else [])


def read_keys(path: Path) -> list[Key]:
    """A YAML file of names, each with its `key` and, where it is not `user`, its `role`."""
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"keys file {path} can't be read: {error}") from None
    if not isinstance(document, dict) or not document:
        raise ConfigError(f"keys file {path}: write names with a key each, as in 'alice: {{key: SECRET, role: user}}'")
    return [_read_key(path, str(name), entry) for name, entry in document.items()]


def _read_key(path: Path, name: str, entry: Any) -> Key:
    where = f"keys file {path}: {name}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected its key and role, as in '{name}: {{key: SECRET, role: user}}'")
    for field in entry:
        if field not in ("key", "role"):
            raise ConfigError(f"{where}: unknown field {field!r}{nearest(field, ('key', 'role'))}")
    secret, role = entry.get("key"), entry.get("role", "user")
    if not isinstance(secret, str) or not secret.strip():
        raise ConfigError(f"{where}: its key is empty or no text; quote it if it looks like a number")
    if role not in get_args(Role):
        raise ConfigError(f"{where}: its role is {role!r}, and must be user or admin")
    return Key.of(name, role, secret)


class Authentication:
    """Bearer keys: any key for all routes but probes, an admin's for admin routes as soon as there is any key."""

    def __init__(self, app: ASGIApp, keys: Sequence[Key]) -> None:
        self.app = app
        self._keys = list(keys)
        self._guards_users = any(key.role == "user" for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        app = self.app if error is None else error_response(error)
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ParallmError | None:
        path = scope["path"]
        admin = path in ADMIN_PATHS or path.startswith(ADMIN_PREFIXES)
        if path in OPEN_PATHS or not self._keys or not (self._guards_users or admin):
            return None
        kind, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not token:
            return AuthenticationError("this server needs a key: send it as 'Authorization: Bearer KEY'")
        key = self._find(token)
        if key is None:
            return AuthenticationError("the key is wrong")
        if admin and key.role != "admin":
            return PermissionDeniedError("this route needs an admin key: --admin-key sets one")
        return None

    def _find(self, token: str) -> Key | None:
        """Compares with every key, in the same time whichever it is."""
        digest = hashlib.sha256(token.encode()).digest()
        found = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        return next((key for key in found if key.role == "admin"), found[0] if found else None)


class OriginGuard:
    """Refuses requests that a web page makes a browser send.

    `hosts`: the names that this server answers to; None: any, since it does not listen on loopback alone.
    `origins`: pages elsewhere that may call it; `*` is all.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str]) -> None:
        self.app = app
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
        if scope["method"] not in CHANGING_METHODS:
            return None
        origin = headers.get("origin")
        if origin is not None and not self._may_call(origin, host):
            return PermissionDeniedError(
                f"a page of {origin[:200]!r} may not call this server: --cors-allow-origin {origin[:200]} changes that",
                code="origin_not_allowed",
            )
        return _media_type_error(scope["path"], headers)

    def _is_ours(self, host: str) -> bool:
        assert self._hosts is not None
        name = _host_name(host)
        return not name or name in self._hosts or name in LOOPBACK_NAMES or is_loopback_address(name)

    def _may_call(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin.lower() in self._origins:
            return True
        return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _media_type_error(path: str, headers: Headers) -> ParallmError | None:
    """What browsers send across sites without asking first is no JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if (not kind and not has_body) or kind == "application/json" or kind.endswith("+json"):
        return None
    if path in UPLOAD_PATHS and kind in UPLOAD_TYPES:
        return None
    if path in TENSOR_PATHS and kind in SAFETENSORS_TYPES:
        return None
    message = "the body must be JSON, sent with Content-Type: application/json"
    if path == "/update_adapter_weights" or path in TENSOR_PATHS:
        message += ", or a safetensors file with -H 'Content-Type: application/octet-stream'"
    elif path in UPLOAD_PATHS:
        message = "the files must come as a form: curl -F name=NAME -F weights=@FILE -F config=@adapter_config.json"
    if kind == "application/x-www-form-urlencoded":
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
    """Whether listening there is heard by this machine alone."""
    if is_loopback_address(host):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(is_loopback_address(address.partition("%")[0]) for address in found)


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
