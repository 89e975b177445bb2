"""The transformer encoder that all families share: what differs between them is which tensors and settings it gets.

Hidden states are computed for whole batches, padded on the right; padding never changes what the tokens get.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.devices.device import this_device
from mlx_parallm.host import to_numpy
from mlx_parallm.steps import LazySteps, Steps, run_through

COMPOSED_LENGTH = 512  # tokens up to which all scores of a batch are kept in memory
Array = np.ndarray[Any, Any]

ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
}
# Configs' names of them.
ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A linear layer's."""

    weight: mx.array  # (out, in)
    bias: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.weight.T if self.bias is None else mx.addmm(self.bias, x, self.weight.T)


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A layer normalisation's."""

    weight: mx.array
    bias: mx.array | None
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embeddings of a layer."""

    dims: int  # of a head that are rotated
    base: float
    interleaved: bool = False

    def __call__(self, x: mx.array) -> mx.array:  # (B, H, T, D)
        return mx.fast.rope(x, self.dims, traditional=self.interleaved, base=self.base, scale=1.0, offset=0)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """Attention, then an MLP, each added to its input; normalised before (`pre_norm`) or after."""

    qkv: DenseWeights  # queries, keys and values one after the other: (3 * D, D)
    out: DenseWeights
    attention_norm: NormWeights | None  # None: the input is normalised already
    up: DenseWeights  # (F, D); gated: (2 * F, D), first what goes through the activation
    down: DenseWeights
    mlp_norm: NormWeights
    heads: int
    activation: str
    gated: bool = False
    pre_norm: bool = False
    rotary: Rotary | None = None
    window: int | None = None  # keys so far away are still seen; None: all

    def __call__(self, x: mx.array, masks: "Masks") -> mx.array:  # (B, T, D) -> (B, T, D)
        if self.pre_norm:
            x = x + self._attend(x if self.attention_norm is None else self.attention_norm(x), masks)
            return x + self._mlp(self.mlp_norm(x))
        x = x + self._attend(x, masks)
        x = x if self.attention_norm is None else self.attention_norm(x)
        return self.mlp_norm(x + self._mlp(x))

    def _attend(self, x: mx.array, masks: "Masks") -> mx.array:
        B, T, _ = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.heads, -1).transpose(2, 0, 3, 1, 4)  # (3, B, H, T, D / H)
        q = qkv[0]
        k = qkv[1]
        v = qkv[2]
        if self.rotary is not None:
            q = self.rotary(q)
            k = self.rotary(k)
        attended = attention(q, k, v, masks.of(self.window))
        return self.out(attended.transpose(0, 2, 1, 3).reshape(B, T, -1))

    def _mlp(self, x: mx.array) -> mx.array:
        activation = ACTIVATIONS[self.activation]
        x = self.up(x)
        if not self.gated:
            return self.down(activation(x))
        first, second = mx.split(x, 2, axis=-1)
        return self.down(activation(first) * second)


def attention(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:  # (B, H, T, D)
    """Computes attention. On CUDA, MLX's own asks cuDNN for a plan per shape, which takes 60 to 80 ms; short sequences
    are also faster without it."""
    scale = q.shape[-1] ** -0.5
    if this_device().plans_shapes and q.shape[2] <= COMPOSED_LENGTH:
        return composed_attention(q, k, v, mask, scale)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def composed_attention(q: mx.array, k: mx.array, v: mx.array, mask: mx.array, scale: float) -> mx.array:
    """Attention of two matrix products and a softmax in float32, which keeps all scores in memory."""
    scores = mx.where(mask, (q * scale) @ k.swapaxes(-1, -2), mx.array(-mx.inf, q.dtype))
    return mx.softmax(scores, axis=-1, precise=True) @ v


class Masks:
    """Which keys a query sees, for each window that a batch's layers have."""

    def __init__(self, mask: mx.array) -> None:
        empty = ~mx.any(mask, axis=-1, keepdims=True)  # (B, 1): without any key, softmax would give NaN
        self._keys = (mask | empty)[:, None, None, :]  # (B, 1, 1, T)
        self._by_window: dict[int, mx.array] = {}

    def of(self, window: int | None) -> mx.array:
        """True: seen."""
        length = self._keys.shape[-1]
        if window is None or window >= length - 1:
            return self._keys
        if window not in self._by_window:
            places = mx.arange(length)
            distance = mx.abs(places[:, None] - places)
            # Padding far from all tokens sees itself.
            self._by_window[window] = (self._keys & (distance <= window)) | (distance == 0)  # (B, 1, T, T)
        return self._by_window[window]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The embeddings of tokens, and of their positions and types where the family has them."""

    word: mx.array  # (V, D)
    norm: NormWeights
    position: mx.array | None = None
    types: mx.array | None = None
    first_position: int = 0
    padding: int | None = None  # this token has a position of its own, and the others are counted without it

    def __call__(self, tokens: mx.array, token_types: mx.array | None) -> mx.array:  # (B, T) -> (B, T, D)
        x = self.word[tokens]
        if self.position is not None:
            x = x + self.position[self._positions(tokens)]
        if self.types is not None:
            kinds = mx.zeros_like(tokens) if token_types is None else token_types
            x = x + self.types[mx.minimum(kinds, self.types.shape[0] - 1)]
        return self.norm(x)

    def _positions(self, tokens: mx.array) -> mx.array:
        if self.padding is None:
            return mx.arange(tokens.shape[1]) + self.first_position
        counted = (tokens != self.padding).astype(mx.int32)
        return mx.cumsum(counted, axis=1) * counted + self.padding


class PackedPass(Protocol):
    """Tokens and types (B, T), which of them are no padding (B, T) -> hidden states of those alone, (N, D)."""

    def steps(self, tokens: Array, mask: Array, token_types: Array | None) -> Steps[Array]: ...


def _padded(packed: PackedPass, tokens: mx.array, mask: mx.array, token_types: mx.array | None) -> Steps[Array]:
    seen = to_numpy(mask).astype(bool)
    types = None if token_types is None else to_numpy(token_types)
    states = yield from packed.steps(to_numpy(tokens), seen, types)
    hidden = np.zeros((*seen.shape, states.shape[1]), np.float32)
    hidden[seen] = states
    return hidden


@dataclass(slots=True, eq=False)
class Encoder:
    """A loaded encoder. `encoder(tokens, mask)` gives a hidden state for each token."""

    family: str
    embeddings: Embeddings
    layers: Sequence[EncoderLayer]
    max_length: int  # tokens of an input
    final_norm: NormWeights | None = None
    pooler: DenseWeights | None = None  # BERT's
    packed: "PackedPass | None" = None  # on the CPU: without padding, in C
    vocab_size: int = field(init=False)
    hidden_size: int = field(init=False)
    weight_bytes: int = field(init=False)
    precision: str = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size, self.hidden_size = self.embeddings.word.shape
        self.weight_bytes = sum(array.nbytes for array in self.arrays())
        self.precision = str(self.embeddings.word.dtype).removeprefix("mlx.core.")

    def __call__(self, tokens: mx.array, mask: mx.array, token_types: mx.array | None = None) -> mx.array:
        """Tokens (B, T), which of them are no padding (B, T), and their types -> hidden states (B, T, D)."""
        return run_through(self.steps(tokens, mask, token_types))

    def steps(self, tokens: mx.array, mask: mx.array, token_types: mx.array | None = None) -> LazySteps[mx.array]:
        """The same as a generator, which yields after each layer."""
        assert tokens.shape[1] <= self.max_length, f"{tokens.shape[1]} tokens, and the limit is {self.max_length}"
        if self.packed is not None:
            hidden = yield from _padded(self.packed, tokens, mask, token_types)
            return mx.array(hidden)
        masks = Masks(mask.astype(mx.bool_))
        on_cpu = this_device().kind == "cpu"
        x = self.embeddings(tokens, token_types)
        for layer in self.layers:
            x = layer(x, masks)
            if on_cpu:  # all layers together take so long there that rows may come meanwhile
                mx.eval(x)
            yield x
        return x if self.final_norm is None else self.final_norm(x)

    def pooled(self, hidden: mx.array) -> mx.array:
        """BERT's pooler over the first token: (B, T, D) -> (B, D)."""
        assert self.pooler is not None, "the model has no pooler"
        return mx.tanh(self.pooler(hidden[:, 0]))

    def arrays(self) -> list[mx.array]:
        parts = [self.embeddings.word, self.embeddings.position, self.embeddings.types]
        norms = [self.embeddings.norm, self.final_norm]
        dense = [self.pooler]
        for layer in self.layers:
            norms += [layer.attention_norm, layer.mlp_norm]
            dense += [layer.qkv, layer.out, layer.up, layer.down]
        for one in (*norms, *dense):
            parts += [] if one is None else [one.weight, one.bias]
        return [part for part in parts if part is not None]
