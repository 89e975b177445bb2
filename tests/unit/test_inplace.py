"""Copies between layers' buffers: in place by kernels of ours where there is CUDA, else by MLX's operations."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.devices.cuda_placing import collector, placer
from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.engine.compute.batching import batch_cache
from mlx_parallm.engine.compute.patch import let_caches_attend
from mlx_parallm.kv.block_store import BlockStore, Packing
from mlx_parallm.kv.slots import SlotCache
from mlx_parallm.models.forward import Forward
from tests.tiny import tiny

cuda = pytest.mark.skipif(this_device().kind != "cuda", reason="needs CUDA")
CLOSE = 0.02 if this_device().kind == "cuda" else 1e-4  # MLX multiplies in TF32 there
ROWS = [(number * 7) % 50 + 3 for number in range(36)]


@cuda
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("shape", [(60, 3, 64), (56, 8, 128), (2, 1, 8), (200, 2, 96)])
def test_kernels_are_built_and_pass_their_own_trial(shape: tuple[int, int, int], dtype: mx.Dtype) -> None:
    assert placer(*shape, dtype) is not None
    assert collector(*shape, 16, dtype, 16) is not None


def test_shapes_that_can_not_be_copied_in_pieces_are_left_to_mlx() -> None:
    assert placer(4, 2, 6, mx.bfloat16) is None
    assert collector(4, 2, 64, 16, mx.int8, 1) is None
    assert placer(400, 2, 64, mx.float32) is None


@pytest.mark.parametrize("way", ["mlx", "native", pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("bits", [None, 8])
def test_rows_join_decode_and_are_kept(way: str, bits: int | None) -> None:
    """Prompts joined together, decoded and collected: what comes back is what the model computes of each alone."""
    model = tiny(head_dim=64)
    let_caches_attend(model.module)
    forward = Forward(model.module)
    fused, compiled = way == "cuda", way != "native"
    tuning = DeviceProfile(
        steps_in_flight=0, compiled=compiled, view_step=32, max_padding=0.2, round_prompts=False, fused=fused
    )
    cache = batch_cache(model, forward, len(ROWS), 1 << 30, tuning)
    assert isinstance(cache, SlotCache)
    store = BlockStore(8, cache.sides, Packing(bits, 32), max_bytes=1 << 22, fused=fused)
    random = np.random.default_rng(5)
    texts = [random.integers(3, 90, length).tolist() for length in ROWS]
    cache.expect(len(ROWS))
    for first in range(0, len(ROWS), 3):
        some = texts[first : first + 3]
        longest = max(len(text) for text in some)
        staged = cache.stage(len(some), longest)
        forward(mx.array([text + [0] * (longest - len(text)) for text in some]), staged)
        assert cache.join(staged, [(i, len(text)) for i, text in enumerate(some)]) == [*range(first, first + 3)]
    for step in range(6):
        tokens = random.integers(3, 90, len(texts)).tolist()
        logits = cache.decode(forward, mx.array(tokens), [len(text) for text in texts])
        texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
        mx.eval(logits)
        if step in (0, 5):
            for row in (0, 7, 35):
                alone = model.module(mx.array([texts[row]]))[0, -1]
                assert mx.allclose(logits[row], alone, atol=CLOSE)
    row = max(range(len(texts)), key=lambda i: len(texts[i]))
    count = len(texts[row]) // 8
    ids = [(5 * i + 2) % store.total for i in range(count)]
    sides = [side for layer in cache.layers for side in (layer.keys, layer.values)]
    store.write(sides, row, range(count), ids)
    known = store.read(ids, 1, count * 8, count * 8)
    alone = cache.stage(1, count * 8)
    forward(mx.array([texts[row][: count * 8]]), alone)
    expected = [side for layer in alone for side in (layer.keys, layer.values)]
    for one, other in zip(known, expected, strict=True):
        assert mx.allclose(one, other, atol=CLOSE if bits is None else 0.05)
