"""Images and prompts as a model that reads images takes them. NumPy alone, on any thread but the engine's."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.models.vision.families import Family
from mlx_parallm.types import ImageInput, PromptImages

DIGEST = 16


class ImageProcessor:
    """A `runtime.client.ImageReader`."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def read(self, pixels: Any) -> ImageInput:
        """`pixels`: (height, width, 3), uint8. Whatever the family's processor raises, it could not take this image."""
        from PIL import Image

        digest = blake2b(repr(pixels.shape).encode(), digest_size=DIGEST)
        digest.update(np.ascontiguousarray(pixels).data)
        try:
            arrays, tokens = self._family.read(Image.fromarray(pixels))
        except Exception as error:
            height, width = pixels.shape[:2]
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"the model can't take an image of {width} × {height} pixels: {reason}"
            ) from error
        return ImageInput(digest.digest(), arrays, tokens)

    def place(self, prompt: Sequence[int], images: Sequence[ImageInput]) -> tuple[list[int], PromptImages]:
        """A prompt with the tokens of its images, in place of the one that the chat template has put there for each."""
        mark = self._family.image_token
        marks = [number for number, token in enumerate(prompt) if token == mark]
        if len(marks) != len(images):
            raise InvalidRequestError(
                f"the messages have {len(images)} images, and the model's chat template makes places for {len(marks)}: "
                "texts must not contain the model's own mark of an image",
                param="messages",
            )
        tokens: list[int] = []
        places = []
        content = []
        done = 0
        for number, image in zip(marks, images, strict=True):
            tokens += prompt[done:number]
            inside = np.array([i for i, token in enumerate(image.tokens) if token == mark], np.int32)
            places.append(inside + len(tokens))
            tokens += image.tokens
            done = number + 1
        tokens += prompt[done:]
        content = list(tokens)
        for image, numbers in zip(images, places, strict=True):
            name = int.from_bytes(image.digest, "big") + (1 << 8 * DIGEST)  # no token has such a number
            for place in numbers.tolist():
                content[place] = name
        positions = self._family.positions(len(tokens), images, places)
        shift = 0 if positions is None else int(positions.max()) + 1 - len(tokens)
        return tokens, PromptImages(tuple(images), places, content, positions, shift)
