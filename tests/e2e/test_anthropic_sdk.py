"""The `anthropic` package of PyPI against our server: what its users do must work as it does with Anthropic's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import ServerProcess, ours, running
from tests.support.thinking import thinking_folder

anthropic = pytest.importorskip("anthropic")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

GREEDY = {"temperature": 0}  # newer versions of the package have no parameter for it
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(tiny_server: ServerProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=tiny_server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_create(client: Any) -> None:
    message = client.messages.create(model="default", max_tokens=8, messages=HELLO, extra_body=GREEDY)
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny-llama")
    assert message.content[0].text
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert message.usage.output_tokens <= 8
    assert message._request_id == message.id.removeprefix("msg_")


async def test_async_client(tiny_server: ServerProcess) -> None:
    async with anthropic.AsyncAnthropic(base_url=tiny_server.url, api_key="none", max_retries=0) as client:
        message = await client.messages.create(model="default", max_tokens=8, messages=HELLO, extra_body=GREEDY)
        async with client.messages.stream(model="default", max_tokens=8, messages=HELLO, extra_body=GREEDY) as stream:
            text = "".join([piece async for piece in stream.text_stream])
        assert text == message.content[0].text
        asked: dict[str, Any] = {"model": "default", "max_tokens": 8, "messages": HELLO, "extra_body": GREEDY}
        raw = await client.messages.create(**asked, stream=True)
        kinds = [event.type async for event in raw]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_stream_helper(client: Any) -> None:
    whole = client.messages.create(model="default", max_tokens=12, messages=HELLO, extra_body=GREEDY)
    with client.messages.stream(model="default", max_tokens=12, messages=HELLO, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_tool_runs_over_two_turns(client: Any) -> None:
    asked: dict[str, Any] = {"model": "default", "max_tokens": 200, "tools": [WEATHER], "extra_body": GREEDY}
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    pieces: list[str] = []
    with client.messages.stream(**asked, messages=HELLO, tool_choice=choice) as stream:
        pieces += [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    (call,) = message.content
    assert (call.type, call.name, message.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert call.input["city"] in ("Rome", "Oslo")
    assert len(pieces) > 1
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**asked, messages=turns).usage.cache_read_input_tokens > 0


def test_count_tokens(client: Any) -> None:
    counted = client.messages.count_tokens(model="default", messages=HELLO, system="Be kind.", tools=[WEATHER])
    usage = client.messages.create(
        model="default", max_tokens=1, messages=HELLO, system="Be kind.", tools=[WEATHER]
    ).usage
    assert counted.input_tokens == (
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )


def test_beta_client(client: Any) -> None:
    message = client.beta.messages.create(model="default", max_tokens=4, messages=HELLO, betas=["some-beta-2025-01-01"])
    assert message.type == "message"


def test_thinking(tmp_path: Path) -> None:
    folder = thinking_folder(tmp_path / "thinker")
    with (
        running(ours(str(folder))) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {"model": "default", "max_tokens": 96, "messages": HELLO, "extra_body": GREEDY}
        asked |= {"thinking": {"type": "enabled", "budget_tokens": 64}}
        kinds = []
        with client.messages.stream(**asked) as stream:
            kinds += [event.type for event in stream]
            message = stream.get_final_message()
        assert {"thinking", "signature"} <= set(kinds)
        assert (message.content[0].type, bool(message.content[0].signature)) == ("thinking", True)
        again = [*HELLO, {"role": "assistant", "content": message.content}, *HELLO]
        assert client.messages.create(**asked | {"messages": again}).content


def test_errors_are_the_sdk_s_own(client: Any, tiny_folder: Path) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(model="default", max_tokens=0, messages=HELLO)
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude-sonnet-4-5", max_tokens=4, messages=HELLO)
    assert missing.value.request_id
    with running(ours(str(tiny_folder), ["--api-key", "open", "--max-body-size", "2000"])) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="open", max_retries=0) as keyed:
            assert keyed.messages.create(model="default", max_tokens=2, messages=HELLO).content
            long = [{"role": "user", "content": "x" * 3000}]
            with pytest.raises(anthropic.APIStatusError) as large:
                keyed.messages.create(model="default", max_tokens=2, messages=long)
            assert large.value.status_code == 413
        with anthropic.Anthropic(base_url=server.url, auth_token="open", max_retries=0) as keyed:
            assert keyed.messages.create(model="default", max_tokens=2, messages=HELLO).content
        with (
            anthropic.Anthropic(base_url=server.url, api_key="guess", max_retries=0) as wrong,
            pytest.raises(anthropic.AuthenticationError),
        ):
            wrong.messages.create(model="default", max_tokens=2, messages=HELLO)


def test_an_error_within_a_stream_is_raised(tiny_folder: Path) -> None:
    flags = ["--request-timeout-seconds", "1", "--admin-key", "sesame"]
    with (
        running(ours(str(tiny_folder), flags)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="sesame", max_retries=0) as client,
    ):
        stream = client.messages.create(
            model="default", max_tokens=2000, messages=HELLO, extra_body={"temperature": 2}, stream=True
        )
        events = iter(stream)
        assert next(events).type == "message_start"
        client.post("/pause?mode=keep", cast_to=object)
        with pytest.raises(anthropic.APIStatusError) as cut:
            list(events)
        assert cut.value.body["error"]["type"] == "timeout_error"
        client.post("/resume", cast_to=object)
