"""From Anthropic's messages to those that chat templates take.

There, results of tools are messages of their own, calls and reasoning fields of the assistant's message, and turns
alternate: messages of one role that follow one another become one, as in Anthropic's API.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.anthropic.content_blocks import (
    AnyMessage,
    AssistantTurn,
    ImageBlock,
    MessageText,
    TextLike,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from mlx_parallm.server.generation.call import ImageSource
from mlx_parallm.text.prompts import Message

# A line that Claude Code puts before its system prompt. It says nothing to a model, and differs in every request, so
# that no prompt would begin like the one before it and the prefix cache would never be hit.
BILLING_LINE = "x-anthropic-billing-header:"


@dataclass(slots=True)
class Transcript:
    """A conversation as a chat template takes it, as far as it was read."""

    messages: list[Message] = field(default_factory=list)
    images: list[ImageSource] = field(default_factory=list)
    _open: dict[str, str] = field(default_factory=dict)  # calls without a result: their ids, and names of their tools

    @classmethod
    def of(cls, system: str | Sequence[MessageText], messages: Sequence[AnyMessage]) -> "Transcript":
        transcript = cls()
        transcript._add_system(system)
        for index, message in enumerate(messages):
            if isinstance(message, UserMessage):
                transcript._add_user(message, index)
            elif isinstance(message, AssistantTurn):
                transcript._add_assistant(message)
            else:
                transcript._add_system(message.content)
        transcript._check_results(set(transcript._open), len(messages) - 1)
        transcript._drop_empty_start()
        return transcript

    @property
    def is_begun(self) -> bool:
        """Whether the last message is the start of the response."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def _add_system(self, content: str | Sequence[MessageText]) -> None:
        texts = [content] if isinstance(content, str) else [block.text for block in content]
        text = "\n".join(text for text in map(_without_billing_line, texts) if text)
        if text:
            self._add("system", text)

    def _add_user(self, message: UserMessage, index: int) -> None:
        if isinstance(message.content, str):
            self._check_results(set(self._open), index)
            self._add("user", message.content)
            return
        parts: list[Any] = []
        missing = set(self._open)
        for number, block in enumerate(message.content):
            if isinstance(block, ToolResultBlock):
                place = f"messages.{index}.content.{number}"
                missing.discard(block.tool_use_id)
                parts += self._add_result(block, place)
        self._check_results(missing, index)
        self._open.clear()
        for number, block in enumerate(message.content):
            if not isinstance(block, ToolResultBlock):
                parts.append(self._part(block, f"messages.{index}.content.{number}"))
        if parts:
            self._add("user", _joined(parts))

    def _add_result(self, block: ToolResultBlock, place: str) -> list[Any]:
        """Adds a tool's result as a message; its images are returned, since templates show those of users alone."""
        name = self._open.get(block.tool_use_id)
        if name is None:
            param = f"{place}.tool_use_id"
            raise InvalidRequestError(
                f"{param}: there is no tool_use block {block.tool_use_id[:100]!r} in the message before, or its result "
                "came already",
                param=param,
            )
        del self._open[block.tool_use_id]
        content = block.content if isinstance(block.content, list) else []
        texts = [one.text for one in content if not isinstance(one, ImageBlock)]
        images = [
            self._part(one, f"{place}.content.{number}")
            for number, one in enumerate(content)
            if isinstance(one, ImageBlock)
        ]
        text = block.content if isinstance(block.content, str) else "\n".join(texts)
        text = text or ("(an image, which follows)" if images else "")
        if block.is_error and "error" not in text.lower():  # else the text says so itself
            text = f"Error: {text}" if text else "Error"
        self.messages.append({"role": "tool", "content": text, "name": name, "tool_call_id": block.tool_use_id})
        return images

    def _check_results(self, missing: set[str], index: int) -> None:
        """Every call must have its result in the message that follows it."""
        if missing:
            param = f"messages.{index}"
            raise InvalidRequestError(
                f"{param}: the tool_use block {min(missing)[:100]!r} needs a tool_result block in the next message",
                param=param,
            )

    def _part(self, block: TextLike | ImageBlock, place: str) -> Any:
        if isinstance(block, ImageBlock):
            self.images.append(ImageSource(block.source.address, f"{place}.source"))
            return {"type": "image"}
        return {"type": "text", "text": block.text}

    def _add_assistant(self, message: AssistantTurn) -> None:
        blocks = message.content
        if isinstance(blocks, str):
            self._add("assistant", blocks)
            return
        self._add("assistant", "\n".join(block.text for block in blocks if isinstance(block, MessageText)))
        said = self.messages[-1]
        if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]:
            said["reasoning_content"] = "\n".join([*filter(None, [said.get("reasoning_content")]), *thoughts])
        for block in blocks:
            if isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": block.input}
                said.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
                self._open[block.id] = block.name

    def _add(self, role: str, content: Any) -> None:
        """Another message, or more of the last one where that is of the same role."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != role:
            self.messages.append({"role": role, "content": content})
        elif isinstance(last["content"], str) and isinstance(content, str):
            last["content"] = "\n".join(text for text in (last["content"], content) if text)
        else:
            last["content"] = [*_as_parts(last["content"]), *_as_parts(content)]

    def _drop_empty_start(self) -> None:
        """A response that has begun with nothing has not begun."""
        if self.is_begun and not self.messages[-1]["content"]:
            self.messages.pop()


def _without_billing_line(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING_LINE) else text


def _joined(parts: Sequence[Any]) -> Any:
    """Text, or where there are images the parts."""
    if any(part["type"] == "image" for part in parts):
        return list(parts)
    return "\n".join(part["text"] for part in parts)


def _as_parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
