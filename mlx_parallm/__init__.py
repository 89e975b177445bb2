"""MLX ParaLLM: an LLM server for Apple Silicon with continuous batching, that trains what it serves.

`LLM` and `SamplingParams` are all that offline users need, `InferenceClient` what trainers do, `RLIntegratedServer`
with `LoRAConfig` and `RLConfig` what trains and serves in one process. They load lazily, so that `import mlx_parallm`
costs nothing and the BLAS can still be chosen before MLX is imported.
"""

import importlib
import os
from typing import TYPE_CHECKING

from mlx_parallm.blas import preload
from mlx_parallm.platforms import keep_open_files_limit
from mlx_parallm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlx_parallm.client import InferenceClient
    from mlx_parallm.config.training import LoRAConfig, RLConfig
    from mlx_parallm.integrated import RLIntegratedServer
    from mlx_parallm.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "InferenceClient",
    "LoRAConfig",
    "RLConfig",
    "RLIntegratedServer",
    "SamplingParams",
    "__version__",
]
LAZY = {
    "LLM": "mlx_parallm.llm",
    "InferenceClient": "mlx_parallm.client",
    "RLIntegratedServer": "mlx_parallm.integrated",
    "RLConfig": "mlx_parallm.config.training",
    "LoRAConfig": "mlx_parallm.config.training",
}

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would miss PyTorch, which nobody needs here
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # float32 is float32: GPUs and an M5 would multiply it with 10 bits
# For MLX on CUDA, at its first use. Over a server's life come more shapes than it lets its caches miss, and then every
# pass would fail. A plan for attention takes 0.3 s to make: the more of them are kept, the better.
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")
os.environ.setdefault("MLX_CUDA_SDPA_CACHE_SIZE", "512")
os.environ.setdefault("MLX_CUDA_SDPA_BACKWARD_CACHE_SIZE", "512")
preload()  # before any module of ours can import MLX
keep_open_files_limit()  # before mlx-lm is imported


def __getattr__(name: str) -> object:
    if name in LAZY:
        found: object = getattr(importlib.import_module(LAZY[name]), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
