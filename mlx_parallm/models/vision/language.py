"""The module of a model that reads images, as the engine runs it: mlx-vlm's language model, called like mlx-lm's.

It finds what the rows of a pass have beside their tokens in `state_of_pass`, where `models.forward` puts it. The image
encoder is no part of it: adapters and the engine's own layers are for the language model alone.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.forward import PassState, RowInputs


class ImageTextModel(nn.Module):
    def __init__(self, language_model: nn.Module, three_axes: bool) -> None:
        super().__init__()
        self.language_model = language_model
        self.state_of_pass = PassState()
        self._three_axes = three_axes

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:
        inputs = self.state_of_pass.inputs
        embeddings = None if inputs is None else self._embeddings(tokens, inputs)
        language = self.language_model
        if not self._three_axes:
            return language(tokens, inputs_embeds=embeddings, cache=cache).logits
        # Past mlx-vlm's own way to positions, which reads the cache's offsets from the device at every step.
        positions = self._positions(tokens, cache, inputs)
        hidden = language.model(tokens, inputs_embeds=embeddings, cache=cache, position_ids=positions)
        head = language.lm_head if "lm_head" in language else language.model.embed_tokens.as_linear
        return head(hidden)

    def _embeddings(self, tokens: mx.array, inputs: RowInputs) -> mx.array | None:
        if inputs.features is None or inputs.replaced is None:
            return None
        language = self.language_model
        embed = language.embed_tokens if "embed_tokens" in language else language.model.embed_tokens
        embeddings = embed(tokens)
        return mx.where(inputs.replaced, inputs.features.astype(embeddings.dtype), embeddings)

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
