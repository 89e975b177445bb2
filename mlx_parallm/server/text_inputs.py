"""Texts for models that predict: what a body may hold, and the tokens that a model takes, made off the event loop.

An input is a text, token ids, a pair of texts for cross-encoders, or a conversation. Routes give their body a field of
`TextInputs`, and hand it to `encode_texts` with the model that they found.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.server.api.openai.messages import ChatMessage, conversation
from mlx_parallm.server.predictors import ServedPredictor
from mlx_parallm.server.schema import MAX_TOKENS, Body
from mlx_parallm.server.tokenizers import LONG_TEXT, TokenizerPool
from mlx_parallm.text.templates import render_chat
from mlx_parallm.types import INT64, TextTokens
from mlx_parallm.validation import check_ids

MAX_INPUTS = 2048
WHOLE_CONTEXT = -1
CHECKED_CHARACTERS = 16  # for each token of the context: a text of fewer is simply tokenised

Side = Literal["left", "right"]


class TextPair(Body):
    """Two texts for a cross-encoder, or one."""

    text: str
    text_pair: str | None = None


def _form(value: Any) -> str | None:
    """Which kind of input it is. A list of two texts is a pair only inside a list of inputs."""
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, dict | TextPair):
        return "<pair>"
    if not isinstance(value, list) or not value:
        return None
    if set(map(type, value)) == {int}:
        return "<tokens>"
    if len(value) == 2 and all(isinstance(part, str) for part in value):
        return "<pair>"
    return "<chat>" if all(isinstance(part, dict | ChatMessage) for part in value) else None


def _as_pair(value: Any) -> Any:
    return {"text": value[0], "text_pair": value[1]} if isinstance(value, list) else value


def _as_list(value: Any) -> Any:
    """One input is a list of one."""
    if isinstance(value, str | dict) or (isinstance(value, list) and value and set(map(type, value)) == {int}):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("input", "Expected a text, token ids, a pair of texts, or a list of such inputs")
    return value


TextInput = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[int], Field(max_length=MAX_TOKENS), Tag("<tokens>")]
    | Annotated[TextPair, BeforeValidator(_as_pair), Tag("<pair>")]
    | Annotated[list[ChatMessage], Tag("<chat>")],
    Discriminator(
        _form,
        custom_error_type="input",
        custom_error_message=(
            "Expected a text, token ids, a pair of texts ([a, b] or {text, text_pair}), or a conversation's messages"
        ),
    ),
]
TextInputs = Annotated[list[TextInput], BeforeValidator(_as_list), Field(min_length=1, max_length=MAX_INPUTS)]


class TruncationBody(Body):
    """How routes that take texts cut those that are too long."""

    truncate_prompt_tokens: int | None = Field(
        None,
        ge=WHOLE_CONTEXT,
        le=INT64,
        description="Keep so many tokens of an input; -1: what the model takes. Default: refuse longer ones",
    )
    truncation_side: Side = Field("right", description="Which end of a long input is cut off")

    def truncation(self, second: int | None = None) -> "Truncation":
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens is 0, which leaves nothing; it is at least 1, or -1 for the model's limit",
                param="truncate_prompt_tokens",
            )
        return Truncation(self.truncate_prompt_tokens, self.truncation_side, second)


@dataclass(frozen=True, slots=True)
class Truncation:
    tokens: int | None = None  # None: none; -1: the model's limit
    side: Side = "right"  # that is cut off
    second: int | None = None  # most tokens of a pair's second text, which is cut at its end


@dataclass(frozen=True, slots=True)
class EncodedText:
    """An input as the model takes it, and where its tokens stand in the text."""

    input: TextTokens
    text: str | None = None  # None: it came as token ids
    encoding: Any = None  # a `tokenizers.Encoding`


Name = Callable[[int], str]  # of an input in the body, for errors


async def encode_texts(
    model: ServedPredictor, items: Sequence[Any], pool: TokenizerPool, truncation: Truncation, name: Name
) -> list[EncodedText]:
    """The tokens of each input. ContextLengthError for one that is too long, InvalidRequestError for what the model
    can't take; both name it."""

    def work() -> list[EncodedText]:
        return _Encoder(model, truncation, name).encode(items)

    return work() if sum(map(_size, items)) < LONG_TEXT else await pool.run(work)


def _size(item: Any) -> int:
    if isinstance(item, str):
        return len(item)
    if isinstance(item, TextPair):
        return len(item.text) + len(item.text_pair or "")
    return LONG_TEXT // 8 * len(item) if item and isinstance(item[0], ChatMessage) else 0


class _Encoder:
    """One call's inputs for one model."""

    def __init__(self, model: ServedPredictor, truncation: Truncation, name: Name) -> None:
        self._info = model.info
        self._tokenizer = model.tokenizer
        self._truncation = truncation
        self._name = name
        limit, asked = model.info.context_length or MAX_TOKENS, truncation.tokens
        if asked is not None and asked > limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens: {asked} is more than the {limit} tokens that the model takes",
                param="truncate_prompt_tokens",
            )
        self._limit = limit if asked is None or asked == WHOLE_CONTEXT else asked

    def encode(self, items: Sequence[Any]) -> list[EncodedText]:
        texts: list[tuple[str, str | None, bool]] = []  # a text, its pair, and whether special tokens belong to it
        places: list[int] = []
        found: dict[int, EncodedText] = {}
        for place, item in enumerate(items):
            if isinstance(item, list) and isinstance(item[0], int):
                found[place] = EncodedText(TextTokens(self._ids(item, place)))
                continue
            texts.append(self._text(item, place))
            places.append(place)
        found |= dict(zip(places, self._encode_texts(texts, places), strict=True))
        return [found[place] for place in range(len(items))]

    def _text(self, item: Any, place: int) -> tuple[str, str | None, bool]:
        if isinstance(item, str):
            return item, None, True
        if isinstance(item, TextPair):
            return item.text, item.text_pair, True
        messages = conversation(
            item, (), add_generation_prompt=False, continue_final_message=False, template_kwargs={}
        ).messages
        template, special = getattr(self._info, "chat_template", None), getattr(self._info, "special_tokens", {})
        return render_chat(template, messages, special, self._name(place)), None, False

    def _ids(self, tokens: list[int], place: int) -> list[int]:
        check_ids(tokens, self._info.vocab_size or MAX_TOKENS, self._name(place))
        if self._truncation.tokens is None:
            self._check_length(len(tokens), place)
        return tokens[: self._limit] if self._truncation.side == "right" else tokens[-self._limit :]

    def _encode_texts(self, texts: Sequence[tuple[str, str | None, bool]], places: Sequence[int]) -> list[EncodedText]:
        for (first, second, _), place in zip(texts, places, strict=True):
            self._check_characters(first, second, place)
        different = list(
            dict.fromkeys(text for first, second, _ in texts for text in (first, second) if text is not None)
        )
        tokens = dict(zip(different, self._tokens(different), strict=True))
        encoded = []
        for (text, second, special), place in zip(texts, places, strict=True):
            encoding = self._whole(tokens[text], None if second is None else tokens[second], special, place)
            segments = None if second is None else encoding.type_ids
            encoded.append(EncodedText(TextTokens(encoding.ids, segments), text, encoding))
        return encoded

    def _tokens(self, texts: list[str]) -> list[Any]:
        """Without special tokens. The batch call gives up the interpreter lock while it works."""
        return list(self._tokenizer.encode_batch(texts, add_special_tokens=False)) if texts else []

    def _whole(self, first: Any, second: Any, special: bool, place: int) -> Any:
        """With special tokens, and cut where that is asked for."""
        added = self._tokenizer.num_special_tokens_to_add(second is not None) if special else 0
        if second is not None and self._truncation.second is not None:
            second = _cut(second, self._truncation.second, "right")
        count = len(first.ids) + (0 if second is None else len(second.ids))
        if count + added > self._limit:
            if self._truncation.tokens is None:
                self._check_length(count + added, place)
            first, second = self._shortened(first, second, self._limit - added)
        encoding = self._tokenizer.post_process(first, second, special)
        if not encoding.ids:
            raise InvalidRequestError(f"{self._name(place)} is empty: it has no tokens", param=self._name(place))
        return encoding

    def _shortened(self, first: Any, second: Any, room: int) -> tuple[Any, Any]:
        """Both texts of a pair keep half of the room, and what the other leaves."""
        if room < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {self._limit}, which the model's own special tokens take up",
                param="truncate_prompt_tokens",
            )
        side = self._truncation.side
        if second is None:
            return _cut(first, room, side), None
        half = room // 2
        lengths = len(first.ids), len(second.ids)
        shorter = min(*lengths, half)
        longer = room - shorter
        sizes = (shorter, longer) if lengths[0] <= lengths[1] else (longer, shorter)
        return _cut(first, sizes[0], side), _cut(second, sizes[1], side)

    def _check_characters(self, first: str, second: str | None, place: int) -> None:
        """Refuses a text that is far too long without tokenising all of it, which takes seconds for megabytes."""
        if self._truncation.tokens is not None or (second is not None and self._truncation.second is not None):
            return
        for text in (first, second or ""):
            if len(text) > self._limit * CHECKED_CHARACTERS:
                count = len(self._tokens([text[: self._limit * CHECKED_CHARACTERS]])[0].ids)
                if count > self._limit + self._limit // 16 + 64:  # cut off, it may have a few tokens more
                    self._check_length(count, place, "more than ")

    def _check_length(self, count: int, place: int, words: str = "") -> None:
        if count > self._limit:
            name = self._name(place)
            raise ContextLengthError(
                f"This model's maximum context length is {self._limit} tokens. However, {name} resulted in "
                f"{words}{count} tokens. Please reduce its length, or cut it with truncate_prompt_tokens.",
                param=name,
            )


def _cut(encoding: Any, size: int, side: Side) -> Any:
    """The same encoding where it is short enough, else a copy: a text that stands in several pairs is shared."""
    if len(encoding.ids) <= size:
        return encoding
    copied = type(encoding).merge([encoding])
    copied.truncate(size, direction=side)
    return copied


def numbered(field: str, count: int) -> Name:
    """Names of inputs: `input` of a single one, `input.3` of several."""
    return lambda place: field if count == 1 else f"{field}.{place}"
