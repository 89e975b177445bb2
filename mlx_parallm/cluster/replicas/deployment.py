"""Replicas as a deployment of Ray Serve: which processes run where, and what is started anew.

This file and `application.py` alone know Ray.

Ray runs without its dashboard and without Serve's own proxies: `front.py` serves the address. `RayCluster` is used by
`run.py`. Other machines join with `join`.
"""

import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingContext
from ray.serve.schema import LoggingConfig

from mlx_parallm.cluster.replicas.replica import FrontLink, Replica
from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.paths import socket_folder
from mlx_parallm.progress import say

log = logging.getLogger(__name__)

APPLICATION = "mlx_parallm"
RESOURCE = "mlx_parallm"  # a replica's place on a machine
LOOPBACK = "127.0.0.1"
CLUSTER_PORT = 6379
OBJECT_STORE_BYTES = 80_000_000  # nothing of ours is kept there


class EngineReplica:
    """A process of Ray's with an engine in it."""

    def __init__(self, config: ServeConfig, front_url: str, secret: str, shared: bool) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        host = ray.util.get_node_ip_address() if shared else LOOPBACK
        sharing = 1 if shared else config.cluster.most
        self._replica = Replica(config, FrontLink(front_url, secret, name), secret, host, sharing)
        self._replica.start()

    def check_health(self) -> None:
        """Ray ends the process where this raises, and starts another."""
        self._replica.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"in_flight": float(self._replica.in_flight)}

    def __call__(self) -> str:
        """Exists for `serve` alone: requests come by HTTP."""
        return "ok"

    def __del__(self) -> None:
        if hasattr(self, "_replica"):
            self._replica.stop()


class RayCluster:
    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.shared = config.cluster.share_model
        self.address = ""
        self._head: subprocess.Popen[bytes] | None = None
        self._folder = str(socket_folder())
        self._deployed = 0
        self._stopped = False

    @property
    def host(self) -> str:
        """The address at which replicas reach the front."""
        return ray.util.get_node_ip_address() if self.shared else LOOPBACK

    def open(self) -> None:
        """Starts Ray; on the main thread, since it minds signals."""
        options: dict[str, Any] = dict(
            namespace=APPLICATION, log_to_driver=True, logging_level=logging.WARNING, configure_logging=True
        )
        if self.shared:
            self._start_head()
            ray.init(address=self.address, **options)
            self.address = ray.get_runtime_context().gcs_address  # as others reach it
        else:
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=1,  # nothing of ours asks for one, and Ray starts an idle process for each
                resources={RESOURCE: self._config.cluster.most},
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address=LOOPBACK,
                _temp_dir=self._folder,
                **options,
            )
        serve.start(proxy_location="Disabled", logging_config=_quiet())

    def _start_head(self) -> None:
        ip = _own_address(self._config.http.host)
        self.address = f"{ip}:{_free_port(ip)}"
        self._head = _ray_start(
            [
                "--head",
                f"--port={self.address.rpartition(':')[2]}",
                f"--node-ip-address={ip}",
                "--include-dashboard=false",
            ],
            self._config.cluster.replicas,
            self._folder,
        )

    def places(self) -> int:
        """Replicas that the machines of the cluster have room for."""
        return int(ray.cluster_resources().get(RESOURCE, 0))

    def deploy(self, count: int, front_url: str, secret: str) -> None:
        """Starts replicas, or changes how many there are; those that run go on."""
        if count == self._deployed:
            return
        http = self._config.http
        deployment = serve.deployment(EngineReplica).options(
            name="replica",
            num_replicas=count,
            ray_actor_options={"num_cpus": 0, "resources": {RESOURCE: 1}},
            max_ongoing_requests=1000,
            health_check_period_s=2,
            health_check_timeout_s=30,
            graceful_shutdown_timeout_s=http.drain_timeout_seconds + 5,
            logging_config=_quiet(),
        )
        application = deployment.bind(self._config, front_url, secret, self.shared)
        serve.run_many(
            [serve.RunTarget(target=application, name=APPLICATION, route_prefix=None)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        self._deployed = count

    def stop(self) -> None:
        """Replicas drain and end, then Ray's own processes."""
        if self._stopped:
            return
        self._stopped = True
        try:
            serve.shutdown()
        finally:
            ray.shutdown()
            if self._head is not None:
                _end(self._head)
            shutil.rmtree(self._folder, ignore_errors=True)


def join(config: ServeConfig) -> int:
    """Offers this machine to a cluster, until a signal comes or the cluster ends."""
    assert config.cluster.connect_to is not None
    folder = str(socket_folder())
    process = _ray_start([f"--address={config.cluster.connect_to}"], config.cluster.replicas, folder)
    asked = False

    def leave(*_: Any) -> None:
        nonlocal asked
        asked = True
        process.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    say(f"  joining the cluster at {config.cluster.connect_to} with {config.cluster.replicas} replica(s)")
    try:
        code = process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if asked or code == 0 else 1  # Ray has an exit code of its own for a signal


def queue_policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Says how many replicas Serve is to run: as many as keep `target_ongoing_requests` requests in flight on each."""
    settings = context.config
    assert settings is not None
    in_flight = sum((context.aggregated_metrics or {}).get("in_flight", {}).values())
    wanted = -(-in_flight // (settings.target_ongoing_requests or 8))
    return int(min(settings.max_replicas, max(settings.min_replicas, wanted))), {}


def _ray_start(flags: list[str], replicas: int, folder: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *flags, "--block", "--disable-usage-stats"]
    command += [f"--resources={json.dumps({RESOURCE: replicas})}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    command += [f"--temp-dir={folder}"] if "--head" in flags else []
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=partial(_end_with, os.getpid()))


def _end_with(parent: int) -> None:
    """Has this new process get SIGTERM when its parent dies, however that dies. Linux alone has this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


def _free_port(ip: str) -> int:
    """Ray's usual port, or another where a program has that one."""
    for port in (CLUSTER_PORT, 0):
        with suppress(OSError), socket.create_server((ip, port)) as probe:
            return int(probe.getsockname()[1])
    raise ConfigError(f"no port is free on {ip} for Ray")


def _own_address(host: str) -> str:
    return str(ray.util.get_node_ip_address()) if host in ("0.0.0.0", "::") else host


def _quiet() -> LoggingConfig:
    return LoggingConfig(log_level="WARNING", enable_access_log=False)
