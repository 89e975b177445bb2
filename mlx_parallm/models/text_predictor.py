"""What embedders and classifiers share: texts as token ids, padded to one length, on an encoder or a decoder."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.devices.padding import padded_shape, warm_up_shapes
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.models.classification_heads import Backbone
from mlx_parallm.models.decoders import DecoderStates
from mlx_parallm.models.kinds import Predictor
from mlx_parallm.steps import LazySteps, run_through
from mlx_parallm.types import TextTokens


class TextPredictor(Predictor):
    """Inputs are `TextTokens`, or lists of token ids."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone

    @abstractmethod
    def read(self, hidden: mx.array, tokens: mx.array, lengths: list[int]) -> list[Any]:
        """An output for each row of hidden states (B, T, D). Rows that are padding alone come last."""

    def cost(self, item: TextTokens | Sequence[int]) -> int:
        return len(_text(item).tokens)

    def warm_up(self) -> None:
        for rows, length in warm_up_shapes(self._backbone.max_length):
            self.predict([TextTokens([0] * length)] * rows)

    def predict(self, batch: Sequence[TextTokens | Sequence[int]]) -> list[Any]:
        return run_through(self.steps(batch))

    def steps(self, batch: Sequence[TextTokens | Sequence[int]]) -> LazySteps[list[Any]]:
        texts = [_text(item) for item in batch]
        lengths = [len(text.tokens) for text in texts]
        self._check(texts, lengths)
        rows, longest = padded_shape(len(texts), max(lengths), self._backbone.max_length)
        lengths += [1] * (rows - len(texts))
        ids, segments = np.zeros((2, rows, longest), np.int32)
        for row, text in enumerate(texts):
            ids[row, : lengths[row]] = text.tokens
            if text.segments is not None:
                segments[row, : lengths[row]] = text.segments
        tokens = mx.array(ids)
        mask = mx.array(np.arange(longest) < np.array(lengths, np.int32)[:, None])
        if isinstance(self._backbone, DecoderStates):
            hidden = self._backbone(tokens, mask)
        else:
            paired = any(text.segments is not None for text in texts)
            hidden = yield from self._backbone.steps(tokens, mask, mx.array(segments) if paired else None)
        return self.read(hidden, tokens, lengths)[: len(texts)]

    def _check(self, texts: Sequence[TextTokens], lengths: Sequence[int]) -> None:
        """Checks lengths and ids before anything is computed: an id outside the table would read other memory."""
        limit = self._backbone.max_length
        size = self._backbone.vocab_size
        if min(lengths) < 1 or max(lengths) > limit:
            raise InvalidRequestError(f"an input needs 1 to {limit} tokens", param="input")
        if any(min(text.tokens) < 0 or max(text.tokens) >= size for text in texts):
            raise InvalidRequestError(f"token ids must be below {size}, and not negative", param="input")


def _text(item: TextTokens | Sequence[int]) -> TextTokens:
    return item if isinstance(item, TextTokens) else TextTokens(item)
