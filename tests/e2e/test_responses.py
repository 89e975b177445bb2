"""The `openai` package's `responses` against our server: create, stream, parse, tools, stored responses, errors."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from mlx_parallm.server.api.responses.response_types import InputItemList, ResponseDeleted, ResponseObject
from tests.support.servers import ServerProcess, ours, running
from tests.support.shapes import read_as

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Changes files"}
ASK: dict[str, Any] = {"model": "default", "input": "hello", "max_output_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def client(tiny_server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def raw(client: OpenAI, method: str, path: str, **more: Any) -> httpx.Response:
    with httpx.Client(base_url=str(client.base_url), timeout=60) as http:
        return http.request(method, path, **more)


# Create


def test_create(client: OpenAI) -> None:
    answer = client.responses.create(
        **ASK, instructions="Be brief.", metadata={"a": "b"}, extra_body={"ignore_eos": 1 > 0}
    )
    assert answer.object == "response"
    assert answer.id.startswith("resp_")
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    [message] = answer.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "incomplete")
    assert answer.output_text == message.content[0].text  # type: ignore[union-attr]
    assert answer.output_text
    assert (answer.instructions, answer.metadata, answer.model) == ("Be brief.", {"a": "b"}, "tiny-llama")
    assert answer.usage is not None
    assert answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.usage.input_tokens_details.cached_tokens >= 0


def test_it_answers_as_chat_does(client: OpenAI) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "two", "annotations": []}],
        },
        {"role": "user", "content": "three"},
    ]
    given = {**ASK, "input": items, "instructions": "Be brief."}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    chat = client.chat.completions.create(model="default", messages=messages, max_tokens=12, temperature=0)
    answer = client.responses.create(**given)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert client.responses.input_tokens.count(input=items, instructions="Be brief.").input_tokens == (
        chat.usage.prompt_tokens
    )


def test_an_answer_is_what_is_documented(client: OpenAI) -> None:
    body = {"input": "hi", "max_output_tokens": 3, "tools": [WEATHER, PATCH, {"type": "web_search"}]}
    answer = raw(client, "POST", "responses", json=body).json()
    read_as(ResponseObject, answer)
    assert answer["tools"] == [WEATHER, PATCH, {"type": "web_search"}]
    read_as(ResponseObject, raw(client, "GET", f"responses/{answer['id']}").json())
    read_as(InputItemList, raw(client, "GET", f"responses/{answer['id']}/input_items").json())
    read_as(ResponseDeleted, raw(client, "DELETE", f"responses/{answer['id']}").json())


def test_logprobs(client: OpenAI) -> None:
    answer = client.responses.create(**ASK, include=["message.output_text.logprobs"], top_logprobs=2)
    part = answer.output[0].content[0]  # type: ignore[union-attr,index]
    assert len(part.logprobs) >= 1  # type: ignore[union-attr,arg-type]
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in part.logprobs)  # type: ignore
    streamed = [
        entry.token
        for event in client.responses.create(**ASK, top_logprobs=2, stream=True)
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == [entry.token for entry in part.logprobs]  # type: ignore


# Stream


def test_events_come_in_order(client: OpenAI) -> None:
    whole = client.responses.create(**ASK)
    events = list(client.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    last = events[-1].response  # type: ignore[union-attr]
    assert "".join(deltas) == whole.output_text == last.output_text
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert events[0].response.status == "in_progress"  # type: ignore[union-attr]
    assert len({getattr(event, "item_id", None) for event in events} - {None}) == 1


def test_the_stream_helper(client: OpenAI) -> None:
    whole = client.responses.create(**ASK)
    with client.responses.stream(**ASK) as stream:
        found = [event for event in stream if event.type == "response.output_text.delta"]
    assert found[-1].snapshot == "".join(event.delta for event in found) == whole.output_text
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    shape: Any = {"format": {"type": "json_schema", "name": "nothing", "schema": schema}}
    with client.responses.stream(**{**ASK, "max_output_tokens": 60}, text=shape) as stream:
        final = stream.get_final_response()
    assert json.loads(final.output_text) == {}


def test_the_async_client(tiny_server: ServerProcess) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key="none") as client:
            answers = await asyncio.gather(*(client.responses.create(**ASK) for _ in range(4)))
            return [answer.output_text for answer in answers]

    assert len(set(asyncio.run(ask()))) == 1


def test_a_client_that_leaves_frees_its_row(client: OpenAI, tiny_server: ServerProcess) -> None:
    stream = client.responses.create(
        model="default", input="hello", max_output_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 5
    while httpx.get(f"{tiny_server.url}/debug/metrics").json()["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Structured output


class Thing(BaseModel):
    color: str
    count: int


def test_parse(client: OpenAI) -> None:
    answer = client.responses.parse(
        model="default", input="A thing.", text_format=Thing, max_output_tokens=200, temperature=0
    )
    if answer.status == "completed":
        assert isinstance(answer.output_parsed, Thing)
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}},
        "required": ["color"],
        "additionalProperties": False,
    }
    shape: Any = {"format": {"type": "json_schema", "name": "thing", "strict": True, "schema": schema}}
    fixed = client.responses.create(**{**ASK, "max_output_tokens": 100}, text=shape)
    assert json.loads(fixed.output_text)["color"] in ("red", "green")
    assert fixed.text is not None
    assert fixed.text.to_dict()["format"] == shape["format"]
    free = client.responses.create(
        **{**ASK, "max_output_tokens": 300}, text={"format": {"type": "json_object"}}, extra_body={"logit_bias": {}}
    )
    assert free.output_text.startswith("{")


# Tools


def test_tools_there_and_back(client: OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "The weather in Rome?"}]
    given: dict[str, Any] = {"model": "default", "tools": [WEATHER], "max_output_tokens": 200, "temperature": 0}
    answer = client.responses.create(**given, input=items, tool_choice="required", parallel_tool_calls=False)
    [call] = answer.output
    assert call.type == "function_call"
    assert call.name == "get_weather"
    assert call.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    items += [item.to_dict() for item in answer.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    after = client.responses.create(**given, input=items, tool_choice="none")
    assert after.output[0].type == "message"
    continued = client.responses.create(**given, input=items[-1:], previous_response_id=answer.id, tool_choice="none")
    assert continued.output_text == after.output_text


def test_streamed_calls(client: OpenAI) -> None:
    given: dict[str, Any] = {"model": "default", "tools": [WEATHER], "max_output_tokens": 200, "temperature": 0}
    events = list(
        client.responses.create(
            **given, input="hi", tool_choice={"type": "function", "name": "get_weather"}, stream=True
        )
    )
    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added"
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    done = events[-3].arguments  # type: ignore[union-attr]
    assert text == done
    assert json.loads(done)["city"] in ("Paris", "Rome")
    item = events[-1].response.output[0]  # type: ignore[union-attr]
    assert (item.type, item.arguments) == ("function_call", done)  # type: ignore[union-attr]
    with client.responses.stream(**given, input="hi", tool_choice="required", parallel_tool_calls=False) as stream:
        final = stream.get_final_response()
    assert final.output[0].type == "function_call"


def test_custom_tools(client: OpenAI) -> None:
    given: dict[str, Any] = {"model": "default", "tools": [PATCH, WEATHER], "max_output_tokens": 60, "temperature": 0}
    choice: Any = {"type": "custom", "name": "apply_patch"}
    events = list(client.responses.create(**given, input="hi", tool_choice=choice, stream=True))
    response = events[-1].response  # type: ignore[union-attr]
    [call] = response.output
    assert call.type == "custom_tool_call"
    assert call.name == "apply_patch"
    [done] = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert done.input == call.input
    items: list[Any] = [
        {"role": "user", "content": "hi"},
        call.to_dict(),
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"},
    ]
    assert client.responses.create(**given, input=items, tool_choice="none").output[0].type == "message"


def test_a_local_shell_and_a_namespace(client: OpenAI) -> None:
    given: dict[str, Any] = {"model": "default", "input": "hi", "max_output_tokens": 400, "temperature": 0}
    shell: list[Any] = [{"type": "local_shell"}, {"type": "image_generation"}]
    answer = raw(
        client, "POST", "responses", json={**given, "tools": shell, "tool_choice": {"type": "local_shell"}}
    ).json()
    [call] = answer["output"]
    assert (call["type"], call["action"]["type"]) == ("local_shell_call", "exec")
    assert all(isinstance(word, str) for word in call["action"]["command"])
    space = {"type": "namespace", "name": "mcp__sky", "description": "The sky", "tools": [WEATHER]}
    body = {**given, "tools": [space], "tool_choice": "required", "parallel_tool_calls": False}
    [call] = raw(client, "POST", "responses", json=body).json()["output"]
    assert (call["name"], call["namespace"]) == ("get_weather", "mcp__sky")


def test_allowed_tools(client: OpenAI) -> None:
    choice: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_weather"}],
    }
    answer = client.responses.create(
        **{**ASK, "max_output_tokens": 200}, tools=[PATCH, WEATHER], tool_choice=choice, parallel_tool_calls=False
    )
    assert [item.type for item in answer.output] == ["function_call"]
    assert answer.to_dict()["tool_choice"] == choice


# Stored responses


def test_a_conversation_is_continued(client: OpenAI) -> None:
    first = client.responses.create(**ASK, instructions="Be brief.")
    second = client.responses.create(**{**ASK, "input": "and then?"}, previous_response_id=first.id)
    third = client.responses.create(**{**ASK, "input": "and then?"}, previous_response_id=second.id)
    items: list[Any] = [
        {"role": "user", "content": "hello"},
        *first.output,
        {"role": "user", "content": "and then?"},
        *second.output,
        {"role": "user", "content": "and then?"},
    ]
    same = client.responses.create(**{**ASK, "input": items})
    assert third.output_text == same.output_text
    assert third.usage is not None
    assert same.usage is not None
    assert third.usage.input_tokens == same.usage.input_tokens
    assert third.previous_response_id == second.id
    by_reference = client.responses.create(
        **{**ASK, "input": [items[0], {"type": "item_reference", "id": first.output[0].id}, *items[2:]]}
    )
    assert by_reference.output_text == same.output_text


def test_a_streamed_response_is_stored_when_its_end_is_told(client: OpenAI) -> None:
    for _ in range(5):
        *_, last = client.responses.create(**ASK, stream=True)
        found = client.responses.retrieve(last.response.id)  # type: ignore[union-attr]
        assert found.to_dict() == last.response.to_dict()  # type: ignore[union-attr]


def test_retrieve_and_delete(client: OpenAI) -> None:
    answer = client.responses.create(**ASK, metadata={"k": "v"})
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    client.responses.delete(answer.id)
    for call in (
        lambda: client.responses.retrieve(answer.id),
        lambda: client.responses.delete(answer.id),
        lambda: client.responses.input_items.list(answer.id),
        lambda: client.responses.cancel(answer.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK, previous_response_id=answer.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_is_not_stored_is_not_found(client: OpenAI) -> None:
    answer = client.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_input_items(client: OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": f"number {number}"} for number in range(5)]
    answer = client.responses.create(**{**ASK, "input": items})
    page = client.responses.input_items.list(answer.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["number 4", "number 3"]  # type: ignore
    listed = list(client.responses.input_items.list(answer.id, order="asc", limit=2))  # page by page
    assert [item.content[0].text for item in listed] == [f"number {number}" for number in range(5)]  # type: ignore
    rest = client.responses.input_items.list(answer.id, order="asc", after=listed[3].id)  # type: ignore[arg-type]
    assert [item.id for item in rest.data] == [listed[4].id]
    assert not rest.has_more


def test_background(client: OpenAI) -> None:
    answer = client.responses.create(**ASK, background=True)
    assert answer.status == "in_progress"
    deadline = time.monotonic() + 30
    while answer.status == "in_progress":
        assert time.monotonic() < deadline
        time.sleep(0.02)
        answer = client.responses.retrieve(answer.id)
    assert answer.output_text == client.responses.create(**ASK).output_text
    assert client.responses.cancel(answer.id).status == answer.status  # it has ended


def test_cancel(client: OpenAI, tiny_server: ServerProcess) -> None:
    long: dict[str, Any] = {"model": "default", "input": "hello", "max_output_tokens": 1900, "background": True}
    answer = client.responses.create(**long, extra_body={"ignore_eos": True})
    with pytest.raises(openai.BadRequestError, match="in progress"):
        client.responses.create(**ASK, previous_response_id=answer.id)
    cancelled = client.responses.cancel(answer.id)
    assert (cancelled.id, cancelled.status) == (answer.id, "cancelled")
    assert client.responses.retrieve(answer.id).status == "cancelled"
    answer = client.responses.create(**long, extra_body={"ignore_eos": True})
    client.responses.delete(answer.id)
    deadline = time.monotonic() + 5
    while httpx.get(f"{tiny_server.url}/debug/metrics").json()["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    ended = client.responses.create(**ASK)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(ended.id)


def test_truncation(client: OpenAI) -> None:
    items: list[Any] = []
    for number in range(40):
        items.append({"role": "user", "content": f"Question {number}: " + "why " * 20})
        items.append({"role": "assistant", "content": f"Answer {number}."})
    items.append({"role": "user", "content": "And now?"})
    given = {**ASK, "input": items, "instructions": "Be brief."}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**given)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    answer = client.responses.create(**given, truncation="auto")
    assert answer.usage is not None
    assert 1000 < answer.usage.input_tokens <= 2048 - 512
    whole = client.responses.create(**{**given, "input": items[-3:]})
    assert whole.usage is not None
    assert whole.usage.input_tokens < answer.usage.input_tokens
    with pytest.raises(openai.BadRequestError):  # one message alone is too long
        client.responses.create(**{**ASK, "input": "why " * 5000}, truncation="auto")


# Restarts and keys


def test_a_restart_keeps_conversations(tiny_folder: Path, tmp_path: Path) -> None:
    flags = ["--responses-dir", str(tmp_path / "kept")]
    with running(ours(str(tiny_folder), flags)) as server, OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        first = client.responses.create(**ASK)
        expected = client.responses.create(**{**ASK, "input": "go on"}, previous_response_id=first.id)
        long = {**ASK, "max_output_tokens": 1900}
        broken = client.responses.create(**long, background=True, extra_body={"ignore_eos": True})
        server.process.kill()
    with running(ours(str(tiny_folder), flags)) as server, OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        second = client.responses.create(**{**ASK, "input": "go on"}, previous_response_id=first.id)
        assert second.output_text == expected.output_text
        assert second.usage is not None
        assert expected.usage is not None
        assert second.usage.input_tokens == expected.usage.input_tokens
        assert client.responses.retrieve(expected.id).to_dict() == expected.to_dict()
        lost = client.responses.retrieve(broken.id)
        assert lost.status == "failed"
        assert lost.error is not None
        assert "stopped" in lost.error.message
    mode = (tmp_path / "kept").stat().st_mode | next((tmp_path / "kept").glob("*.sqlite3")).stat().st_mode
    assert mode & 0o077 == 0, "others could read them"


def test_responses_belong_to_their_key(tiny_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("alice: {key: a-secret}\nbob: {key: b-secret}\nroot: {key: r-secret, role: admin}\n")
    flags = ["--keys-file", str(keys), "--responses-dir", str(tmp_path / "kept")]
    with running(ours(str(tiny_folder), flags)) as server, ExitStack() as clients:

        def of(key: str) -> OpenAI:
            return clients.enter_context(OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0))

        answer = of("a-secret").responses.create(**ASK)
        assert of("a-secret").responses.retrieve(answer.id).id == answer.id
        for key in ("b-secret", "r-secret"):
            other = of(key).responses
            for call in (other.retrieve, other.delete, other.cancel, other.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    call(answer.id)
            with pytest.raises(openai.BadRequestError):
                other.create(**ASK, previous_response_id=answer.id)
            with pytest.raises(openai.NotFoundError):
                other.create(**{**ASK, "input": [{"type": "item_reference", "id": answer.output[0].id}]})
        with pytest.raises(openai.AuthenticationError):
            of("guess").responses.retrieve(answer.id)
        assert of("a-secret").responses.create(**ASK, previous_response_id=answer.id).status
    assert b"a-secret" not in next((tmp_path / "kept").glob("*.sqlite3")).read_bytes()


@pytest.mark.slow
def test_a_server_that_keeps_none(tiny_folder: Path) -> None:
    flags = ["--responses-max-bytes", "0"]
    with running(ours(str(tiny_folder), flags)) as server, OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        answer = client.responses.create(**ASK)
        assert answer.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)
        for more in ({"previous_response_id": answer.id}, {"background": True}):
            with pytest.raises(openai.BadRequestError):
                client.responses.create(**ASK, **more)  # type: ignore[arg-type]
