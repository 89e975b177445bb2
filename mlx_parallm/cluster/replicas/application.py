"""The same as an application for a Ray cluster that exists already: `serve deploy packaging/ray-serve.yaml`.

The front is Serve's ingress, one replica of it, behind Serve's proxies; engines are a second deployment, which Serve
scales by requests in flight. Engines find the front by an actor with a name. `serve` imports `build`.
"""

import asyncio
import contextlib
import socket
import time
from typing import Any

import aiohttp
import ray
import uvicorn
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_parallm.cluster.replicas.deployment import APPLICATION, EngineReplica
from mlx_parallm.cluster.replicas.front import Front
from mlx_parallm.cluster.replicas.front_routes import FrontRoutes
from mlx_parallm.cluster.replicas.links import new_secret
from mlx_parallm.cluster.replicas.members import Members
from mlx_parallm.config import ServeConfig
from mlx_parallm.server.http import logs

ADDRESS = "mlx_parallm_front"  # the actor's name
FIND_SECONDS = 120.0
SILENCE_SECONDS = 2.0


@ray.remote(num_cpus=0)
class FrontAddress:
    """Tells engines where the front is, and the secret of their links."""

    def __init__(self, url: str, secret: str) -> None:
        self._found = (url, secret)

    def get(self) -> tuple[str, str]:
        return self._found


class PassedOn(Response):
    """A response that the front writes."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._front(scope, receive, send)


class FrontIngress:
    def __init__(self, config: ServeConfig, engines: DeploymentHandle) -> None:
        """`engines` is not called: requests go by HTTP. It makes Serve start both."""
        self._config = config
        self._front: Front | None = None
        self._starting = asyncio.Lock()

    async def __call__(self, request: Request) -> Response:
        return PassedOn(await self._started())

    async def check_health(self) -> None:
        await self._started()

    async def _started(self) -> Front:
        async with self._starting:
            if self._front is None:
                self._front = await self._start()
        return self._front

    async def _start(self) -> Front:
        logs.set_up(self._config.http, helper=True)
        secret = new_secret()
        host = ray.util.get_node_ip_address()

        def session() -> aiohttp.ClientSession:
            assert front.session is not None
            return front.session

        members = Members(secret, self._config.cluster.replicas, session)
        front = Front(members, self._config, secret)
        await front.open()
        routes = FrontRoutes(members, secret, lambda reason: None)
        listener = socket.create_server((host, 0))
        settings = uvicorn.Config(routes, ws="none", lifespan="off", log_config=None, access_log=False)
        self._inner = asyncio.ensure_future(uvicorn.Server(settings).serve(sockets=[listener]))
        self._watch = asyncio.ensure_future(_remove_silent(members))
        self._address = await asyncio.to_thread(_publish, f"http://{host}:{listener.getsockname()[1]}", secret)
        return front


async def _remove_silent(members: Members) -> None:
    while True:
        await asyncio.sleep(SILENCE_SECONDS)
        await members.remove_silent()


def _publish(url: str, secret: str) -> Any:
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(ADDRESS, namespace=APPLICATION))
        time.sleep(1)
    actor = FrontAddress.options(name=ADDRESS, namespace=APPLICATION, lifetime="detached")  # type: ignore[attr-defined]
    return actor.remote(url, secret)


class ClusterEngine(EngineReplica):
    """An engine that looks for the front."""

    def __init__(self, config: ServeConfig) -> None:
        deadline = time.monotonic() + FIND_SECONDS
        while True:
            try:
                address = ray.get_actor(ADDRESS, namespace=APPLICATION)
                break
            except ValueError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        url, secret = ray.get(address.get.remote())
        super().__init__(config, url, secret, True)


def build(args: dict[str, Any]) -> serve.Application:
    """`args`: options of mlx_parallm_serve by name, as `model_path: [/models/llama]`."""
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in args.items()}
    config = ServeConfig.of(**options)
    engine = serve.deployment(ClusterEngine).options(name="engine")
    return serve.deployment(FrontIngress).options(name="front", num_replicas=1).bind(config, engine.bind(config))
