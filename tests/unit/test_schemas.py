"""Bodies are read strictly, nulls are absences, and errors name their place. The e2e table has the many cases."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server import api
from mlx_parallm.server.api.dashboard import ServerSnapshot
from mlx_parallm.server.api.openai.chat import ChatBody, chat_call
from mlx_parallm.server.api.openai.common import GenerationBody
from mlx_parallm.server.api.openai.completions import CompletionBody
from mlx_parallm.server.api.tokens import TokenizeBody
from mlx_parallm.server.http.http_errors import validation_error
from mlx_parallm.text.prompts import Conversation

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def chat_conversation(body: ChatBody) -> Conversation:
    turn = chat_call(body).chat
    assert turn is not None
    return turn.conversation


def wrong(model: type[GenerationBody], body: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return validation_error(caught.value.errors(), body)


def test_defaults() -> None:
    body = CompletionBody.model_validate({"prompt": "x"})
    assert (body.model, body.temperature, body.n, body.max_tokens, body.stop) == ("default", 1.0, 1, None, ())


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user"}, "messages.0.content: A user message needs content"),
        ({"role": "tool", "content": "4"}, "messages.0.tool_call_id: A tool message needs the id of the call"),
    ],
)
def test_a_message_without_what_its_role_needs(message: dict[str, Any], said: str) -> None:
    assert wrong(ChatBody, {"messages": [message]}).message.startswith(said)


def test_a_parameter_of_the_address_is_named() -> None:
    found = [{"type": "int_parsing", "loc": ("query", "limit"), "msg": "Input should be a valid integer"}]
    error = validation_error(found, None)
    assert (error.message, error.param) == ("limit: Input should be a valid integer", "limit")
    assert error.code == "invalid_value"


def test_null_is_absent_at_every_depth() -> None:
    empty = dict.fromkeys(name for name in ChatBody.model_fields if name != "messages")
    assert ChatBody.model_validate({"messages": HELLO, **empty}) == ChatBody.model_validate({"messages": HELLO})
    message = {"role": "user", "content": "x", "name": None, "tool_calls": None}
    assert ChatBody.model_validate({"messages": [message], "stream_options": None}).messages[0].tool_calls == []


def test_unknown_fields_are_ignored() -> None:
    assert CompletionBody.model_validate({"prompt": "x", "zebra": 1}) == CompletionBody.model_validate({"prompt": "x"})


@pytest.mark.parametrize(
    ("given", "read"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts(given: Any, read: Any) -> None:
    assert CompletionBody.model_validate({"prompt": given}).prompt == read


@pytest.mark.parametrize("prompt", ["a", [1]])
def test_the_number_of_prompts_is_bounded(prompt: Any) -> None:
    assert len(CompletionBody.model_validate({"prompt": [prompt] * 1024}).prompt) == 1024
    assert wrong(CompletionBody, {"prompt": [prompt] * 1025}).param == "prompt"


def test_stop_and_bias() -> None:
    body = CompletionBody.model_validate({"prompt": "x", "stop": "end", "logit_bias": {"5": 1, "6": -2.5}})
    assert body.stop == ("end",)
    assert body.logit_bias == {5: 1.0, 6: -2.5}


@pytest.mark.parametrize("value", ["1", True, [1], {}, float("nan"), float("inf"), -0.5, 2.5])
def test_temperature_is_a_number_in_range(value: Any) -> None:
    assert wrong(CompletionBody, {"prompt": "x", "temperature": value}).param == "temperature"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages.0.content.0.text"),
        ({"messages": HELLO, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"messages": HELLO, "tool_choice": {"function": {"name": 1}}}, "tool_choice.function.name"),
        ({"messages": HELLO, "tool_choice": 5}, "tool_choice"),
        ({"messages": [{"role": "tool"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "messages.0.content"),
        ({"messages": HELLO, "temperature": 9, "stream": True, "stream_options": {"include_usage": 1}},
         "stream_options.include_usage"),
    ],
)  # fmt: skip
def test_the_deepest_error_is_told(body: dict[str, Any], param: str) -> None:
    error = wrong(ChatBody, body)
    assert error.param == param
    assert error.message.startswith(param)


def test_messages_become_what_templates_expect() -> None:
    body = ChatBody.model_validate(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "hm",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
                },
                {"role": "tool", "content": "ok", "tool_call_id": "1"},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        }
    )
    talk = chat_conversation(body)
    assert talk.messages == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "ok", "tool_call_id": "1"},
    ]
    assert talk.add_generation_prompt
    assert list(talk.tools) == [{"type": "function", "function": {"name": "f"}}]
    body.tool_choice = "none"
    assert list(chat_conversation(body).tools) == []


def test_continuing_opens_no_turn() -> None:
    body = ChatBody.model_validate({"messages": HELLO, "continue_final_message": True})
    assert not chat_conversation(body).add_generation_prompt


def test_reasoning_effort_reaches_the_template() -> None:
    body = ChatBody.model_validate({"messages": HELLO, "reasoning_effort": "none", "chat_template_kwargs": {"x": 1}})
    kwargs = chat_conversation(body).template_kwargs
    assert kwargs == {"x": 1, "reasoning_effort": "none", "enable_thinking": False}


def test_tokenize_takes_either() -> None:
    assert TokenizeBody.model_validate({"prompt": "x"}).messages is None
    assert TokenizeBody.model_validate({"messages": HELLO}).prompt is None


def examples() -> Iterator[tuple[type[BaseModel], Any]]:
    for module in pkgutil.walk_packages(api.__path__, f"{api.__name__}."):
        importlib.import_module(module.name)
    found: list[type[BaseModel]] = [BaseModel]
    for one in found:
        found += one.__subclasses__()
        more = one.model_config.get("json_schema_extra")
        if one.__module__.startswith("mlx_parallm.") and isinstance(more, dict) and "example" in more:
            yield one, more["example"]


def test_the_examples_of_the_documentation_are_what_they_are_examples_of() -> None:
    """Bodies ignore fields that they do not know; examples of them have none."""
    found = list(examples())
    for model, example in found:
        if model is not ServerSnapshot:  # of which the example shows a part
            model.model_validate(example)
        fields = model.model_fields.items()
        known = {name for name, _ in fields} | {field.alias for _, field in fields}
        assert set(example) <= known, f"{model.__name__}: {set(example) - known}"
    assert len(found) > 40
