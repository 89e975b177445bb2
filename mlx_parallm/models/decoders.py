"""Hidden states of mlx-lm's language models, in one pass without a cache and without an output head.

Causal ones need no mask for padding on the right: no token sees what follows it. Gemma's embedding models see both
ways; their layers are called one by one with masks of their own. Heads for tasks stand on them: their weights are left.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma, gemma3_text
from mlx_lm.utils import _get_classes as classes_of
from mlx_lm.utils import load_model

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.encoders import Settings
from mlx_parallm.models.encoders.encoder_layers import Masks
from mlx_parallm.models.loader import apply_precision

States = Callable[[mx.array, mx.array], mx.array]


@dataclass(slots=True, eq=False)
class DecoderStates:
    """`decoder(tokens, mask)`, both (B, T), gives hidden states (B, T, D)."""

    states: States
    max_length: int
    vocab_size: int
    hidden_size: int
    weight_bytes: int
    precision: str

    def __call__(self, tokens: mx.array, mask: mx.array) -> mx.array:
        return self.states(tokens, mask)


def load_decoder(folder: Path, dtype: str = "auto") -> DecoderStates:
    """The language model in a folder, its weights named as a whole model's or as those of its inner part alone."""
    settings = Settings.of(folder)
    # Nobody needs the output head; models with tied weights have none.
    overrides = {"tie_word_embeddings": True} | _rope(settings) | _sliding_pattern(settings)
    try:
        model, _ = load_model(folder, lazy=True, model_config=overrides, get_model_classes=_headless_classes)
    except Exception as error:  # mlx-lm's, the file reader's and the model's own
        raise ModelLoadError(f"{folder} can't be loaded: {error}") from error
    inner = getattr(model, "model", None)
    if inner is None or not hasattr(inner, "embed_tokens"):
        raise ModelLoadError(f"{folder}: models of the type {settings.get('model_type')!r} can't embed text here")
    _correct(inner)
    precision = apply_precision(inner, dtype)
    return DecoderStates(
        states=_states(inner, settings),
        max_length=_max_length(inner, settings),
        vocab_size=settings.size("vocab_size"),
        hidden_size=settings.size("hidden_size"),
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(inner.parameters())),
        precision=precision,
    )


def _sliding_pattern(settings: Settings) -> dict[str, Any]:
    """Every which layer of Gemma sees all: mlx-lm takes it from a name that newer configs don't have."""
    kinds = settings.get("layer_types")
    if settings.get("model_type") != "gemma3_text" or not isinstance(kinds, list) or "full_attention" not in kinds:
        return {}
    pattern = kinds.index("full_attention") + 1
    expected = ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(len(kinds))]
    if kinds != expected:
        raise settings.wrong("layer_types", kinds, "a full_attention layer after every few others")
    return {"sliding_window_pattern": pattern}


def _rope(settings: Settings) -> dict[str, Any]:
    """transformers 5 writes all of RoPE into one object, of which most of mlx-lm's models know nothing."""
    parameters = settings.get("rope_parameters", default={})
    full = parameters.get("full_attention", parameters)
    sliding = parameters.get("sliding_attention", {})
    found = {"rope_theta": full.get("rope_theta"), "rope_local_base_freq": sliding.get("rope_theta")}
    if full.get("rope_type", "default") != "default" and not settings.get("rope_scaling"):
        found["rope_scaling"] = full
    return {name: value for name, value in found.items() if value is not None}


def _max_length(inner: nn.Module, settings: Settings) -> int:
    """Returns a model's longest text: at most the window, where its layers see one and mlx-lm's see everything."""
    length = settings.size("max_position_embeddings", default=32768)
    if settings.get("sliding_window") is None or settings.get("use_sliding_window", default=True) is False:
        return length
    args = getattr(inner, "args", None)
    knows_windows = hasattr(args, "sliding_window") and getattr(args, "layer_types", ()) is not None
    return length if knows_windows else min(length, settings.size("sliding_window"))


class TanhGemmaMLP(gemma.MLP):
    """The first Gemma's with its own GELU; mlx-lm's has another."""

    def __call__(self, x: mx.array) -> mx.array:
        product: mx.array = self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))
        return product


def _correct(inner: nn.Module) -> None:
    for layer in inner.layers:
        if type(layer.get("mlp")) is gemma.MLP:
            layer.mlp.__class__ = TanhGemmaMLP


def _headless_classes(config: dict[str, Any]) -> tuple[type, type]:
    """mlx-lm's classes for a config; the model takes weights of its inner part by their own names too."""
    model_class, args_class = classes_of(config)

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        if not any(name.startswith("model.") for name in weights):
            weights = {f"model.{name}": array for name, array in weights.items()}
        weights = {name: array for name, array in weights.items() if name.startswith("model.")}
        original = getattr(super(headless, self), "sanitize", None)
        return weights if original is None else original(weights)

    headless = type(model_class.__name__, (model_class,), {"sanitize": sanitize})
    return headless, args_class


def _states(inner: nn.Module, settings: Settings) -> States:
    if settings.get("use_bidirectional_attention"):
        if not isinstance(inner, gemma3_text.Gemma3Model):
            raise settings.wrong("use_bidirectional_attention", True, "gemma3_text with it")
        return BidirectionalGemma(inner)
    if settings.get("is_causal") is False:
        raise settings.wrong("is_causal", False, "true")
    return lambda tokens, mask: inner(tokens)


class BidirectionalGemma:
    """Gemma 3 whose tokens see those behind them too: EmbeddingGemma."""

    def __init__(self, inner: nn.Module) -> None:
        self._inner = inner

    def __call__(self, tokens: mx.array, mask: mx.array) -> mx.array:
        inner = self._inner
        masks = Masks(mask.astype(mx.bool_))
        h = inner.embed_tokens(tokens)
        h = h * mx.array(inner.args.hidden_size**0.5, h.dtype)
        for layer in inner.layers:
            window = inner.window_size // 2 if layer.self_attn.is_sliding else None
            h = layer(h, masks.of(window), None)
        states: mx.array = inner.norm(h)
        return states
