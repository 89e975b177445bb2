"""MLX ParaLLM: an LLM server for Apple Silicon with continuous batching.

`LLM` and `SamplingParams` are all that offline users need, `InferenceClient` what trainers do; they load lazily, so
that `import mlx_parallm` costs nothing and the BLAS can still be chosen before MLX is imported.
"""

import os
from typing import TYPE_CHECKING

from mlx_parallm.blas import preload
from mlx_parallm.types import SamplingParams

if TYPE_CHECKING:
    from mlx_parallm.client import InferenceClient
    from mlx_parallm.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "InferenceClient", "SamplingParams", "__version__"]

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would miss PyTorch, which nobody needs here
preload()  # before any module of ours can import MLX


def __getattr__(name: str) -> object:
    if name == "LLM":
        from mlx_parallm.llm import LLM

        return LLM
    if name == "InferenceClient":
        from mlx_parallm.client import InferenceClient

        return InferenceClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
