"""Features of images, on the engine thread: computed by mlx-vlm's encoders, kept by the images' digests.

The runner has one image encoded at a time, as a step of its own before the prompt's pieces, and gets from here what a
piece with images in it depends on.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.models.fingerprint import fingerprint
from mlx_parallm.models.forward import RowInputs
from mlx_parallm.types import ImageInput, PromptImages

KEPT_BYTES = 256 << 20  # of features that were used last


class ImageEncoder:
    """`model` is mlx-vlm's, the language model included."""

    def __init__(self, model: nn.Module, image_token: int, kept_bytes: int = KEPT_BYTES) -> None:
        self._model = model
        self._image_token = image_token
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[bytes, mx.array] = OrderedDict()  # the longest unused first
        self.encoded = 0  # images that were computed

    def fingerprint(self) -> str:
        """Returns a fingerprint of its weights."""
        parts = [part for name, part in self._model.items() if name != "language_model" and isinstance(part, nn.Module)]
        return " ".join(map(fingerprint, parts))

    def features(self, image: ImageInput) -> mx.array:
        """(N, D): one for each place of the image in its prompt; not evaluated where they are new. Wider where the
        first layers have features of their own (`ImageTextModel`)."""
        features = self._kept.pop(image.digest, None)
        if features is None:
            features = self._encode(image)
            self.encoded += 1
        self._kept[image.digest] = features
        while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > self._kept_bytes:
            self._kept.popitem(last=False)
        return features

    def forget(self) -> None:
        self._kept.clear()

    def _encode(self, image: ImageInput) -> mx.array:
        arrays = {name: mx.array(array) for name, array in image.arrays.items()}
        if "image_grid_thw" in arrays:
            tower = self._model.vision_tower
            pixels = arrays["pixel_values"].astype(tower.patch_embed.proj.weight.dtype)
            found = tower(pixels, arrays["image_grid_thw"], output_hidden_states=False)
            return found if isinstance(found, mx.array) else mx.concatenate([found[0], *found[1]], axis=-1)
        places = [number for number, token in enumerate(image.tokens) if token == self._image_token]
        found = self._model.get_input_embeddings(mx.array([list(image.tokens)]), **arrays)
        return found.inputs_embeds[0][mx.array(places)]

    def row_inputs(
        self, images: PromptImages, features: Mapping[int, mx.array], start: int, count: int, adapters: Any
    ) -> RowInputs:
        """Returns the inputs of a pass over tokens `start` to `start + count` of a text whose prompt has images."""
        index = np.zeros((count,), np.int32)
        replaced = np.zeros((count,), np.bool_)
        pieces = []
        known = 0
        for number, places in enumerate(images.places):
            first, last = np.searchsorted(places, [start, start + count])
            if first < last:
                index[places[first:last] - start] = np.arange(known, known + last - first)
                replaced[places[first:last] - start] = True
                pieces.append(features[number][int(first) : int(last)])
                known += last - first
        return RowInputs(
            adapters,
            positions=None if images.positions is None else mx.array(_positions(images, start, count)),
            features=mx.concatenate(pieces)[mx.array(index)][None] if pieces else None,
            replaced=mx.array(replaced)[None, :, None] if pieces else None,
        )


def _positions(images: PromptImages, start: int, count: int) -> Any:
    """(3, 1, count): the prompt's own, and behind it one after the other."""
    found = np.broadcast_to(np.arange(start, start + count, dtype=np.int32) + images.shift, (3, count)).copy()
    own = images.positions[:, start : start + count]
    found[:, : own.shape[1]] = own
    return found[:, None]
