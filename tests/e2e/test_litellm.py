"""LiteLLM as a client of both dialects."""

from typing import Any

import pytest

from tests.support.servers import ServerProcess

litellm = pytest.importorskip("litellm")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "go",
        "parameters": {"type": "object", "properties": {"to": {"enum": ["Rome"]}}, "required": ["to"]},
    },
}


@pytest.mark.parametrize("provider", ["anthropic", "ollama_chat", "ollama"])
def test_completion(tiny_server: ServerProcess, provider: str) -> None:
    asked: dict[str, Any] = {"model": f"{provider}/tiny-llama", "api_base": tiny_server.url, "api_key": "none"}
    asked |= {"messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = litellm.completion(**asked)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens == 12
    chunks = list(litellm.completion(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_tools_of_anthropic(tiny_server: ServerProcess) -> None:
    answer = litellm.completion(
        model="anthropic/tiny-llama",
        api_base=tiny_server.url,
        api_key="none",
        messages=HELLO,
        max_tokens=200,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, answer.choices[0].finish_reason) == ("go", "tool_calls")
