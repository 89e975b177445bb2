"""What must be there before Ray is imported: its package, and the environment that it reads once. `cli` calls it."""

import os
import secrets
import sys
from importlib.util import find_spec

from mlx_parallm.config.cluster import ClusterConfig
from mlx_parallm.errors import ConfigError


def prepare(config: ClusterConfig) -> None:
    missing = [name for name in ("ray", "aiohttp") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--replicas, --max-replicas, --share-model and --connect-to need {' and '.join(missing)}: "
            "pip install 'mlx-parallm[cluster]'"
        )
    has_token = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if config.connect_to is not None and not has_token:
        raise ConfigError("--connect-to needs RAY_AUTH_TOKEN in the environment, as the first machine has printed it")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not has_token:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # replicas may use the GPU
    # Ray would give a process without reserved CPUs one thread.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.most)))
    if sys.platform == "darwin":
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
