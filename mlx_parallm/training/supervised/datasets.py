"""JSON-lines files, and what SFT, DPO and RL learn from in their rows. No MLX.

Whatever is wrong with a row is said with its file, line and field. A conversation is rendered by the model's own
chat template. Which tokens are an assistant's follows from renderings of its prefixes: what a turn adds to what stood
there when the model was asked is the completion.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.text.prompts import Conversation, Message, Prompts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """A line of a file, an object."""

    path: str
    line: int
    fields: Mapping[str, Any]

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}, line {self.line}: {problem}")

    def messages(self, name: str, role: str) -> list[Message]:
        """`role`: of a message that is only a string."""
        value = self.get(name)
        if isinstance(value, str) and value:
            return [{"role": role, "content": value}]
        if not isinstance(value, list) or not value:
            raise self.error(f"field {name!r} must be a string or a list of messages, and not empty")
        for number, message in enumerate(value):
            for key in ("role", "content"):
                if not isinstance(message, dict) or not isinstance(message.get(key), str):
                    raise self.error(f"message {number} of field {name!r} has no {key!r} that is a string")
        return value

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not value:
            raise self.error(f"field {name!r} must be a string, and not empty, where no chat template is used")
        return value

    def get(self, name: str) -> Any:
        if name not in self.fields:
            raise self.error(f"field {name!r} is missing; there is {', '.join(map(repr, self.fields)) or 'none'}")
        return self.fields[name]


def read_rows(path: Path | str) -> list[DatasetRow]:
    """All lines that are not empty."""
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None
    rows = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            rows.append(DatasetRow(str(path), number, _object(line, DatasetRow(str(path), number, {}))))
    if not rows:
        raise ConfigError(f"{path} has no rows in it")
    return rows


def _object(line: bytes, row: DatasetRow) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise row.error(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise row.error(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise row.error(f"a row must be an object, and this is {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True)
class Example:
    """A text as tokens, and which of them are learnt."""

    tokens: list[int]
    mask: list[bool]

    @property
    def learnt(self) -> int:
        return sum(self.mask[1:])  # nothing stands before the first: nothing says what it is

    def cut(self, length: int) -> "Example":
        return self if len(self.tokens) <= length else Example(self.tokens[:length], self.mask[:length])


@dataclass(frozen=True, slots=True)
class Preference:
    """Two completions to one prompt, the better one first."""

    chosen: Example
    rejected: Example


@dataclass(slots=True)
class Dataset(Generic[T]):
    items: list[T] = field(default_factory=list)
    cut: int = 0  # items that were longer than allowed
    left_out: int = 0  # of which nothing to learn was left


class DatasetReader:
    """Rows as tokens. `chat`: strings are a user's and an assistant's messages; else they are text as it is, and an
    answer ends with the end-of-sequence token."""

    def __init__(self, prompts: Prompts, eos_token: int, max_length: int, chat: bool = True) -> None:
        self._prompts = prompts
        self._eos = eos_token
        self._max_length = max_length
        self._chat = chat

    def examples(self, path: Path | str) -> Dataset[Example]:
        """Reads the examples for SFT: `messages`, or `prompt` and `completion`."""
        return self._dataset(path, self._examples, lambda one: [one], lambda some: some[0])

    def preferences(self, path: Path | str) -> Dataset[Preference]:
        """Reads the preferences for DPO: `prompt`, `chosen` and `rejected`."""
        return self._dataset(
            path,
            self._preferences,
            lambda one: [one.chosen, one.rejected],
            lambda some: Preference(chosen=some[0], rejected=some[1]),
        )

    def _dataset(
        self,
        path: Path | str,
        read: Callable[[DatasetRow], list[T]],
        parts: Callable[[T], list[Example]],
        join: Callable[[list[Example]], T],
    ) -> Dataset[T]:
        dataset: Dataset[T] = Dataset()
        for row in read_rows(path):
            try:
                items = read(row)
            except InvalidRequestError as error:  # the template, or the tokenizer
                raise row.error(error.message) from error
            for item in items:
                cut = [part.cut(self._max_length) for part in parts(item)]
                dataset.cut += any(one is not other for one, other in zip(cut, parts(item), strict=True))
                if all(part.learnt for part in cut):
                    dataset.items.append(join(cut))
                else:
                    dataset.left_out += 1
        if not dataset.items:
            raise ConfigError(f"{path}: no row has anything to learn within {self._max_length} tokens")
        return dataset

    def _examples(self, row: DatasetRow) -> list[Example]:
        if "messages" in row.fields:
            return self._turns(row, row.messages("messages", "user"), 0)
        if "prompt" not in row.fields:
            row.get("messages")
        if self._is_text(row, "prompt", "completion"):
            return [self._text(row.text("prompt"), row.text("completion"))]
        prompt = row.messages("prompt", "user")
        completion = row.messages("completion", "assistant")
        return self._turns(row, prompt + completion, len(prompt))

    def _preferences(self, row: DatasetRow) -> list[Preference]:
        if self._is_text(row, "prompt", "chosen", "rejected"):
            prompt = row.text("prompt")
            chosen, rejected = (self._text(prompt, row.text(name)) for name in ("chosen", "rejected"))
            return [Preference(chosen=chosen, rejected=rejected)]
        before = row.messages("prompt", "user")
        return [Preference(chosen=self._answer(row, before, "chosen"), rejected=self._answer(row, before, "rejected"))]

    def _answer(self, row: DatasetRow, before: list[Message], name: str) -> Example:
        """The completion in a field, as one example."""
        examples = self._turns(row, before + row.messages(name, "assistant"), len(before))
        if len(examples) > 1:
            raise row.error(f"the chat template renders the turns of field {name!r} differently as they go on")
        return examples[0]

    def _is_text(self, row: DatasetRow, *names: str) -> bool:
        return not self._chat and all(isinstance(row.get(name), str) for name in names)

    def _text(self, prompt: str, completion: str) -> Example:
        tokens = self._prompts.encode(prompt + completion, add_special_tokens=True)
        tokens = tokens if tokens[-1] == self._eos else [*tokens, self._eos]
        begin = _alike(self._prompts.encode(prompt, add_special_tokens=True), tokens)
        return Example(tokens, [place >= begin for place in range(len(tokens))])

    def _turns(self, row: DatasetRow, messages: Sequence[Message], first: int) -> list[Example]:
        """The assistant's turns, from the given message on, are learnt: all in one example, or each in its own where
        the template renders a turn differently once others follow."""
        places = [place for place in range(first, len(messages)) if messages[place]["role"] == "assistant"]
        if not places:
            raise row.error("there is no message of the assistant's to learn from")
        if places[0] == 0:
            raise row.error("the first message is the assistant's: there is nothing that it answers")
        whole = self._render(messages)
        spans = [(self._render(messages[:place], ask=True), self._render(messages[: place + 1])) for place in places]
        if any(not after.startswith(before) for before, after in spans):
            raise row.error("the chat template does not render a completion behind what asks for it")
        if all(whole.startswith(after) for _, after in spans):
            return [self._marked(whole, spans)]
        return [self._marked(after, [(before, after)]) for before, after in spans]

    def _render(self, messages: Sequence[Message], ask: bool = False) -> str:
        return self._prompts.render(Conversation([dict(one) for one in messages], add_generation_prompt=ask))

    def _marked(self, text: str, spans: Sequence[tuple[str, str]]) -> Example:
        """A text of which the spans, each from the end of one prefix to that of another, are learnt."""
        tokens = self._tokens(text)
        mask = [False] * len(tokens)
        for before, after in spans:
            begin, end = (_alike(self._tokens(prefix), tokens) for prefix in (before, after))
            mask[begin:end] = [True] * (end - begin)
        return Example(tokens, mask)

    def _tokens(self, text: str) -> list[int]:
        return self._prompts.encode(text, add_special_tokens=False)


def _alike(prefix: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns how many tokens both begin with: all of the prefix, unless its last characters are part of a longer
    token."""
    places = range(min(len(prefix), len(tokens)))
    return next((place for place in places if prefix[place] != tokens[place]), len(places))


def split(items: Sequence[T], share: float, seed: int) -> tuple[list[T], list[T]]:
    """Splits items into those to learn from and those held out: a share of them, chosen by the seed alone; one at least
    where the share is above 0."""
    if not 0 <= share < 1:
        raise ConfigError(f"the share of rows to hold out must be at least 0 and below 1, not {share}")
    count = max(1, round(share * len(items))) if share else 0
    if count >= len(items):
        raise ConfigError(f"of {len(items)} rows {count} would be held out, and none be left to learn from")
    held_out = set(random.Random(f"split {seed}").sample(range(len(items)), count))
    return (
        [one for place, one in enumerate(items) if place not in held_out],
        [one for place, one in enumerate(items) if place in held_out],
    )
