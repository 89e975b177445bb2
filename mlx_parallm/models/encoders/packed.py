"""An encoder's pass on the CPU: sequences one after the other without padding, a BLAS for the products, C for the rest.

MLX on the CPU computes activations, norms and softmax one element at a time, on one core, and padding like tokens.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.devices.native import kernels
from mlx_parallm.devices.native.gemm import matrix_product
from mlx_parallm.devices.native.pointers import Sizes, pointer
from mlx_parallm.host import numpy_view
from mlx_parallm.models.encoders.encoder_layers import (
    Array,
    DenseWeights,
    Embeddings,
    Encoder,
    EncoderLayer,
    NormWeights,
)
from mlx_parallm.steps import Steps

GROUP = 2048  # tokens that go through all layers together: what they need stays in the processor's cache
SLAB = 512  # tokens that go through an MLP together
KINDS = {"gelu": 0, "gelu_tanh": 1, "relu": 2, "silu": 3}  # as kernels.c numbers them
FAR = 1 << 40  # a window that all keys are in


def packed_encoder(encoder: Encoder) -> "PackedEncoder | None":
    """None where there are no kernels, or the encoder is no plain float32 one."""
    library = kernels() if mx.default_device().type == mx.DeviceType.cpu else None
    plain = all(array.dtype == mx.float32 for array in encoder.arrays())
    rotaries = [layer.rotary for layer in encoder.layers if layer.rotary is not None]
    if library is None or not plain or any(rotary.interleaved for rotary in rotaries):
        return None
    return PackedEncoder(encoder, library)


class PackedEncoder:
    def __init__(self, encoder: Encoder, library: Any) -> None:
        self._library = library
        self._embeddings = encoder.embeddings
        self._layers = [PackedLayer(layer, library) for layer in encoder.layers]
        self._norms = (encoder.embeddings.norm, encoder.final_norm)
        self._size = encoder.hidden_size

    def steps(self, tokens: Array, mask: Array, token_types: Array | None) -> Steps[Array]:
        lengths = mask.sum(axis=1)
        positions = _positions(self._embeddings, tokens)[mask]
        ids = tokens[mask]
        types = None if token_types is None else token_types[mask]
        places = np.broadcast_to(np.arange(mask.shape[1]), mask.shape)[mask]  # what rotary positions count
        hidden = np.empty((len(ids), self._size), np.float32)
        for first, starts in _groups(lengths):
            part = slice(first, first + int(starts[-1]))
            embedded = self._embed(ids[part], positions[part], None if types is None else types[part])
            hidden[part] = yield from self._states(embedded, np.ascontiguousarray(places[part]), starts)
        return hidden

    def _embed(self, ids: Array, positions: Array, types: Array | None) -> Array:
        embeddings = self._embeddings
        x = numpy_view(embeddings.word)[ids]
        if embeddings.position is not None:
            x += numpy_view(embeddings.position)[positions]
        if embeddings.types is not None:
            kinds = numpy_view(embeddings.types)
            x += kinds[0] if types is None else kinds[np.minimum(types, len(kinds) - 1)]
        return add_norm(self._library, x, None, None, embeddings.norm)

    def _states(self, x: Array, places: Array, starts: Array) -> Steps[Array]:
        for layer in self._layers:
            x = yield from layer.steps(x, places, starts)
            yield
        final = self._norms[1]
        return x if final is None else add_norm(self._library, x, None, None, final)


class PackedLayer:
    """An `EncoderLayer` over tokens (N, D) of sequences that begin at `starts`."""

    def __init__(self, layer: EncoderLayer, library: Any) -> None:
        self._library = library
        self._layer = layer
        self._product = matrix_product()

    def steps(self, x: Array, places: Array, starts: Array) -> Steps[Array]:
        """Yields between attention and MLP."""
        layer = self._layer
        if not layer.pre_norm:
            attended = self._attend(x, places, starts)
            x = add_norm(self._library, attended, _view(layer.out.bias), x, layer.attention_norm)
            yield
            return add_norm(self._library, self._mlp(x), _view(layer.down.bias), x, layer.mlp_norm)
        first = x if layer.attention_norm is None else add_norm(self._library, x, None, None, layer.attention_norm)
        summed = np.empty_like(x)
        attended = self._attend(first, places, starts)
        second = add_norm(self._library, attended, _view(layer.out.bias), x, layer.mlp_norm, summed)
        yield
        return add_norm(self._library, self._mlp(second), _view(layer.down.bias), summed, None)

    def _attend(self, x: Array, places: Array, starts: Array) -> Array:
        """Returns attention's output without the bias of its last product, which `add_norm` adds."""
        layer = self._layer
        library = self._library
        qkv = self._times(x, layer.qkv)
        if layer.qkv.bias is not None:
            qkv += numpy_view(layer.qkv.bias)
        width = x.shape[1] // layer.heads
        if layer.rotary is not None:
            table = _rope_table(layer.rotary.dims, layer.rotary.base, 1 << int(places.max()).bit_length())
            sizes = Sizes(len(x), layer.heads, width, layer.rotary.dims)
            library.rope_packed(pointer(qkv), pointer(places), pointer(table), sizes)
        attended = np.empty_like(x)
        window = FAR if layer.window is None else layer.window
        sizes = Sizes(len(starts) - 1, layer.heads, width, window, int(np.diff(starts).max()))
        if library.attend_packed(pointer(qkv), pointer(attended), pointer(starts), sizes, width**-0.5):
            raise MemoryError
        return self._times(attended, layer.out)

    def _mlp(self, x: Array) -> Array:
        layer = self._layer
        inner = layer.down.weight.shape[1]
        out = np.empty_like(x)
        wide = np.empty((min(SLAB, len(x)), inner * (1 + layer.gated)), np.float32)
        narrow = np.empty((len(wide), inner), np.float32) if layer.gated else wide
        for first in range(0, len(x), SLAB):
            part = x[first : first + SLAB]
            up = wide[: len(part)]
            active = narrow[: len(part)]
            self._product(part, numpy_view(layer.up.weight), up)
            bias = pointer(_view(layer.up.bias))
            kind = KINDS[layer.activation]
            self._library.activate(pointer(up), bias, pointer(active), len(part), inner, kind, layer.gated)
            self._product(active, numpy_view(layer.down.weight), out[first : first + SLAB])
        return out

    def _times(self, x: Array, dense: DenseWeights) -> Array:
        out = np.empty((len(x), dense.weight.shape[0]), np.float32)
        self._product(x, numpy_view(dense.weight), out)
        return out


def add_norm(
    library: Any,
    x: Array,
    bias: Array | None,
    residual: Array | None,
    norm: NormWeights | None,
    summed: Array | None = None,
) -> Array:
    """The layer normalisation of x + bias + residual, which is put into `summed`; without a norm, only the sum."""
    out = np.empty_like(x)
    weight, shift = (None, None) if norm is None else (_view(norm.weight), _view(norm.bias))
    arrays = map(pointer, (x, bias, residual, weight, shift, summed, out))
    library.add_norm(*arrays, *x.shape, 0.0 if norm is None else norm.eps)
    return out


def _view(array: mx.array | None) -> Array | None:
    return None if array is None else numpy_view(array)


def _positions(embeddings: Embeddings, tokens: Array) -> Array:
    if embeddings.padding is None:
        return np.broadcast_to(np.arange(tokens.shape[1]) + embeddings.first_position, tokens.shape)
    counted = tokens != embeddings.padding
    return np.cumsum(counted, axis=1) * counted + embeddings.padding


def _groups(lengths: Array) -> Iterator[tuple[int, Array]]:
    """Sequences whose tokens go through the layers together: where the first begins, and where each does from there."""
    first = 0
    starts = [0]
    for length in map(int, lengths):
        if length == 0:
            continue
        if starts[-1] and starts[-1] + length > GROUP:
            yield first, np.array(starts, np.int64)
            first = first + starts[-1]
            starts = [0]
        starts.append(starts[-1] + length)
    if starts[-1]:
        yield first, np.array(starts, np.int64)


@cache
def _rope_table(dims: int, base: float, positions: int) -> Array:
    """(positions, dims): cosines, then sines, of each position's angles."""
    angles = np.arange(positions)[:, None] * base ** (-np.arange(0, dims, 2) / dims)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
