"""Layers that ask their cache for attention, and the CUDA kernel that answers, where there is CUDA."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_parallm.devices.cuda_attention import attend
from mlx_parallm.devices.device import this_device
from mlx_parallm.engine.compute.patch import let_caches_attend
from tests.tiny import tiny

TOKENS = mx.array([[5, 9, 2, 6]])


class Attending(KVCache):
    """Computes attention itself, by hand."""

    asked = 0

    def attend(self, queries: mx.array, scale: float, mask: object) -> mx.array | None:
        Attending.asked += 1
        if self.offset % 2:
            return None
        keys, values = (mx.repeat(side, 2, axis=1)[:, :, : self.offset] for side in (self.keys, self.values))
        scores = scale * queries @ keys.swapaxes(-1, -2)
        tokens = queries.shape[2]
        seen = mx.arange(self.offset)[None] <= mx.arange(self.offset - tokens, self.offset)[:, None]
        return mx.softmax(mx.where(seen, scores, -1e9), axis=-1) @ values


def attention_class(module: nn.Module) -> type:
    return type(module.layers[0].self_attn)


def test_attention_asks_the_cache_and_gives_the_same() -> None:
    plain, asking = tiny().module, tiny().module
    let_caches_attend(asking)
    assert attention_class(asking) is not attention_class(plain)
    assert issubclass(attention_class(asking), attention_class(plain))
    caches = [Attending() for _ in asking.layers]
    expected = make_prompt_cache(plain)
    for tokens in (TOKENS, mx.array([[7]]), mx.array([[8]])):
        one, other = plain(tokens, cache=expected), asking(tokens, cache=caches)
        assert mx.allclose(one, other, atol=1e-4)
    assert Attending.asked == 3 * len(caches)
    assert mx.allclose(plain(TOKENS), asking(TOKENS), atol=1e-4)  # without a cache as well


@pytest.mark.skipif(this_device().kind != "cuda", reason="needs CUDA")
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    "shape", [(64, 24, 8, 512, 128), (32, 9, 3, 300, 64), (16, 16, 8, 70, 256), (96, 14, 2, 9, 64)]
)
def test_the_kernel_reads_each_row_to_its_length(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    rows, heads, shared, capacity, width = shape
    queries = mx.random.normal((rows, heads, 1, width)).astype(dtype)
    keys, values = (mx.random.normal((rows, shared, capacity, width)).astype(dtype) for _ in range(2))
    offsets = mx.random.randint(0, capacity, (rows,))
    offsets[0], offsets[1] = 0, capacity - 1
    fresh = tuple(mx.random.normal((rows, shared, 1, width)).astype(dtype) for _ in range(2))
    index = offsets[:, None, None, None]
    puts = [mx.put_along_axis(side, index, new, axis=2) for side, new in zip((keys, values), fresh, strict=True)]
    mx.eval(puts)
    found = attend(queries, keys, values, fresh, offsets, width**-0.5)
    assert found is not None
    mx.eval(found)
    assert mx.array_equal(keys, puts[0])  # the new tokens are in place
    assert mx.array_equal(values, puts[1])
    mask = (mx.arange(capacity) <= offsets[:, None])[:, None, None]
    exact = mx.fast.scaled_dot_product_attention(
        *(array.astype(mx.float32) for array in (queries, keys, values)), scale=width**-0.5, mask=mask
    )
    error = mx.abs(found.astype(mx.float32) - exact).max().item()
    assert error < {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}[dtype]
