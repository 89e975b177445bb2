"""What the server tests share: asking, streaming, and holding each answer against its documented shape."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

from mlx_parallm.server.api.openai.chat_response_types import ChatChunk, ChatCompletion
from mlx_parallm.server.api.openai.completions import CompletionChunk, CompletionResponse
from tests.support.shapes import read_as

SHAPES: dict[str, Any] = {
    "text_completion": CompletionResponse | CompletionChunk,
    "chat.completion": ChatCompletion,
    "chat.completion.chunk": ChatChunk,
}


class Api:
    """A client whose calls succeed, or fail the test."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def complete(self, **body: Any) -> dict[str, Any]:
        return self._post("/v1/completions", {"temperature": 0, **body})

    def chat(self, content: str = "hello", **body: Any) -> dict[str, Any]:
        return self._post("/v1/chat/completions", _chat(content, body))

    def stream_completion(self, **body: Any) -> list[dict[str, Any]]:
        return list(self._stream("/v1/completions", {"temperature": 0, **body}))

    def stream_chat(self, content: str = "hello", **body: Any) -> list[dict[str, Any]]:
        return list(self._stream("/v1/chat/completions", _chat(content, body)))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        read_as(SHAPES[answer["object"]], answer)
        return answer

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
            read_as(SHAPES[chunk["object"]], chunk)
            yield chunk


def _chat(content: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **body}


def choices(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for choice in choices(chunks, index))


def content_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in choices(chunks, index))


def finish_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    reasons = [choice["finish_reason"] for choice in choices(chunks, index) if choice["finish_reason"] is not None]
    assert len(reasons) == 1
    return str(reasons[0])
