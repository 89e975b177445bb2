"""Images as tokens, arrays and positions, with stand-ins for mlx-vlm's processors; tests/engine/test_vision.py has the
real ones."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.engine.compute.pass_contexts import PassContexts
from mlx_parallm.engine.rows import Job, Row
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.models.forward import RowInputs
from mlx_parallm.models.vision.encoder import ImageEncoder
from mlx_parallm.models.vision.families import FAMILIES
from mlx_parallm.models.vision.processor import ImageProcessor
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.types import ImageInput

PIXELS, SEEN = np.arange(24.0).reshape(1, 2, 3, 2, 2), np.ones((1, 2, 2, 2))


class Tokenizer:
    fake_image_token, global_image_token = "<mark>", "<whole>"

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<{token}>"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.text = text
        return list(text.encode())


def tiled(rows: int, columns: int, **more: Any) -> tuple[dict[str, Any], list[int], str]:
    def images(given: list[list[str]], return_row_col_info: bool) -> dict[str, Any]:
        assert (given, return_row_col_info) == ([["an image"]], True)
        return {"pixel_values": PIXELS, "rows": [[rows]], "cols": [[columns]], **more}

    tokenizer = Tokenizer()
    processor = SimpleNamespace(image_processor=images, tokenizer=tokenizer, image_token_id=9, image_seq_len=2)
    arrays, tokens = FAMILIES["smolvlm"](processor, {"image_token_id": 7}).read("an image")
    return arrays, tokens, tokenizer.text


def test_an_image_in_tiles_is_each_of_them_and_the_whole() -> None:
    arrays, tokens, text = tiled(1, 2, pixel_attention_mask=SEEN)
    assert text == "<mark><row_1_col_1><7><7><mark><row_1_col_2><7><7>\n\n<mark><whole><7><7><mark>"
    assert bytes(tokens).decode() == text
    assert arrays.keys() == {"pixel_values", "pixel_attention_mask"}
    np.testing.assert_array_equal(arrays["pixel_values"], PIXELS)
    arrays, _, text = tiled(0, 0)
    assert text == "<mark><whole><7><7><mark>"
    assert arrays.keys() == {"pixel_values"}


def test_an_image_as_a_grid_has_a_token_for_each_merged_patch() -> None:
    class Images:
        merge_size = 2

        def __call__(self, images: list[str]) -> dict[str, Any]:
            assert images == ["an image"]
            return {"pixel_values": PIXELS, "image_grid_thw": np.array([[1, 4, 6]])}

    processor = SimpleNamespace(image_processor=Images(), tokenizer=Tokenizer(), image_token_id=9)
    family = FAMILIES["qwen2_vl"](processor, {})
    assert family.three_axes
    arrays, tokens = family.read("an image")
    assert tokens == [9] * 6
    assert arrays.keys() == {"pixel_values", "image_grid_thw"}
    image = ImageInput(b"", arrays, tokens)
    found = family.positions(12, [image], [np.arange(3, 9)])
    assert found.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8],
    ]


@pytest.mark.parametrize("config", [{"image_token_index": 5}, {"image_token_id": 5, "image_token_index": 6}])
def test_the_token_of_images_is_the_configs(config: dict[str, int]) -> None:
    processor = SimpleNamespace(image_processor=None, tokenizer=Tokenizer(), image_token_id=9, image_seq_len=1)
    assert FAMILIES["idefics3"](processor, config).image_token == 5
    assert FAMILIES["idefics3"](processor, {}).image_token == 9


IMAGE = ImageInput(b"digest", {}, [1, 9, 9, 2])


def processor() -> ImageProcessor:
    family: Any = SimpleNamespace(image_token=9, positions=lambda length, images, places: None)
    return ImageProcessor(family)


def test_images_stand_where_the_template_has_put_their_marks() -> None:
    tokens, images = processor().place([5, 9, 6], [IMAGE])
    assert tokens == [5, 1, 9, 9, 2, 6]
    assert [places.tolist() for places in images.places] == [[2, 3]]
    for prompt in ([5, 6], [9, 9]):
        with pytest.raises(InvalidRequestError, match=f"have 1 images, .* makes places for {prompt.count(9)}"):
            processor().place(prompt, [IMAGE])


def test_a_piece_of_a_prompt_has_the_features_of_its_images_and_one_without_images_none() -> None:
    contexts = PassContexts(encoder=ImageEncoder(nn.Module(), 9))
    tokens, images = processor().place([5, 9, 6], [IMAGE])
    rows = [Row(tokens, SamplingParams(), 0, 0, 10, frozenset()) for _ in range(2)]
    rows[0].images = images
    jobs = [Job([row], tokens, 0, 0.0) for row in rows]
    jobs[0].features[0] = mx.array([[1.0], [2.0]])
    found = contexts.of_piece(jobs[0], 1, 4)
    assert isinstance(found, RowInputs)
    assert found.replaced[0, :, 0].tolist() == [False, True, True, False]
    assert found.features[0, 1:3, 0].tolist() == [1.0, 2.0]
    assert contexts.of_piece(jobs[1], 1, 4) is None
