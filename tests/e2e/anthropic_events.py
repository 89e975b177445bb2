"""What the tests of `/v1/messages` share: asking, and reading a stream's events as the message that they make."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pydantic_core

from mlx_parallm.server.api.anthropic.response_types import MessageResponse
from tests.support.shapes import read_as

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PATH = "/v1/messages"
DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


def ask(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "default", "max_tokens": 16, "temperature": 0, "messages": HELLO, **fields}
    answer = client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    read_as(MessageResponse, answer.json())
    found: dict[str, Any] = answer.json()
    return found


def events(client: httpx.Client, path: str = PATH, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "default", "max_tokens": 16, "temperature": 0, "messages": HELLO, "stream": True, **fields}
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(read(response.iter_lines()))


def read(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Each event; its name must be its type."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line:
            event = json.loads(line.removeprefix("data: "))
            assert event["type"] == name
            yield event


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events make; fails where they come in another order than Anthropic's."""
    kinds = [event["type"] for event in found]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("message_start") == kinds.count("message_delta") == kinds.count("message_stop") == 1
    assert "service_tier" not in found[-2]["usage"]  # the beginning has told it
    if "content_block_start" in kinds:
        assert kinds[1:3] == ["content_block_start", "ping"]
    message, open_block = dict(found[0]["message"]), None
    assert (message["content"], message["stop_reason"]) == ([], None)
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None, "a block was not closed"
            open_block = {**event["content_block"], "json": ""}
            assert event["index"] == len(message["content"])
        elif event["type"] == "content_block_delta":
            assert (open_block is not None, event["index"]) == (True, len(message["content"]))
            add(open_block, event["delta"])
        elif event["type"] == "content_block_stop":
            assert (open_block is not None, event["index"]) == (True, len(message["content"]))
            message["content"].append(closed(open_block))
            open_block = None
    assert open_block is None
    message |= found[-2]["delta"]
    message["usage"] = message["usage"] | found[-2]["usage"]
    read_as(MessageResponse, message)
    return message


def add(block: Any, delta: dict[str, Any]) -> None:
    if delta["type"] == "input_json_delta":
        block["json"] += delta["partial_json"]
    else:
        block[DELTAS[delta["type"]]] += delta[DELTAS[delta["type"]]]


def closed(block: Any) -> dict[str, Any]:
    written = block.pop("json")
    if block["type"] == "tool_use":
        block["input"] = pydantic_core.from_json(written or "{}", allow_partial=True)
    found: dict[str, Any] = block
    return found
