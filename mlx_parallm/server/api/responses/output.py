"""Output items, put together as a response's text arrives, and the events that tell of them.

Whole and streamed responses are made here in the same way; the events of a whole one go nowhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from mlx_parallm.server.api.responses.input_items import encode_reasoning
from mlx_parallm.server.api.responses.items import new_id
from mlx_parallm.server.api.responses.tools import OfferedTool, ToolUse
from mlx_parallm.server.generation.token_logprobs import TokenLogprobs
from mlx_parallm.text.parsers.calls import CallDelta, Piece


class Emit(Protocol):
    def __call__(self, kind: str, **fields: Any) -> None:
        """Writes an event down at once: what it holds may change later."""


class OpenItem(ABC):
    """An item that is being written."""

    def __init__(self, emit: Emit, index: int, item: dict[str, Any]) -> None:
        self.item = {"id": new_id(item["type"]), **item, "status": "in_progress"}
        self._index = index
        self._emit = emit
        self._texts: list[str] = []
        emit("response.output_item.added", output_index=index, item=self.item)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, text: str) -> None:
        self._texts.append(text)

    def close(self, status: str) -> None:
        self._finish()
        self.item["status"] = status
        self._emit("response.output_item.done", output_index=self._index, item=self.item)

    @abstractmethod
    def _finish(self) -> None:
        """Puts what was written into the item."""

    def _event(self, kind: str, **fields: Any) -> None:
        self._emit(f"response.{kind}", item_id=self.item["id"], output_index=self._index, **fields)


class OpenPart(OpenItem):
    """An item whose text is its only part."""

    events: str  # what its events are called
    part: str  # the type of its part

    def __init__(self, emit: Emit, index: int, item: dict[str, Any]) -> None:
        super().__init__(emit, index, {**item, "content": []})
        self.logprobs: list[TokenLogprobs] = []
        self._event("content_part.added", content_index=0, part=self._part(""))

    def write(self, text: str, logprobs: list[TokenLogprobs]) -> None:
        self.add(text)
        self.logprobs += logprobs
        self._event(f"{self.events}.delta", content_index=0, delta=text, **self._scores(logprobs))

    def _finish(self) -> None:
        part = self._part(self.text)
        self._event(f"{self.events}.done", content_index=0, text=self.text, **self._scores(self.logprobs))
        self._event("content_part.done", content_index=0, part=part)
        self.item["content"] = [part]

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": self.part, "text": text}

    def _scores(self, logprobs: list[TokenLogprobs]) -> dict[str, Any]:
        return {}


class OpenMessage(OpenPart):
    events = "output_text"
    part = "output_text"

    def __init__(self, emit: Emit, index: int) -> None:
        super().__init__(emit, index, {"type": "message", "role": "assistant"})

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": self.part, "text": text, "annotations": [], "logprobs": self.logprobs}

    def _scores(self, logprobs: list[TokenLogprobs]) -> dict[str, Any]:
        return {"logprobs": logprobs}


class OpenReasoning(OpenPart):
    events = "reasoning_text"
    part = "reasoning_text"

    def __init__(self, emit: Emit, index: int, encoded: bool) -> None:
        self._encoded = encoded
        super().__init__(emit, index, {"type": "reasoning", "summary": []})

    def _finish(self) -> None:
        super()._finish()
        if self._encoded:
            self.item["encrypted_content"] = encode_reasoning(self.text)


class OpenFunctionCall(OpenItem):
    def __init__(self, emit: Emit, index: int, tool: OfferedTool | None, call: CallDelta) -> None:
        item = {"type": "function_call", "call_id": call.id, "name": call.name if tool is None else tool.name}
        if tool is not None and tool.namespace is not None:
            item["namespace"] = tool.namespace
        super().__init__(emit, index, {**item, "arguments": ""})

    def add(self, text: str) -> None:
        super().add(text)
        if text:
            self._event("function_call_arguments.delta", delta=text)

    def _finish(self) -> None:
        self.item["arguments"] = self.text
        self._event("function_call_arguments.done", name=self.item["name"], arguments=self.text)


class OpenCustomCall(OpenItem):
    """Its input is known when its arguments are whole."""

    def __init__(self, emit: Emit, index: int, tool: OfferedTool, call: CallDelta) -> None:
        item = {"type": "custom_tool_call", "call_id": call.id, "name": tool.name}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        super().__init__(emit, index, {**item, "input": ""})

    def _finish(self) -> None:
        given = _parsed(self.text).get("input")
        text = self.item["input"] = given if isinstance(given, str) else self.text
        self._event("custom_tool_call_input.delta", delta=text)
        self._event("custom_tool_call_input.done", input=text)


class OpenShellCall(OpenItem):
    def __init__(self, emit: Emit, index: int, call: CallDelta) -> None:
        action = {"type": "exec", "command": [], "env": {}}
        super().__init__(emit, index, {"type": "local_shell_call", "call_id": call.id, "action": action})

    def _finish(self) -> None:
        given = _parsed(self.text)
        command = given.get("command")
        self.item["action"] = {
            "type": "exec",
            "command": list(map(str, command)) if isinstance(command, list) else [self.text],
            "env": {},
            "timeout_ms": given["timeout_ms"] if isinstance(given.get("timeout_ms"), int) else None,
            "working_directory": str(given["working_directory"]) if given.get("working_directory") else None,
        }


def _parsed(arguments: str) -> dict[str, Any]:
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


class OutputBuilder:
    """The items of one response, in the order in which they are written."""

    def __init__(self, tools: ToolUse, emit: Emit, *, encoded_reasoning: bool) -> None:
        self._tools = tools
        self._emit = emit
        self._encoded = encoded_reasoning
        self._items: list[OpenItem] = []
        self._open: OpenItem | None = None
        self._space = ""  # white space that is text only if more text follows

    @property
    def items(self) -> list[dict[str, Any]]:
        return [item.item for item in self._items]

    def add(self, piece: Piece, logprobs: Sequence[TokenLogprobs] = ()) -> None:
        calls = list(piece.calls)
        while calls and calls[0].name is None:  # the rest of a call that was open before any text of this piece
            self._continue_call(calls.pop(0))
        if piece.reasoning:
            self._reasoning().write(piece.reasoning, [])
        if piece.content or (logprobs and isinstance(self._open, OpenMessage)):
            self._write(piece.content, list(logprobs))
        for call in calls:
            if call.name is not None:
                self._start(self._call(call))
            self._continue_call(call)

    def finish(self, status: str) -> None:
        """`status` of the item that was written last; a response without any item is an empty message."""
        if not self._items:
            self._message().write(self._space, [])
        self._close(status)

    def _write(self, text: str, logprobs: list[TokenLogprobs]) -> None:
        if not isinstance(self._open, OpenMessage) and not logprobs and not text.strip():
            self._space += text
            return
        text = self._space + text
        self._space = ""
        self._message().write(text, logprobs)

    def _reasoning(self) -> OpenReasoning:
        if not isinstance(self._open, OpenReasoning):
            self._close("completed")
            self._start(OpenReasoning(self._emit, len(self._items), self._encoded))
        assert isinstance(self._open, OpenReasoning)
        return self._open

    def _message(self) -> OpenMessage:
        if not isinstance(self._open, OpenMessage):
            self._close("completed")
            self._start(OpenMessage(self._emit, len(self._items)))
        assert isinstance(self._open, OpenMessage)
        return self._open

    def _call(self, call: CallDelta) -> OpenItem:
        self._close("completed")
        self._space = ""
        tool = self._tools.find(call.name or "")
        if tool is not None and tool.kind == "custom":
            return OpenCustomCall(self._emit, len(self._items), tool, call)
        if tool is not None and tool.kind == "local_shell":
            return OpenShellCall(self._emit, len(self._items), call)
        return OpenFunctionCall(self._emit, len(self._items), tool, call)

    def _continue_call(self, call: CallDelta) -> None:
        if self._open is not None:
            self._open.add(call.arguments)

    def _start(self, item: OpenItem) -> None:
        self._items.append(item)
        self._open = item

    def _close(self, status: str) -> None:
        if self._open is not None:
            self._open.close(status)
            self._open = None
