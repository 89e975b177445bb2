"""What Anthropic's and Ollama's bodies mean: conversations as templates take them, durations, options, error shapes."""

import math
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from mlx_parallm.errors import ContextLengthError, InvalidRequestError, ParallmError, QueueFullError
from mlx_parallm.server.api import route_table
from mlx_parallm.server.api.anthropic.bodies import CountTokensBody, MessagesBody
from mlx_parallm.server.api.ollama.bodies import OllamaChatBody, OllamaOptions
from mlx_parallm.server.api.ollama.durations import read_keep_alive
from mlx_parallm.server.api.ollama.names import shown
from mlx_parallm.server.api.ollama.writer import nanoseconds
from mlx_parallm.server.api.trl import _likeliest
from mlx_parallm.server.http.error_shapes import Failure
from mlx_parallm.server.http.http_errors import validation_error
from mlx_parallm.text.parsers.calls import read_arguments
from mlx_parallm.types import TokenLogprob

PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}}
OTHER = {"type": "tool_use", "id": "t2", "name": "hear", "input": {}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def result(identity: str, content: Any = "ok", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": identity, "content": content, **more}


def body(*messages: Any, **fields: Any) -> MessagesBody:
    said = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(messages)]
    return MessagesBody.model_validate({"model": "m", "max_tokens": 8, "messages": said, **fields})


def rendered(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return body(*messages, **fields).turn().conversation.messages


def test_trl_is_told_the_likeliest_tokens_and_the_one_that_was_drawn() -> None:
    score = TokenLogprob(7, -2.0, 3, ((5, -0.5), (6, -1.5), (7, -2.0)))
    assert [_likeliest(score, count) for count in (0, 1, 3)] == [
        [(7, -2.0)],
        [(5, -0.5), (7, -2.0)],
        [(5, -0.5), (6, -1.5), (7, -2.0)],
    ]


def test_system_prompts_in_either_form() -> None:
    assert rendered("hi", system="Be kind.") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
    ]
    assert rendered("hi", system=[text("Be"), text(""), text("kind.")])[0]["content"] == "Be\nkind."
    assert rendered("hi", system="")[0]["role"] == "user"
    header = "x-anthropic-billing-header: cc_version=2.1; cch=12ab3;"
    assert rendered("hi", system=[text(header), text("Be kind.")]) == rendered("hi", system="Be kind.")
    assert rendered("hi", system=f"{header}\nBe kind.") == rendered("hi", system="Be kind.")


def test_calls_and_results() -> None:
    messages = rendered(
        "hi",
        [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("I look."), CALL, OTHER],
        [text("So?"), result("t2", [text("a"), text("b")]), result("t1", "broken", is_error=True)],
    )
    assert messages == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}},
                {"id": "t2", "type": "function", "function": {"name": "hear", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "a\nb", "name": "hear", "tool_call_id": "t2"},
        {"role": "tool", "content": "Error: broken", "name": "look", "tool_call_id": "t1"},
        {"role": "user", "content": "So?"},
    ]
    assert rendered("hi", [CALL], [result("t1", "An error.", is_error=True)])[-1]["content"] == "An error."
    assert rendered("hi", [CALL], [result("t1", is_error=True, content="")])[-1]["content"] == "Error"


def test_turns_alternate() -> None:
    said = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [text("b"), {"type": "image", "source": PNG}]},
    ]
    said += [{"role": "assistant", "content": "c"}, {"role": "assistant", "content": [text("d")]}]
    found = MessagesBody.model_validate({"model": "m", "max_tokens": 8, "messages": said}).turn()
    assert found.conversation.messages == [
        {"role": "user", "content": [*map(text, "ab"), {"type": "image"}]},
        {"role": "assistant", "content": "c\nd"},
    ]
    assert (found.conversation.continue_final_message, found.conversation.add_generation_prompt) == (True, False)


def test_images_are_in_the_order_of_their_parts() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    turn = body("hi", [CALL], [text("see"), url, result("t1", [{"type": "image", "source": PNG}])]).turn()
    assert [image.param for image in turn.images] == [
        "messages.2.content.2.content.0.source",
        "messages.2.content.1.source",
    ]
    assert [image.url for image in turn.images] == ["data:image/png;base64,AAAA", "https://example.com/x.png"]
    assert turn.conversation.messages[-1]["content"] == [{"type": "image"}, text("see"), {"type": "image"}]
    assert turn.conversation.messages[-2]["role"] == "tool"


def test_documents_are_text() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    found = {"type": "search_result", "source": "S", "title": "R", "content": [text("C")]}
    assert rendered([document, found, text("?")]) == [{"role": "user", "content": "T\nD\nR\nS\nC\n?"}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (["hi", [CALL], [result("t9")]], "messages.2.content.0.tool_use_id"),
        (["hi", [CALL], [result("t1"), result("t1")]], "messages.2.content.1.tool_use_id"),
        (["hi", [CALL, OTHER], [result("t1")]], "messages.2"),
        (["hi", [CALL], "well?"], "messages.2"),
        (["hi", [CALL]], "messages.1"),
        ([[result("t1")]], "messages.0.content.0.tool_use_id"),
    ],
)
def test_results_belong_to_calls(messages: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        body(*messages).turn()
    assert caught.value.param == param


def test_tool_choices() -> None:
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]

    def turn(**choice: Any) -> Any:
        return body("hi", tools=tools, tool_choice=choice).turn()

    assert (turn(type="auto").must_call, turn(type="any").must_call, turn(type="any").tool_name) == (False, True, None)
    assert (turn(type="tool", name="f").must_call, turn(type="tool", name="f").tool_name) == (True, "f")
    assert list(turn(type="none").conversation.tools) == []
    assert turn(type="auto", disable_parallel_tool_use=True).parallel_calls is False
    assert turn(type="auto").conversation.tools == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    ]


def test_thinking_is_switched_by_the_template() -> None:
    def kwargs(**fields: Any) -> Any:
        return body("hi", **fields).turn().conversation.template_kwargs

    assert kwargs() == kwargs(thinking={"type": "disabled"}) == {"enable_thinking": False}
    assert kwargs(thinking={"type": "enabled", "budget_tokens": 7}) == {"enable_thinking": True}
    effort = kwargs(thinking={"type": "adaptive"}, output_config={"effort": "max"})
    assert effort == {"enable_thinking": True, "reasoning_effort": "high"}
    for given, told in {"low": "low", "medium": "medium", "high": "high", "xhigh": "high"}.items():
        assert kwargs(output_config={"effort": given})["reasoning_effort"] == told


def test_counting_needs_no_max_tokens() -> None:
    CountTokensBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(ValidationError) as caught:
        MessagesBody.model_validate(sent := {"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    assert validation_error(caught.value.errors(), sent).param == "max_tokens"


# Ollama


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (5, 5), (0, 0), (2.5, 2.5), ("5m", 300), ("1h30m", 5400), ("300ms", 0.3), ("1.5s", 1.5), (".5s", 0.5), ("0", 0),
        ("300", 300), ("+2s", 2), ("20us", 2e-5),
        (-1, math.inf), ("-1", math.inf), ("-1m", math.inf), (1e300, math.inf),
    ],
)  # fmt: skip
def test_durations(given: Any, seconds: float) -> None:
    assert read_keep_alive(given) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["", "m", "5 m", "5x", "1e3s", True, [], {}, "5m!", "--1", "9" * 80])
def test_what_is_no_duration(given: Any) -> None:
    with pytest.raises(PydanticCustomError):
        read_keep_alive(given)


def test_options_have_ollamas_defaults() -> None:
    plain = OllamaOptions().sampling(None)
    assert (plain.temperature, plain.top_k, plain.top_p, plain.max_tokens, plain.seed) == (0.8, 40, 0.9, None, None)
    assert plain.repetition_penalty == 1.0
    options = {"num_predict": 5, "seed": 0, "repeat_penalty": 1.2, "stop": "x"}
    given = OllamaOptions.model_validate(options).sampling(3)
    assert (given.max_tokens, given.seed, given.repetition_penalty, given.stop, given.logprobs) == (
        5,
        0,
        1.2,
        ("x",),
        3,
    )


def test_think_reaches_the_template() -> None:
    def kwargs(**fields: Any) -> Any:
        return OllamaChatBody.model_validate({"model": "m", **fields}).template_kwargs

    assert (kwargs(), kwargs(think=False)) == ({}, {"enable_thinking": False})
    assert kwargs(think="high") == {"enable_thinking": True, "reasoning_effort": "high"}


def test_names_are_shown_with_a_tag() -> None:
    assert [shown(name) for name in ("a", "a:7b", "x/a", "host:80/a")] == [
        "a:latest",
        "a:7b",
        "x/a:latest",
        "host:80/a:latest",
    ]


def test_arguments_are_an_object_whatever_was_written() -> None:
    assert read_arguments('{"a": 1}') == read_arguments('{"a": 1') == {"a": 1}
    assert read_arguments("") == read_arguments("[1]") == read_arguments("nonsense") == {}


# Errors


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InvalidRequestError("x is wrong", param="x"), "invalid_request_error", "x is wrong"),
        (InvalidRequestError("it is wrong", param="x"), "invalid_request_error", "x: it is wrong"),
        (QueueFullError("too many"), "rate_limit_error", "too many"),
        (ParallmError("oh no"), "api_error", "oh no"),
        (ContextLengthError("9 > 8", param="messages"), "invalid_request_error", "prompt is too long: 9 > 8"),
    ],
)
def test_an_error_has_the_shape_of_its_path(error: ParallmError, kind: str, message: str) -> None:
    failure = Failure.of(error)

    def body(path: str) -> dict[str, Any]:
        return route_table().find("POST", path).error_shape.body(failure, "r")

    assert body("/v1/chat/completions") == body("/v1/messages_of_old") == body("/v1/nobody") == error.body()
    told = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "r"}
    assert body("/v1/messages") == body("/v1/messages/count_tokens") == body("/v1/messages/nobody") == told
    assert body("/api/chat") == body("/api/nobody") == {"error": failure.text}


@pytest.mark.parametrize(("seconds", "given"), [(1.5, 1_500_000_000), (0.0, 0), (-0.25, 0)])
def test_ollamas_times_are_in_nanoseconds_and_never_negative(seconds: float, given: int) -> None:
    assert nanoseconds(seconds) == given
