"""CUDA kernels that add each row's own low-rank product to the outputs of layers of the same inputs.

A pass over few tokens is bound by the number of kernels that it starts. With MLX's operations an adapter costs five
per layer; here it is one for q, k and v together, and none more where the kernel takes the place of others:
`add_and_residual` also adds the block's residual to a layer's output, `add_and_gate` also computes swiglu, and
`add_and_rope`, in passes of one token a row, also applies RoPE. They round between one and the other as separate
kernels would; within swiglu they don't. `layers` and `blocks` call them as `AdapterKernels`, once `kernel_check` has
found them right; `cuda_source` has their text.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.devices import cuda_lora_source as cuda_source
from mlx_parallm.devices.cuda_lora_source import BYTES, MAX_RANK, WARPS
from mlx_parallm.lora.hooks import LayerOutput, RopeParams
from mlx_parallm.lora.row_adapters import StackedLoRA

ENOUGH_BLOCKS = 128  # about as many as a large device runs side by side
# Tokens times rank: each token reads its own columns, which in longer prompts takes longer than to start MLX's kernels.
MOST_READ = 1 << 13

# y (B, T, out_features), a (L, C, size), b (L, C, out_features), the first of the L * C
KernelLayer = tuple[mx.array, mx.array, mx.array, int]


def add_adapters(x: mx.array, layers: Sequence[LayerOutput], row_adapters: StackedLoRA) -> list[mx.array] | None:
    """Returns y + x (B, T, size) · the row's own columns of a[number] · its own of b[number] for each layer.

    None where MLX's operations should do it.
    """
    kernel_layers = _kernel_layers(x, layers, row_adapters)
    if kernel_layers is None:
        return None
    return _run(_add_kernel(len(kernel_layers)), x, kernel_layers, row_adapters, [y.shape for y, *_ in kernel_layers])


def add_and_residual(x: mx.array, layer: LayerOutput, row_adapters: StackedLoRA, residual: mx.array) -> mx.array | None:
    """The same for one layer, and then added to residual (B, T, out_features)."""
    kernel_layers = _kernel_layers(x, [layer], row_adapters)
    if kernel_layers is None or residual.shape != layer[0].shape or residual.dtype != x.dtype:
        return None
    return _run(_residual_kernel(), x, kernel_layers, row_adapters, [residual.shape], [residual])[0]


def add_and_gate(x: mx.array, layers: Sequence[LayerOutput], row_adapters: StackedLoRA) -> mx.array | None:
    """The same for two layers, and then swiglu of the first and the second."""
    kernel_layers = _kernel_layers(x, layers, row_adapters)
    if kernel_layers is None or layers[0][0].shape != layers[1][0].shape:
        return None
    return _run(_gate_kernel(), x, kernel_layers, row_adapters, [layers[0][0].shape])[0]


def add_and_rope(
    x: mx.array, layers: Sequence[LayerOutput], row_adapters: StackedLoRA, rope: RopeParams, offsets: mx.array
) -> list[mx.array] | None:
    """The same for queries, keys and values, of which the first two are then rotated; not all need have adapters."""
    kernel_layers = _kernel_layers(x, layers, row_adapters)
    half = rope.inv_freq.shape[0]
    if kernel_layers is None or half * x.dtype.size % BYTES or any(y.shape[2] % (2 * half) for y, *_ in kernel_layers):
        return None
    if x.shape[1] != 1 or offsets.shape != x.shape[:1] or offsets.dtype != mx.int32:
        return None
    shapes = [(len(x), y.shape[2] // (2 * half), 1, 2 * half) for y, *_ in kernel_layers]
    return _run(
        _rope_kernel(), x, kernel_layers, row_adapters, shapes, [offsets, rope.inv_freq], [("IN_LOG2", rope.in_log2)]
    )


def _kernel_layers(x: mx.array, layers: Sequence[LayerOutput], row_adapters: StackedLoRA) -> list[KernelLayer] | None:
    """Returns what the kernels need of layers; None where they can't do it."""
    if row_adapters.spans is None or row_adapters.max_rank > MAX_RANK or x.ndim != 3:
        return None
    if x.shape[1] > 1 and x.shape[0] * x.shape[1] * row_adapters.max_rank > MOST_READ:
        return None
    any_group = next(row_adapters.groups[group] for _, group, _ in layers if row_adapters.has(group))
    kernel_layers: list[KernelLayer] = []
    for y, group, number in layers:
        a, b, _ = row_adapters.groups.get(group, any_group)
        kernel_layers.append((y, a, b, number * a.shape[1] if row_adapters.has(group) else -1))
    return kernel_layers if _aligned(x, kernel_layers) else None


def _run(
    kernel: Any,
    x: mx.array,
    kernel_layers: Sequence[KernelLayer],
    row_adapters: StackedLoRA,
    shapes: Sequence[tuple[int, ...]],
    more: Sequence[mx.array] = (),
    template: Sequence[tuple[str, Any]] = (),
) -> list[mx.array]:
    ys, a, b, firsts = zip(*kernel_layers, strict=True)
    threads = WARPS * 32
    tokens = x.shape[0] * x.shape[1]
    shares = max(1, min(4, ENOUGH_BLOCKS // (len(shapes) * tokens)))
    outputs: list[mx.array] = kernel(
        inputs=[x, row_adapters.spans, _first_columns(firsts), *more, *ys, *a, *b],
        template=[("T", x.dtype), *template],
        grid=(threads * shares, len(shapes), tokens),
        threadgroup=(threads, 1, 1),
        output_shapes=list(shapes),
        output_dtypes=[x.dtype] * len(shapes),
    )
    return outputs


def _aligned(x: mx.array, kernel_layers: Sequence[KernelLayer]) -> bool:
    of_one_dtype = all(array.dtype == x.dtype for y, a, b, _ in kernel_layers for array in (y, a, b))
    whole = all(
        array.shape[-1] * array.dtype.size % BYTES == 0 for array in (x, *(layer[0] for layer in kernel_layers))
    )
    return of_one_dtype and whole and x.dtype in (mx.float32, mx.float16, mx.bfloat16)


@functools.cache
def _first_columns(firsts: tuple[int, ...]) -> mx.array:
    return mx.array(firsts, mx.int32)


@functools.cache
def _add_kernel(count: int) -> Any:
    return _kernel(f"add_adapters_{count}", cuda_source.ADD.format(cases=_cases(count)), count, count)


@functools.cache
def _residual_kernel() -> Any:
    return _kernel("add_and_residual", cuda_source.ADD_RESIDUAL, 1, 1, ["residual"])


@functools.cache
def _gate_kernel() -> Any:
    return _kernel("add_and_gate", cuda_source.GATE, 2, 1)


@functools.cache
def _rope_kernel() -> Any:
    return _kernel("add_and_rope", cuda_source.ROPE.format(cases=_cases(3)), 3, 3, ["offsets", "inv_freq"])


def _cases(count: int) -> str:
    return " ".join(cuda_source.CASE.format(i=i) for i in range(count))


def _kernel(name: str, source: str, count: int, outputs: int, more: Sequence[str] = ()) -> Any:
    names = ["x", "spans", "firsts", *more, *(f"{side}{i}" for side in "yab" for i in range(count))]
    return mx.fast.cuda_kernel(name, names, [f"out{i}" for i in range(outputs)], source, cuda_source.HEADER)


def log2_inv_freq(base: float, half: int) -> mx.array:
    """Returns the base-2 logarithms of RoPE's inverse frequencies, as MLX's own kernel has them."""
    share = np.arange(half, dtype=np.float32) / np.float32(half)
    return mx.array(-share * np.float32(math.log2(base)))
