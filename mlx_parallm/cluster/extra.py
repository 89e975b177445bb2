"""What replicas need beyond the usual packages: Ray, and aiohttp, which it brings along."""

from importlib.util import find_spec

from mlx_parallm.errors import ConfigError


def check_installed() -> None:
    missing = [name for name in ("ray", "aiohttp") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--replicas, --share-model and --connect-to need {' and '.join(missing)}: "
            "pip install 'mlx-parallm[cluster]'"
        )
