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
from mlx_parallm.sampling_params import INT64
from mlx_parallm.server.auth.caller import current_caller
from mlx_parallm.server.generation.chat_messages import ChatMessage, ChatMessages, conversation
from mlx_parallm.server.generation.tokenizers import LONG_TEXT, TokenizerPool
from mlx_parallm.server.http.schema import MAX_TOKENS, Body, few
from mlx_parallm.server.predictors import ServedPredictor
from mlx_parallm.text.prompts import far_too_many
from mlx_parallm.text.scoring_templates import render_chat
from mlx_parallm.types import TextTokens
from mlx_parallm.validation import check_ids

MAX_INPUTS = 2048
WHOLE_CONTEXT = -1

Side = Literal["left", "right"]


class TextPair(Body):
    """Two texts for a cross-encoder, or one."""

    text: str
    text_pair: str | None = None


def _form(value: Any) -> str | None:
    """Returns which kind of input it is. A list of two texts is a pair only inside a list of inputs."""
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
    | Annotated[list[int], few(MAX_TOKENS), Tag("<tokens>")]
    | Annotated[TextPair, BeforeValidator(_as_pair), Tag("<pair>")]
    | Annotated[ChatMessages, Tag("<chat>")],
    Discriminator(
        _form,
        custom_error_type="input",
        custom_error_message=(
            "Expected a text, token ids, a pair of texts ([a, b] or {text, text_pair}), or a conversation's messages"
        ),
    ),
]
TextInputs = Annotated[list[TextInput], few(MAX_INPUTS), Field(min_length=1), BeforeValidator(_as_list)]


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
    alone: int | None = None  # the same, of a text that is no pair


@dataclass(frozen=True, slots=True)
class EncodedText:
    """An input as the model takes it, and where its tokens stand in the text."""

    input: TextTokens
    text: str | None = None  # None: it came as token ids
    encoding: Any = None  # a `tokenizers.Encoding`


Name = Callable[[int], str]  # of an input in the body, for errors


async def encode_texts(
    model: ServedPredictor,
    items: Sequence[Any],
    pool: TokenizerPool,
    truncation: Truncation,
    name: Name,
    *,
    offsets: bool = False,
) -> list[EncodedText]:
    """The tokens of each input, charged to the request's key. ContextLengthError for one that is too long,
    InvalidRequestError for what the model can't take; both name it. `offsets`: the encodings are to say where tokens
    stand in their text."""

    def work() -> list[EncodedText]:
        return _Encoder(model, truncation, name, offsets).encode(items)

    encoded = work() if sum(map(_size, items)) < LONG_TEXT else await pool.run(work)
    current_caller.get().charge_prompt(sum(len(one.input.tokens) for one in encoded))
    return encoded


def _size(item: Any) -> int:
    """About how many characters there are to tokenise."""
    if isinstance(item, str):
        return len(item)
    if isinstance(item, TextPair):
        return len(item.text) + len(item.text_pair or "")
    return LONG_TEXT // 8 * len(item) if item and isinstance(item[0], ChatMessage) else 0


@dataclass(frozen=True, slots=True)
class _Text:
    place: int
    first: str
    second: str | None = None
    special: bool = True  # special tokens belong to it; a chat template writes its own


class _Encoder:
    """One call's inputs for one model."""

    def __init__(self, model: ServedPredictor, truncation: Truncation, name: Name, offsets: bool) -> None:
        self._info = model.info
        self._tokenizer = model.tokenizer
        # The batch calls give up the interpreter lock while they work.
        self._batch = model.tokenizer.encode_batch if offsets else model.tokenizer.encode_batch_fast
        self._truncation = truncation
        self._name = name
        limit = model.info.context_length or MAX_TOKENS
        asked = truncation.tokens
        if asked is not None and asked > limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens: {asked} is more than the {limit} tokens that the model takes",
                param="truncate_prompt_tokens",
            )
        self._limit = limit if asked is None or asked == WHOLE_CONTEXT else asked

    def encode(self, items: Sequence[Any]) -> list[EncodedText]:
        found: dict[int, EncodedText] = {}
        texts: dict[bool, list[_Text]] = {True: [], False: []}
        for place, item in enumerate(items):
            if isinstance(item, list) and isinstance(item[0], int):
                found[place] = EncodedText(TextTokens(self._ids(item, place)))
            else:
                text = self._text(item, place)
                self._check_characters(text)
                texts[text.special].append(text)
        for special, some in texts.items():
            inputs = [text.first if text.second is None else (text.first, text.second) for text in some]
            encodings = self._batch(inputs, add_special_tokens=special) if inputs else ()
            for text, encoding in zip(some, encodings, strict=True):
                found[text.place] = self._fitting(text, encoding)
        return [found[place] for place in range(len(items))]

    def _text(self, item: Any, place: int) -> _Text:
        if isinstance(item, str):
            return _Text(place, item)
        if isinstance(item, TextPair):
            return _Text(place, item.text, item.text_pair)
        messages = conversation(
            item, (), add_generation_prompt=False, continue_final_message=False, template_kwargs={}
        ).messages
        template = getattr(self._info, "chat_template", None)
        special = getattr(self._info, "special_tokens", {})
        return _Text(place, render_chat(template, messages, special, self._name(place)), special=False)

    def _ids(self, tokens: list[int], place: int) -> list[int]:
        check_ids(tokens, self._info.vocab_size or MAX_TOKENS, self._name(place))
        if self._truncation.tokens is None:
            self._check_length(len(tokens), place)
        return tokens[: self._limit] if self._truncation.side == "right" else tokens[-self._limit :]

    def _fitting(self, text: _Text, encoding: Any) -> EncodedText:
        """Returns a text as it is where it fits, else cut where that is asked for."""
        ids = encoding.ids
        if len(ids) > self._limit or self._most(text) is not None:
            encoding = self._cut(text)
            ids = encoding.ids
        if not ids:
            name = self._name(text.place)
            raise InvalidRequestError(f"{name} is empty: it has no tokens", param=name)
        segments = None if text.second is None else encoding.type_ids
        return EncodedText(TextTokens(ids, segments), text.first, encoding)

    def _cut(self, text: _Text) -> Any:
        """Anew, without the special tokens: they stay whatever is cut."""
        parts = [text.first] if text.second is None else [text.first, text.second]
        first, *rest = self._batch(parts, add_special_tokens=False)
        second = rest[0] if rest else None
        added = self._tokenizer.num_special_tokens_to_add(second is not None) if text.special else 0
        if (most := self._most(text)) is not None:
            (first if second is None else second).truncate(most)
        count = len(first.ids) + (0 if second is None else len(second.ids))
        if count + added > self._limit:
            if self._truncation.tokens is None:
                self._check_length(count + added, text.place)
            self._shorten(first, second, self._limit - added)
        return self._tokenizer.post_process(first, second, text.special)

    def _most(self, text: _Text) -> int | None:
        """Returns to how many tokens a pair's second text, or a text that is no pair, is cut at its end."""
        return self._truncation.alone if text.second is None else self._truncation.second

    def _shorten(self, first: Any, second: Any, room: int) -> None:
        """Each text of a pair keeps half of the room, and what the other leaves."""
        if room < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {self._limit}, which the model's own special tokens take up",
                param="truncate_prompt_tokens",
            )
        side = self._truncation.side
        if second is None:
            first.truncate(room, direction=side)
            return
        lengths = len(first.ids), len(second.ids)
        shorter = min(*lengths, room // 2)
        sizes = (shorter, room - shorter) if lengths[0] <= lengths[1] else (room - shorter, shorter)
        first.truncate(sizes[0], direction=side)
        second.truncate(sizes[1], direction=side)

    def _check_characters(self, text: _Text) -> None:
        """Refuses a text that is far too long without tokenising all of it, which takes seconds for megabytes."""
        if self._truncation.tokens is not None or self._most(text) is not None:
            return
        for part in (text.first, text.second or ""):
            count = far_too_many(part, self._limit, self._count)
            if count is not None:
                self._check_length(count, text.place, "more than ")

    def _count(self, text: str) -> int:
        [encoded] = self._batch([text], add_special_tokens=False)
        return len(encoded.ids)

    def _check_length(self, count: int, place: int, words: str = "") -> None:
        if count > self._limit:
            name = self._name(place)
            raise ContextLengthError(
                f"This model's maximum context length is {self._limit} tokens. However, {name} resulted in "
                f"{words}{count} tokens. Please reduce its length, or cut it with truncate_prompt_tokens.",
                param=name,
            )


def numbered(field: str, count: int) -> Name:
    """Names of inputs: `input` of a single one, `input.3` of several."""
    return lambda place: field if count == 1 else f"{field}.{place}"
