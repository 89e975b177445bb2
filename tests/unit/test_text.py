"""Incremental text equals text decoded at once, whatever the tokenizer; stop strings end it where they begin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.engine.text import Prefixes, TextStream, Vocabulary
from tests.unit.vocabularies import byte_level, sentence_piece, word_piece

TEXT = "Héllo wörld 👩‍👩‍👧‍👦 日本語\n\n  code\tend "
BYTES = Vocabulary(byte_level(["<think>"], ["<tool>"]))
PIECES = Vocabulary(sentence_piece())


def streamed(stream: TextStream, tokens: list[int], size: int = 1) -> list[str]:
    parts = [stream.push(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    return [*parts, stream.finish()]


@pytest.mark.parametrize("tokenizer", [byte_level(), sentence_piece(), sentence_piece(strip=False), word_piece()])
@pytest.mark.parametrize("size", [1, 3])
def test_pieces_add_up_to_the_whole(tokenizer: TokenizerWrapper, size: int) -> None:
    vocabulary = Vocabulary(tokenizer)
    for text in (TEXT, "hello world, a test.", ""):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert "".join(streamed(TextStream(vocabulary, trim=True), tokens, size)) == whole


@given(st.text(), st.integers(1, 4))
def test_any_text_survives(text: str, size: int) -> None:
    for vocabulary in (BYTES, PIECES):
        tokens = vocabulary.tokenizer.encode(text, add_special_tokens=False)
        whole = vocabulary.tokenizer.decode(tokens, clean_up_tokenization_spaces=False, skip_special_tokens=True)
        assert "".join(streamed(TextStream(vocabulary, trim=True), tokens, size)) == whole


@given(st.lists(st.integers(0, 255)))
def test_any_bytes_decode_like_the_tokenizer(tokens: list[int]) -> None:
    parts = streamed(TextStream(BYTES), tokens)
    assert "".join(parts) == BYTES.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def test_half_a_character_waits() -> None:
    tokens = BYTES.tokenizer.encode("é👋")
    parts = streamed(TextStream(BYTES), tokens)
    assert parts == ["", "é", "", "", "", "👋", ""]
    assert "".join(streamed(TextStream(BYTES), tokens[:-1])) == "é�"


def test_space_after_a_prompt_is_kept() -> None:
    tokens = PIECES.tokenizer.encode("hello world", add_special_tokens=False)
    assert "".join(streamed(TextStream(PIECES), tokens)) == " hello world"
    assert "".join(streamed(TextStream(PIECES, trim=True), tokens)) == "hello world"
    window = Vocabulary(word_piece())
    tail = window.tokenizer.encode("a test", add_special_tokens=False)
    tokens = window.tokenizer.encode("hello", add_special_tokens=False)
    assert "".join(streamed(TextStream(window, prompt_tail=tail), tokens)) == " hello"


def test_special_tokens_are_skipped_unless_shown() -> None:
    tokenizer = BYTES.tokenizer
    tokens = tokenizer.encode("a<think>b<tool>c<eos>")
    think = tokenizer.convert_tokens_to_ids("<think>")
    assert "".join(streamed(TextStream(BYTES), tokens)) == "ab<tool>c"
    assert "".join(streamed(TextStream(BYTES, visible=[think]), tokens)) == "a<think>b<tool>c"
    assert "".join(streamed(TextStream(BYTES, skip_special=False), tokens)) == "a<think>b<tool>c<eos>"
    stream = TextStream(BYTES)
    stream.show_special = True
    assert "".join(streamed(stream, tokens)) == "a<think>b<tool>c<eos>"


def test_ids_beyond_the_vocabulary_say_nothing() -> None:
    assert "".join(streamed(TextStream(BYTES), [65, 10_000, 66])) != ""
    assert BYTES.spell(10_000) == b""
    assert BYTES.decode([10_000]) == ""


def test_what_a_token_spells() -> None:
    first, second = BYTES.tokenizer.encode("é")
    assert (BYTES.spell(first), BYTES.spell(second)) == (b"\xc3", b"\xa9")
    assert BYTES.text(first) == "�"
    assert PIECES.text(PIECES.tokenizer.convert_tokens_to_ids("▁the")) == " the"
    assert Vocabulary(word_piece()).text(2) == "hello"


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("stop", "text", "expected", "found"),
    [
        (["STOP"], "go on STOP now", "go on ", "STOP"),
        (["STOP"], "go STO STOPSTOP", "go STO ", "STOP"),
        (["\n\n", "User:"], "hi\n\nUser: no", "hi", "\n\n"),
        (["aab"], "aaaab", "aa", "aab"),
        (["é"], "caféé", "caf", "é"),
        (["missing"], "all of missin", "all of missin", None),
        (["x"], "", "", None),
    ],
)
def test_stop_strings(stop: list[str], text: str, expected: str, found: str | None, size: int) -> None:
    tokens = BYTES.tokenizer.encode(text)
    stream = TextStream(BYTES, stop)
    assert "".join(streamed(stream, tokens, size)) == expected
    assert stream.stopped == found
    assert stream.push(BYTES.tokenizer.encode("more")) == "" or found is None


def test_text_is_withheld_only_while_a_stop_could_be_starting() -> None:
    stream = TextStream(BYTES, ["<end>"])
    parts = [stream.push([token]) for token in BYTES.tokenizer.encode("a<b<en<x")]
    assert parts == ["a", "", "<b", "", "", "", "<en", "<x"]
    assert not stream.withholds


def test_stop_may_be_included_and_must_come_late_enough() -> None:
    tokens = BYTES.tokenizer.encode("ab.cd.ef")
    assert "".join(streamed(TextStream(BYTES, ["."], include_stop=True), tokens)) == "ab."
    for size in (1, 8):
        assert "".join(streamed(TextStream(BYTES, ["."], min_tokens=4), tokens, size)) == "ab.cd"


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_a_stop_string_is_never_let_through(text: str, stop: list[str]) -> None:
    out = "".join(streamed(TextStream(BYTES, stop), BYTES.tokenizer.encode(text)))
    assert text.startswith(out)
    assert not any(string in out for string in stop)
    assert out == text or any(string in text for string in stop)


def test_prefixes() -> None:
    marks = Prefixes(["<tool>", "</think>"])
    assert marks.find("a</think><tool>") == (1, "</think>")
    assert marks.find("nothing") is None
    assert [marks.held(text) for text in ("a<", "a</th", "<tool", "b", "")] == [1, 4, 5, 0, 0]
