"""The `openai` package of PyPI against our server: what its users do must work as it does with OpenAI's own."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from tests.support.servers import ServerProcess

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Paris", "Rome"]},
                    "days": {"type": "integer", "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]


@pytest.fixture(scope="module")
def client(tiny_server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def text(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def running(server: ServerProcess) -> int:
    answer: dict[str, int] = httpx.get(f"{server.url}/debug/metrics").json()
    return answer["running"]


# Models


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny-llama"
    assert model.object == "model"
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_default_names_the_served_model(client: OpenAI) -> None:
    answers = [
        client.chat.completions.create(model=model, messages=HELLO, max_tokens=4, temperature=0)
        for model in ("default", "tiny-llama")
    ]
    assert answers[0].choices == answers[1].choices


# Chat


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default", messages=HELLO, max_tokens=5, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_a_stream_is_the_same_answer(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "default", "messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text(chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_of_a_stream(client: OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model="default", messages=HELLO, max_tokens=6, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == []
    assert last.usage is not None
    assert 1 <= last.usage.completion_tokens <= 6
    assert all(chunk.usage is None for chunk in chunks)


def test_the_stream_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(model="default", messages=HELLO, max_tokens=8, temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        snapshot = stream.current_completion_snapshot
    assert "".join(pieces) == snapshot.choices[0].message.content


def test_roles_and_parts(client: OpenAI) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four", "name": "Ann"},
    ]
    answer = client.chat.completions.create(model="default", messages=messages, max_completion_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 3


def test_several_choices(client: OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "default",
        "messages": HELLO,
        "max_tokens": 8,
        "n": 3,
        "seed": 5,
        "temperature": 1.3,
    }
    whole = client.chat.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) > 1
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert [text(chunks, index) for index in range(3)] == [choice.message.content for choice in whole.choices]


def test_seeds(client: OpenAI) -> None:
    def sample(seed: int) -> str | None:
        ask = client.chat.completions.create(model="default", messages=HELLO, max_tokens=16, temperature=1, seed=seed)
        return ask.choices[0].message.content

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_stop(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "default", "messages": HELLO, "temperature": 0, "extra_body": {"ignore_eos": True}}
    free = client.chat.completions.create(**ask, max_tokens=24).choices[0].message.content
    assert free
    stop = free[len(free) // 2 :][:2]
    for stops in (stop, ["\0", stop]):
        choice = client.chat.completions.create(**ask, max_tokens=24, stop=stops).choices[0]
        assert choice.message.content == free[: free.index(stop)]
        assert choice.finish_reason == "stop"
        chunks = list(client.chat.completions.create(**ask, max_tokens=24, stop=stops, stream=True))
        assert text(chunks) == choice.message.content


def test_logprobs(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "default", "messages": HELLO, "max_tokens": 5, "temperature": 0}
    choice = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy takes the likeliest
        assert bytes(entry.bytes or []).decode("utf-8", "replace") == entry.token
    streamed = [
        entry
        for chunk in client.chat.completions.create(**ask, logprobs=True, top_logprobs=3, stream=True)
        for part in chunk.choices
        if part.logprobs
        for entry in part.logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]
    assert client.chat.completions.create(**ask).choices[0].logprobs is None


def test_penalties_and_bias_change_the_answer(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "default", "messages": HELLO, "max_tokens": 16, "temperature": 0}
    plain = client.chat.completions.create(**ask, extra_body={"return_token_ids": True}).choices[0]
    first = plain.model_extra["token_ids"][0] if plain.model_extra else None
    banned = client.chat.completions.create(**ask, logit_bias={str(first): -100}).choices[0]
    assert banned.message.content != plain.message.content
    client.chat.completions.create(**ask, frequency_penalty=1.0, presence_penalty=-1.0, top_p=0.5, user="ann")


# Structure


class City(BaseModel):
    name: str
    people: int


def test_json_object(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default", messages=HELLO, max_tokens=200, temperature=1, seed=1, response_format={"type": "json_object"}
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    else:
        assert (answer.choices[0].message.content or "").startswith("{")


def test_json_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["color", "size"],
        "additionalProperties": False,
    }
    format: Any = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": schema}}
    ask: dict[str, Any] = {"model": "default", "messages": HELLO, "max_tokens": 100, "temperature": 1, "seed": 2}
    choice = client.chat.completions.create(**ask, response_format=format).choices[0]
    thing = json.loads(choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert thing["color"] in ("red", "green")
    assert 1 <= thing["size"] <= 9
    chunks = list(client.chat.completions.create(**ask, response_format=format, stream=True))
    assert json.loads(text(chunks)) == thing


def test_parse_gives_pydantic_objects(client: OpenAI) -> None:
    class Coin(BaseModel):
        heads: bool

    answer = client.chat.completions.parse(model="default", messages=HELLO, max_tokens=60, response_format=Coin)
    assert isinstance(answer.choices[0].message.parsed, Coin)


# Tools


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_must_be_called(client: OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model="default", messages=HELLO, tools=TOOLS, tool_choice=choice, max_tokens=300, temperature=1, seed=4
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert answer.choices[0].finish_reason in ("tool_calls", "stop")
    for call in calls:
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            assert arguments["city"] in ("Paris", "Rome")
    if choice != "required":
        assert {call.function.name for call in calls} == {"get_weather"}


def test_streamed_tool_calls(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "default", "messages": HELLO, "tools": TOOLS, "max_tokens": 300, "temperature": 0}
    ask["tool_choice"] = {"type": "function", "function": {"name": "get_weather"}}
    (whole,) = client.chat.completions.create(**ask).choices[0].message.tool_calls or []
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            continue
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    for chunk in client.chat.completions.create(**ask, stream=True):
        indices = [one.index for choice in chunk.choices for one in choice.delta.tool_calls or []]
        assert len(indices) == len(set(indices)), "openai before version 3 takes them for several calls"
    assert whole.type == "function"
    assert call.function.name == whole.function.name == "get_weather"
    assert json.loads(call.function.arguments) == json.loads(whole.function.arguments)


def test_a_conversation_with_tool_results(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    answer = client.chat.completions.create(
        model="default", messages=messages, tools=TOOLS, max_tokens=4, tool_choice="none"
    )
    assert not answer.choices[0].message.tool_calls


# Completions


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(
        model="default", prompt="the", max_tokens=4, temperature=0, echo=True, logprobs=2
    )
    (choice,) = answer.choices
    assert answer.object == "text_completion"
    assert choice.text.startswith("the")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens
    assert choice.logprobs.token_logprobs
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)


def test_prompts_in_all_forms(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "default", "max_tokens": 4, "temperature": 0}
    ids = httpx.post(str(client.base_url).replace("/v1/", "/tokenize"), json={"prompt": "the and"}).json()["tokens"]
    by_text = client.completions.create(prompt="the and", **ask).choices[0].text
    assert client.completions.create(prompt=ids, **ask).choices[0].text == by_text
    for prompt in (["the and", "the and"], [ids, ids]):
        answer = client.completions.create(prompt=prompt, **ask)
        assert [choice.text for choice in answer.choices] == [by_text, by_text]
        assert [choice.index for choice in answer.choices] == [0, 1]


def test_streamed_completions(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "default", "prompt": "the", "max_tokens": 10, "temperature": 0}
    chunks = list(client.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == client.completions.create(**ask).choices[0].text


def test_completions_default_to_16_tokens(client: OpenAI) -> None:
    answer = client.completions.create(model="default", prompt="the", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


# Errors


@pytest.mark.parametrize(
    ("change", "error", "param", "code"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": 9}, openai.BadRequestError, "temperature", None),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens", None),
        ({"messages": []}, openai.BadRequestError, "messages", None),
        ({"messages": [{"role": "wizard", "content": "x"}]}, openai.BadRequestError, "messages.0.role", None),
        (
            {"messages": [{"role": "user", "content": "x" * 9000}]},
            openai.BadRequestError,
            None,
            "context_length_exceeded",
        ),
        ({"response_format": {"type": "yaml"}}, openai.BadRequestError, None, None),
    ],
)
def test_errors_are_typed(
    client: OpenAI, change: Any, error: type[openai.APIStatusError], param: str, code: str
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**({"model": "default", "messages": HELLO} | change))
    found = caught.value
    assert found.type == ("not_found_error" if error is openai.NotFoundError else "invalid_request_error")
    assert found.message
    assert found.request_id
    if param is not None:
        assert found.param == param
    if code is not None:
        assert found.code == code


def test_errors_before_a_stream_begins(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="default", messages=HELLO, stream=True, top_p=7)


def test_a_missing_route(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="x")


def test_the_request_id_of_the_client(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="default", messages=HELLO, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.request_id == "mine-1"


# Many at once


async def test_async_clients_together(tiny_server: ServerProcess) -> None:
    async with AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def ask(number: int) -> str | None:
            messages: Any = [{"role": "user", "content": f"the {number % 4}"}]
            answer = await client.chat.completions.create(
                model="default", messages=messages, max_tokens=8, temperature=0
            )
            return answer.choices[0].message.content

        answers = await asyncio.gather(*(ask(number) for number in range(16)))
        assert answers[:4] * 4 == answers
        stream = await client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "the 0"}], max_tokens=8, temperature=0, stream=True
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == answers[0]


def test_a_client_that_leaves_frees_its_row(client: OpenAI, tiny_server: ServerProcess) -> None:
    with client.chat.completions.create(
        model="default", messages=HELLO, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        assert running(tiny_server) == 1
    deadline = time.monotonic() + 5
    while running(tiny_server) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running(tiny_server) == 0


def test_timeouts_are_the_clients(client: OpenAI, tiny_server: ServerProcess) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(
            model="default", messages=HELLO, max_tokens=1900, extra_body={"ignore_eos": True}
        )


# Sense, which only a trained model has


def test_the_embedded_model_answers(embedded_server: ServerProcess) -> None:
    with OpenAI(base_url=f"{embedded_server.url}/v1", api_key="none", timeout=120) as client:
        question: Any = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat.completions.create(model="default", messages=question, max_tokens=20, temperature=0)
        assert "Paris" in (answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"
        city = client.chat.completions.parse(
            model="default", messages=question, max_tokens=60, temperature=0, response_format=City
        )
        assert city.choices[0].message.parsed is not None
