"""The Metal kernels' own text, compiled as C++, beside NumPy: 150 cases of each, and in `make test-all` 10,000.

A case is (random numbers, how many forms of the kernel may be compiled).
"""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.devices.metal import check, kernels, sources
from mlx_parallm.host import to_numpy
from tests.support.metal_shim import ShimError, ShimKernel

FEW = 150  # cases of each kernel in `make test`
MANY = 10_000
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
ROUNDING = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}  # of one number in that precision, and of sums


@pytest.fixture(autouse=True)
def shim(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches = [kernels._lora_kernel, kernels._attention_kernel, kernels._attention_sum_kernel, kernels._cut_kernel]
    monkeypatch.setattr(mx.fast, "metal_kernel", ShimKernel)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


COUNTS = pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])


def normal(random: np.random.Generator, dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.array(random.standard_normal(shape).astype(np.float32)).astype(dtype)


def floats(array: mx.array) -> Any:
    return to_numpy(array.astype(mx.float32)).astype(np.float64)


def close(found: mx.array, expected: Any, dtype: mx.Dtype) -> bool:
    bound = ROUNDING[dtype] * np.maximum(1.0, np.abs(expected))
    return bool((np.abs(floats(found) - expected) <= bound).all())


def lora_is_right(random: np.random.Generator, forms: int) -> bool:
    """One case: rows with adapters of several ranks and without, and what stands in columns that are not theirs."""
    dtype = DTYPES[random.integers(3)]
    rows, layers = int(random.integers(1, 7)), int(random.integers(1, min(forms, 3) + 1))
    ranks = random.choice([0, 1, 4, 8, 16, 24], 3)
    size = 4 * int(random.integers(1, 41))
    columns = 1 << int(max(int(ranks.sum()), 1) - 1).bit_length()
    begins = np.cumsum([0, *ranks])[:3]
    x, a = normal(random, dtype, rows, size), normal(random, dtype, layers * columns, size) / 8
    if columns > ranks.sum():
        a = mx.where(mx.arange(layers * columns)[:, None] % columns < int(ranks.sum()), a, mx.array(np.inf, dtype))
    outs = [
        (normal(random, dtype, rows, n), normal(random, dtype, columns, n) / 8)
        for n in map(int, random.integers(8, 600, layers))
    ]
    own = random.integers(0, 4, rows)  # 3: no adapter
    spans = np.zeros((max(rows, 4), 2), np.int32)
    spans[:rows] = [(0, 0) if n == 3 else (begins[n], ranks[n]) for n in own]
    sums = kernels.add_own_lora(x, a, outs, mx.array(spans))
    assert sums is not None
    for layer, ((y, b), found) in enumerate(zip(outs, sums, strict=True)):
        expected = floats(y)
        for row, (begin, rank) in enumerate(spans[:rows]):
            lines = slice(layer * columns + begin, layer * columns + begin + rank)
            expected[row] += floats(x)[row] @ floats(a)[lines].T @ floats(b)[begin : begin + rank]
        if found.dtype != dtype or not close(found, expected, dtype):
            return False
    return True


def attention_is_right(random: np.random.Generator, forms: int) -> bool:
    """One case: rows of every length over slots with something else behind each row's own tokens."""
    dtype = DTYPES[random.integers(3)]
    width, sharing = int(random.choice([64, 96, 128, 256][: forms - 1])), int(random.choice([1, 3, 2, 4][:forms]))
    shared = int(random.integers(1, 3))
    rows, capacity = int(random.integers(1, 5)), 256 * int(random.choice([1, 1, 2, 4]))
    lengths = random.integers(1, random.choice([4, 40, capacity]) + 1, rows)
    keys, values = (normal(random, dtype, rows, shared, capacity, width) for _ in "kv")
    queries = normal(random, dtype, rows, shared * sharing, 1, width)
    scale = float(random.choice([width**-0.5, 1.0 / 8]))
    offsets = np.zeros(max(rows, kernels.SMALLEST), np.int32)
    offsets[:rows] = lengths - 1
    found = kernels.attend(queries, keys, values, mx.array(offsets), scale)
    assert found is not None
    assert found.dtype == dtype
    expected = np.zeros(queries.shape)
    for row, length in enumerate(lengths):
        for head in range(shared * sharing):
            own = slice(0, int(length))
            scores = floats(keys[row, head // sharing, own]) @ floats(queries[row, head, 0]) * scale
            weights = np.exp(scores - scores.max())
            expected[row, head, 0] = weights @ floats(values[row, head // sharing, own]) / weights.sum()
    return close(found, expected, dtype)


def cut_is_right(random: np.random.Generator, forms: int) -> bool:
    """One case: logits of several shapes, with equals among them, and cuts near where they decide something."""
    rows, size = int(random.integers(1, 5)), int(random.choice([5, 40, 700, 3000]))
    spread = random.choice([0.0, 0.3, 3.0, 12.0])
    logits = (random.standard_normal((rows, size)) * spread).astype(np.float32)
    if random.random() < 0.3:
        logits = np.round(logits)  # equals
    if random.random() < 0.3:
        logits[:, random.random(size) < 0.7] = -np.inf  # a grammar
        logits[:, 0] = 1.0
    limits = np.zeros((max(rows, 4), 2), np.float32)
    limits[:, 0] = random.choice([0.01, 0.5, 0.9, 0.999, 1.0, 2.0], len(limits))
    limits[:, 1] = random.choice([1, 2, 20, 64, 1000, size], len(limits))
    with pytest.MonkeyPatch.context() as patch:  # few threads have no room for all that is near the highest
        patch.setattr(kernels, "CUT_SIMDGROUPS", int(random.choice([1, 2, 8, 32][:forms])))
        found = to_numpy(kernels.least_kept(mx.array(logits), mx.array(limits)))[:, 0]
    for row, threshold in enumerate(found):
        top_p, top_k = limits[row]
        line = np.sort(logits[row].astype(np.float64))[::-1][: int(min(top_k, size))]
        weights = np.exp(line - line[0])
        before = (np.cumsum(weights) - weights) / weights.sum()
        if top_p > 1 and top_k >= size:
            right = {-np.inf}
        else:  # where sums are so near to top-p that rounding decides, either is right
            kept = [max(1, int((before < top_p + slack).sum())) for slack in (-2e-5, 0, 2e-5)]
            right = {line[number - 1] for number in range(kept[0], kept[2] + 1)}
        if threshold not in right and not (threshold == -np.inf and line[-1] == -np.inf):
            return False
    return True


CASES: dict[str, Callable[[np.random.Generator, int], bool]] = {
    "lora": lora_is_right,
    "attention": attention_is_right,
    "cut": cut_is_right,
}


@pytest.mark.parametrize("name", CASES)
@COUNTS
def test_a_kernel_gives_what_numpy_does(name: str, count: int) -> None:
    random = np.random.default_rng(count)
    wrong = [case for case in range(count) if not CASES[name](random, 2 if count == FEW else 4)]
    assert not wrong


BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
# Faults that somebody could make: a kernel's name, what its text has, and what it would have.
FAULTS = {
    "lora: another row's columns": ("lora", "LORA", "begin = spans[2 * row]", "begin = spans[0]"),
    "lora: no barrier": ("lora", "LORA", BARRIER, ""),
    "lora: the first layer's columns": ("lora", "LORA", "layer * columns + begin + r", "begin + r"),
    "lora: the last column is left out": ("lora", "LORA", "r < rank; ++r", "r < rank - 1; ++r"),
    "attention: the row's newest token is left out": ("attention", "ATTENTION", "offsets[row] + 1", "offsets[row]"),
    "attention: one token too many": ("attention", "ATTENTION", "offsets[row] + 1", "offsets[row] + 2"),
    "attention: a sum is not put in proportion": ("attention", "ATTENTION", "sum[h][e] * before +", "sum[h][e] +"),
    "attention: no second barrier": (
        "attention",
        "ATTENTION",
        f"        }}\n        {BARRIER}\n    }}\n",
        "        }\n    }\n",
    ),
    "attention: shares are added as they are": (
        "attention",
        "ATTENTION_SUM",
        "share = metal::exp(parts[place + D + 1] - top)",
        "share = 1.0f",
    ),
    "cut: one too many": ("cut", "CUT", "above < top_k)", "above <= top_k)"),
    "cut: equals count all": ("cut", "CUT", "(top_k - above) *", "1.0f *"),
    "cut: the window is taken for all": ("cut", "CUT", "lane) < top_k;", "lane) < 0.0f;"),
    "cut: top-p of the window alone": ("cut", "CUT", "lane) < top_p * all;", "lane) < 0.0f;"),
    "cut: keys of negative logits": ("cut", "CUT_HEADER", "? ~bits : bits", "? bits : bits"),
    "cut: no barrier before": (
        "cut",
        "CUT_HEADER",
        f"    const float sum = metal::simd_sum(mine);\n    {BARRIER}",
        "    const float sum = metal::simd_sum(mine);",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, text, said, other = FAULTS[fault]
    whole: str = getattr(sources, text)
    assert said in whole
    monkeypatch.setattr(sources, text, whole.replace(said, other, 1))
    random = np.random.default_rng(1)
    try:
        right = all(CASES[name](random, 2) for _ in range(2 * FEW))
    except ShimError:  # threads that wait for ever
        right = False
    assert not right


def test_a_kernel_that_is_wrong_or_slow_or_missing_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    one, other = mx.ones((4,)), mx.zeros((4,))
    times = iter([(1.0, 2.0), (2.0, 1.0)])
    monkeypatch.setattr(check, "_seconds", lambda kernel, operations: next(times))
    assert check.is_worth_using("tests", lambda: [one], lambda: [one + 0])
    assert not check.is_worth_using("tests", lambda: [one], lambda: [one + 0])
    assert not check.is_worth_using("tests", lambda: [one], lambda: [other])

    def missing() -> list[mx.array]:
        raise RuntimeError("no Metal back-end")

    assert not check.is_worth_using("tests", missing, lambda: [one])
    said = [record.getMessage() for record in caplog.records]
    assert [
        next(part for part in ("is used", "is slower", "wrong results", "can't be used") if part in line)
        for line in said
    ] == ["is used", "is slower", "wrong results", "can't be used"]


def test_kernels_are_timed_beside_operations() -> None:
    own, theirs = check._seconds(lambda: [mx.ones((4,)) + 1], lambda: [mx.ones((512, 512)) @ mx.ones((512, 512))])
    assert 0 < own < theirs
