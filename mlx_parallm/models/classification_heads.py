"""Classification heads: from an encoder's or decoder's hidden states to logits, for each text or for each token.

A head is recognised by the names of its tensors, so that families that share a form need no word here. The kind
`classifier` makes one of a folder's weights; engine thread only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.decoders import DecoderStates
from mlx_parallm.models.encoders.encoder_layers import ACTIVATION_NAMES, ACTIVATIONS, DenseWeights, Encoder, NormWeights
from mlx_parallm.models.encoders.encoder_weights import Settings, Weights

Backbone = Encoder | DecoderStates
Function = Callable[[mx.array], mx.array]


class Pooling(Protocol):
    def __call__(self, hidden: mx.array, tokens: mx.array, lengths: mx.array) -> mx.array:
        """The states that are classified: (B, T, D), (B, T), (B,) -> (B, D), or (B, T, D) for a label per token."""
        ...


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    """Some states of a text, perhaps a layer with its activation and norm, and a layer with an output per label."""

    pooling: Pooling
    out: DenseWeights
    dense: DenseWeights | None = None
    activation: Function = mx.tanh
    norm: NormWeights | None = None

    def __call__(self, hidden: mx.array, tokens: mx.array, lengths: mx.array) -> mx.array:
        x = self.pooling(hidden, tokens, lengths)
        if self.dense is not None:
            x = self.activation(self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        return self.out(x)

    @property
    def labels(self) -> int:
        return self.out.weight.shape[0]

    def arrays(self) -> list[mx.array]:
        layers = (self.out, self.dense, self.norm)
        return [array for one in layers if one is not None for array in (one.weight, one.bias) if array is not None]


def load_head(settings: Settings, weights: Weights, backbone: Backbone, per_token: bool) -> ClassificationHead:
    """The head that the weights hold, for the states of this model. ModelLoadError where none is known."""
    size = backbone.hidden_size
    first: Pooling = every_token if per_token else first_token
    if "score.weight" in weights:
        return ClassificationHead(every_token if per_token else last_token(settings), _out(weights, "score", size))
    if "classifier.out_proj.weight" in weights:  # RoBERTa
        return ClassificationHead(
            first, _out(weights, "classifier.out_proj", size), _square(weights, "classifier.dense", size)
        )
    if "classifier.weight" not in weights:
        raise ModelLoadError(f"{settings.folder}: no classification head is found among its tensors")
    out = _out(weights, "classifier", size)
    if "head.dense.weight" in weights:  # ModernBERT
        return _modernbert(settings, weights, size, first, out)
    if per_token:
        return ClassificationHead(every_token, out)
    if "pre_classifier.weight" in weights:  # DistilBERT
        return ClassificationHead(first, out, _square(weights, "pre_classifier", size), ACTIVATIONS["relu"])
    pooler = backbone.pooler if isinstance(backbone, Encoder) else None
    return ClassificationHead(first, out, pooler or _square(weights, "pooler.dense", size))  # BERT


def _out(weights: Weights, name: str, size: int) -> DenseWeights:
    return weights.dense(name, -1, size, bias=None)


def _square(weights: Weights, name: str, size: int) -> DenseWeights:
    return weights.dense(name, size, size, bias=None)


def _modernbert(
    settings: Settings, weights: Weights, size: int, pooling: Pooling, out: DenseWeights
) -> ClassificationHead:
    activation = settings.one_of("classifier_activation", list(ACTIVATION_NAMES), "gelu")
    if settings.one_of("classifier_pooling", ("cls", "mean"), "cls") == "mean" and pooling is first_token:
        pooling = mean_of_tokens
    norm = weights.norm("head.norm", size, settings.number("norm_eps", default=1e-5), bias=None)
    dense = _square(weights, "head.dense", size)
    return ClassificationHead(pooling, out, dense, ACTIVATIONS[ACTIVATION_NAMES[activation]], norm)


def every_token(hidden: mx.array, tokens: mx.array, lengths: mx.array) -> mx.array:
    return hidden


def first_token(hidden: mx.array, tokens: mx.array, lengths: mx.array) -> mx.array:
    return hidden[:, 0]


def mean_of_tokens(hidden: mx.array, tokens: mx.array, lengths: mx.array) -> mx.array:
    real = mx.arange(hidden.shape[1]) < lengths[:, None]  # (B, T)
    return mx.sum(mx.where(real[..., None], hidden, 0), axis=1) / lengths[:, None]


def last_token(settings: Settings) -> Pooling:
    """The last that is not the padding token, as transformers has it, even where a text itself ends with that one."""
    text: Any = settings.get("text_config", default={})
    padding = settings.get("pad_token_id", default=text.get("pad_token_id"))

    def pooling(hidden: mx.array, tokens: mx.array, lengths: mx.array) -> mx.array:
        places = mx.arange(hidden.shape[1])
        counted = places < lengths[:, None]  # (B, T)
        if isinstance(padding, int):
            counted = counted & (tokens != padding)
        last = mx.max(mx.where(counted, places, 0), axis=1)  # (B,)
        return mx.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]

    return pooling
