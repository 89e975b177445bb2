"""A decode step through a Llama block, in C from its first norm to its last sum.

Between two of MLX's operations on the CPU there is a thread to wake and an array to copy, some four hundred times a
step: a quarter of the time that a small model takes for a few dozen rows. Here a block's numbers stay in NumPy's hands.
It is for one token a row, over caches that let kernels write to them, with adapters or without; any other pass, and any
block that has other layers than Llama's own, goes the way it went before.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama

from mlx_parallm.devices.native.functions import WIDE
from mlx_parallm.devices.native.native_layers import RMSNorm, Rope, offsets_of
from mlx_parallm.devices.native.pointers import Array, Sizes, pointer
from mlx_parallm.devices.native.products import AdaptedWeights, products_of, suits, weight_addresses
from mlx_parallm.host import numpy_view


class NativeBlock(llama.TransformerBlock):
    kernels: Any

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        decoded = self._decoded(x, mask, cache) if suits(x.shape[0]) and x.shape[1] == 1 else None
        if decoded is not None:
            return decoded
        result: mx.array = super().__call__(x, mask, cache)
        return result

    def _decoded(self, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        """(B, 1, D) -> (B, 1, D); None, with nothing written, where it must go the other way."""
        attention = self.self_attn
        mlp = self.mlp
        places = cache.places(mask) if hasattr(cache, "places") else None
        if places is None or x.dtype != mx.float32 or not self._is_plain_llama():
            return None
        first = _adapted_weights(attention.q_proj, attention.k_proj, attention.v_proj)
        second = _adapted_weights(attention.o_proj)
        third = _adapted_weights(mlp.gate_proj, mlp.up_proj)
        fourth = _adapted_weights(mlp.down_proj)
        if first is None or second is None or third is None or fourth is None:
            return None
        keys, values, offset, slots = places
        mx.eval(x, keys, values)
        k = numpy_view(keys)
        v = numpy_view(values)
        slots_usable = all(slots.dtype == np.float32 and slots.flags.c_contiguous for slots in (k, v))
        if not slots_usable or k.shape != v.shape or k.shape[3] % WIDE or not (k.flags.writeable and v.flags.writeable):
            return None
        h = numpy_view(x).reshape(x.shape[0], -1)
        offsets, _ = offsets_of(offset, len(h))
        new_q, new_k, new_v = products_of(self.kernels, self._normed(self.input_layernorm, h), first)
        attended = self._attended(new_q, new_k, new_v, (k, v), offsets, None if slots is None else numpy_view(slots))
        h = h + products_of(self.kernels, attended, second)[0]
        gate, up = products_of(self.kernels, self._normed(self.post_attention_layernorm, h), third)
        gated = np.empty(gate.shape, np.float32)
        self.kernels.swiglu(pointer(gate), pointer(up), pointer(gated), gate.size)
        h += products_of(self.kernels, gated, fourth)[0]
        return mx.array(h[:, None])

    def _is_plain_llama(self) -> bool:
        rope = self.self_attn.rope
        norms = (self.input_layernorm, self.post_attention_layernorm)
        plain = isinstance(rope, Rope) and not rope.traditional and rope.scale == 1.0
        return plain and all(isinstance(norm, RMSNorm) and norm.weight.dtype == mx.float32 for norm in norms)

    def _normed(self, norm: nn.RMSNorm, h: Array) -> Array:
        out = np.empty(h.shape, np.float32)
        self.kernels.rms_norm(pointer(h), pointer(numpy_view(norm.weight)), pointer(out), *h.shape, norm.eps)
        return out

    def _attended(
        self, q: Array, k: Array, v: Array, slots: tuple[Array, Array], offsets: Array, numbers: Array | None
    ) -> Array:
        """Queries (B, H * D), the rows' new keys and values (B, K * D), which are put into the slots: (B, H * D).

        `numbers`: of the slot that each row is in; None: in order.
        """
        attention = self.self_attn
        rows = len(q)
        heads = attention.n_heads
        shared = attention.n_kv_heads
        width = slots[0].shape[3]
        rotated = [self._rotated(one, count, width, offsets) for one, count in ((q, heads), (k, shared))]
        out = np.empty(q.shape, np.float32)
        lengths = offsets.astype(np.int32)
        sizes = Sizes(rows, heads, *slots[0].shape[1:])
        strides = Sizes(heads * width, width, shared * width, width, shared * width, width)
        arrays = (rotated[0], *slots, rotated[1], v, lengths, numbers, out)
        if self.kernels.attend_slots(*map(pointer, arrays), sizes, strides, attention.scale):
            raise MemoryError
        return out

    def _rotated(self, x: Array, heads: int, width: int, offsets: Array) -> Array:
        rope = self.self_attn.rope
        out = np.empty(x.shape, np.float32)
        sizes = Sizes(len(x), heads, 1, width, rope.dims)
        table = rope.rope_table(int(offsets.max()) + 1)
        self.kernels.rope(
            pointer(x), pointer(out), pointer(offsets), pointer(table), sizes, Sizes(heads * width, width, width)
        )
        return out


def _adapted_weights(*layers: nn.Module) -> list[AdaptedWeights] | None:
    """Returns where the layers' weights are and what rows' adapters add; None where the kernels can't use them."""
    adapted: list[AdaptedWeights] = []
    for layer in layers:
        weights = weight_addresses(layer)
        hook = getattr(layer, "hook", None)
        row_groups = (None, 0) if hook is None else hook.row_groups(1)
        if weights is None or row_groups is None:
            return None
        adapted.append((weights, *row_groups))
    return adapted
