"""Builds the CUDA kernels for adapters and holds them against MLX's operations before they are used.

`compute.patch` asks for them once per model. A kernel that can't be built, or that gives wrong numbers, is not used.
"""

import logging
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import swiglu

from mlx_parallm.host import to_numpy
from mlx_parallm.lora.hooks import AdapterKernels, Adder, JointKernels, LayerOutput
from mlx_parallm.lora.kernel import add_adapters, add_side_by_side, gate
from mlx_parallm.lora.row_adapters import Groups, StackedLoRA

log = logging.getLogger(__name__)

MOST_LAYERS = 3  # of the same inputs
BOUNDS = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 0.1}

Kernel = Callable[[mx.array, Sequence[LayerOutput], StackedLoRA], list[mx.array] | None]


def checked_kernels(dtype: mx.Dtype) -> AdapterKernels:
    """The kernels that are right for a model of that precision."""
    add = checked_adder(dtype)
    return AdapterKernels(add=add, joint=None if add is None else checked_joint(dtype))


def checked_adder(dtype: mx.Dtype) -> Adder | None:
    return add_adapters if _passes(lambda: _adds_right(dtype, add_adapters)) else None


def checked_joint(dtype: mx.Dtype) -> JointKernels | None:
    def is_right() -> bool:
        return _adds_right(dtype, _side_by_side) and _gates(dtype)

    return JointKernels(add_side_by_side, gate) if _passes(is_right) else None


def _adds_right(dtype: mx.Dtype, kernel: Kernel) -> bool:
    sizes = [[32 * (i + 1) for i in range(count)] for count in range(1, MOST_LAYERS + 1)]
    return all(adds_right(dtype, out_features, kernel, tokens=tokens) for out_features in sizes for tokens in (1, 3))


def _side_by_side(x: mx.array, layers: Sequence[LayerOutput], row_adapters: StackedLoRA) -> list[mx.array] | None:
    widths = [y.shape[2] for y, _, _ in layers]
    places = [(group, number) for _, group, number in layers]
    joint = add_side_by_side(x, mx.concatenate([y for y, _, _ in layers], axis=2), places, widths, row_adapters)
    return None if joint is None else list(mx.split(joint, np.cumsum(widths)[:-1].tolist(), axis=2))


def _passes(is_right: Callable[[], bool]) -> bool:
    try:
        if is_right():
            return True
        log.warning("a CUDA kernel for adapters gives wrong results, and is not used")
    except (RuntimeError, ValueError) as error:
        log.warning("a CUDA kernel for adapters can't be used: %s", str(error)[:300])
    return False


def _gates(dtype: mx.Dtype) -> bool:
    both = [mx.random.normal((3, 32), key=mx.random.key(key)).astype(dtype) for key in (1, 2)]
    found = gate(mx.concatenate(both, axis=1))
    return found is not None and bool(mx.allclose(found, swiglu(*both), atol=BOUNDS[dtype]).item())


def adds_right(
    dtype: mx.Dtype,
    out_features: Sequence[int],
    kernel: Kernel,
    tokens: int = 1,
) -> bool:
    """Returns whether a kernel gives what layers of some sizes should, for a row without an adapter and one with. The
    products are NumPy's: MLX's own on CUDA are in fewer bits than float32 has."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(random.standard_normal(shape).astype(np.float32) * 0.25).astype(dtype)

    x = normal(2, tokens, 64)
    ys = [normal(2, tokens, count) for count in out_features]
    groups: Groups = {i: (normal(2, 24, 64), normal(2, 24, count), None) for i, count in enumerate(out_features)}
    row_adapters = StackedLoRA(groups, spans=mx.array([[0, 0], [8, 16]], mx.int32), max_rank=16)
    outputs = kernel(x, [(y, i, 1) for i, y in enumerate(ys)], row_adapters)
    assert outputs is not None
    sums = []
    for y, (a, b, _) in zip(ys, groups.values(), strict=True):
        inputs, row_a, row_b, total = (to_numpy(one.astype(mx.float32)) for one in (x, a[1, 8:], b[1, 8:], y))
        total[1] += inputs[1] @ row_a.T @ row_b
        sums.append(mx.array(total).astype(dtype))
    return all(mx.allclose(one, other, atol=BOUNDS[dtype]).item() for one, other in zip(outputs, sums, strict=True))
