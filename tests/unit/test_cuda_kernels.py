"""The CUDA kernels' own text, compiled as C++, beside MLX's operations and NumPy; see `cuda_shim`."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu

from mlx_parallm.devices import cuda_attention
from mlx_parallm.devices.cuda_attention import HeadNorms, RopeParams, attend, rotate_and_attend
from mlx_parallm.host import to_numpy
from mlx_parallm.lora import kernel, kernel_check
from mlx_parallm.lora.row_adapters import StackedLoRA
from tests.support.cuda_shim import cuda_kernel

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
BOUNDS = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
CACHES = (
    *(cuda_attention._kernel, cuda_attention._rotating_kernel, cuda_attention._joining_kernel),
    *(kernel._add_kernel, kernel._gate_kernel),
)


@pytest.fixture(autouse=True)
def shim(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    for cache in CACHES:
        cache.cache_clear()
    yield
    for cache in CACHES:
        cache.cache_clear()


def normal(dtype: mx.Dtype, *shape: int, seed: int = 0) -> mx.array:
    random = np.random.default_rng([seed, *shape])
    return mx.array(random.standard_normal(shape).astype(np.float32)).astype(dtype)


def close(one: mx.array, other: mx.array, dtype: mx.Dtype) -> bool:
    return bool(mx.allclose(one, other, rtol=BOUNDS[dtype], atol=BOUNDS[dtype]).item())


def attended(queries: mx.array, keys: mx.array, values: mx.array, lengths: Any, scale: float) -> mx.array:
    mask = (mx.arange(keys.shape[2]) < mx.array(lengths)[:, None])[:, None, None]
    single = [one.astype(mx.float32) for one in (queries, keys, values)]
    found: mx.array = mx.fast.scaled_dot_product_attention(*single, scale=scale, mask=mask)
    return found


# rows, heads of queries and of keys, capacity, width
FORMS: list[Any] = [(16, 8, 4, 40, 64)]
FORMS += [
    pytest.param(form, marks=pytest.mark.slow)
    for form in ((8, 9, 9, 20, 64), (32, 4, 2, 33, 128), (8, 16, 8, 9, 256), (32, 14, 2, 12, 64))
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_attention_reads_each_row_to_its_length(form: tuple[int, ...], dtype: mx.Dtype) -> None:
    rows, heads, shared, capacity, width = form
    queries = normal(dtype, rows, heads, 1, width)
    keys, values = (normal(dtype, rows, shared, capacity, width, seed=seed) for seed in (1, 2))
    fresh = (normal(dtype, rows, shared, 1, width, seed=3), normal(dtype, rows, shared, 1, width, seed=4))
    offsets = np.random.default_rng(5).integers(0, capacity, rows).astype(np.int32)
    written = [
        mx.put_along_axis(s, mx.array(offsets)[:, None, None, None], f, 2)
        for s, f in zip((keys, values), fresh, strict=True)
    ]
    mx.eval(written)
    found = attend(queries, keys, values, fresh, mx.array(offsets), width**-0.5)
    assert found is not None
    assert mx.array_equal(keys, written[0])
    assert mx.array_equal(values, written[1])
    assert close(found.astype(mx.float32), attended(queries, *written, offsets + 1, width**-0.5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("in_log2", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_queries_and_keys_are_normed_and_rotated(
    form: tuple[int, ...], in_log2: bool, normed: bool, dtype: mx.Dtype
) -> None:
    rows, heads, shared, capacity, width = form
    scale, base = width**-0.5, 10000.0
    y = normal(dtype, rows, (heads + 2 * shared) * width)
    keys, values = (normal(dtype, rows, shared, capacity, width, seed=seed) for seed in (1, 2))
    offsets = mx.array(np.random.default_rng(5).integers(0, capacity, rows).astype(np.int32))
    norms = HeadNorms(1 + normal(dtype, width, seed=6) / 4, 1 + normal(dtype, width, seed=7) / 4, 1e-5)
    parts = mx.split(y, [heads * width, (heads + shared) * width], axis=1)
    queries, new_keys, new_values = (part.reshape(rows, -1, 1, width) for part in parts)
    if normed:
        queries = mx.fast.rms_norm(queries, norms.queries, norms.eps)
        new_keys = mx.fast.rms_norm(new_keys, norms.keys, norms.eps)
    queries, new_keys = (
        mx.fast.rope(one, width, traditional=False, base=base, scale=1.0, offset=offsets) for one in (queries, new_keys)
    )
    places = offsets[:, None, None, None]
    written = [mx.put_along_axis(keys, places, new_keys, 2), mx.put_along_axis(values, places, new_values, 2)]
    mx.eval(written)
    log2 = kernel.log2_inv_freq(base, width // 2)
    rope = RopeParams(log2, True) if in_log2 else RopeParams(mx.power(2.0, log2), False)
    found = rotate_and_attend(y, heads, keys, values, offsets, rope, norms if normed else None, scale)
    assert found is not None
    assert close(keys, written[0], dtype)
    assert mx.array_equal(values, written[1])
    expected = attended(queries, keys, values, to_numpy(offsets) + 1, scale)
    assert close(found.astype(mx.float32), expected.reshape(rows, -1), dtype)


@pytest.mark.parametrize("span", [8, 32, 1024])
def test_a_row_attends_alike_whatever_the_others_are(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: beside shorter, longer and other rows, in a larger buffer, in another slot, and among rows that have
    none, whether its tokens are read by one block or by several."""
    monkeypatch.setattr(cuda_attention, "SPAN", span)
    dtype = mx.bfloat16
    heads, shared, width = 8, 4, 64
    y = normal(dtype, 16, (heads + 2 * shared) * width)
    slots = [normal(dtype, 16, shared, 48, width, seed=seed) for seed in (1, 2)]
    rope = RopeParams(kernel.log2_inv_freq(10000.0, width // 2), True)

    def row(y: mx.array, slots: list[mx.array], offsets: list[int], place: int) -> mx.array:
        slots = [slot + 0 for slot in slots]
        found = rotate_and_attend(y, heads, *slots, mx.array(offsets, mx.int32), rope, None, 0.125)
        assert found is not None
        return found[place]

    alone = row(y, slots, [37, *[0] * 15], 0)
    assert mx.array_equal(alone, row(y, slots, [37, *range(15)], 0))
    wider = [mx.concatenate([slot, slot], axis=2) for slot in slots]
    assert mx.array_equal(alone, row(y, wider, [37, *[60] * 15], 0))
    turned = [slot[::-1] for slot in slots]
    assert mx.array_equal(alone, row(y[::-1], turned, [*[5] * 15, 37], 15))
    few = [slot[:4] for slot in slots]
    assert mx.array_equal(alone, row(y, few, [37, 3, 9, 40, *[0] * 12], 0))
    assert not row(y, few, [37, 3, 9, 40, *[0] * 12], 4).any(), "it has no slot"


@pytest.mark.parametrize("capacity", [40, 48])
def test_several_blocks_read_a_long_row(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "SPAN", 16)
    rows, heads, shared, width = 6, 4, 2, 64
    queries = normal(mx.float32, rows, heads, 1, width)
    keys, values = (normal(mx.float32, rows, shared, capacity, width, seed=seed) for seed in (1, 2))
    fresh = (normal(mx.float32, rows, shared, 1, width, seed=3), normal(mx.float32, rows, shared, 1, width, seed=4))
    offsets = np.array([0, 15, 16, 31, 32, capacity - 1], np.int32)
    places = mx.array(offsets)[:, None, None, None]
    written = [mx.put_along_axis(s, places, f, 2) for s, f in zip((keys, values), fresh, strict=True)]
    mx.eval(written)
    found = attend(queries, keys, values, fresh, mx.array(offsets), 0.125)
    assert found is not None
    assert mx.array_equal(keys, written[0])
    assert mx.array_equal(values, written[1])
    assert close(found, attended(queries, *written, offsets + 1, 0.125), mx.float32)


def test_shapes_that_the_kernels_do_not_know_are_left_alone() -> None:
    keys = mx.zeros((16, 4, 8, 64))
    offsets = mx.zeros((16,), mx.int32)
    rope = RopeParams(mx.zeros((32,)), True)
    y = mx.zeros((16, 16 * 64))
    assert rotate_and_attend(y, 8, keys, keys, offsets, rope, None, 1.0) is not None
    assert rotate_and_attend(y.astype(mx.float16), 8, keys, keys, offsets, rope, None, 1.0) is None
    assert rotate_and_attend(y, 8, keys, keys, offsets, RopeParams(mx.zeros((16,)), True), None, 1.0) is None
    odd = mx.zeros((16, 4, 8, 80))
    assert attend(mx.zeros((16, 8, 1, 80)), odd, odd, (odd[:, :, :1],) * 2, offsets, 1.0) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_trials_pass(dtype: mx.Dtype) -> None:
    kernels = kernel_check.checked_kernels(dtype)
    assert kernels.add is not None
    assert kernels.joint is not None


def test_a_wrong_kernel_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.cuda_source, "GATE", kernel.cuda_source.GATE.replace("line + width", "line"))
    assert kernel_check.checked_joint(mx.float32) is None
    kernel._gate_kernel.cache_clear()
    wrong = kernel.cuda_source.ADD.replace("firsts[layer]) + spans[2 * row]", "firsts[layer])")
    monkeypatch.setattr(kernel.cuda_source, "ADD", wrong)
    kernel._add_kernel.cache_clear()
    assert kernel_check.checked_adder(mx.float32) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_an_adapter_keeps_its_numbers(dtype: mx.Dtype) -> None:
    x, y = normal(dtype, 5, 1, 64), normal(dtype, 5, 1, 32 + 64 + 32)
    groups: Any = {0: (normal(dtype, 2, 24, 64), normal(dtype, 2, 24, 32), None)}
    groups[2] = (normal(dtype, 2, 24, 64, seed=8), normal(dtype, 2, 24, 32, seed=9), None)
    spans = mx.array([[0, 0], [0, 8], [8, 16], [0, 0], [3, 4]], mx.int32)
    added = kernel.add_side_by_side(
        x, y, [(0, 1), (1, 0), (2, 1)], [32, 64, 32], StackedLoRA(groups, spans=spans, max_rank=16)
    )
    assert added is not None
    assert mx.array_equal(added[0], y[0])
    assert mx.array_equal(added[3], y[3])
    assert mx.array_equal(added[..., 32:96], y[..., 32:96]), "nobody has anything for the second layer"
    for row, (begin, rank) in enumerate(spans.tolist()):
        for group, first in ((0, 0), (2, 96)):
            a, b = (side[1, begin : begin + rank].astype(mx.float32) for side in groups[group][:2])
            expected = y[row, 0, first : first + 32].astype(mx.float32) + x[row, 0].astype(mx.float32) @ a.T @ b
            assert close(added[row, 0, first : first + 32].astype(mx.float32), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 1536, 1544])
def test_swiglu_of_both_halves(width: int, dtype: mx.Dtype) -> None:
    y = 4 * normal(dtype, 3, 2 * width)
    found = kernel.gate(y)
    assert found is not None
    assert close(found, swiglu(y[:, :width], y[:, width:]), dtype)
    assert kernel.gate(mx.zeros((2, 6))) is None
