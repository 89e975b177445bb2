"""From tokens to text, one choice at a time: detokenising, stop strings, and what each token spells.

A `Vocabulary` is made once per model. The server and `LLM` give each choice a `TextStream` and push the
tokens of every delta into it, on their own side of the engine: nothing here touches MLX. A push costs a
table look-up per token; no text is ever decoded twice.
"""

import codecs
import json
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Protocol

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.sampling_params import SamplingParams


class Vocabulary:
    """What each token id spells, as bytes where the tokenizer's decoder works byte by byte."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self.tokenizer = tokenizer
        self.special = _special_ids(tokenizer)
        self.added = frozenset(getattr(tokenizer, "added_tokens_decoder", {}))  # those and others outside the BPE
        decoder = _decoder_config(tokenizer)
        self.strips_first_space = _strips_first_space(decoder)
        self.pieces = _pieces(tokenizer, decoder)

    def spell(self, token: int) -> bytes:
        """The token's bytes; several tokens may share one character."""
        if self.pieces is not None:
            return self.pieces[token] if token < len(self.pieces) else b""
        return str(self.tokenizer.decode([token])).encode()

    def text(self, token: int) -> str:
        return self.spell(token).decode("utf-8", "replace")

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of a whole sequence, as the tokenizer itself decodes it."""
        known = [token for token in tokens if token < len(self.tokenizer)]
        text = self.tokenizer.decode(known, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return str(text)


def _special_ids(tokenizer: TokenizerWrapper) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {token for token, entry in added.items() if entry.special}


def _decoder_config(tokenizer: TokenizerWrapper) -> dict[str, object]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return {}
    config: dict[str, object] = json.loads(backend.decoder.__getstate__())
    return config


def _steps(decoder: dict[str, object]) -> list[str]:
    steps = decoder.get("decoders")
    return [step["type"] for step in steps] if isinstance(steps, list) else [str(decoder.get("type"))]


def _strips_first_space(decoder: dict[str, object]) -> bool:
    return _steps(decoder) == ["Replace", "ByteFallback", "Fuse", "Strip"]


def _pieces(tokenizer: TokenizerWrapper, decoder: dict[str, object]) -> list[bytes] | None:
    """Bytes per token id, or None where a token's text depends on its neighbours in other ways."""
    tokens: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    if _steps(decoder) == ["ByteLevel"]:
        alphabet = _byte_alphabet()
        return [_byte_level(token or "", alphabet) for token in tokens]
    if _steps(decoder)[:3] == ["Replace", "ByteFallback", "Fuse"] and len(_steps(decoder)) <= 4:
        return [_sentence_piece(token or "") for token in tokens]
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: a printable byte stands for itself, the n-th other byte is the character 256 + n."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _byte_level(token: str, alphabet: dict[str, int]) -> bytes:
    if all(char in alphabet for char in token):
        return bytes(alphabet[char] for char in token)
    return token.encode()  # an added token is written as it reads


def _sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


class Decoder(Protocol):
    """Turns tokens into the text they complete; an unfinished character waits for its last byte."""

    def push(self, tokens: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class ByteDecoder:
    """The decoder for vocabularies with bytes per token: joins them and decodes what is complete."""

    __slots__ = ("_pending", "_pieces", "_trim")

    def __init__(self, pieces: list[bytes], trim: bool) -> None:
        self._pieces = pieces
        self._trim = trim
        self._pending = b""

    def push(self, tokens: Sequence[int]) -> str:
        pieces = self._pieces
        size = len(self._pieces)
        data = self._pending + b"".join([pieces[token] for token in tokens if token < size])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._trimmed(text) if self._trim else text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def _trimmed(self, text: str) -> str:
        self._trim = not text
        return text.removeprefix(" ")


class WindowDecoder:
    """The decoder for any other tokenizer: decodes a short window of recent tokens and keeps what is new in it."""

    __slots__ = ("_read", "_start", "_tokens", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, prompt_tail: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._tokens = list(prompt_tail)
        self._start = 0
        self._read = len(self._tokens)

    def push(self, tokens: Sequence[int]) -> str:
        self._tokens.extend(tokens)
        before = self._decode(self._read)
        after = self._decode(len(self._tokens))
        if len(after) <= len(before) or after.endswith("�"):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        if self._start > 64:
            del self._tokens[: self._start]
            self._start, self._read = 0, self._read - self._start
        return after[len(before) :]

    def flush(self) -> str:
        text = self._decode(len(self._tokens))[len(self._decode(self._read)) :]
        self._read = len(self._tokens)
        return text

    def _decode(self, end: int) -> str:
        return self._vocabulary.decode(self._tokens[self._start : end])


class Prefixes:
    """Knows how much of a text's end could be the start of one of some strings.

    Each string has its failure function (Knuth, Morris and Pratt): memory and time are linear in what is looked for and
    in what is looked through.
    """

    __slots__ = ("_failures", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self._failures = [_failure(string) for string in self.strings]

    def find(self, text: str) -> tuple[int, str] | None:
        """The first of the strings in the text; of two that begin at one place, the first given."""
        best: tuple[int, str] | None = None
        for string in self.strings:
            at = text.find(string)
            if at >= 0 and (best is None or at < best[0]):
                best = at, string
        return best

    def held(self, text: str) -> int:
        """Returns how many characters at the end must wait, since one of the strings may have begun there."""
        return max(self.matched([0] * len(self.strings), text), default=0)

    def matched(self, before: Sequence[int], text: str) -> list[int]:
        """Returns how many characters of each string the end of the text is, where the text before it ended with
        `before`."""
        columns = zip(self.strings, self._failures, before, strict=True)
        return [_matched(string, failure, size, text) for string, failure, size in columns]


def _failure(string: str) -> list[int]:
    """Returns, for each prefix of the string, the length of the longest shorter prefix that it ends with."""
    failure = [0] * len(string)
    size = 0
    for place in range(1, len(string)):
        while size and string[place] != string[size]:
            size = failure[size - 1]
        size += string[place] == string[size]
        failure[place] = size
    return failure


def _matched(string: str, failure: list[int], size: int, text: str) -> int:
    place = 0 if size else max(len(text) - len(string) + 1, 0)
    while place < len(text):
        if not size:  # on to where it may begin
            place = text.find(string[0], place)
            if place < 0:
                return 0
        while size and text[place] != string[size]:
            size = failure[size - 1]
        size += text[place] == string[size]
        if size == len(string):
            size = failure[-1]
        place += 1
    return size


@lru_cache(maxsize=64)
def _stop_prefixes(strings: tuple[str, ...]) -> Prefixes:
    """Those of a request's stop strings, which all of its choices share."""
    return Prefixes(strings)


class TextStream:
    """The text of one choice as its tokens arrive. After `stopped`, nothing more comes out of it."""

    __slots__ = (
        "_count", "_decoder", "_hidden", "_include_stop", "_matched", "_min_tokens", "_stops", "_withheld",
        "decoded", "show_special", "stopped",
    )  # fmt: skip

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,  # a stop string counts only after so many tokens
        visible: Collection[int] | None = (),  # special tokens that are shown; None: all of them
        trim: bool = False,  # the text begins a message, so a SentencePiece space at its start is none
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._decoder: Decoder
        if vocabulary.pieces is not None:
            self._decoder = ByteDecoder(vocabulary.pieces, trim and vocabulary.strips_first_space)
        else:
            self._decoder = WindowDecoder(vocabulary, () if trim else prompt_tail[-8:])
        self._hidden = frozenset() if visible is None else vocabulary.special - frozenset(visible)
        self._stops = _stop_prefixes(tuple(stop)) if stop else None
        self._matched = [0] * len(stop)  # characters of each stop string that the text ends with
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._count = 0
        self._withheld = ""
        self.show_special = False
        self.decoded = 0  # characters so far, those withheld too
        self.stopped: str | None = None  # the stop string that was found

    @classmethod
    def of(
        cls,
        vocabulary: Vocabulary,
        sampling: SamplingParams,
        prompt: Sequence[int],
        *,
        chat: bool,
        include_stop: bool = False,
        skip_special: bool = True,
        visible: Collection[int] = (),
    ) -> "TextStream":
        """Makes the stream of a completion of `prompt`; `chat`: of the next message of a conversation."""
        return cls(
            vocabulary,
            sampling.stop,
            include_stop=include_stop,
            min_tokens=sampling.min_tokens,
            visible=visible if skip_special else None,
            trim=chat,
            prompt_tail=prompt,
        )

    @property
    def has_stops(self) -> bool:
        return self._stops is not None

    @property
    def withholds(self) -> bool:
        return bool(self._withheld)

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete, up to a stop string, less what may be the start of one."""
        if self.stopped is not None:
            return ""
        if self._stops is not None and len(tokens) > 1 and self._count < self._min_tokens:
            return "".join(self.push([token]) for token in tokens)
        self._count += len(tokens)
        if self._hidden and not self.show_special:
            tokens = [token for token in tokens if token not in self._hidden]
        text = self._decoder.push(tokens)
        self.decoded += len(text)
        return self._until_stop(text) if self._stops is not None else text

    def finish(self) -> str:
        """Returns what was withheld, once no token can follow."""
        if self.stopped is not None:
            return ""
        text = self._decoder.flush()
        self.decoded += len(text)
        if self._stops is not None:
            text = self._until_stop(text)
        if self.stopped is None:
            text = text + self._withheld
            self._withheld = ""
        return text

    def _until_stop(self, text: str) -> str:
        assert self._stops is not None
        new = text
        text = self._withheld + text
        self._withheld = ""
        if self._count < self._min_tokens:
            return text
        if found := self._stops.find(text):
            at, self.stopped = found
            return text[: at + len(self.stopped) * self._include_stop]
        self._matched = self._stops.matched(self._matched, new)
        if held := max(self._matched):
            text, self._withheld = text[:-held], text[-held:]
        return text
