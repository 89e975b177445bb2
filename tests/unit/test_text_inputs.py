"""Inputs of models that take texts: their forms, their tokens, and how they are cut. The reference is `tokenizers`."""

import random
from typing import Any

import pytest
from pydantic import ValidationError

from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.server.api.scoring.bodies import ClassifyBody, RerankBody, ScoreBody
from mlx_parallm.server.generation.text_inputs import EncodedText, TextPair, Truncation, encode_texts, numbered
from mlx_parallm.server.generation.tokenizers import TokenizerPool
from mlx_parallm.server.predictors import ServedPredictor
from mlx_parallm.types import ClassifierInfo
from tests.support.classifiers import LETTERS, word_piece

LIMIT = 24
WHOLE = Truncation()


class Client:
    """Knows its tokenizer and limits, and predicts nothing."""

    def __init__(self, **fields: Any) -> None:
        self.tokenizer = word_piece()
        self.info = ClassifierInfo(kind="classifier", labels=("a",), context_length=LIMIT, vocab_size=62, **fields)


async def encode(items: list[Any], truncation: Truncation = WHOLE, **fields: Any) -> list[EncodedText]:
    model: Any = ServedPredictor("model", Client(**fields), None)  # type: ignore[arg-type]
    return await encode_texts(model, items, TokenizerPool(), truncation, numbered("input", len(items)), offsets=True)


def inputs(value: Any) -> Any:
    return ClassifyBody.model_validate({"input": value}).input


def test_forms_of_inputs() -> None:
    assert inputs("a b") == ["a b"]
    assert inputs(["a", "b"]) == ["a", "b"], "two texts, no pair"
    assert inputs([5, 6]) == [[5, 6]]
    assert inputs([[5, 6], "a"]) == [[5, 6], "a"]
    pair = TextPair(text="a", text_pair="b")
    assert inputs([["a", "b"]]) == inputs({"text": "a", "text_pair": "b"}) == [pair]
    assert inputs([{"text": "a"}, ["a", "b"]]) == [TextPair(text="a"), pair]
    chat = inputs([[{"role": "user", "content": "hi"}]])
    assert chat[0][0].content == "hi"


@pytest.mark.parametrize(
    "value",
    [
        *([], [[]], 5, True, [True], [1.5], [["a"]], [["a", "b", "c"]], [["a", 5]], [{}], {"text": 5}, ["a"] * 2049),
        *([None], [[{"role": "nobody", "content": "hi"}]], {"text": "a", "text_pair": 7}, [[5, "a"]]),
        [{"text_pair": "a"}],
    ],
)
def test_wrong_forms(value: Any) -> None:
    with pytest.raises(ValidationError):
        inputs(value)


async def test_tokens_and_cuts_are_those_of_tokenizers() -> None:
    """Texts and pairs of any length, whole and cut, at either end."""
    chance, reference = random.Random(0), word_piece()
    for _ in range(200):
        first, second = (" ".join(chance.choices(LETTERS, k=chance.randrange(1, 40))) for _ in range(2))
        is_pair, keep, side = chance.random() < 0.6, chance.randrange(6, LIMIT + 1), chance.choice(["left", "right"])
        reference.enable_truncation(keep, direction=side, strategy="longest_first")
        wanted = reference.encode(first, second if is_pair else None)
        item = TextPair(text=first, text_pair=second) if is_pair else first
        [found] = await encode([item], Truncation(keep, side))  # type: ignore[arg-type]
        assert found.input.tokens == wanted.ids
        assert found.input.segments == (wanted.type_ids if is_pair else None)
        assert found.encoding.offsets == wanted.offsets


async def test_the_context_is_kept() -> None:
    assert len((await encode(["a " * 22]))[0].input.tokens) == LIMIT
    for long in ("a " * 23, "a " * 20_000, TextPair(text="a", text_pair="b " * 30), [5] * 25):
        with pytest.raises(ContextLengthError, match=f"is {LIMIT} tokens") as raised:
            await encode(["a", long])
        assert raised.value.param == "input.1"
        whole = await encode(["a", long], Truncation(-1))
        assert len(whole[1].input.tokens) == LIMIT
    [cut] = await encode([TextPair(text="a b", text_pair="c " * 30)], Truncation(second=4))
    assert cut.input.tokens.count(LETTERS.index("c") + 4) == 4
    assert (await encode([[5, 6, 7]], Truncation(2)))[0].input.tokens == [5, 6]
    assert (await encode([[5, 6, 7]], Truncation(2, "left")))[0].input.tokens == [6, 7]


@pytest.mark.parametrize(
    ("item", "truncation", "param"),
    [
        ("a b c", Truncation(2), "truncate_prompt_tokens"),  # [CLS] and [SEP] alone
        ("a b c", Truncation(LIMIT + 1), "truncate_prompt_tokens"),
        ([5, 62], WHOLE, "input.1"),
        ([-1], WHOLE, "input.0"),
        (inputs([[{"role": "user", "content": "hi"}]])[0], WHOLE, "input"),  # no chat template
    ],
)
async def test_what_is_refused(item: Any, truncation: Truncation, param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        await encode([item], truncation)
    assert raised.value.param == param


async def test_chats_are_rendered_without_more_special_tokens() -> None:
    chat = inputs([[{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]])[0]
    template = "{{ sep_token }}{% for m in messages %}{{ m.content }}.{% endfor %}"
    [found] = await encode([chat], chat_template=template, special_tokens={"sep_token": "[SEP]"})
    assert found.encoding.tokens == ["[SEP]", "a", "##b", ".", "c", "."]
    with pytest.raises(InvalidRequestError, match="no systems here") as raised:
        await encode([chat], chat_template="{{ raise_exception('no systems here') }}")
    assert raised.value.param == "input"


def test_pairs_of_a_score() -> None:
    one = ScoreBody.model_validate({"text_1": "q", "text_2": ["a", "b"]})
    assert [(pair.text, pair.text_pair) for pair in one.pairs] == [("q", "a"), ("q", "b")]
    each = ScoreBody.model_validate({"queries": ["p", "q"], "documents": ["a", "b"]})
    assert [(pair.text, pair.text_pair) for pair in each.pairs] == [("p", "a"), ("q", "b")]
    for first, second in (("queries", "text_2"), ("text_1", "documents"), ("data_1", "data_2")):
        named = ScoreBody.model_validate({first: "p", second: "a"})
        assert [(pair.text, pair.text_pair) for pair in named.pairs] == [("p", "a")], (first, second)
    assert not ScoreBody.model_validate({"input": "a"}).compares
    wrong: list[dict[str, Any]] = [{}, {"text_1": "a"}, {"text_1": ["a", "b"], "text_2": ["c"]}]
    wrong += [{"text_1": "a", "text_2": []}, {"text_1": "a", "text_2": "b", "input": "c"}]
    for body in wrong:
        with pytest.raises(ValidationError):
            ScoreBody.model_validate(body)


def test_documents_keep_their_fields() -> None:
    body = RerankBody.model_validate({"query": "q", "documents": ["a", {"text": "b", "url": "c"}]})
    assert [document.model_dump() for document in body.documents] == [{"text": "a"}, {"text": "b", "url": "c"}]
