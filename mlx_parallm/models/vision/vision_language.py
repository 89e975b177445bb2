"""The module of a model that reads images, as the engine runs it: mlx-vlm's language model, called like mlx-lm's.

It finds what the rows of a pass have beside their tokens in `state_of_pass`, where `models.forward` puts it. The image
encoder is no part of it: adapters and the engine's own layers are for the language model alone.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.forward import PassState, RowInputs


class ImageTextModel(nn.Module):
    """A language model that takes images' features. Where these are several times as wide as embeddings (Qwen3-VL's
    DeepStack), the first part replaces the embeddings, and each other is added to the states behind one of the first
    layers."""

    def __init__(self, language_model: nn.Module, three_axes: bool) -> None:
        super().__init__()
        self.language_model = language_model
        _add_dense_features(language_model.get("model"))
        self.state_of_pass = PassState()
        self._three_axes = three_axes

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:
        inputs = self.state_of_pass.inputs
        features = {} if inputs is None else self._features(tokens, inputs)
        language = self.language_model
        if not self._three_axes:
            return language(tokens, cache=cache, **features).logits
        # Past mlx-vlm's own way to positions, which reads the cache's offsets from the device at every step.
        positions = self._positions(tokens, cache, inputs)
        hidden = language.model(tokens, cache=cache, position_ids=positions, **features)
        head = language.lm_head if "lm_head" in language else language.model.embed_tokens.as_linear
        return head(hidden)

    def _features(self, tokens: mx.array, inputs: RowInputs) -> dict[str, Any]:
        """Returns what mlx-vlm's language models take beside tokens."""
        if inputs.features is None or inputs.replaced is None:
            return {}
        language = self.language_model
        embed = language.embed_tokens if "embed_tokens" in language else language.model.embed_tokens
        embeddings = embed(tokens)
        found = inputs.features.astype(embeddings.dtype)
        first, *others = mx.split(found, found.shape[-1] // embeddings.shape[-1], axis=-1)
        features: dict[str, Any] = {"inputs_embeds": mx.where(inputs.replaced, first, embeddings)}
        if others:
            features["deepstack_visual_embeds"] = [mx.where(inputs.replaced, other, 0) for other in others]
        return features

    def _positions(self, tokens: mx.array, cache: list[Any] | None, inputs: RowInputs | None) -> mx.array:
        """(3, B, T)"""
        if inputs is not None and inputs.positions is not None:
            return inputs.positions
        rows, count = tokens.shape
        offset = cache[0].offset if cache else 0
        if inputs is not None and inputs.shifts is not None:
            offset = offset + inputs.shifts
        if isinstance(offset, mx.array) and offset.ndim:
            offset = offset[:, None]
        return mx.broadcast_to(mx.arange(count) + offset, (3, rows, count))

    @property
    def layers(self) -> list[Any]:
        language = self.language_model
        return language.layers

    def make_cache(self) -> list[Any]:
        from mlx_lm.models.cache import KVCache

        if hasattr(self.language_model, "make_cache"):
            return self.language_model.make_cache()
        return [KVCache() for _ in self.layers]


def _add_dense_features(backbone: nn.Module | None) -> None:
    """mlx-vlm asks the device at every layer which tokens are an image's, to add features to those. Ours are zero at
    all other tokens, and are added to all."""
    original = type(backbone)
    if hasattr(original, "_deepstack_process"):
        members = {"_deepstack_process": lambda _self, states, _places, features: states + features}
        backbone.__class__ = type(original.__name__, (original,), members)
