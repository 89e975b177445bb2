"""What coding agents send to `/v1/responses`, turn by turn; `golden/codex_requests.json` is in Codex CLI's shape."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.servers import ServerProcess, ours, running
from tests.tiny import save_tiny, tiny

TRANSCRIPT: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "codex_requests.json").read_text())
SHARE = 0.9  # of a turn's input that must have been computed in earlier turns


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Of a tiny model with room for an agent's prompt. Agents don't say how long an answer may be."""
    folder = tmp_path_factory.mktemp("models") / "tiny-long"
    folder.mkdir()
    save_tiny(tiny("llama", max_position_embeddings=16384), folder)
    with running(ours(str(folder), ["--max-tokens", "24"])) as server:
        yield server


def events(server: ServerProcess, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a streamed answer, as an agent reads them."""
    url = f"{server.url}/v1/responses"
    with httpx.stream("POST", url, json=body, headers=TRANSCRIPT["headers"], timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[0]["type"] == "response.created"
    assert found[-1]["type"] in ("response.completed", "response.incomplete")
    return found


def as_resent(item: dict[str, Any]) -> dict[str, Any]:
    """An item as Codex sends it back: without its id, and of reasoning only what is encoded."""
    kept = {key: value for key, value in item.items() if key not in ("id", "status", "logprobs")}
    if kept["type"] == "reasoning":
        kept["content"] = None
    return kept


def share_of_cached(usage: dict[str, Any]) -> float:
    return float(usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"])


def play(server: ServerProcess, **more: Any) -> list[float]:
    """The transcript as it was recorded; which share of each turn's input was cached."""
    items: list[dict[str, Any]] = []
    shares = []
    for turn in TRANSCRIPT["turns"]:
        items += turn
        *_, last = events(server, {**TRANSCRIPT["request"], "input": items, **more})
        assert last["response"]["store"] is False
        kinds = {tool["type"] for tool in last["response"]["tools"]}
        assert kinds == {"function", "custom", "namespace", "web_search"}
        shares.append(share_of_cached(last["response"]["usage"]))
    return shares


def test_a_recorded_session_finds_its_prefix(server: ServerProcess) -> None:
    shares = play(server)
    assert len(shares) >= 5
    assert min(shares[1:]) >= SHARE, shares


def test_a_session_with_the_answers_that_were_given(server: ServerProcess) -> None:
    """Each turn calls a tool; its output and all before it are sent again, as an agent does."""
    request = {**TRANSCRIPT["request"], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    request["tools"] = [tool for tool in request["tools"] if tool.get("name") in ("view_image", "apply_patch")]
    items = list(TRANSCRIPT["turns"][0])
    shares = []
    for _ in range(5):
        found = events(server, {**request, "input": items, "max_output_tokens": 60})
        done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
        assert done == found[-1]["response"]["output"]
        [call] = done
        assert call["type"] in ("function_call", "custom_tool_call")
        items = [*items, as_resent(call), output_of(call)]
        shares.append(share_of_cached(found[-1]["response"]["usage"]))
    assert min(shares[1:]) >= SHARE, shares


def output_of(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "Exit code: 0\nOutput:\nok\n"}


def test_a_session_that_the_server_keeps(server: ServerProcess) -> None:
    """The same with `previous_response_id`: only what is new is sent."""
    shared = {key: TRANSCRIPT["request"][key] for key in ("instructions", "tools", "model", "reasoning", "include")}
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client:
        answer = client.responses.create(**shared, input=TRANSCRIPT["turns"][0])
        for question in ("Go on.", "And then?", "Is that all?"):
            answer = client.responses.create(**shared, input=question, previous_response_id=answer.id)
            assert answer.usage is not None
            assert share_of_cached(answer.usage.to_dict()) >= SHARE


@pytest.mark.slow
def test_a_recorded_session_on_the_embedded_model(embedded_server: ServerProcess) -> None:
    shares = play(embedded_server, max_output_tokens=32)
    assert min(shares[1:]) >= SHARE, shares


# Reasoning

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is not false %}<think>{% endif %}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A tiny model whose template has it reason first."""
    folder = tmp_path_factory.mktemp("models") / "tiny-thinker"
    folder.mkdir()
    size = tiny("llama").vocab_size
    model = tiny("llama", vocab_size=size + 2)
    model.tokenizer._tokenizer.add_tokens(["<think>", "</think>"], special_tokens=False)
    model.tokenizer._tokenizer.chat_template = TEMPLATE
    save_tiny(model, folder)
    with running(ours(str(folder))) as server:
        server.end_of_thought = size + 1  # type: ignore[attr-defined]
        yield server


def test_reasoning_items(thinker: ServerProcess) -> None:
    end = {str(thinker.end_of_thought): 6}  # type: ignore[attr-defined]  # so that it comes soon
    body = {"input": "hello", "max_output_tokens": 120, "seed": 3, "logit_bias": end, "ignore_eos": True}
    body["include"] = ["reasoning.encrypted_content"]
    whole = httpx.post(f"{thinker.url}/v1/responses", json=body, timeout=60).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    reasoning, message = whole["output"]
    assert reasoning["content"][0]["type"] == "reasoning_text"
    assert reasoning["encrypted_content"].startswith("parallm:")
    assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"]
    found = events(thinker, {**body, "stream": True})
    kinds = list(dict.fromkeys(event["type"] for event in found))
    assert kinds[2:8] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    streamed = found[-1]["response"]["output"]
    assert [item["content"] for item in streamed] == [reasoning["content"], message["content"]]
    counts = [count(thinker, [as_resent(item) for item in items]) for items in ([reasoning, message], [message])]
    assert counts[0] > counts[1], "encoded reasoning comes back into the prompt"
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA-of-another-server"}
    assert count(thinker, [foreign, as_resent(message)]) == counts[1]
    quiet = httpx.post(f"{thinker.url}/v1/responses", json={**body, "reasoning": {"effort": "none"}}, timeout=60)
    assert quiet.json()["output"][0]["type"] == "message"


def count(server: ServerProcess, answer: list[dict[str, Any]]) -> int:
    items = [{"role": "user", "content": "hello"}, *answer, {"role": "user", "content": "why?"}]
    found = httpx.post(f"{server.url}/v1/responses/input_tokens", json={"input": items}, timeout=60).json()
    return int(found["input_tokens"])
