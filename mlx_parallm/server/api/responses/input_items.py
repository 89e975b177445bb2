"""From items to the conversation that a chat template renders.

Templates know messages with roles, and one system message at the start. So instructions and the system or developer
messages that come first are joined into one; the reasoning, text and calls of one response become one assistant
message.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.responses.items import (
    ENCODED,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    InputMessage,
    InputPart,
    ReasoningItem,
    ShellCallItem,
    ShellOutputItem,
)
from mlx_parallm.server.api.responses.tools import SHELL, function_name
from mlx_parallm.server.generation.call import ImageSource
from mlx_parallm.text.prompts import Message

HEAD_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """A message as templates take it, with the images of its parts in their order."""

    message: Message
    images: Sequence[ImageSource] = ()

    @property
    def role(self) -> str:
        return str(self.message["role"])


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item, and the field of the body that it came in."""

    item: InputItem
    param: str


def prompt_messages(items: Sequence[PlacedItem], instructions: str | None) -> list[PromptMessage]:
    talk = _Talk()
    for placed in items:
        talk.add(placed.item, placed.param)
    head = [] if instructions is None else [instructions]
    messages = talk.messages
    while messages and messages[0].role in HEAD_ROLES and isinstance(messages[0].message["content"], str):
        head.append(messages.pop(0).message["content"])
    system = [PromptMessage({"role": "system", "content": "\n\n".join(head)})] if head else []
    return system + messages


@dataclass(frozen=True, slots=True)
class Shortened:
    """The same conversation with more and more of its oldest messages left out: one for each number below its length.
    The system message stays.

    It begins with a user's message, as templates want; of the last one, what follows is left out too, a call with its
    outputs at a time.
    """

    messages: Sequence[PromptMessage]
    starts: Sequence[tuple[Sequence[PromptMessage], int]]  # what stays, and the place of the message that follows

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> list[PromptMessage]:
        kept, place = self.starts[number]
        return [*kept, *self.messages[place:]]


def shortened(messages: Sequence[PromptMessage]) -> Shortened:
    head = list(messages[: 1 if messages and messages[0].role in HEAD_ROLES else 0])
    users = [place for place, message in enumerate(messages) if message.role == "user"]
    if not users:
        return Shortened(messages, [])
    last = users[-1]
    answers = [place for place in range(last + 1, len(messages)) if messages[place].role == "assistant"]
    kept = head
    with_last = [*head, messages[last]]
    starts = [(kept, place) for place in users if place > len(head)]
    return Shortened(messages, [*starts, *((with_last, place) for place in answers[1:])])


@dataclass(slots=True)
class _Talk:
    messages: list[PromptMessage] = field(default_factory=list)
    calls: dict[str, str] = field(default_factory=dict)  # names of functions by the ids of their calls

    def add(self, item: InputItem, param: str) -> None:
        if isinstance(item, InputMessage):
            self._add_message(item, param)
        elif isinstance(item, ReasoningItem):
            self._add_reasoning(reasoning_text(item))
        elif isinstance(item, FunctionCallItem):
            self._add_call(item.call_id, function_name(item.name, item.namespace), _arguments(item.arguments))
        elif isinstance(item, CustomCallItem):
            self._add_call(item.call_id, function_name(item.name, item.namespace), {"input": item.input})
        elif isinstance(item, ShellCallItem):
            arguments = item.action.model_dump(exclude_none=True, exclude={"type"})
            self._add_call(item.call_id or item.id or "", SHELL, arguments)
        elif isinstance(item, FunctionOutputItem | CustomOutputItem):
            self._add_output(item.call_id, item.output, param)
        else:
            assert isinstance(item, ShellOutputItem), "references are resolved before"
            self._add_output(item.call_id or item.id or "", item.output, param)

    def _add_message(self, item: InputMessage, param: str) -> None:
        content, images = _content(item.content, f"{param}.content")
        if item.role != "assistant":
            self.messages.append(PromptMessage({"role": item.role, "content": content}, images))
            return
        last = self._last_response()
        if last is not None and not last["content"] and "tool_calls" not in last and not images:
            last["content"] = content
        else:
            self.messages.append(PromptMessage({"role": "assistant", "content": content}, images))

    def _add_reasoning(self, text: str) -> None:
        if not text:
            return
        last = self._last_response()
        if last is None or last["content"] or "tool_calls" in last:
            self.messages.append(PromptMessage({"role": "assistant", "content": "", "reasoning_content": text}))
        else:
            last["reasoning_content"] = f"{last['reasoning_content']}\n{text}"

    def _add_call(self, identity: str, name: str, arguments: dict[str, Any]) -> None:
        self.calls[identity] = name
        last = self._last_response()
        if last is None:
            last = {"role": "assistant", "content": ""}
            self.messages.append(PromptMessage(last))
        call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
        last.setdefault("tool_calls", []).append(call)

    def _add_output(self, identity: str, output: str | list[InputPart], param: str) -> None:
        if identity not in self.calls:
            raise InvalidRequestError(
                f"{param}.call_id: there is no call {identity[:100]!r} before this output", param=f"{param}.call_id"
            )
        content, images = _content(output, f"{param}.output")
        if images:  # templates show images of users alone
            texts = [part["text"] for part in content if part["type"] == "text"]
            shown = PromptMessage({"role": "user", "content": [{"type": "image"} for _ in images]}, images)
            content = "\n".join(texts) or "The image follows."
        message = {"role": "tool", "tool_call_id": identity, "name": self.calls[identity], "content": content}
        self.messages.append(PromptMessage(message))
        if images:
            self.messages.append(shown)

    def _last_response(self) -> Message | None:
        """The assistant's message that is being put together."""
        return self.messages[-1].message if self.messages and self.messages[-1].role == "assistant" else None


def _content(content: str | list[InputPart], param: str) -> tuple[Any, list[ImageSource]]:
    """Text, or parts where there are images."""
    if isinstance(content, str):
        return content, []
    images = [
        ImageSource(part.image_url, f"{param}.{number}")
        for number, part in enumerate(content)
        if part.type == "input_image" and part.image_url is not None
    ]
    if not images:
        return "\n".join(part.content for part in content), []
    parts = [
        {"type": "image"} if part.type == "input_image" else {"type": "text", "text": part.content} for part in content
    ]
    return parts, images


def _arguments(arguments: str) -> dict[str, Any]:
    """Templates want an object. A call that the model has got wrong, or not finished, stays in the conversation."""
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"arguments": arguments}


def encode_reasoning(text: str) -> str:
    """Encodes reasoning for clients that keep none but what they can't read. It is no secret: base64, and no key."""
    return ENCODED + base64.b64encode(text.encode()).decode()


def reasoning_text(item: ReasoningItem) -> str:
    if item.content:
        return "\n".join(part.text for part in item.content)
    encoded = item.encrypted_content or ""
    if encoded.startswith(ENCODED):
        try:
            return base64.b64decode(encoded.removeprefix(ENCODED), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return "\n".join(part.text for part in item.summary)
