"""`ServeConfig`: all that a serving process is told, composed of a config per concern."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from mlx_parallm.config.cache import CacheConfig
from mlx_parallm.config.cluster import ClusterConfig
from mlx_parallm.config.http import BatchConfig, HttpConfig
from mlx_parallm.config.model_config import AdapterConfig, ModelConfig
from mlx_parallm.config.options import build, changed, group, option
from mlx_parallm.config.reading import add_flags, read_config
from mlx_parallm.config.training import BUILT_IN_SCORERS, CheckpointConfig, TrainingConfig
from mlx_parallm.errors import ConfigError

MODE_NAMES = {"inference_only": "inference", "training_only": "training"}  # other names of modes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    mode: str = option(
        "inference",
        "inference (or inference_only): serve; inference_and_training: the same as --enable-rl-training; training (or "
        "training_only): train, and serve with what time it leaves",
        choices=("inference", "training", "inference_and_training", *MODE_NAMES),
    )
    model: ModelConfig = group(ModelConfig, "models", "model")
    adapters: AdapterConfig = group(AdapterConfig, "adapters", "model")
    http: HttpConfig = group(HttpConfig, "HTTP server", "server")
    batch: BatchConfig = group(BatchConfig, "requests and batches", "server")
    cache: CacheConfig = group(CacheConfig, "memory and caches", "cache")
    training: TrainingConfig = group(TrainingConfig, "training", "rl_training")
    checkpoints: CheckpointConfig = group(CheckpointConfig, "checkpoints", "checkpointing")
    cluster: ClusterConfig = group(ClusterConfig, "several machines", "cluster")

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Makes a config from options by name, as `ServeConfig.of(port=8001, ssd=False)`."""
        return build(cls, options)

    def but(self, **options: Any) -> Self:
        """The same with other values of some options."""
        return changed(self, **options)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", MODE_NAMES.get(self.mode, self.mode))
        if self.trains:  # what is said of training may stay in a file while it is off
            self._check_training()
        self._check_cluster()

    def _check_cluster(self) -> None:
        if self.cluster.several and self.trains:
            raise ConfigError(
                "replicas do not train: leave --enable-rl-training out, and start mlx_parallm_train --mode rl "
                "--connect-to HOST:PORT beside them"
            )

    def _check_training(self) -> None:
        training = self.training
        adapters = self.adapters
        if training.update_frequency > training.trajectory_buffer_size:
            raise ConfigError(
                f"update_frequency is {training.update_frequency}, and trajectory_buffer_size holds only "
                f"{training.trajectory_buffer_size}"
            )
        if training.environment and not training.built_in_scorer and training.atropos_url is None:
            raise ConfigError(
                "--environment needs --atropos-url, the API that it sends its trajectories to, unless it names a "
                f"built-in scorer: {', '.join(BUILT_IN_SCORERS)}"
            )
        if training.lora.rank > adapters.max_lora_rank:
            raise ConfigError(f"lora_rank is {training.lora.rank}, and max_lora_rank allows {adapters.max_lora_rank}")
        if len(training.train_adapter) > adapters.max_loras:
            raise ConfigError(f"{len(training.train_adapter)} adapters to train, and max_loras is {adapters.max_loras}")

    @property
    def trains(self) -> bool:
        return self.training.enable_rl_training or self.mode in ("training", "inference_and_training")

    @property
    def serving_share(self) -> float:
        """The share of the engine's time that serving has where training has work, too."""
        share = self.training.inference_share
        return min(0.05, share) if self.mode == "training" else share

    def named_models(self) -> dict[str, str | None]:
        """Name to source for each model to serve; None is the embedded default."""
        return self.model.named_models()

    def named_adapters(self) -> dict[str, str]:
        """Name to folder for each adapter to load at start."""
        return self.adapters.named_adapters(self.named_models())


C = TypeVar("C", bound=ServeConfig)


def load_config(
    flags: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    kind: type[C] = ServeConfig,  # type: ignore[assignment]
    defaults: Mapping[str, Any] | None = None,
) -> C:
    """Flags over PARALLM_* over the YAML file named by either."""
    kinds: tuple[type, ...] = (ServeConfig, *ServeConfig.__subclasses__())
    config = read_config(kind, flags, environment, defaults=defaults, other_kinds=kinds)
    for name in ("atropos_url", "environment"):
        if name in flags and not config.trains:
            raise ConfigError(f"--{name.replace('_', '-')} needs --enable-rl-training")
    return config


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ServeConfig)
