"""How another machine joins a cluster: what is asked and answered, which needs no Ray, and what is set for Ray."""

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import orjson
import pytest

from mlx_parallm.cluster.replicas import joining
from mlx_parallm.cluster.replicas import ray_setup as extra
from mlx_parallm.cluster.replicas.joining import JoinRoute, RayAddress, find_cluster
from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.server.api.ops import CLUSTER_PATH
from mlx_parallm.server.auth.access import AccessControl

HERE = RayAddress("10.0.0.1:6379", "secret", "2.50.0", joining.platform.python_version())


async def test_an_admin_is_told_where_ray_is() -> None:
    config = ServeConfig.of(admin_key="sesame")
    app = JoinRoute(config, AccessControl.of(config), HERE)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000") as client:
        assert (await client.get(CLUSTER_PATH)).status_code == 401
        answer = await client.get(CLUSTER_PATH, headers={"Authorization": "Bearer sesame"})
    assert answer.json() == asdict(HERE)
    assert answer.headers["cache-control"] == "no-store"


@contextlib.contextmanager
def first_machine(found: RayAddress) -> Iterator[str]:
    """Its HTTP address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = orjson.dumps(asdict(found))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("ray", "python", "words"),
    [
        ("2.50.0", HERE.python_version, None),
        ("2.49.0", HERE.python_version, "has Ray 2.49.0, this one 2.50.0"),
        ("2.50.0", "3.99.0", "has Python 3.99.0"),
    ],
)
def test_machines_of_other_versions_do_not_join(
    ray: str, python: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "version", {"ray": "2.50.0"}.__getitem__)  # as if it were installed
    found = RayAddress(HERE.address, HERE.token, ray, python)
    with first_machine(found) as address:
        config = ServeConfig.of(connect_to=address)
        if words is None:
            assert find_cluster(config, has_token=False) == found
        else:
            with pytest.raises(ConfigError, match=words):
                find_cluster(config, has_token=False)


def test_replicas_share_the_machine_s_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "find_spec", lambda name: name)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_TOKEN": "mine"})
    extra.prepare(ServeConfig.of(max_replicas=4))
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]) == ("token", "mine")
    os.environ["OMP_NUM_THREADS"] = "5"
    extra.prepare(ServeConfig.of(max_replicas=4))
    assert os.environ["OMP_NUM_THREADS"] == "5", "what the user has set stays"
