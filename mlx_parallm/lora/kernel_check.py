"""Builds the CUDA kernels for adapters and holds them against MLX's operations before they are used.

`compute.patch` asks for them once per model. A kernel that can't be built, or that gives wrong numbers, is not used.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import swiglu

from mlx_parallm.host import to_numpy
from mlx_parallm.lora.hooks import AdapterKernels, Adder, FusedKernels, LayerOutput, RopeParams
from mlx_parallm.lora.kernel import add_adapters, add_and_gate, add_and_residual, add_and_rope, log2_inv_freq
from mlx_parallm.lora.row_adapters import Groups, StackedLoRA

log = logging.getLogger(__name__)

MOST_LAYERS = 3  # of the same inputs
WIDTH = 32  # of a head
ROPE_BASE = 500.0


def checked_kernels(dtype: mx.Dtype) -> AdapterKernels:
    """The kernels that are right for a model of that precision."""
    add = checked_adder(dtype)
    return AdapterKernels(add=add, fused=None if add is None else checked_fused(dtype))


def checked_adder(dtype: mx.Dtype) -> Adder | None:
    sizes = [[32 * (i + 1) for i in range(count)] for count in range(1, MOST_LAYERS + 1)]

    def is_right() -> bool:
        return all(
            adds_right(dtype, out_features, add_adapters, tokens=tokens) for out_features in sizes for tokens in (1, 3)
        )

    return add_adapters if _passes(is_right) else None


def checked_fused(dtype: mx.Dtype) -> FusedKernels | None:
    freqs = ROPE_BASE ** (mx.arange(0, WIDTH, 2) / WIDTH)

    def is_right() -> bool:
        return (
            _adds_residual(dtype)
            and _gates(dtype)
            and _rotates(dtype, RopeParams(log2_inv_freq(ROPE_BASE, WIDTH // 2), in_log2=True), base=ROPE_BASE)
            and _rotates(dtype, RopeParams(1.0 / freqs, in_log2=False), base=None, freqs=freqs)
        )

    return FusedKernels(add_and_residual, add_and_gate, add_and_rope) if _passes(is_right) else None


def _passes(is_right: Callable[[], bool]) -> bool:
    try:
        if is_right():
            return True
        log.warning("a CUDA kernel for adapters gives wrong results, and is not used")
    except (RuntimeError, ValueError) as error:
        log.warning("a CUDA kernel for adapters can't be used: %s", str(error)[:300])
    return False


def _adds_residual(dtype: mx.Dtype) -> bool:
    residual = mx.random.normal((2, 3, 32), key=mx.random.key(1)).astype(dtype)

    def kernel(x: mx.array, layers: Sequence[LayerOutput], row_adapters: StackedLoRA) -> list[mx.array] | None:
        total = add_and_residual(x, layers[0], row_adapters, residual)
        return None if total is None else [total]

    return adds_right(dtype, [32], kernel, lambda sums: [residual + sums[0]], tokens=3)


def _gates(dtype: mx.Dtype) -> bool:
    def kernel(x: mx.array, layers: Sequence[LayerOutput], row_adapters: StackedLoRA) -> list[mx.array] | None:
        gated = add_and_gate(x, layers, row_adapters)
        return None if gated is None else [gated]

    return adds_right(dtype, [32, 32], kernel, lambda sums: [swiglu(sums[0], sums[1])], tokens=3)


def _rotates(dtype: mx.Dtype, rope: RopeParams, **frequencies: Any) -> bool:
    offsets = mx.array([7, 300], mx.int32)

    def kernel(x: mx.array, layers: Sequence[LayerOutput], row_adapters: StackedLoRA) -> list[mx.array] | None:
        return add_and_rope(x, layers, row_adapters, rope, offsets)

    def rotated(sums: list[mx.array]) -> list[mx.array]:
        queries, keys, values = (one.reshape(2, -1, 1, WIDTH) for one in sums)
        how = {"traditional": False, "scale": 1.0, "offset": offsets, **frequencies}
        return [mx.fast.rope(queries, WIDTH, **how), mx.fast.rope(keys, WIDTH, **how), values]

    return adds_right(dtype, [96, 32, 32], kernel, rotated)


def adds_right(
    dtype: mx.Dtype,
    out_features: Sequence[int],
    kernel: Callable[[mx.array, Sequence[LayerOutput], StackedLoRA], list[mx.array] | None],
    then: Callable[[list[mx.array]], list[mx.array]] = lambda sums: sums,
    tokens: int = 1,
) -> bool:
    """Returns whether a kernel gives what layers of some sizes should, for a row without an adapter and one with.
    `then`: what it does to the sums. The products are NumPy's: MLX's own on CUDA are in fewer bits than float32 has."""
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
    bound = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 0.1}[dtype]
    return all(mx.allclose(one, other, atol=bound).item() for one, other in zip(outputs, then(sums), strict=True))
