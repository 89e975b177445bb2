"""/v1/chat/completions on a real server: messages, tools, structure, logprobs, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.http import Api, choices, content_of, finish_of
from tests.support.servers import ServerProcess

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}},
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def api(tiny_server: ServerProcess) -> Iterator[Api]:
    with httpx.Client(base_url=tiny_server.url, timeout=120) as client:
        yield Api(client)


def test_answer(api: Api) -> None:
    answer = api.chat(max_tokens=5, ignore_eos=True, cache_salt="nobody else's")
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    again = api.chat(max_tokens=5, ignore_eos=True, cache_salt="nobody else's")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["choices"] == answer["choices"]


def test_usage_counts_a_prompt_once_however_many_choices_it_has(api: Api) -> None:
    body: dict[str, Any] = dict(max_tokens=4, ignore_eos=True, temperature=1.0, seed=1, cache_salt="counted once")
    first = api.chat(**body)["usage"]
    single = api.chat(**body)["usage"]
    assert (first["prompt_tokens_details"]["cached_tokens"], single["prompt_tokens"]) == (0, first["prompt_tokens"])
    several = api.chat(**body, n=3)["usage"]
    assert several["prompt_tokens"] == single["prompt_tokens"]
    assert several["prompt_tokens_details"] == single["prompt_tokens_details"]
    assert 0 < several["prompt_tokens_details"]["cached_tokens"] < several["prompt_tokens"]
    assert several["completion_tokens"] == 12
    assert several["total_tokens"] == several["prompt_tokens"] + 12


def test_stream(api: Api) -> None:
    body: dict[str, Any] = dict(max_tokens=9, ignore_eos=True, n=2, temperature=1.2, seed=3)
    whole = api.chat(**body, cache_salt="whole")
    more: dict[str, Any] = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    chunks = api.stream_chat(**body, **more, cache_salt="streamed")
    for index in range(2):
        parts = choices(chunks, index)
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert content_of(chunks, index) == whole["choices"][index]["message"]["content"]
        assert finish_of(chunks, index) == "length"
        assert sum(len(part.get("token_ids", ())) for part in parts) == 9
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_max_completion_tokens_goes_first(api: Api) -> None:
    answer = api.chat(max_tokens=9, max_completion_tokens=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3


def test_messages_of_all_roles_and_parts(api: Api) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call("weather", '{"city": "Rome", "days": 2}')]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        {"role": "function", "name": "weather", "content": "rain"},
        {"role": "assistant", "content": [{"type": "text", "text": "ok"}]},
        {"role": "user", "content": "and now?"},
    ]
    rendered = render(api, messages=messages, tools=[WEATHER])
    assert "<|im_start|>system\nBe brief." in rendered
    assert '{"name": "weather"' in rendered
    assert "one\ntwo<|im_end|>" in rendered
    assert "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response>" in rendered
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>' in rendered
    answer = api.chat(messages=messages, tools=[WEATHER], max_tokens=3)
    assert answer["usage"]["prompt_tokens"] == len(tokens(api, messages=messages, tools=[WEATHER]))


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def tokens(api: Api, **body: Any) -> list[int]:
    found: list[int] = api.client.post("/tokenize", json=body).json()["tokens"]
    return found


def render(api: Api, **body: Any) -> str:
    return str(api.client.post("/detokenize", json={"tokens": tokens(api, **body)}).json()["prompt"])


def test_continue_final_message(api: Api) -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two"}]
    body = dict(messages=messages, continue_final_message=True)
    assert render(api, **body).endswith("<|im_start|>assistant\none, two")
    assert api.chat(**body, max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_echo_begins_with_the_last_message(api: Api) -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two"}]
    body: dict[str, Any] = dict(messages=messages, continue_final_message=True, max_tokens=3, ignore_eos=True)
    alone = api.chat(**body)["choices"][0]["message"]["content"]
    assert api.chat(**body, echo=True)["choices"][0]["message"]["content"] == "one, two" + alone
    assert api.chat(max_tokens=3, ignore_eos=True, echo=True) | {"id": 0, "created": 0} == api.chat(
        max_tokens=3, ignore_eos=True
    ) | {"id": 0, "created": 0}


def test_tokens_as_ids(api: Api) -> None:
    answer = api.chat(max_tokens=3, ignore_eos=True, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    assert all(entry["token"].startswith("token_id:") for entry in answer["choices"][0]["logprobs"]["content"])
    assert answer["prompt_logprobs"] is None


def test_logprobs(api: Api) -> None:
    body: dict[str, Any] = dict(max_tokens=6, ignore_eos=True, logprobs=True, top_logprobs=2)
    answer = api.chat(**body)["choices"][0]
    content = answer["logprobs"]["content"]
    assert len(content) == 6
    assert (
        b"".join(bytes(entry["bytes"]) for entry in content)
        .decode("utf-8", "replace")
        .startswith(answer["message"]["content"].rstrip("�"))
    )
    for entry in content:
        assert [top["logprob"] for top in entry["top_logprobs"]] == sorted(
            (top["logprob"] for top in entry["top_logprobs"]), reverse=True
        )
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"])
    streamed = [part["logprobs"]["content"] for part in choices(api.stream_chat(**body)) if part["logprobs"]]
    assert [entry["token"] for part in streamed for entry in part] == [entry["token"] for entry in content]
    assert api.chat(max_tokens=2, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_token_ids(api: Api) -> None:
    answer = api.chat(max_tokens=4, ignore_eos=True, return_token_ids=True)
    assert len(answer["choices"][0]["token_ids"]) == 4
    assert answer["prompt_token_ids"] == tokens(api, messages=[{"role": "user", "content": "hello"}])


def test_json_object(api: Api) -> None:
    for seed in range(3):
        answer = api.chat(response_format={"type": "json_object"}, temperature=1, seed=seed, max_tokens=400)
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_json_schema(api: Api) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for seed in range(4):
        body: dict[str, Any] = dict(response_format=form, temperature=1, seed=seed, max_tokens=400)
        choice = api.chat(**body)["choices"][0]
        assert choice["finish_reason"] == "stop"
        person = json.loads(choice["message"]["content"])
        assert set(person) == {"name", "age"}
        assert len(person["name"]) <= 5
        assert 0 <= person["age"] <= 99
        assert content_of(api.stream_chat(**body)) == choice["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_named_tool(api: Api, stream: bool) -> None:
    body: dict[str, Any] = dict(
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        temperature=1,
        seed=5,
        max_tokens=300,
    )
    found, finish = tool_calls(api, stream, body)
    assert finish == "tool_calls"
    assert [entry["function"]["name"] for entry in found] == ["weather"]
    arguments = json.loads(found[0]["function"]["arguments"])
    assert arguments["city"] in ("Rome", "Oslo")
    assert 1 <= arguments["days"] <= 9
    assert found[0]["id"].startswith("call_")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_required_tool(api: Api, stream: bool, parallel: bool) -> None:
    body: dict[str, Any] = dict(
        tools=[WEATHER, CLOCK],
        tool_choice="required",
        parallel_tool_calls=parallel,
        temperature=1,
        seed=1,
        max_tokens=1300,
    )
    found, finish = tool_calls(api, stream, body)
    assert finish == "tool_calls"
    assert len(found) == 1 or parallel
    assert {entry["function"]["name"] for entry in found} <= {"weather", "clock"}
    assert len({entry["id"] for entry in found}) == len(found)


def tool_calls(api: Api, stream: bool, body: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The calls of an answer, put together from their deltas when it is streamed."""
    if not stream:
        choice = api.chat(**body)["choices"][0]
        assert choice["message"]["content"] is None
        return choice["message"]["tool_calls"], choice["finish_reason"]
    chunks = api.stream_chat(**body)
    found: list[dict[str, Any]] = []
    for part in choices(chunks):
        for delta in part["delta"].get("tool_calls", []):
            if delta.get("id"):
                assert delta["index"] == len(found)
                found.append({"id": delta["id"], "function": {"name": delta["function"]["name"], "arguments": ""}})
            found[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    assert content_of(chunks) == ""
    return found, finish_of(chunks)


def test_tool_choice_none_shows_no_tools(api: Api) -> None:
    plain = api.chat(max_tokens=2)["usage"]["prompt_tokens"]
    assert api.chat(max_tokens=2, tools=[WEATHER], tool_choice="none")["usage"]["prompt_tokens"] == plain
    assert api.chat(max_tokens=2, tools=[WEATHER])["usage"]["prompt_tokens"] > plain


def test_null_means_absent_and_unknown_fields_are_ignored(api: Api) -> None:
    nothing = dict.fromkeys(["stop", "tools", "tool_choice", "seed", "n", "response_format", "stream_options", "user"])
    assert api.chat(max_tokens=2, **nothing, store=True, zebra={"a": 1})["choices"]
