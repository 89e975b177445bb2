"""Models that read images answer as mlx-vlm's own generate does: alone, in mixed batches, cached, with an adapter."""

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_vlm")

from mlx_vlm import load as load_peer
from mlx_vlm import stream_generate
from PIL import Image

from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.lora.adapter import Adapter, Part
from mlx_parallm.models.loader import load
from mlx_parallm.types import PromptImages
from tests.engine.harness import Driver, Pending, driver_of
from tests.engine.test_recovery import Saboteur, sabotage
from tests.tiny_vision import picture, tiny_vision

# As on a GPU: steps overlap, are traced, and prompts are padded to round shapes.
GPU = DeviceProfile(2, True, 64, max_padding=0.5, round_prompts=True, match_step=16, min_match=16, pass_tokens=48)
PLAIN = ("smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
KINDS = [*((kind, None) for kind in PLAIN), *((kind, GPU) for kind in ("smolvlm", "qwen2_5_vl", "qwen3_vl"))]
COUNT = 10


class Reader:
    """A model in an engine, and mlx-vlm's own over the same weights."""

    def __init__(self, running: Driver, folder: Path) -> None:
        self.running = running
        self.folder = folder
        self.model = running.engine.model
        self.peer, self.processor = load_peer(str(folder))
        self._expected: dict[Any, list[int]] = {}

    def text(self, *parts: str | Image.Image) -> str:
        """A conversation of one message, as the model's template renders it."""
        content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
        messages = [{"role": "user", "content": content}]
        rendered: str = self.model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return rendered

    def prompt(self, *parts: str | Image.Image) -> tuple[list[int], PromptImages | None]:
        tokens = self.model.tokenizer.encode(self.text(*parts), add_special_tokens=False)
        images = [np.asarray(part) for part in parts if isinstance(part, Image.Image)]
        if not images:
            return tokens, None
        assert self.model.vision is not None
        processor = self.model.vision.processor
        return processor.place(tokens, [processor.read(image) for image in images])

    def submit(self, *parts: str | Image.Image, **options: Any) -> Pending:
        tokens, images = self.prompt(*parts)
        options = {"max_tokens": COUNT, "ignore_eos": True, "images": images} | options
        return self.running.submit(tokens, **options)[1]

    def ask(self, *parts: str | Image.Image, **options: Any) -> list[int]:
        return self.submit(*parts, **options).wait()[0].tokens

    def adapted(self, adapter: Adapter) -> "Reader":
        """The same with an adapter's weights added to mlx-vlm's."""
        other = copy.copy(self)
        other.peer, other._expected = load_peer(str(self.folder))[0], {}
        layers = dict(other.peer.named_modules())
        for path, part in adapter.parts.items():
            layers[path].weight = layers[path].weight + mx.array(part.b @ part.a)
        return other

    def expected(self, *parts: str | Image.Image, count: int = COUNT) -> list[int]:
        """By mlx-vlm's stream_generate, which knows no ignore_eos: nothing ends its answers here."""
        key = (*((part if isinstance(part, str) else part.tobytes()) for part in parts), count)
        if key not in self._expected:
            images = [part for part in parts if isinstance(part, Image.Image)]
            self.processor.tokenizer.stopping_criteria.eos_token_ids = []
            found = stream_generate(
                self.peer, self.processor, self.text(*parts), image=images or None, max_tokens=count, temperature=0.0
            )
            self._expected[key] = [response.token for response in found][:count]
        return self._expected[key]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}{'-gpu' if kind[1] else ''}")
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    kind, profile = request.param
    folder = tiny_vision(kind, tmp_path_factory.mktemp("vision") / kind)
    with driver_of(
        lambda: load(str(folder), name=kind), profile=profile, max_batch_size=6, prefill_step_size=32
    ) as running:
        yield Reader(running, folder)
        running.settle()


WIDE, TALL, SMALL = picture(60, 40), picture(30, 70, seed=1), picture(16, 16, seed=2)


def test_an_image_alone_and_again(reader: Reader) -> None:
    expected = reader.expected(WIDE, "what is in it?")
    assert reader.ask(WIDE, "what is in it?") == expected
    assert reader.expected(TALL, "what is in it?") != expected, "the image makes no difference"
    second = reader.submit(WIDE, "what is in it?")
    assert second.wait()[0].tokens == expected
    assert second.answers[0].deltas[0].cached_tokens > 16, "the second time, the image is cached"


def test_several_images_in_the_order_of_the_text(reader: Reader) -> None:
    orders = (("first", WIDE, "then", TALL, "and", SMALL, "?"), (TALL, WIDE), (SMALL, SMALL, "twice"), ("x", SMALL))
    for parts in orders:
        assert reader.ask(*parts) == reader.expected(*parts)
    assert reader.expected(TALL, WIDE) != reader.expected(WIDE, TALL)


def test_images_and_texts_that_join_and_leave_one_batch(reader: Reader) -> None:
    asked: list[tuple[tuple[Any, ...], int]] = [
        ((WIDE, "what is in it?"), 24),
        (("no image at all",), 30),
        ((TALL, "and", SMALL, "in these?"), 6),
        (("some text that is a little longer than the others, so that it takes several pieces",), 12),
        ((SMALL, "a small one"), 17),
        (("a",), 9),
        (("first", WIDE, "then", TALL), 14),
    ]
    under_way = []
    for number, (parts, count) in enumerate(asked):
        under_way.append(reader.submit(*parts, max_tokens=count, stream=bool(number % 2)))
        if number % 3 == 2:
            under_way[0].wait_for_tokens(number)
    answers = [pending.wait()[0].tokens for pending in under_way]
    reader.running.settle()
    for (parts, count), answer in zip(asked, answers, strict=True):
        assert answer == reader.expected(*parts, count=count), parts


def test_one_pixel_is_no_cache_hit_and_the_same_image_is_encoded_once(reader: Reader) -> None:
    encoder = reader.model.vision and reader.model.vision.encoder
    assert encoder is not None
    image = picture(50, 50, seed=3)
    other = image.copy()
    other.putpixel((49, 49), (1, 2, 3))
    begun = encoder.encoded
    first = reader.ask(image, "one pixel")
    assert encoder.encoded == begun + 1
    changed = reader.submit(other, "one pixel")
    assert changed.wait()[0].tokens == reader.expected(other, "one pixel")
    assert changed.answers[0].deltas[0].cached_tokens < 16, "the other image's keys and values were used"
    assert encoder.encoded == begun + 2
    assert reader.ask("other words before", image) == reader.expected("other words before", image)
    assert reader.ask(image, "one pixel") == first == reader.expected(image, "one pixel")
    assert encoder.encoded == begun + 2, "its features are kept, and its prompt too"
    reader.running.engine.flush_cache()
    assert reader.ask(image, "one pixel") == first
    assert encoder.encoded == begun + 3


def test_choices_of_one_prompt_and_its_log_probabilities(reader: Reader) -> None:
    answers = reader.submit(WIDE, "twice", n=2, prompt_logprobs=0).wait()
    assert [answer.tokens for answer in answers] == [reader.expected(WIDE, "twice")] * 2
    scored = answers[0].deltas[0].prompt_logprobs
    assert scored is not None
    assert len(scored) == len(reader.prompt(WIDE, "twice")[0])


def adapter_for(reader: Reader) -> Adapter:
    """On every linear layer of the language model's attention and MLP."""
    draw = np.random.default_rng(5)
    parts = {}
    for path, target in reader.running.engine.layout.targets.items():
        if target.kind == "linear" and ".layers." in path:
            a, b = (draw.normal(size=shape) for shape in ((4, target.size), (target.out_features, 4)))
            parts[path] = Part((0.2 * a).astype(np.float32), (0.2 * b).astype(np.float32))
    return Adapter(parts)


def test_an_adapter_on_the_language_model(reader: Reader) -> None:
    adapter = adapter_for(reader)
    assert not any("vision" in path for path in reader.running.engine.layout.targets)
    reader.running.engine.adapters.publish("tuned", adapter, "test")
    tuned = reader.adapted(adapter)
    asked: list[tuple[Any, ...]] = [(WIDE, "adapted?"), ("no image, adapted?",), ("one", SMALL, "two", TALL)]
    for _ in range(2):  # the second time from the prefix cache
        under_way = [reader.submit(*parts, adapter=name) for name in ("tuned", None) for parts in asked]
        answers = [pending.wait()[0].tokens for pending in under_way]
        reader.running.settle()
        assert answers[:3] == [tuned.expected(*parts) for parts in asked]
        assert answers[3:] == [reader.expected(*parts) for parts in asked]
    assert answers[0] != answers[3]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["smolvlm", "qwen2_5_vl", "qwen3_vl"])
def test_rows_that_lose_their_place_and_a_fault_in_between(kind: str, tmp_path: Path) -> None:
    folder, saboteur = tiny_vision(kind, tmp_path / kind), Saboteur()
    room = 2 * 512 * 2 * 2 * 2 * 16 * 4  # two rows of 512 tokens: 2 layers, keys and values, 2 heads of 16, float32
    load_it = partial(load, str(folder), name=kind)
    with driver_of(lambda: sabotage(load_it(), saboteur), max_batch_size=3, kv_cache_memory=room) as running:
        reader = Reader(running, folder)
        asked: list[tuple[Any, ...]] = [(WIDE, "long"), (TALL, "long"), ("a text",)]
        under_way = [reader.submit(*parts, max_tokens=300, stream=True) for parts in asked]
        under_way[0].wait_for_tokens(20)
        saboteur.faults = 1
        answers = [pending.wait()[0].tokens for pending in under_way]
        running.settle()
        assert running.engine.metrics.preemptions > 0
        assert running.engine.metrics.faults == 1
        for parts, answer in zip(asked, answers, strict=True):
            assert answer == reader.expected(*parts, count=300)
