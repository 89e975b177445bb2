"""/v1/messages on a real server: answers, events, tools, thinking, counts, errors in Anthropic's shape, Claude Code."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_parallm.server.api.anthropic.response_types import AnthropicError
from tests.e2e.anthropic_events import HELLO, PATH, ask, events, joined, read
from tests.support.servers import ServerProcess, ours, running
from tests.support.shapes import read_as
from tests.support.thinking import thinking_folder
from tests.tiny import save_tiny, tiny

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "additionalProperties": False}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome", "days": 2}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}
CONVERSATION = json.loads((Path(__file__).parents[1] / "golden/claude_code.json").read_text())


@pytest.fixture(scope="module")
def client(tiny_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = thinking_folder(tmp_path_factory.mktemp("models") / "thinker")
    with running(ours(str(folder))) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def guarded(tiny_folder: Path) -> Iterator[httpx.Client]:
    """A server with keys, a small body limit, few places and little patience."""
    flags = ["--api-key", "open", "--admin-key", "sesame", "--max-body-size", "2000", "--request-timeout-seconds", "1"]
    flags += ["--max-batch-size", "1", "--max-queue-size", "1"]
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def total(usage: dict[str, int]) -> int:
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage[part] for part in parts)


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def test_an_answer(client: httpx.Client) -> None:
    answer = ask(client, max_tokens=5, system="Be brief.")
    assert answer["id"].startswith("msg_")
    assert (answer["model"], answer["role"], answer["stop_sequence"]) == ("tiny-llama", "assistant", None)
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) in (("max_tokens", 5), ("end_turn", 5))
    assert [block["type"] for block in answer["content"]] == ["text"]
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    again = ask(client, max_tokens=5, system=blocks, metadata={"user_id": "ada"}, service_tier="auto")
    assert again["content"] == answer["content"], "a system prompt is the same in blocks"
    assert total(again["usage"]) == total(answer["usage"])
    assert again["usage"]["cache_read_input_tokens"] > 0


def test_events_are_the_same_answer(client: httpx.Client) -> None:
    whole, found = ask(client, max_tokens=24), events(client, max_tokens=24)
    message = joined(found)
    assert message["content"] == whole["content"]
    assert (message["stop_reason"], message["stop_sequence"]) == (whole["stop_reason"], whole["stop_sequence"])
    assert message["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert sum(event["type"] == "content_block_delta" for event in found) > 3


def test_names_of_the_request(client: httpx.Client) -> None:
    body = {"model": "default", "max_tokens": 1, "messages": HELLO}
    answer = client.post(
        f"{PATH}?beta=true", json=body, headers={"X-Request-Id": "mine", "anthropic-beta": "no-such-beta"}
    )
    assert (answer.headers["request-id"], answer.json()["id"]) == ("mine", "msg_mine")
    refused = client.post(PATH, json={}, headers={"X-Request-Id": "mine"})
    assert (refused.headers["request-id"], refused.json()["request_id"]) == ("mine", "mine")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences(client: httpx.Client, stream: bool) -> None:
    text = ask(client, max_tokens=24)["content"][0]["text"]
    stop = text[6:8]
    fields: dict[str, Any] = {"max_tokens": 24, "stop_sequences": ["never written", stop]}
    answer = joined(events(client, **fields)) if stream else ask(client, **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == text[: text.index(stop)]


def test_more_tokens_than_fit_are_no_error(client: httpx.Client) -> None:
    long = [{"role": "user", "content": "x" * 1990}]
    answer = ask(client, max_tokens=32_000, messages=long, temperature=1)
    room = 2048 - total(answer["usage"])
    if answer["stop_reason"] != "end_turn":
        assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("model_context_window_exceeded", room)
    too_long = [{"role": "user", "content": "x" * 3000}]
    refused = client.post(PATH, json={"model": "default", "max_tokens": 5, "messages": too_long})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("prompt is too long: ")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_has_to_be_called(client: httpx.Client, choice: dict[str, str], stream: bool) -> None:
    choice = choice | {"disable_parallel_tool_use": True}  # type: ignore[dict-item]
    tools = [WEATHER, CLOCK] if "name" in choice else [WEATHER]
    fields: dict[str, Any] = {"max_tokens": 200, "tools": tools, "tool_choice": choice}
    answer = joined(events(client, **fields)) if stream else ask(client, **fields)
    (block,) = answer["content"]
    assert (block["type"], block["name"], answer["stop_reason"]) == ("tool_use", "get_weather", "tool_use")
    assert re.fullmatch(r"toolu_\w+", block["id"])
    assert block["input"]["city"] in ("Rome", "Oslo")
    assert 1 <= block["input"]["days"] <= 9


def test_input_is_streamed_in_pieces(client: httpx.Client) -> None:
    path = {"name": "go", "input_schema": {"type": "object", "properties": {"to": {"enum": ["a long way from here"]}},
                                           "required": ["to"], "additionalProperties": False}}  # fmt: skip
    found = events(client, max_tokens=200, tools=[path], tool_choice={"type": "tool", "name": "go"})
    start = next(event for event in found if event["type"] == "content_block_start")
    assert start["content_block"]["input"] == {}
    pieces = [event["delta"]["partial_json"] for event in found if event["type"] == "content_block_delta"]
    assert len(pieces) > 3
    assert json.loads("".join(pieces)) == {"to": "a long way from here"}


def test_several_calls_are_blocks_of_their_own(client: httpx.Client) -> None:
    for attempt in range(5):
        message = joined(
            events(
                client, max_tokens=600, tools=[CLOCK], tool_choice={"type": "any"}, temperature=1, system=f"{attempt}"
            )
        )
        if len(message["content"]) > 1 and message["stop_reason"] == "tool_use":
            assert {block["name"] for block in message["content"]} == {"clock"}
            assert len({block["id"] for block in message["content"]}) == len(message["content"])
            return
    pytest.skip("the random model has made one call each time")


def test_a_conversation_with_tools_goes_on(client: httpx.Client) -> None:
    turns = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "I look."}, CALL]}]
    blocks = [RESULT | {"content": [{"type": "text", "text": "sunny"}]}, {"type": "text", "text": "And tomorrow?"}]
    assert ask(client, messages=[*turns, user(*blocks)], tools=[WEATHER])["content"]
    assert ask(client, messages=[*turns, user(RESULT)], tools=[WEATHER], tool_choice={"type": "none"})["content"]


def test_an_answer_that_has_begun_goes_on(client: httpx.Client) -> None:
    text = ask(client, max_tokens=12)["content"][0]["text"]
    begun = [*HELLO, {"role": "assistant", "content": text[:6]}]
    counted = client.post(f"{PATH}/count_tokens", json={"model": "default", "messages": begun}).json()["input_tokens"]
    plain = client.post(f"{PATH}/count_tokens", json={"model": "default", "messages": HELLO}).json()["input_tokens"]
    assert counted > plain, "no turn is opened or closed behind it"
    assert ask(client, messages=begun)["content"]
    empty = ask(client, messages=[*HELLO, {"role": "assistant", "content": ""}], max_tokens=12)
    assert empty["content"][0]["text"] == text


def test_structured_output(client: httpx.Client) -> None:
    shape = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = ask(client, max_tokens=64, output_config={"format": {"type": "json_schema", "schema": shape}})
    assert json.loads(answer["content"][0]["text"])["n"] in (1, 2)


def test_count_tokens_is_what_the_answer_used(client: httpx.Client) -> None:
    turns = [*HELLO, {"role": "assistant", "content": [CALL]}, user(RESULT)]
    fields: dict[str, Any] = {"system": "Be kind.", "messages": turns, "tools": [WEATHER, CLOCK]}
    counted = client.post(f"{PATH}/count_tokens", json={"model": "default", **fields})
    assert counted.json() == {"input_tokens": total(ask(client, **fields)["usage"])}
    long = [{"role": "user", "content": "x" * 9000}]
    beyond = client.post(f"{PATH}/count_tokens", json={"model": "default", "messages": long})
    assert beyond.json()["input_tokens"] > 9000, "what does not fit can be counted"


def test_thinking(thinker: httpx.Client) -> None:
    on = {"type": "enabled", "budget_tokens": 64}
    fields: dict[str, Any] = {"max_tokens": 96, "thinking": on}
    whole, message = ask(thinker, **fields), joined(events(thinker, **fields))
    assert message["content"] == whole["content"]
    thought, *rest = whole["content"]
    assert (thought["type"], bool(thought["thinking"]), bool(thought["signature"])) == ("thinking", True, True)
    assert [block["type"] for block in rest] in ([], ["text"])
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    hidden = joined(events(thinker, **fields | {"thinking": on | {"display": "omitted"}}))
    assert (hidden["content"][0]["thinking"], hidden["content"][0]["signature"]) == ("", thought["signature"])
    assert hidden["content"][1:] == rest
    off = ask(thinker, max_tokens=16)
    assert "thinking" not in [block["type"] for block in off["content"]]
    assert ask(thinker, max_tokens=16, thinking={"type": "disabled"})["content"] == off["content"]


def test_thinking_of_earlier_turns_reaches_the_template(thinker: httpx.Client) -> None:
    def count(*blocks: dict[str, Any]) -> int:
        messages = [*HELLO, {"role": "assistant", "content": list(blocks)}, *HELLO]
        answer = thinker.post(f"{PATH}/count_tokens", json={"model": "default", "messages": messages})
        return int(answer.json()["input_tokens"])

    said = {"type": "text", "text": "yes"}
    plain = count(said)
    assert count({"type": "redacted_thinking", "data": "xyz"}, said) == plain
    assert count({"type": "thinking", "thinking": "let me see", "signature": "sig"}, said) > plain


def test_claude_code(tmp_path: Path) -> None:
    """Six turns as its terminal sends them: from the second on nearly all of the prompt is found in the cache."""
    save_tiny(tiny("llama", max_position_embeddings=32_768), tmp_path)
    with running(ours(str(tmp_path))) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        client.headers.update(CONVERSATION["headers"])
        messages: list[Any] = []
        for number, turn in enumerate(CONVERSATION["turns"]):
            calls = [block for block in messages[-1]["content"] if block["type"] == "tool_use"] if messages else []
            results = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": turn["results"]}
                | ({"is_error": True} if turn.get("is_error") else {})
                for call in calls
            ]
            messages.append({"role": "user", "content": [*results, *turn["content"]]})
            body = json.loads(json.dumps(CONVERSATION["body"]).replace("NONCE", f"{number:05x}"))
            body |= {"messages": messages, "max_tokens": 60}
            body |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}} if turn["calls"] else {}
            counted = {key: body[key] for key in ("model", "messages", "system", "tools")}
            tokens = client.post(f"{PATH}/count_tokens", params=CONVERSATION["query"], json=counted).json()[
                "input_tokens"
            ]
            message = joined(events(client, f"{PATH}?beta=true", **body))
            usage = message["usage"]
            assert total(usage) == tokens
            if number:
                assert usage["cache_read_input_tokens"] >= 0.9 * tokens, (number, usage)
            if turn["calls"]:
                assert any(block["type"] == "tool_use" for block in message["content"])
            messages.append({"role": "assistant", "content": message["content"] or "-"})


# Errors


def test_keys_in_either_header(guarded: httpx.Client) -> None:
    body = {"model": "default", "max_tokens": 1, "messages": HELLO}
    for headers in ({"x-api-key": "open"}, {"Authorization": "Bearer open"}, {"x-api-key": "sesame"}):
        assert guarded.post(PATH, json=body, headers=headers).status_code == 200
    for headers in ({}, {"x-api-key": "guess"}, {"Authorization": "Bearer guess"}, {"x-api-key": ""}):
        refused = guarded.post(PATH, json=body, headers=headers)
        assert (refused.status_code, kind_of(refused)) == (401, "authentication_error")
    assert guarded.get("/v1/models", headers={"x-api-key": "open"}).status_code == 200
    assert guarded.get("/debug/metrics", headers={"x-api-key": "open"}).status_code == 403


def kind_of(answer: httpx.Response) -> str:
    error = read_as(AnthropicError, answer.json())
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert error["error"]["message"]
    return error["error"]["type"]


def test_what_middleware_refuses_has_the_shape_too(guarded: httpx.Client) -> None:
    key = {"x-api-key": "open"}
    large = {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": "x" * 3000}]}
    refused = guarded.post(PATH, json=large, headers=key)
    assert (refused.status_code, kind_of(refused)) == (413, "request_too_large")
    chunks = iter([json.dumps(large).encode()])
    refused = guarded.post(PATH, content=chunks, headers=key | {"Content-Type": "application/json"})
    assert (refused.status_code, kind_of(refused)) == (413, "request_too_large")
    for method, path, status in (("GET", PATH, 405), ("POST", f"{PATH}/batches", 404)):
        refused = guarded.request(method, path, headers=key)
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        assert (refused.status_code, kind_of(refused)) == (status, kind)
    foreign = guarded.post(PATH, json={}, headers=key | {"Origin": "https://evil.example"})
    assert (foreign.status_code, kind_of(foreign)) == (403, "permission_error")
    form = guarded.post(PATH, data={"model": "default"}, headers=key)
    assert (form.status_code, kind_of(form)) == (400, "invalid_request_error")


def test_a_stream_that_fails_ends_with_an_error_event_and_a_full_queue_is_429(guarded: httpx.Client) -> None:
    body = {"model": "default", "max_tokens": 2000, "messages": HELLO, "temperature": 2, "stream": True}
    key, admin = {"x-api-key": "open"}, {"x-api-key": "sesame"}
    with guarded.stream("POST", PATH, json=body, headers=key | {"X-Request-Id": "cut"}) as response:
        lines = response.iter_lines()
        first = next(lines)
        assert guarded.post("/pause?mode=keep", headers=admin).status_code == 200
        refused, deadline = None, time.monotonic() + 10
        with httpx.Client(base_url=guarded.base_url, timeout=0.2) as others:
            while refused is None and time.monotonic() < deadline:
                try:
                    answer = others.post(PATH, json=body | {"stream": False}, headers=key)
                    refused = answer if answer.status_code == 429 else None
                except httpx.TimeoutException:
                    continue
                break
        found = list(read(iter([first, *lines])))
    assert guarded.post("/resume", headers=admin).status_code == 200
    if found[-1]["type"] == "message_stop":
        pytest.skip("the random model had ended its answer before the pause")
    assert found[-1] == {
        "type": "error",
        "error": {"type": "timeout_error", "message": found[-1]["error"]["message"]},
        "request_id": "cut",
    }
    if refused is not None:
        assert kind_of(refused) == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1


def fields(**more: Any) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 8, "messages": HELLO, **more}


def message(**more: Any) -> dict[str, Any]:
    return fields(messages=[{"role": "user", "content": "hi", **more}])


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    return fields(messages=[user(*blocks)])


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in fields().items() if key != name}


BAD: list[tuple[Any, int, str]] = [
    (b"", 400, "needs a JSON body"),
    (b"{", 400, "not valid JSON"),
    (b"[]", 400, "JSON object"),
    (b'{"max_tokens": NaN}', 400, "not valid JSON"),
    (without("model"), 400, "model: "),
    (without("messages"), 400, "messages: "),
    (without("max_tokens"), 400, "max_tokens: "),
    (fields(model="claude-sonnet-4-5"), 404, "there is no model 'claude-sonnet-4-5' here"),
    (fields(model=""), 400, "model: "),
    (fields(model=5), 400, "model: "),
    *((fields(max_tokens=value), 400, "max_tokens: ") for value in (0, -1, 1.5, "8", True, 2**70, [])),
    *((fields(temperature=value), 400, "temperature: ") for value in (-0.1, 2.1, "1", True)),
    *((fields(top_p=value), 400, "top_p: ") for value in (0, 1.1, "1")),
    *((fields(top_k=value), 400, "top_k: ") for value in (-1, 2**70, 1.5)),
    *((fields(stop_sequences=value), 400, "stop_sequences: ") for value in ([""], [1], 5, ["x"] * 99, ["x" * 1025])),
    *((fields(stream=value), 400, "stream: ") for value in ("yes", 1)),
    *((fields(metadata=value), 400, "metadata: ") for value in ("ada", [])),
    (fields(messages=[]), 400, "messages: "),
    (fields(messages="hello"), 400, "messages: "),
    (fields(messages=[{"content": "hi"}]), 400, "messages.0: Expected the role user, assistant or system"),
    (message(role="tool"), 400, "messages.0"),
    (message(content=None), 400, "messages.0.content: "),
    (message(content=5), 400, "messages.0.content: "),
    (message(content=[{"text": "hi"}]), 400, "messages.0.content.0: "),
    (said({"type": "video"}), 400, "messages.0.content.0: Expected a block of type text, image"),
    (said({"type": "text"}), 400, "messages.0.content.0.text: "),
    (said({"type": "text", "text": 5}), 400, "messages.0.content.0.text: "),
    (said(CALL), 400, "messages.0.content.0: "),
    (said(PIXEL), 400, "messages.0.content.0.source: tiny-llama reads text only"),
    (said({"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}), 400, "reads text only"),
    (said({"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}), 400, "source.url: "),
    (said({"type": "image", "source": {"type": "file", "file_id": "x"}}), 400, "files are not kept"),
    (said({"type": "document", "source": {"type": "base64", "data": "x"}}), 400, "PDF files are not read"),
    (said(RESULT), 400, "messages.0.content.0.tool_use_id: there is no tool_use block 'toolu_1'"),
    (fields(messages=[*HELLO, {"role": "assistant", "content": [CALL]}]), 400, "needs a tool_result"),
    (fields(messages=[*HELLO, {"role": "assistant", "content": [CALL]}, *HELLO]), 400, "messages.2: the tool_use"),
    (fields(messages=[{"role": "assistant", "content": [RESULT]}]), 400, "messages.0.content.0: "),
    (fields(system=5), 400, "system"),
    (fields(system=[PIXEL]), 400, "system.0"),
    (fields(tools=[{"name": "f"}]), 400, "tools.0.input_schema: A tool needs its input_schema"),
    (fields(tools=[{"name": "no spaces", "input_schema": {}}]), 400, "tools.0.name: "),
    (fields(tools=[{"type": "web_search_20250305", "name": "web_search"}]), 400, "web_search_20250305 is a tool that"),
    (fields(tools="all"), 400, "tools: "),
    (fields(tools=[CLOCK], tool_choice={"type": "tool"}), 400, "tool_choice.name: "),
    (fields(tools=[CLOCK], tool_choice={"type": "tool", "name": "x{y}"}), 400, "no tool 'x{y}' to choose"),
    (fields(tool_choice={"type": "any"}), 400, "tool_choice: "),
    (fields(tools=[CLOCK], tool_choice="auto"), 400, "tool_choice: "),
    (fields(tools=[{"name": "f", "input_schema": {"type": "banana"}}], tool_choice={"type": "any"}), 400, "tools"),
    (fields(thinking={"type": "enabled", "budget_tokens": 8}), 400, "max_tokens: It must be greater"),
    (fields(thinking={"type": "enabled", "budget_tokens": -5}), 400, "thinking.budget_tokens: "),
    (fields(thinking={"type": "maybe"}), 400, "thinking.type: "),
    (fields(thinking=True), 400, "thinking: "),
    (fields(output_config={"format": {"type": "json_schema"}}), 400, "output_config.format.schema: "),
    (fields(output_config={"format": {"type": "json_schema", "schema": {"type": "banana"}}}), 400, "output_config"),
    (fields(mcp_servers=[{"url": "https://example.com"}]), 400, "mcp_servers: "),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_input_is_refused_in_shape(client: httpx.Client, number: int) -> None:
    body, status, words = BAD[number]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(PATH, content=content, headers={"Content-Type": "application/json"})
    kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert (answer.status_code, kind_of(answer)) == (status, kind), answer.text
    assert words in answer.json()["error"]["message"]


def test_a_good_one_is_answered_after_all_that(client: httpx.Client) -> None:
    assert ask(client)["content"]
    counts = client.get("/debug/metrics").json()
    assert counts["slots_free"] == counts["slots_total"]


def test_counting_refuses_the_same(client: httpx.Client) -> None:
    for body in ({}, {"model": "default"}, {"model": "nobody", "messages": HELLO}, fields(messages=[user(RESULT)])):
        answer = client.post(f"{PATH}/count_tokens", json=body)
        assert answer.status_code in (400, 404)
        kind_of(answer)


def test_a_client_that_leaves_frees_its_row(client: httpx.Client) -> None:
    body = {"model": "default", "max_tokens": 1900, "messages": HELLO, "temperature": 2, "stream": True}
    with client.stream("POST", PATH, json=body) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 5
    while client.get("/debug/metrics").json()["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
