"""Incremental text equals text decoded at once, whatever the tokenizer; stop strings end it where they begin."""

import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import decoders

from mlx_parallm.server.model_table import ServedModel
from mlx_parallm.text.detokenize import ByteDecoder, Prefixes, TextStream, Vocabulary, WindowDecoder
from tests.tiny import tiny_tokenizer
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


unhurried = settings(deadline=None)  # on a busy machine any example may take long


@unhurried
@given(st.text(), st.integers(1, 4))
def test_any_text_survives(text: str, size: int) -> None:
    for vocabulary in (BYTES, PIECES):
        tokens = vocabulary.tokenizer.encode(text, add_special_tokens=False)
        whole = vocabulary.tokenizer.decode(tokens, clean_up_tokenization_spaces=False, skip_special_tokens=True)
        assert "".join(streamed(TextStream(vocabulary, trim=True), tokens, size)) == whole


@unhurried
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
    assert "".join(streamed(TextStream(BYTES, visible=None), tokens)) == "a<think>b<tool>c<eos>"
    stream = TextStream(BYTES)
    stream.show_special = True
    assert "".join(streamed(stream, tokens)) == "a<think>b<tool>c<eos>"


def test_ids_beyond_the_vocabulary_say_nothing() -> None:
    known = BYTES.tokenizer.encode("ab")
    size = len(BYTES.tokenizer)
    for beyond in (size, 10_000):
        assert "".join(streamed(TextStream(BYTES), [known[0], beyond, known[1]])) == "ab"
        assert BYTES.spell(beyond) == b""
        assert BYTES.decode([known[0], beyond, known[1]]) == "ab"
    assert BYTES.spell(size - 1) == b"<tool>"


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
    if found is not None:
        assert stream.push(BYTES.tokenizer.encode("more")) == stream.finish() == ""


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


@unhurried
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


@unhurried
@given(
    st.text(alphabet="ab", max_size=20),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(0, 20),
)
def test_what_is_held_is_the_longest_beginning_of_a_string(text: str, strings: list[str], cut: int) -> None:
    beginnings = {string[:size] for string in strings for size in range(1, len(string))}
    longest = max((size for size in range(1, len(text) + 1) if text[-size:] in beginnings), default=0)
    marks = Prefixes(strings)
    assert marks.held(text) == longest
    first, second = text[:cut], text[cut:]
    assert max(marks.matched(marks.matched([0] * len(strings), first), second)) == longest


def test_the_memory_of_stop_strings_is_linear() -> None:
    """All beginnings of these would be 2 GB."""
    strings = [letter * 65_536 for letter in "abcd"]
    tracemalloc.start()
    stream = TextStream(BYTES, strings)
    out = "".join(streamed(stream, BYTES.tokenizer.encode("aab" * 2_000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert out == "aab" * 2_000
    assert peak < 20_000_000


def test_which_tokenizers_have_bytes_per_token() -> None:
    """A decoder that is not known in every step is left to the tokenizer itself."""
    for vocabulary, strips in ((Vocabulary(byte_level()), False), (Vocabulary(sentence_piece()), True)):
        assert len(vocabulary.pieces or []) == len(vocabulary.tokenizer)
        assert vocabulary.strips_first_space is strips
    unstripped = Vocabulary(sentence_piece(strip=False))
    assert (unstripped.pieces is not None, unstripped.strips_first_space) == (True, False)
    assert Vocabulary(word_piece()).pieces is None
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    for others in (steps[1:], [*steps, decoders.Replace("x", "y")], [steps[0], decoders.Fuse(), steps[1]]):
        changed = sentence_piece()
        changed.backend_tokenizer.decoder = decoders.Sequence(others)
        assert Vocabulary(changed).pieces is None
    bare = byte_level()
    bare.backend_tokenizer.decoder = None
    assert Vocabulary(bare).pieces is None


def test_every_byte_is_spelled_as_itself() -> None:
    letters, pieces = Vocabulary(byte_level()), Vocabulary(sentence_piece())
    alphabet = [letters.spell(token) for token in range(256)]
    assert sorted(alphabet) == [bytes([byte]) for byte in range(256)]
    fallback = [pieces.spell(3 + byte) for byte in range(256)]
    assert fallback == [bytes([byte]) for byte in range(256)]


def test_added_and_special_tokens() -> None:
    vocabulary = Vocabulary(byte_level(["<think>"], ["<tool>"]))
    think, tool, end = vocabulary.tokenizer.convert_tokens_to_ids(["<think>", "<tool>", "<eos>"])
    assert vocabulary.special == {think, end}
    assert vocabulary.added == {think, tool, end}
    assert Vocabulary(sentence_piece()).special == {0, 1}


def test_a_tokenizer_in_python_alone_has_no_pieces_and_no_added_tokens() -> None:
    class Slow:
        all_special_ids = [3]

        def __len__(self) -> int:
            return 4

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return ["x"] * len(ids)

    vocabulary = Vocabulary(Slow())
    assert (vocabulary.pieces, vocabulary.added, vocabulary.special) == (None, frozenset(), {3})


def test_the_tokenizer_decodes_a_whole_with_and_without_special_tokens() -> None:
    tokens = BYTES.tokenizer.encode("a<think>b ,c")
    assert BYTES.decode(tokens) == "a<think>b ,c"
    assert BYTES.decode(tokens, skip_special=True) == "ab ,c"


def test_bytes_are_flushed_once_and_a_space_is_trimmed_once() -> None:
    decoder = ByteDecoder([b"\xc3", b" a", b" "], trim=True)
    assert (decoder.push([1]), decoder.push([1]), decoder.push([0])) == ("a", " a", "")
    assert (decoder.flush(), decoder.flush()) == ("�", "")
    late = ByteDecoder([b"\xc3", b"\xa9", b" "], trim=True)
    assert (late.push([0]), late.push([1]), late.push([2])) == ("", "é", " "), "nothing was written yet, then something"


class Spelled:
    """A vocabulary whose tokens are bytes, and that decodes a whole at once."""

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, tokens: list[int], *, skip_special: bool = False) -> str:
        self.longest = max(self.longest, len(tokens))
        return bytes(tokens).decode("utf-8", "replace")


@pytest.mark.parametrize("tail", [b"", b"before"])
def test_a_window_holds_a_few_tokens_and_half_a_character_waits(tail: bytes) -> None:
    vocabulary = Spelled()
    decoder = WindowDecoder(vocabulary, tail)  # type: ignore[arg-type]
    text = "aé👋b" * 60
    parts = [decoder.push([byte]) for byte in text.encode()]
    assert "".join(parts) == text
    assert parts[:4] == ["a", "", "é", ""]
    assert vocabulary.longest < 80, "the window moves on"
    assert decoder.flush() == ""
    assert decoder.push(list("é".encode()[:1])) == ""
    assert (decoder.flush(), decoder.flush()) == ("�", "")


def test_a_window_takes_several_tokens_at_once_and_none() -> None:
    decoder = WindowDecoder(Spelled(), b"")  # type: ignore[arg-type]
    assert [decoder.push(list(part)) for part in (b"ab", b"", b"c")] == ["ab", "", "c"]


def test_a_window_sees_the_last_tokens_of_the_prompt_unless_a_message_begins() -> None:
    window = Vocabulary(word_piece())
    a, tests, ing = window.tokenizer.convert_tokens_to_ids(["a", "test", "##ing"])
    tail = [a] * 7 + [tests]
    assert "".join(streamed(TextStream(window, prompt_tail=tail), [ing])) == "ing"
    assert "".join(streamed(TextStream(window, prompt_tail=tail, trim=True), [ing])) == "##ing"


def test_a_stream_counts_the_characters_that_it_has_decoded() -> None:
    stream = TextStream(BYTES, ["STOP"])
    assert (stream.decoded, stream.has_stops, TextStream(BYTES).has_stops) == (0, True, False)
    for text, decoded, withholds in (("ab", 2, False), ("cST", 5, True), ("x", 6, False)):
        stream.push(BYTES.tokenizer.encode(text))
        assert (stream.decoded, stream.withholds) == (decoded, withholds)
    stream.push(BYTES.tokenizer.encode("é")[:1])
    assert stream.finish() == "�"
    assert stream.decoded == 7


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, ""), (1, ""), (2, "."), (3, "..")])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_stop_string_counts_from_its_token_on(min_tokens: int, expected: str, size: int) -> None:
    tokens = BYTES.tokenizer.encode("....")
    assert "".join(streamed(TextStream(BYTES, ["."], min_tokens=min_tokens), tokens, size)) == expected


def test_what_was_withheld_comes_out_once_at_the_end() -> None:
    stream = TextStream(BYTES, ["STOP"])
    assert stream.push(BYTES.tokenizer.encode("a STO")) == "a "
    assert (stream.finish(), stream.finish()) == ("STO", "")
    assert not stream.withholds


def test_of_two_stops_at_one_place_the_first_given_counts() -> None:
    assert Prefixes(["ab", "abc"]).find("xabc") == (1, "ab")
    assert Prefixes(["abc", "ab"]).find("xabc") == (1, "abc")
    assert Prefixes([]).held("x") == 0


def test_special_tokens_that_carry_no_meaning_are_no_marks() -> None:
    plain = tiny_tokenizer()._tokenizer
    plain.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|idle|>"]})
    tokenizer = TokenizerWrapper(plain)
    model: Any = SimpleNamespace(source="tiny", precision="float32")
    served = ServedModel("tiny", SimpleNamespace(tokenizer=tokenizer, model=model))  # type: ignore[arg-type]
    think, idle, end = tokenizer.convert_tokens_to_ids(["<think>", "<|idle|>", "<|im_end|>"])
    assert {think, idle, end} <= served.vocabulary.special
    assert think in served.marks
    assert not served.marks & {idle, end}
