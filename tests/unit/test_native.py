"""The CPU's C kernels give what MLX's operations give, and leave alone what they don't know."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import create_causal_mask

from mlx_parallm.devices import native
from mlx_parallm.devices.native import classes, kernels
from mlx_parallm.devices.native.native_layers import Embedding, Linear
from mlx_parallm.devices.native.products import has_lane_products
from mlx_parallm.devices.native.token_sampling import sample_kernel
from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.engine.compute.batching import slot_cache
from mlx_parallm.engine.compute.patch import attach_adapters, use_native_kernels
from mlx_parallm.engine.compute.sampling import Sampler, SamplingKernels, log_sum_exp
from mlx_parallm.engine.rows import Row
from mlx_parallm.lora.adapter import Adapter, Part
from mlx_parallm.lora.layout import Layout
from mlx_parallm.lora.row_adapters import GroupedLoRA
from mlx_parallm.models.forward import Forward
from mlx_parallm.sampling_params import SamplingParams
from tests.tiny import tiny

pytestmark = pytest.mark.skipif(kernels() is None, reason="needs a C compiler")


def random_adapter(layout: Layout, rank: int) -> Adapter:
    random = np.random.default_rng(rank)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32) * 0.2

    targets = {path: target for path, target in layout.targets.items() if target.kind == "linear"}
    return Adapter(
        {path: Part(normal(rank, one.size), normal(one.out_features, rank)) for path, one in targets.items()}
    )


def fast_llama() -> tuple[nn.Module, nn.Module]:
    """The same random model twice: as mlx-lm has it, and sped up."""
    plain, fast = tiny("llama").module, tiny("llama").module
    use_native_kernels(fast)
    return plain, fast


def close(one: mx.array, other: mx.array, within: float = 2e-5) -> bool:
    return one.shape == other.shape and mx.abs(one - other).max().item() <= within


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_swiglu(size: int) -> None:
    _, fast = fast_llama()
    mlp = fast.layers[0].mlp
    swiglu = type(mlp).__call__.__globals__["swiglu"]
    gate, up = 6 * mx.random.normal((3, size)), mx.random.normal((3, size))
    assert close(swiglu(gate, up), nn.silu(gate) * up)
    extremes = mx.array([[-1e4, -100.0, -0.0, 0.0, 100.0, 1e4]])
    assert close(swiglu(extremes, mx.ones((1, 6))), nn.silu(extremes))


def attention_of(module: nn.Module) -> Any:
    return type(module.layers[0].self_attn).__call__.__globals__["scaled_dot_product_attention"]


@pytest.mark.parametrize("queries", [1, 3, 4, 5, 40])
@pytest.mark.parametrize(("heads", "groups", "dims"), [(9, 3, 64), (4, 4, 20), (6, 1, 33)])
def test_attention_with_every_mask(queries: int, heads: int, groups: int, dims: int) -> None:
    _, fast = fast_llama()
    attention = attention_of(fast)
    rows, length = 3, 50
    q = mx.random.normal((rows, queries, heads, dims)).transpose(0, 2, 1, 3)
    k = mx.random.normal((rows, groups, 64, dims))[:, :, :length]
    v = mx.random.normal((rows, groups, 64, dims))[:, :, :length]
    window = create_causal_mask(queries, length - queries, window_size=7)
    ragged = mx.arange(length) <= mx.array([49, 5, 0])[:, None]
    holes = (mx.arange(length) % 3 == 0)[None, None, None]
    masks: list[Any] = ["causal", window, window[None, None], ragged[:, None, None], holes]
    masks += [None] if queries == 1 else []
    for mask in masks:
        if not isinstance(mask, str) and mask is not None and mask.ndim == 4:
            mask = mx.broadcast_to(mask, (*mask.shape[:2], queries, length))
        expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask=mask)
        assert close(attention(q, k, v, cache=None, scale=0.2, mask=mask), expected)


def test_one_query_sees_the_same_to_the_bit_with_a_mask_and_without() -> None:
    """A row that runs alone has no mask, and beside others it has one."""
    _, fast = fast_llama()
    q = mx.random.normal((2, 9, 1, 64))
    k, v = mx.random.normal((2, 3, 300, 64)), mx.random.normal((2, 3, 300, 64))
    alone, *others = (
        attention_of(fast)(q, k, v, cache=None, scale=0.2, mask=mask)
        for mask in (None, "causal", mx.ones((2, 1, 1, 300), mx.bool_))
    )
    assert all(mx.array_equal(alone, other) for other in others)


def test_attention_leaves_other_arguments_to_mlx() -> None:
    _, fast = fast_llama()
    attention = attention_of(fast)
    q, k, v = (mx.random.normal((2, 4, 6, 16)) for _ in range(3))
    added = mx.random.normal((2, 1, 6, 6))
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask=added)
    assert close(attention(q, k, v, cache=None, scale=0.2, mask=added), expected)
    assert close(attention(q, k, v, None, 0.2, None), mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2))
    half = [x.astype(mx.float16) for x in (q, k, v)]
    expected = mx.fast.scaled_dot_product_attention(*half, scale=0.2, mask="causal")
    assert attention(*half, None, 0.2, "causal").dtype == mx.float16
    assert mx.array_equal(attention(*half, None, 0.2, "causal"), expected)
    one = q[:, :, :1]
    for keys, values in ((half[1], half[2]), (k, half[2]), (half[1], v)):  # a cache of another precision
        expected = mx.fast.scaled_dot_product_attention(one, keys, values, scale=0.2)
        assert close(attention(one, keys, values, None, 0.2, None), expected, 1e-3)


@pytest.mark.parametrize("offset", [0, 17, 5000])
@pytest.mark.parametrize("dims", [64, 24])
def test_rope_and_norm(offset: int, dims: int) -> None:
    holder = nn.Sequential(nn.RoPE(dims, base=100000.0), nn.RMSNorm(40, eps=1e-5))
    plain_rope, plain_norm = nn.RoPE(dims, base=100000.0), nn.RMSNorm(40, eps=1e-5)
    use_native_kernels(holder)
    rope, norm = holder.layers
    norm.weight = plain_norm.weight = mx.random.normal((40,))
    x = mx.random.normal((3, 5, 4, 64)).transpose(0, 2, 1, 3)
    assert close(rope(x, offset=offset), plain_rope(x, offset=offset), 1e-3 if offset > 1000 else 1e-5)
    offsets = mx.array([offset, 0, 3])
    assert close(rope(x, offset=offsets), plain_rope(x, offset=offsets), 1e-3 if offset > 1000 else 1e-5)
    y = mx.random.normal((40, 7)).T
    assert close(norm(y), plain_norm(y))


def test_a_model_gives_the_same_logits_and_mlx_lm_stays_as_it_was() -> None:
    before = (llama.Attention.__call__, llama.scaled_dot_product_attention, llama.swiglu)
    plain, fast = fast_llama()
    tokens = mx.random.randint(0, 100, (2, 30))
    assert close(plain(tokens), fast(tokens), 1e-4)
    assert before == (llama.Attention.__call__, llama.scaled_dot_product_attention, llama.swiglu)
    assert type(plain.layers[0].self_attn) is llama.Attention
    assert isinstance(fast.layers[0].self_attn, llama.Attention)
    assert dict(plain.parameters()).keys() == dict(fast.parameters()).keys()


@pytest.mark.parametrize("rows", [(1,), (2,), (3, 1), (8,), (5, 3), (2, 16), (33,), (64,), (65,)])
@pytest.mark.parametrize(("size", "lines"), [(4, 8), (64, 50), (576, 192), (10, 24)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_a_few_rows(rows: tuple[int, ...], size: int, lines: int, bias: bool) -> None:
    fast = type("Fast", (Linear,), {"kernels": kernels()})(size, lines, bias=bias)
    plain = nn.Linear(size, lines, bias=bias)
    plain.update(fast.parameters())
    x = mx.random.normal((*rows, size))
    assert close(fast(x), plain(x), 1e-5)
    slices = mx.random.normal((*rows, 2 * size))[..., ::2]
    assert close(fast(slices), plain(slices), 1e-5)
    assert fast(x.astype(mx.float16)).dtype == plain(x.astype(mx.float16)).dtype


def test_a_rows_product_is_the_same_beside_any_others() -> None:
    """Bit for bit: a row's sums are made in one order."""
    fast = type("Fast", (Linear,), {"kernels": kernels()})(576, 200, bias=True)
    x = mx.random.normal((39, 576))
    if has_lane_products():
        whole = np.array(fast(x))
        for first, end in ((0, 2), (0, 5), (3, 12), (20, 33), (7, 9), (0, 16), (5, 30), (1, 34)):
            assert np.array_equal(np.array(fast(x[first:end])), whole[first:end])


@pytest.mark.parametrize(("allowed", "helpers"), [("1", 0), ("2", 1), ("64", 7), ("", 7), ("many", 7), ("0", 7)])
def test_threads_are_as_many_as_the_user_allows(monkeypatch: pytest.MonkeyPatch, allowed: str, helpers: int) -> None:
    monkeypatch.setattr(native.os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    assert native._threads() - 1 == helpers


def test_an_embedding_as_the_output_head() -> None:
    fast = type("Fast", (Embedding,), {"kernels": kernels()})(300, 64)
    x = mx.random.normal((7, 1, 64))
    assert close(fast.as_linear(x), x @ fast.weight.T, 1e-5)
    assert close(fast(mx.array([3, 5])), fast.weight[mx.array([3, 5])], 0)


@pytest.mark.parametrize("size", [1, 2, 5, 64, 127, 128, 129, 1000, 49152])
def test_draws_are_those_of_mlx(size: int) -> None:
    rows = 16
    draw = sample_kernel()
    assert draw is not None
    logits = 3 * mx.random.normal((rows, size))
    heats = np.array([0.0, 0.3, 1.0, 2.5] * (rows // 4), np.float32)
    keys = np.array([[7 * row, 4_000_000_000 + row] for row in range(rows)], np.uint32)
    tokens, scores = draw(logits, heats, keys, True)
    assert scores is not None
    scaled = logits / mx.array(np.where(heats > 0, heats, 1.0))[:, None]
    noise = mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(mx.array(keys))
    hot = mx.array(heats)[:, None] > 0
    assert tokens.tolist() == mx.argmax(mx.where(hot, scaled + noise, scaled), axis=-1).tolist()
    expected = scaled - log_sum_exp(scaled)[:, None]
    assert close(scores, mx.take_along_axis(expected, tokens[:, None], axis=-1)[:, 0])
    alone, nothing = draw(logits[3:4], heats[3:4], keys[3:4], False)
    assert alone.tolist() == tokens[3:4].tolist()
    assert nothing is None


def test_a_sampler_draws_the_same_with_the_kernel_and_without() -> None:
    logits = 3 * mx.random.normal((6, 500), key=mx.random.key(3))
    rows = [
        Row([], SamplingParams(temperature=heat, logprobs=3), 0, 2**32 - 1 - place, 9, frozenset(), recorded=True)
        for place, heat in enumerate((0.0, 0.5, 1.0, 2.0, 1.0))
    ]
    kernels = SamplingKernels(sample_kernel())
    plain, fast = (Sampler([*rows, None], 500, draw)(logits, [0, 3, 9, 7, 7, 0]) for draw in (None, kernels))
    assert fast.tokens.tolist() == plain.tokens.tolist()
    for one, other in zip(fast.arrays(), plain.arrays(), strict=True):
        assert close(one, other)


def test_draws_follow_the_probabilities() -> None:
    draw = sample_kernel()
    assert draw is not None
    count, heat = 20_000, 0.7
    logits = mx.array([0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 0.25])
    keys = np.stack([np.full(count, 5), np.arange(count)], axis=1).astype(np.uint32)
    tokens, _ = draw(mx.broadcast_to(logits, (count, 7)), np.full(count, heat, np.float32), keys, False)
    found = np.bincount(np.array(tokens), minlength=7) / count
    assert np.abs(found - np.array(mx.softmax(logits / heat))).max() < 0.015


@pytest.fixture(params=["here", "another"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This processor, and one for which products and blocks in C are not written."""
    if request.param != "here":
        monkeypatch.setattr(classes, "has_lane_products", lambda: False)
    classes._class_with.cache_clear()
    yield
    classes._class_with.cache_clear()


@pytest.mark.parametrize("rows", [2, 5, 8, 33])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_block_decodes_as_mlx_does(rows: int, adapted: bool, machine: None) -> None:
    """Rows of different lengths in slots, with and without adapters: the same logits, and the same slots after them."""
    plain, fast = fast_llama()
    tuning = DeviceProfile.of("cpu")
    found: list[tuple[list[mx.array], list[mx.array]]] = []
    for module, kind in ((plain, replace(tuning, compiled=True)), (fast, tuning)):
        layout = attach_adapters(module, tuning)
        forward = Forward(module, layout.active)
        cache = slot_cache(len(module.layers), rows, 1 << 30, kind)
        residents = [layout.place(layout.pack(random_adapter(layout, rank))) for rank in (4, 16)]
        row_adapters = GroupedLoRA([None if not adapted else (None, *residents)[row % 3] for row in range(rows)])
        lengths = [(7 * row) % 11 + 1 for row in range(rows)]
        cache.expect(rows)
        for row, length in enumerate(lengths):
            staged = cache.stage(1, length)
            forward(mx.array([[(3 * row + i) % 90 + 3 for i in range(length)]]), staged, row_adapters.row(row))
            cache.join(staged, [(0, length)])
        forward = Forward(module, layout.active)
        logits = []
        for step in range(3):
            cache._method = replace(cache._method, compiled=False)
            tokens = mx.array([(row + 5 * step) % 90 + 3 for row in range(rows)])
            logits.append(cache.decode(forward, tokens, [length + step for length in lengths], row_adapters))
            mx.eval(logits)
        found.append((logits, [array for layer in cache.layers for array in (layer.keys, layer.values)]))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert close(one, other, 1e-4)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        for row, length in enumerate(lengths):
            assert close(one[row, :, : length + 3], other[row, :, : length + 3], 1e-4)
