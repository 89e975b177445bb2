"""MLX's operations that serving rests on, each beside NumPy on the device that is used. `doctor --selftest` runs them.

Sizes are on both sides of where MLX changes its kernel: rows of products, widths of heads, lengths of attention.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.metal import kernels
from mlx_parallm.devices.metal.token_cuts import cut_limits
from mlx_parallm.doctor.findings import Finding, look
from mlx_parallm.host import to_numpy

Array = np.ndarray[Any, np.dtype[Any]]
Case = tuple[str, mx.array, Array]  # what it is, what MLX gives, what NumPy does

DTYPES = (mx.bfloat16, mx.float16, mx.float32)  # the most used first
BOUNDS = {mx.float32: 2e-4, mx.float16: 2e-2, mx.bfloat16: 0.1}  # of the largest expected number
ROWS = (1, 2, 3, 5, 6, 7, 12, 13, 16, 32, 33, 64)  # products change their kernel between most of them
HEAD_WIDTHS = (64, 80, 96, 128, 256)
KEY_LENGTHS = (33, 1100)  # attention of one query takes two passes over long ones
SECONDS = 10.0  # for the cases of one check, after the first
SECONDS_BESIDE = 75.0  # … where checks run beside each other, since each kernel is compiled for seconds
REMEDY = "report this with the file: the device computes wrong results here"


def examine(names: Sequence[str] | None = None) -> Iterator[Finding]:
    """`names`: of the checks to run; all of them by default."""
    for name in CHECKS if names is None else names:
        yield look(name, partial(CHECKS[name], name))


def compared(cases: Callable[[np.random.Generator], Iterator[Case]], name: str) -> Finding:
    """Says which cases differ by more than the rounding of their type."""
    count = 0
    largest: dict[str, float] = {}
    wrong = []
    begun = time.monotonic()
    seconds = SECONDS_BESIDE if this_device().builds_slowly else SECONDS
    complete = True
    for what, found, expected in cases(np.random.default_rng(3)):
        if time.monotonic() - begun > seconds:
            complete = False
            break
        count += 1
        bound = BOUNDS.get(found.dtype, 0.0)
        gap = gap_of(to_numpy(found.astype(mx.float32) if found.dtype in BOUNDS else found), expected)
        kind = str(found.dtype).rpartition(".")[2]
        largest[kind] = max(largest.get(kind, 0.0), gap)
        if not gap <= bound:
            wrong.append(f"{what} in {kind} is off by {gap:.1e}")
    numbers = {"cases": count, "complete": complete, "wrong": wrong, "largest_gap": largest}
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return Finding(name, "; ".join(wrong[:3]) + more, "wrong", REMEDY, numbers)
    gaps = ", ".join(f"{gap:.0e} in {kind}" for kind, gap in largest.items())
    rest = "" if complete else f"; the others were not tried in {seconds:.0f} s"
    return Finding(name, f"{count} cases as NumPy has them, within {gaps}{rest}", numbers=numbers)


def gap_of(found: Array, expected: Array) -> float:
    """Returns the largest difference, as a share of the largest expected number; NaN where one is not a number."""
    if found.shape != expected.shape:
        return float("inf")
    scale = float(np.abs(expected).max(initial=0)) or 1.0
    return float(np.abs(found.astype(np.float64) - expected).max(initial=0)) / scale


def _normal(random: np.random.Generator, dtype: mx.Dtype, *shape: int) -> tuple[mx.array, Array]:
    """Returns random numbers as MLX has them in a type, and as NumPy has the same numbers."""
    array = mx.array(random.standard_normal(shape).astype(np.float32)).astype(dtype)
    return array, to_numpy(array.astype(mx.float32)).astype(np.float64)


def _products(random: np.random.Generator) -> Iterator[Case]:
    for dtype in DTYPES:
        weight, known_weight = _normal(random, dtype, 192, 256)
        bias, known_bias = _normal(random, dtype, 64, 192)
        for rows in ROWS:
            x, known = _normal(random, dtype, rows, 256)
            yield f"a product of {rows} rows", x @ weight.T, known @ known_weight.T
            total = known @ known_weight.T + known_bias[:rows]
            yield f"a sum and a product of {rows} rows", mx.addmm(bias[:rows], x, weight.T), total


def _quantised(random: np.random.Generator) -> Iterator[Case]:
    """Of several rows where weights stay quantised; elsewhere they are expanded when they are loaded, unless `--dtype
    quantized` is given, and CUDA compiles for half a minute before each product of some rows."""
    several = not this_device().builds_slowly
    for dtype in DTYPES:
        for bits in (4, 8):
            weight, _ = _normal(random, dtype, 128, 256)
            packed = mx.quantize(weight, group_size=64, bits=bits)
            known_weight = dequantised(packed, 64, bits)
            yield f"{bits}-bit weights, expanded", mx.dequantize(*packed, group_size=64, bits=bits), known_weight
            for rows in ROWS if several else ROWS[:1]:
                x, known = _normal(random, dtype, rows, 256)
                found = mx.quantized_matmul(x, *packed, transpose=True, group_size=64, bits=bits)
                yield f"a {bits}-bit product of {rows} rows", found, known @ known_weight.T


def dequantised(packed: Sequence[mx.array], group: int, bits: int) -> Array:
    """Returns a packed weight's numbers: of each group of columns, scale times integer plus bias."""
    words, scales, biases = (to_numpy(one if one.dtype == mx.uint32 else one.astype(mx.float32)) for one in packed)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = (words[..., None] >> shifts & np.uint32((1 << bits) - 1)).reshape(len(words), -1).astype(np.float64)
    found: Array = numbers * np.repeat(scales, group, axis=1) + np.repeat(biases, group, axis=1)
    return found


def _attention(random: np.random.Generator) -> Iterator[Case]:
    for dtype in DTYPES:
        for width in HEAD_WIDTHS:
            for length in KEY_LENGTHS if width in (64, 128) else KEY_LENGTHS[:1]:
                for queries in (1, 5):
                    yield from _attention_cases(random, dtype, width, length, queries)


def _attention_cases(
    random: np.random.Generator, dtype: mx.Dtype, width: int, length: int, queries: int
) -> Iterator[Case]:
    q, known_q = _normal(random, dtype, 2, 4, queries, width)
    k, known_k = _normal(random, dtype, 2, 2, length, width)
    v, known_v = _normal(random, dtype, 2, 2, length, width)
    lengths = np.array([length - 7, length // 2])  # each row's own
    own = np.broadcast_to((np.arange(length) < lengths[:, None])[:, None, None], (2, 1, queries, length))
    added, known_added = _normal(random, dtype, 1, 1, queries, length)
    causal = np.arange(length) <= np.arange(queries)[:, None] + length - queries
    masks: list[tuple[str, Any, Array]] = [
        ("no mask", None, np.zeros((1, 1, 1, length))),
        ("each row's own length", mx.array(own), np.where(own, 0.0, -np.inf)),
        ("an added mask", added, known_added),
        ("a causal mask", "causal", np.where(causal, 0.0, -np.inf)),
    ]
    for name, mask, bias in masks:
        found = mx.fast.scaled_dot_product_attention(q, k, v, scale=width**-0.5, mask=mask)
        expected = attended(known_q, known_k, known_v, bias)
        yield f"attention of {queries} over {length} keys, heads of {width}, {name}", found, expected


def attended(q: Array, k: Array, v: Array, bias: Array) -> Array:
    """Returns what attention gives; keys and values of a head serve several heads of queries."""
    shared = q.shape[1] // k.shape[1]
    scores = q @ np.repeat(k, shared, axis=1).swapaxes(2, 3) / np.sqrt(q.shape[-1]) + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: Array = weights / weights.sum(axis=-1, keepdims=True) @ np.repeat(v, shared, axis=1)
    return result


def _norms(random: np.random.Generator) -> Iterator[Case]:
    for dtype in DTYPES:
        for width in (64, 576, 5000):  # the last takes several turns of a group of threads
            x, known = _normal(random, dtype, 3, width)
            weight, known_weight = _normal(random, dtype, width)
            scale = 1 / np.sqrt((known**2).mean(axis=-1, keepdims=True) + 1e-5)
            yield f"RMS norm over {width}", mx.fast.rms_norm(x, weight, 1e-5), known * scale * known_weight
            exponents = np.exp(known - known.max(axis=-1, keepdims=True))
            yield (
                f"softmax over {width}",
                mx.softmax(x, axis=-1, precise=True),
                exponents / exponents.sum(axis=-1, keepdims=True),
            )
            total = np.log(exponents.sum(axis=-1)) + known.max(axis=-1)
            yield f"logsumexp over {width}", mx.logsumexp(x, axis=-1), total


def _rope(random: np.random.Generator) -> Iterator[Case]:
    """Several rows, each at its own position: MLX before 0.32 rotated all but the first wrongly."""
    offsets = np.array([0, 5, 3000])
    for dtype in DTYPES:
        for width in (64, 128):
            for tokens in (1, 4):
                x, known = _normal(random, dtype, 3, 2, tokens, width)
                found = mx.fast.rope(
                    x, width, traditional=False, base=10000.0, scale=1.0, offset=mx.array(offsets, mx.int32)
                )
                positions = (offsets[:, None] + np.arange(tokens))[:, None, :, None]
                angles = positions * 10000.0 ** (-np.arange(0, width, 2) / width)
                left, right = known[..., : width // 2], known[..., width // 2 :]
                turned = [
                    left * np.cos(angles) - right * np.sin(angles),
                    right * np.cos(angles) + left * np.sin(angles),
                ]
                yield f"RoPE of {tokens} tokens, heads of {width}", found, np.concatenate(turned, axis=-1)


def _scatter(random: np.random.Generator) -> Iterator[Case]:
    """Each row writes at its own place, as a decode step does into the cache."""
    for dtype in DTYPES:
        buffer, known = _normal(random, dtype, 5, 2, 130, 64)
        new, known_new = _normal(random, dtype, 5, 2, 1, 64)
        places = np.array([0, 129, 64, 63, 1])
        index = np.broadcast_to(places[:, None, None, None], (5, 2, 1, 64))
        written = known.copy()
        np.put_along_axis(written, index, known_new, axis=2)
        found = mx.put_along_axis(buffer, mx.array(index.astype(np.int32)), new, axis=2)
        yield "a write at each row's own place", found, written
        yield "what was there before", buffer, known  # others still read it
        slab, known_slab = _normal(random, dtype, 9, 2, 16, 8)
        rows, known_rows = _normal(random, dtype, 3, 2, 16, 8)
        slab[mx.array([8, 0, 3])] = rows
        known_slab[[8, 0, 3]] = known_rows
        yield "a write of whole blocks", slab, known_slab


def _gather(random: np.random.Generator) -> Iterator[Case]:
    for dtype in DTYPES:
        table, known = _normal(random, dtype, 1000, 96)
        tokens = random.integers(0, 1000, (4, 7))
        yield "rows of a table", table[mx.array(tokens)], known[tokens]
        index = random.integers(0, 96, (1000, 3))
        found = mx.take_along_axis(table, mx.array(index), axis=1)
        yield "one number of each row", found, np.take_along_axis(known, index, axis=1)
        if this_device().kind == "cpu" and dtype != mx.float32:  # MLX has no such product there
            continue
        weights, known_weights = _normal(random, dtype, 4, 96, 32)
        chosen = random.integers(0, 4, 6)
        x, known_x = _normal(random, dtype, 6, 1, 96)
        found = mx.gather_mm(x, weights, rhs_indices=mx.array(chosen.astype(np.uint32)))
        yield "a product with each row's own matrix", found, known_x @ known_weights[chosen]


def _sort(random: np.random.Generator) -> Iterator[Case]:
    for size in (100, 5000, 50000):  # one group of threads, several, and several turns
        values = random.permutation(size * 2)[:size].astype(np.float32)
        numbers = mx.array(np.stack([values, values[::-1]]))
        known = np.stack([values, values[::-1]])
        yield f"the order of {size}", mx.argsort(numbers, axis=-1), np.argsort(known, axis=-1)
        largest = np.sort(mx_top(numbers, 40), axis=-1)
        yield f"the largest of {size}", mx.array(largest), np.sort(known, axis=-1)[:, -40:]
        yield f"the first of {size}", mx.argmax(numbers, axis=-1), np.argmax(known, axis=-1)
        shares = mx.softmax(numbers / size, axis=-1)
        sums = np.cumsum(to_numpy(shares).astype(np.float64), axis=-1)
        yield f"running sums of {size}", mx.cumsum(shares, axis=-1), sums


def mx_top(numbers: mx.array, count: int) -> Array:
    """Returns the largest numbers of each row by MLX's partition, in any order."""
    places = mx.argpartition(numbers, -count, axis=-1)[:, -count:]
    found: Array = to_numpy(mx.take_along_axis(numbers, places, axis=-1))
    return found


def _own_kernels(name: str) -> Finding:
    """The Metal kernels, whether a start would choose them or not."""
    if not this_device().metal:
        return Finding(name, "not needed here")
    return compared(_kernel_cases, name)


def _kernel_cases(random: np.random.Generator) -> Iterator[Case]:
    for dtype in DTYPES:
        yield from _lora_cases(random, dtype)
        yield from _slot_cases(random, dtype)
    logits, known = _normal(random, mx.float32, 4, 5000)
    cuts = [(0.9, 5000), (2.0, 20), (0.5, 40), (0.3, 5000)]
    limits = cut_limits(*zip(*cuts, strict=True))
    least = []
    for line, (top_p, top_k) in zip(known, cuts, strict=True):
        ordered = np.sort(line)[::-1][:top_k]
        weights = np.exp(ordered - ordered[0])
        before = (np.cumsum(weights) - weights) / weights.sum()
        least.append([ordered[max(1, int((before < top_p).sum())) - 1]])
    yield "the least logit that is kept", kernels.least_kept(logits, limits), np.array(least, np.float64)


def _lora_cases(random: np.random.Generator, dtype: mx.Dtype) -> Iterator[Case]:
    x, known_x = _normal(random, dtype, 4, 256)
    a, known_a = _normal(random, dtype, 2 * 32, 256)
    outputs = [(_normal(random, dtype, 4, count), _normal(random, dtype, 32, count)) for count in (96, 700)]
    spans = np.array([[0, 8], [8, 16], [0, 0], [24, 8]], np.int32)
    sums = kernels.add_own_lora(x, a, [(y, b) for (y, _), (b, _) in outputs], mx.array(spans))
    for layer, ((_, known_y), (_, known_b)) in enumerate(outputs):
        expected = known_y.copy()
        for row, (begin, rank) in enumerate(spans):
            own = known_a[32 * layer + begin : 32 * layer + begin + rank]
            expected[row] += known_x[row] @ own.T @ known_b[begin : begin + rank]
        if sums is not None:
            yield f"rows' own adapters, layer {layer + 1}", sums[layer], expected


def _slot_cases(random: np.random.Generator, dtype: mx.Dtype) -> Iterator[Case]:
    for width, shared, capacity in ((64, 2, 256), (128, 1, 2048)):
        q, known_q = _normal(random, dtype, 3, 4, 1, width)
        k, known_k = _normal(random, dtype, 3, shared, capacity, width)
        v, known_v = _normal(random, dtype, 3, shared, capacity, width)
        lengths = np.array([capacity, 1, 200])
        offsets = mx.array(np.pad(lengths - 1, (0, kernels.SMALLEST - 3)).astype(np.int32))
        found = kernels.attend(q, k, v, offsets, width**-0.5)
        own = (np.arange(capacity) < lengths[:, None])[:, None, None]
        if found is not None:
            expected = attended(known_q, known_k, known_v, np.where(own, 0.0, -np.inf))
            yield f"attention over slots of {capacity}, heads of {width}", found, expected


def _random(name: str) -> Finding:
    """Samples are functions of seed and position: the same key gives the same numbers, another one others."""
    first, again, other = (to_numpy(mx.random.uniform(shape=(20000,), key=mx.random.key(key))) for key in (7, 7, 8))
    wrong = []
    if not np.array_equal(first, again):
        wrong.append("one key gives different numbers")
    if np.array_equal(first, other):
        wrong.append("two keys give the same numbers")
    if not (first >= 0).all() or not (first < 1).all() or abs(first.mean() - 0.5) > 0.02:
        wrong.append("numbers are not uniform between 0 and 1")
    logits = mx.log(mx.array([0.1, 0.2, 0.7]))
    samples = to_numpy(mx.random.categorical(logits, num_samples=20000, key=mx.random.key(1)))
    shares = np.bincount(samples, minlength=3) / len(samples)
    if np.abs(shares - [0.1, 0.2, 0.7]).max() > 0.03:
        wrong.append(f"samples of 0.1, 0.2 and 0.7 come {shares.round(2).tolist()}")
    if wrong:
        return Finding(name, "; ".join(wrong), "wrong", REMEDY)
    return Finding(name, "the same key gives the same numbers, which are spread as they should be")


CHECKS: Mapping[str, Callable[[str], Finding]] = {
    "products": partial(compared, _products),
    "attention": partial(compared, _attention),
    "norms": partial(compared, _norms),
    "rope": partial(compared, _rope),
    "scatter": partial(compared, _scatter),
    "gather": partial(compared, _gather),
    "sort": partial(compared, _sort),
    "random": _random,
    "4-bit": partial(compared, _quantised),
    "our kernels": _own_kernels,
}
