"""How each family of models cuts images into patches, and which tokens of a prompt stand for them. NumPy alone.

A family is what mlx-vlm's models have in common here: the tokens that an image becomes, the arrays that its encoder
takes, and whether RoPE has one axis or three.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_parallm.types import ImageInput

Arrays = dict[str, Any]
Places = Sequence[Any]  # of each image, (N,): numbers of the tokens that its features replace


class Family(ABC):
    """`processor` is mlx-vlm's for the model, `config` its config.json."""

    three_axes = False  # of RoPE: time, height and width

    def __init__(self, processor: Any, config: dict[str, Any]) -> None:
        self._images = processor.image_processor
        self._tokenizer = processor.tokenizer
        self.image_token = int(config.get("image_token_id", config.get("image_token_index", processor.image_token_id)))

    @abstractmethod
    def read(self, image: Any) -> tuple[Arrays, list[int]]:
        """A PIL image as the encoder takes it, and the tokens that stand for it."""

    def positions(self, length: int, images: Sequence[ImageInput], places: Places) -> Any:
        """Returns the positions of all tokens, (3, length), where RoPE has three axes."""
        return None


class TiledImages(Family):
    """Idefics 3 and SmolVLM: an image in tiles, row by row, and the whole of it once more, each with its own marks."""

    def __init__(self, processor: Any, config: dict[str, Any]) -> None:
        super().__init__(processor, config)
        self._patch = self._tokenizer.convert_ids_to_tokens(self.image_token) * processor.image_seq_len
        self._mark = getattr(self._tokenizer, "fake_image_token", "<fake_token_around_image>")
        self._whole = getattr(self._tokenizer, "global_image_token", "<global-img>")

    def read(self, image: Any) -> tuple[Arrays, list[int]]:
        found = self._images([[image]], return_row_col_info=True)
        rows = int(found["rows"][0][0])
        columns = int(found["cols"][0][0])
        text = self._text(rows, columns)
        arrays = {name: np.asarray(found[name]) for name in ("pixel_values", "pixel_attention_mask") if name in found}
        return arrays, self._tokenizer.encode(text, add_special_tokens=False)

    def _text(self, rows: int, columns: int) -> str:
        tiles = [
            "".join(f"{self._mark}<row_{row}_col_{column}>{self._patch}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join(tiles) + ("\n" if tiles else "") + f"{self._mark}{self._whole}{self._patch}{self._mark}"


class GridImages(Family):
    """Qwen2-VL to Qwen3-VL: an image as a grid of merged patches, which are at their row and column in RoPE too."""

    three_axes = True

    def __init__(self, processor: Any, config: dict[str, Any]) -> None:
        super().__init__(processor, config)
        self._merge = int(self._images.merge_size)

    def read(self, image: Any) -> tuple[Arrays, list[int]]:
        found = self._images(images=[image])
        arrays = {name: np.asarray(found[name]) for name in ("pixel_values", "image_grid_thw")}
        return arrays, [self.image_token] * (int(arrays["image_grid_thw"][0].prod()) // self._merge**2)

    def positions(self, length: int, images: Sequence[ImageInput], places: Places) -> Any:
        """Text goes on by one along all axes; an image begins where they stand, and ends at its largest."""
        found = np.empty((3, length), np.int32)
        done = following = 0
        for image, numbers in zip(images, places, strict=True):
            first = int(numbers[0])
            found[:, done:first] = np.arange(following, following + first - done)
            following += first - done
            frames, rows, columns = (int(size) for size in image.arrays["image_grid_thw"][0])
            grid = np.indices((frames, rows // self._merge, columns // self._merge)).reshape(3, -1)
            done = first + grid.shape[1]
            found[:, first:done] = grid + following
            following += int(grid.max()) + 1
        found[:, done:] = np.arange(following, following + length - done)
        return found


FAMILIES: dict[str, type[Family]] = {  # by the model_type of config.json
    "idefics3": TiledImages,
    "smolvlm": TiledImages,
    "qwen2_vl": GridImages,
    "qwen2_5_vl": GridImages,
    "qwen3_vl": GridImages,
    "qwen3_vl_moe": GridImages,
}
