"""How another machine joins a cluster: the front tells an admin where Ray is and its token. Does not import Ray.

`--share-model` answers `GET /debug/cluster` (`JoinRoute`); `--connect-to` asks for it (`find_cluster`) with the first
machine's HTTP address and its admin key. Whoever has Ray's token can run code on every machine of the cluster, so a
server that other machines reach tells it to nobody unless it has keys.
"""

import asyncio
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import orjson
from starlette.types import Receive, Scope, Send

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ConfigError, PermissionDeniedError
from mlx_parallm.http_client import Endpoint, HttpResponse, WireError, send
from mlx_parallm.server.api import route_table
from mlx_parallm.server.api.ops import CLUSTER_PATH
from mlx_parallm.server.auth.access import AccessControl, Authentication, OriginGuard, answered_hosts, is_loopback
from mlx_parallm.server.http.http_errors import JSONResponse, error_response

ASK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RayAddress:
    """What a machine needs to join, and the versions that must be the same there."""

    address: str  # HOST:PORT
    token: str
    ray_version: str
    python_version: str

    @classmethod
    def here(cls, address: str, token: str) -> "RayAddress":
        return cls(address, token, version("ray"), platform.python_version())


def ray_token() -> str:
    """The cluster's, which `extra.prepare` has made where the environment has none."""
    if (token := os.environ.get("RAY_AUTH_TOKEN")) is not None:
        return token
    return Path(os.environ["RAY_AUTH_TOKEN_PATH"]).expanduser().read_text().strip()


class JoinRoute:
    """`GET /debug/cluster`, behind the same checks as the routes of a replica."""

    def __init__(self, config: ServeConfig, access: AccessControl, found: RayAddress) -> None:
        self._found = found
        self.is_open = not access.ring.guards("admin") and not is_loopback(config.http.host)
        routes = route_table()
        guarded = Authentication(self._answer, access, routes)
        self._app = OriginGuard(guarded, answered_hosts(config), config.http.cors_allow_origin, routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.is_open:
            error = PermissionDeniedError(
                "this server has no keys, and whoever has Ray's token can run code on all of its machines: start it "
                "with --admin-key, or join with RAY_AUTH_TOKEN and Ray's address, as the first machine has printed them"
            )
            await error_response(error)(scope, receive, send)
            return
        await JSONResponse(asdict(self._found), headers={"cache-control": "no-store"})(scope, receive, send)


def find_cluster(config: ServeConfig, has_token: bool) -> RayAddress | None:
    """Asks the server at `--connect-to` where Ray is. None: the address is Ray's own, and its token is known."""
    address = config.cluster.connect_to
    assert address is not None
    endpoint = Endpoint.parse(address, config.http.admin_key or config.http.api_key)
    try:
        response = asyncio.run(send(endpoint, CLUSTER_PATH, limit=ASK_SECONDS))
    except WireError as error:
        if has_token:
            return None
        raise ConfigError(
            f"--connect-to {address}: no server answers there ({error}). Give the HTTP address of a server that was "
            "started with --share-model, and its --admin-key"
        ) from error
    if response.status != 200:
        raise ConfigError(_refusal(address, response))
    found = RayAddress(**orjson.loads(response.body))
    _check_versions(address, found)
    return found


def _refusal(address: str, response: HttpResponse) -> str:
    if response.status == 404:
        return f"--connect-to {address}: that server does not share its model; start it with --share-model"
    if response.status == 401:
        return f"--connect-to {address} needs the key of that server: give it with --admin-key"
    try:
        reason = orjson.loads(response.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        reason = f"it answers with status {response.status}"
    return f"--connect-to {address}: {reason}"


def _check_versions(address: str, found: RayAddress) -> None:
    """Ray joins machines of the same Python and Ray alone."""
    here = RayAddress.here("", "")
    for name, theirs, ours in (
        ("Ray", found.ray_version, here.ray_version),
        ("Python", found.python_version, here.python_version),
    ):
        if theirs != ours:
            raise ConfigError(f"--connect-to {address}: that machine has {name} {theirs}, this one {ours}; install it")
