"""LiteLLM as a client of OpenAI's, Anthropic's and Ollama's dialects."""

import json
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
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": ["Rome"]}},
            "required": ["to"],
            "additionalProperties": False,  # a random model would go on with others until its answer is cut off
        },
    },
}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic", "ollama_chat", "ollama"])
def test_completion(tiny_server: ServerProcess, provider: str) -> None:
    base = f"{tiny_server.url}/v1" if provider in ("openai", "hosted_vllm") else tiny_server.url
    asked: dict[str, Any] = {"model": f"{provider}/tiny-llama", "api_base": base, "api_key": "none"}
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


def openai_call(server: ServerProcess, **more: Any) -> dict[str, Any]:
    return {"model": "openai/tiny-llama", "api_base": f"{server.url}/v1", "api_key": "none", "max_retries": 0, **more}


def test_schemas_of_openai(tiny_server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"to": {"enum": ["Rome"]}}, "required": ["to"]}
    shape = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema, "strict": True}}
    answer = litellm.completion(
        **openai_call(tiny_server, messages=HELLO, max_tokens=200, temperature=0, response_format=shape)
    )
    assert json.loads(answer.choices[0].message.content) == {"to": "Rome"}


def test_responses(tiny_server: ServerProcess) -> None:
    asked = openai_call(tiny_server, input="hello", max_output_tokens=12, temperature=0)
    whole = litellm.responses(**asked)
    text = whole.output[0].content[0].text
    deltas = [event.delta for event in litellm.responses(**asked, stream=True) if event.type.endswith("text.delta")]
    assert "".join(deltas) == text


def test_errors(tiny_server: ServerProcess) -> None:
    with pytest.raises(litellm.NotFoundError, match="there is no model"):
        litellm.completion(**openai_call(tiny_server, messages=HELLO) | {"model": "openai/nobody"})
    long = [{"role": "user", "content": "x" * 9000}]
    with pytest.raises(litellm.ContextWindowExceededError, match="maximum context length"):
        litellm.completion(**openai_call(tiny_server, messages=long))
