"""What a start tells people at its end, in words that a newcomer has: what is on and off."""

from collections.abc import Sequence

from mlx_parallm import __version__
from mlx_parallm.config import ServeConfig
from mlx_parallm.runtime.client import ModelClient, RuntimeClient, TrainingClient
from mlx_parallm.server.auth.access import is_loopback
from mlx_parallm.server.auth.keys import KeyRing
from mlx_parallm.types import ModelStatus


def ready_lines(runtime: RuntimeClient, config: ServeConfig, url: str) -> list[str]:
    models = list(runtime.models.values())
    rows = [row for model in models for row in model.describe()]
    rows += [(status.kind, _other(status)) for status in runtime.pool.statuses() if status.name not in runtime.models]
    rows += [
        ("scheduler", _scheduler(config)),
        ("adapters", _adapters(models, config)),
        ("training", _training(config, runtime.training)),
        ("keys", _keys(config)),
        ("URL", f"{url}  (described at {url}/docs)"),
    ]
    return [f"MLX ParaLLM {__version__} is ready", *(f"  {label:<10} {value}" for label, value in rows)]


def _other(status: ModelStatus) -> str:
    """A model that predicts, or one that is not loaded yet."""
    if status.status == "ready":
        return f"{status.name} from {status.source}"
    return f"{status.name}, loaded on its first request"


def _scheduler(config: ServeConfig) -> str:
    queue = f"{config.batch.max_queue_size} more may wait"
    if config.batch.scheduler == "continuous":
        return f"continuous: new requests join the running ones at every step; {queue}"
    return f"requests are gathered for {config.batch.batch_timeout:g} s before they begin; {queue}"


def _adapters(models: Sequence[ModelClient], config: ServeConfig) -> str:
    names = [name for model in models for name in model.adapters.names]
    loaded = ", ".join(names) if names else "none loaded (--lora-path NAME=FOLDER, or POST /v1/adapters/load)"
    return f"{loaded}; up to {config.adapters.max_loras} different ones in a batch"


def _training(config: ServeConfig, training: TrainingClient) -> str:
    if not training.adapters:
        unused = [name for name in ("atropos_url", "environment") if getattr(config.training, name) is not None]
        told = f"; {' and '.join(unused)} is not used" if unused else ""
        return f"off (--enable-rl-training turns it on){told}"
    names = ", ".join(training.adapters)
    algorithm = config.training.rl.algorithm.upper()
    return f"on: {names} learns by {algorithm}, checkpoints in {config.checkpoints.checkpoint_dir}"


def _keys(config: ServeConfig) -> str:
    ring = KeyRing.of(config)
    everybody = "everybody on this machine" if is_loopback(config.http.host) else "EVERYBODY WHO CAN REACH THIS ADDRESS"
    if not ring.guards("admin"):
        return f"none: {everybody} may use and change this server (--api-key, --admin-key)"
    if not ring.guards("user"):
        return f"for changes only: {everybody} may ask for responses (--api-key)"
    if not any(key.role == "admin" for key in ring.keys):
        return "needed for every request; admin routes are closed (--admin-key opens them)"
    return "needed for every request, and an admin's or a trainer's for changes"
