"""The embedded SmolLM2 loads from its wheel, predicts English well, and answers a question."""

import math

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.loader import load

TEXT = """Photosynthesis is the process by which green plants use sunlight to make their own food. The leaves take in
carbon dioxide from the air, and the roots take in water from the soil. Using the energy of the sun, the plant turns
these into sugar and oxygen. The sugar gives the plant the energy that it needs to grow, and the oxygen is released
into the air, where people and animals breathe it. Without photosynthesis, there would be very little oxygen on Earth,
and most living things could not survive."""


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load(None, name="SmolLM2-135M-Instruct", dtype="float32")


def perplexity(model: LanguageModel, text: str) -> float:
    tokens = mx.array(model.tokenizer.encode(text))[None]  # (1, T)
    logits = model.module(tokens[:, :-1]).astype(mx.float32)  # (1, T - 1, V)
    chosen = mx.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return math.exp((mx.logsumexp(logits, axis=-1) - chosen).mean().item())


def test_what_was_found_out(model: LanguageModel) -> None:
    assert model.context_length == 8192
    assert model.vocab_size == 49152
    assert model.eos_token_ids == {0, 2}
    assert model.precision == "float32"
    assert 500e6 < model.weight_bytes < 600e6
    assert model.tokenizer.has_chat_template


def test_perplexity(model: LanguageModel) -> None:
    """With q and k in llama.cpp's order it would be several times as high."""
    assert perplexity(model, TEXT.replace("\n", " ")) < 8


@pytest.mark.parametrize("text", ["In 1969, 12345 people\n\n\tsaw it.", "naïve café 日本語 🙂", "  a  b   c"])
def test_tokenizer_round_trip(model: LanguageModel, text: str) -> None:
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text


def test_greedy_answer(model: LanguageModel) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = mx.array(model.tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    answer = []
    for token, _ in generate_step(prompt, model.module, max_tokens=20):
        if token in model.eos_token_ids:
            break
        answer.append(token)
    assert model.tokenizer.decode(answer) == "The capital of France is Paris."
