"""Malformed requests to `/v1/responses`, each with the status and the place that the answer must name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers import ServerProcess, ours, running

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
MISSING = "missing_required_parameter"
TOO_LONG = "context_length_exceeded"
Case = tuple[dict[str, Any], str | None, int, str | None]


def body(param: str | None, code: str | None = "invalid_value", status: int = 400, /, **fields: Any) -> Case:
    return {"input": "hello", "max_output_tokens": 2, **fields}, param, status, code


def item(param: str, code: str | None = "invalid_value", status: int = 400, /, **fields: Any) -> Case:
    return body(f"input.1{param}", code, status, input=[{"role": "user", "content": "hi"}, fields])


def part(param: str, **fields: Any) -> Case:
    return item(f".content.0{param}", role="user", content=[fields])


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


UNSUPPORTED_ITEMS = ("file_search_call", "computer_call", "computer_call_output", "web_search_call", "mcp_call")
UNSUPPORTED_ITEMS += ("code_interpreter_call", "image_generation_call", "compaction", "shell_call", "unheard_of")
UNSUPPORTED_TOOLS = ("file_search", "computer_use_preview", "code_interpreter", "mcp", "shell", "apply_patch", "magic")

TABLE: list[Case] = [
    ({}, "input", 400, MISSING),
    ({"input": None}, "input", 400, MISSING),
    *(body("input", input=value) for value in (5, True, {}, [])),
    body("input.0", input=["hello"]),
    body("input.0", input=[5]),
    item(".role", MISSING, content="x"),
    item(".content", MISSING, role="user"),
    item(".role", role="king", content="x"),
    item(".role", role="tool", content="x"),
    item(".content", role="user", content=5),
    item("", type=5),
    *(item("", type=kind) for kind in UNSUPPORTED_ITEMS),
    part("", type="hologram", text="x"),
    part("", type="input_text"),
    part(".text", type="input_text", text=5),
    part("", type="input_file", file_id="f"),
    part("", type="input_audio"),
    part("", type="input_image"),
    part("", type="input_image", file_id="f"),
    part("", type="input_image", image_url="data:image/png;base64,AAAA"),  # the model reads text only
    item(".call_id", MISSING, type="function_call", name="f", arguments="{}"),
    item(".name", MISSING, type="function_call", call_id="c", arguments="{}"),
    item(".arguments", MISSING, type="function_call", call_id="c", name="f"),
    item(".arguments", type="function_call", call_id="c", name="f", arguments={}),
    item(".call_id", None, type="function_call_output", call_id="nobody", output="x"),
    item(".call_id", None, type="custom_tool_call_output", call_id="nobody", output="x"),
    item(".call_id", None, type="local_shell_call_output", id="nobody", output="x"),
    item(".output", MISSING, type="function_call_output", call_id="c"),
    item(".output", type="function_call_output", call_id="c", output={"a": 1}),
    item(".input", MISSING, type="custom_tool_call", call_id="c", name="f"),
    item(".action", MISSING, type="local_shell_call", call_id="c"),
    item(".action.command", type="local_shell_call", call_id="c", action={"command": "ls"}),
    item(".id", None, 404, type="item_reference", id="msg_nobody"),
    item(".id", None, 404, id="msg_nobody"),
    item(".id", type="item_reference", id=""),
    item(".summary", type="reasoning", summary="x"),
    item(".content.0.text", type="reasoning", summary=[], content=[{"type": "reasoning_text", "text": 5}]),
    body("input", TOO_LONG, input="a b c " * 2000),
    body("max_output_tokens", TOO_LONG, max_output_tokens=2048),
    *(body("max_output_tokens", max_output_tokens=value) for value in (0, -1, 1.5, "5", True, 2**63)),
    *(body("temperature", temperature=value) for value in ("hot", -0.1, 2.1, True)),
    *(body("top_p", top_p=value) for value in (0, 1.1, "x")),
    *(body("top_logprobs", top_logprobs=value) for value in (-1, 21, "2")),
    body("seed", seed=2**63),
    body("logit_bias", None, logit_bias={"999999": 1}),
    body("instructions", instructions=5),
    body("model", "model_not_found", 404, model="nobody"),
    body("model", model=5),
    body("stream", stream="yes"),
    body("store", store=1),
    body("background", background=True, stream=True),
    body("background", background=True, store=False),
    body("previous_response_id", previous_response_id=5),
    body("previous_response_id", previous_response_id=""),
    body("previous_response_id", "previous_response_not_found", previous_response_id="resp_nobody"),
    body("prompt", prompt={"id": "pmpt_1"}),
    body("conversation", conversation="conv_1"),
    body("context_management", context_management=[{"type": "compaction"}]),
    body("truncation", truncation="some"),
    body("include", include="all"),
    body("include.0", include=["everything"]),
    body("metadata", metadata="x"),
    body("metadata.a", metadata={"a": 5}),
    body("metadata.a", metadata={"a": "x" * 513}),
    body("metadata", metadata={"k" * 65: "x"}),
    body("metadata", metadata={str(number): "x" for number in range(17)}),
    body(None, metadata=nested(300)),
    body(None, input=[nested(300)]),
    body("reasoning.effort", reasoning={"effort": "enormous"}),
    body("reasoning", reasoning="high"),
    body("text", text="json"),
    body("text.format.type", text={"format": {"type": "xml"}}),
    body("text.format", text={"format": {"type": "json_schema", "name": "x"}}),
    body("text.format", text={"format": {"type": "json_schema", "schema": {}}}),
    body("text.format.schema", None, text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "zoo"}}}),
    body("text.verbosity", text={"verbosity": "silent"}),
    body("chat_template_kwargs", None, chat_template_kwargs={"chat_template": "{{ 7 * 7 }}"}),
    body("tools", tools="look"),
    body("tools.0", tools=["look"]),
    *(body("tools.0", tools=[{"type": kind}]) for kind in UNSUPPORTED_TOOLS),
    body("tools.0", tools=[{"name": "look"}]),
    body("tools.0.name", MISSING, tools=[{"type": "function"}]),
    body("tools.0.name", tools=[{"type": "function", "name": "no spaces"}]),
    body("tools.0.parameters", tools=[{"type": "function", "name": "f", "parameters": 5}]),
    body("tools.0.tools.0", tools=[{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]),
    body("tools", tools=[TOOL, TOOL]),
    body("tools", None, tools=[{**TOOL, "parameters": {"type": "zoo"}}], tool_choice="required"),
    body("tool_choice", tools=[TOOL], tool_choice="maybe"),
    body("tool_choice", tool_choice="required"),
    body("tool_choice", tools=[{"type": "web_search"}], tool_choice="required"),
    body("tool_choice", tools=[TOOL], tool_choice={"type": "function", "name": "other"}),
    body("tool_choice", tools=[TOOL], tool_choice={"type": "file_search"}),
    body("tool_choice", tools=[TOOL], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": []}),
    body("parallel_tool_calls", parallel_tool_calls="no"),
]


@pytest.fixture(scope="module")
def client(tiny_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


def check(answer: httpx.Response, case: Case) -> None:
    sent, param, status, code = case
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), (sent, error)
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_is_refused_with_its_place(client: httpx.Client, stream: bool) -> None:
    for case in TABLE:
        sent = case[0] if "stream" in str(case[1:2]) + str(case[0]) else {**case[0], "stream": stream}
        check(client.post("/v1/responses", json=sent), case)
    good = client.post("/v1/responses", json={"input": "hello", "max_output_tokens": 2, "nonsense": 5, "tools": None})
    assert good.status_code == 200


def test_what_is_unsupported_is_named(client: httpx.Client) -> None:
    for sent, name in (
        ({"input": [{"type": "file_search_call", "id": "x"}]}, "file_search_call"),
        ({"input": "x", "tools": [{"type": "code_interpreter"}]}, "code_interpreter"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "web_search_preview"}}, "web_search_preview"),
    ):
        assert name in client.post("/v1/responses", json=sent).json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?limit=0", "limit"),
        ("?limit=101", "limit"),
        ("?limit=many", "limit"),
        ("?limit=-1", "limit"),
        ("?limit=99999999999999999999", "limit"),
        ("?order=up", "order"),
        ("?after=nobody", "after"),
    ],
)
def test_queries_of_input_items(client: httpx.Client, path: str, param: str) -> None:
    found = client.post("/v1/responses", json={"input": "hello", "max_output_tokens": 2}).json()["id"]
    answer = client.get(f"/v1/responses/{found}/input_items{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_other_routes(client: httpx.Client) -> None:
    found = client.post("/v1/responses", json={"input": "hello", "max_output_tokens": 2}).json()["id"]
    assert client.get(f"/v1/responses/{found}?stream=true").status_code == 400
    for name in ("nobody", "x" * 5000, "%00", "'; DROP TABLE responses; --"):
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = client.request(method, f"/v1/responses/{name}{path}")
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert client.get(f"/v1/responses/{found}").status_code == 200
    assert client.get("/v1/responses").status_code == 405


def test_an_error_in_a_stream_is_an_event(client: httpx.Client) -> None:
    with client.stream(
        "POST", "/v1/responses", json={"input": "hello", "max_output_tokens": 1900, "stream": True, "ignore_eos": True}
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: response.created"
        client.post("/pause?mode=abort")
        text = "\n".join(lines)
    assert client.post("/resume").status_code == 200
    assert "event: response.failed" in text
    assert '"status":"failed"' in text


def test_what_can_not_be_stored_is_not_said_to_be(tiny_folder: Path, tmp_path: Path) -> None:
    """Where its folder should be is a file; and what was stored by then is asked for again once the disk works."""
    (tmp_path / "file").write_text("")
    flags = ["--responses-dir", str(tmp_path / "file" / "responses")]
    body: dict[str, Any] = {"input": "hi", "max_output_tokens": 2}
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        answer = client.post("/v1/responses", json=body).json()
        assert (answer["status"], answer["store"]) == ("incomplete", False)
        streamed = client.post("/v1/responses", json=body | {"stream": True}).text
        last = json.loads([line for line in streamed.splitlines() if line.startswith("data: ")][-1][6:])
        assert (last["response"]["status"], last["response"]["store"]) == ("incomplete", False)
        refused = client.post("/v1/responses", json=body | {"background": True})
        assert (refused.status_code, "can't be stored" in refused.text) == (503, True)
        (tmp_path / "file").unlink()
        answer = client.post("/v1/responses", json=body).json()
        assert answer["store"]
        assert client.get(f"/v1/responses/{answer['id']}").json()["id"] == answer["id"]
