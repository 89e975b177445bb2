"""What must be there before Ray is imported: its package, and the environment that it reads once. `cli` calls it."""

import os
import secrets
import sys
from dataclasses import replace
from importlib.util import find_spec

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ConfigError


def prepare(config: ServeConfig) -> ServeConfig:
    """The configuration with Ray's own address in `connect_to`, where a machine joins others."""
    missing = [name for name in ("ray", "aiohttp") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--replicas, --max-replicas, --share-model and --connect-to need {' and '.join(missing)}: "
            "pip install 'mlx-parallm[cluster]'"
        )
    has_token = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if config.cluster.connect_to is not None:
        from mlx_parallm.cluster.replicas.joining import find_cluster

        if (found := find_cluster(config, has_token)) is not None:
            os.environ["RAY_AUTH_TOKEN"] = found.token
            config = replace(config, cluster=replace(config.cluster, connect_to=found.address))
    elif not has_token:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # replicas may use the GPU
    # Ray would give a process without reserved CPUs one thread.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.cluster.most)))
    if sys.platform == "darwin":
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    return config
