"""`mx.fast.cuda_kernel` without CUDA: the same text, compiled as C++, as `metal_shim` does it for Metal.

Kernels that put keys and values in place write to inputs of these names; what they wrote is in the arrays' own memory
afterwards.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from tests.support.metal_shim import ShimKernel


class CudaShimKernel(ShimKernel):
    places = {}
    header = Path(__file__).parent / "cuda_shim.h"
    most_buffers = 500
    in_place: frozenset[str] = frozenset({"k", "v"})

    def _in_cpp(self, text: str) -> str:
        """What blocks share becomes static."""
        return re.sub(r"\b__shared__\b", "static", text)


def cuda_kernel(
    name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = ""
) -> CudaShimKernel:
    return CudaShimKernel(name, input_names, output_names, source, header)
