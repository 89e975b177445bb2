"""The configuration: a dataclass per concern, composed, from flags, environment and a YAML file.

Every option is a field that says all there is to know of it (`options`); `reading` makes flags, variables and file keys
of that. `serve.ServeConfig` is a serving process's, `train.TrainConfig` a training run's.
"""

from mlx_parallm.config.options import parse_bytes
from mlx_parallm.config.reading import nearest
from mlx_parallm.config.serve_config import ServeConfig, add_serve_flags, load_config
from mlx_parallm.config.train_config import TrainConfig, add_train_flags, load_train_config
from mlx_parallm.config.training import LoRAConfig, RLConfig

__all__ = [
    "LoRAConfig",
    "RLConfig",
    "ServeConfig",
    "TrainConfig",
    "add_serve_flags",
    "add_train_flags",
    "load_config",
    "load_train_config",
    "nearest",
    "parse_bytes",
]
