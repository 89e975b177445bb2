"""What each route answers, field by field, in all dialects: a golden file without the words that the model wrote.

After a change that is meant: WRITE_GOLDEN=1 .venv/bin/python -m pytest tests/e2e/test_golden_answers.py
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fuzz_openapi import model_flags
from tests.support.servers import ServerProcess, ours, running

FILE = Path(__file__).parents[1] / "golden" / "answers.json"
# Values that differ from run to run or from machine to machine: texts of the model, moments, sizes, speeds.
WRITTEN = frozenset(
    "text content token bytes delta arguments response thinking reasoning_content partial_json input_json "
    "decoded_token output_text completion tokens ids prompt_ids completion_ids output_ids token_ids "
    "prompt_token_ids".split()
)
MOMENTS = frozenset("created created_at completed_at modified_at expires_at time last_update started heard".split())
MASKED = frozenset(
    "version digest size root path source memory parameter_size kv_bytes_limit active_memory peak_memory spare_memory "
    "serving_peak_memory memory_limit size_vram bytes_limit signature system_fingerprint modelfile "
    "accepted_prediction_tokens rejected_prediction_tokens "
    "model_path eval_count generated_tokens output_tokens completion_tokens total_tokens number".split()
)
KINDS = "rollout chatcmpl cmpl msg resp rs fc call toolu gen req ctc lsh embd classify score rerank pool"
IDS = re.compile(rf"\b({KINDS.replace(' ', '|')})([-_])[0-9a-zA-Z]{{8,}}")
HEX = re.compile(r"\b[0-9a-f]{16,}\b")
HEADERS = ("content-type", "cache-control", "x-accel-buffering", "x-parallm-adapter", "x-parallm-warning")
USER = [{"role": "user", "content": "hello there"}]
TOOL = {
    "name": "look",
    "description": "Looks somewhere",
    "parameters": {"type": "object", "properties": {"at": {"enum": ["sea"]}}, "required": ["at"]},
}
FUNCTION = {"type": "function", "function": TOOL}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SHORT = {"max_tokens": 4, "temperature": 0}
SGLANG = {"max_new_tokens": 2, "temperature": 0}
SIXTY = {"num_predict": 64, "temperature": 0}
FIXED = SHORT | {"ignore_eos": True}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": USER, **FIXED, **fields}


def message(**fields: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": USER, **SHORT, **fields}


def ollama(**fields: Any) -> dict[str, Any]:
    return {"model": "chat", "options": {"num_predict": 4, "temperature": 0}, **fields}


def item(**fields: Any) -> dict[str, Any]:
    return {"model": "chat", "input": "hello", "max_output_tokens": 16, "temperature": 0, **fields}


FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
TEXT_FORMAT = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
ANTHROPIC_TOOL = {"name": "look", "description": "Looks", "input_schema": TOOL["parameters"]}
RESPONSES_TOOL = {"type": "function", "name": "look", "parameters": TOOL["parameters"], "strict": True}
COMPLETION = {"model": "chat", "prompt": "hello", **FIXED}
REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/completions", COMPLETION),
    ("POST", "/v1/completions", COMPLETION | {"n": 2, "logprobs": 2, "echo": True, "return_token_ids": True}),
    ("POST", "/v1/completions", COMPLETION | {"prompt_logprobs": 1, "prompt": ["a", "b c"]}),
    ("POST", "/v1/completions", COMPLETION | {"stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/v1/completions", COMPLETION | {"stream": True, "n": 2, "logprobs": 1, "return_token_ids": True}),
    ("POST", "/v1/completions", COMPLETION | {"collect_trajectory": True, "temprature": 1, "request_id": "mine"}),
    ("POST", "/v1/chat/completions", chat()),
    ("POST", "/v1/chat/completions", chat(n=2, logprobs=True, top_logprobs=2, return_token_ids=True)),
    ("POST", "/v1/chat/completions", chat(stream=True, stream_options={"include_usage": True})),
    ("POST", "/v1/chat/completions", chat(stream=True, logprobs=True, top_logprobs=1)),
    ("POST", "/v1/chat/completions", chat(response_format=FORMAT, max_tokens=64, ignore_eos=False)),
    ("POST", "/v1/chat/completions", chat(tools=[FUNCTION], tool_choice="required", max_tokens=96, ignore_eos=False)),
    (
        "POST",
        "/v1/chat/completions",
        chat(tools=[FUNCTION], tool_choice="required", max_tokens=96, ignore_eos=False, stream=True),
    ),
    ("POST", "/v1/messages", message()),
    ("POST", "/v1/messages", message(system="Be kind.", stream=True)),
    ("POST", "/v1/messages", message(max_tokens=96, tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"})),
    ("POST", "/v1/messages", message(max_tokens=96, tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}, stream=True)),
    ("POST", "/v1/messages/count_tokens", {"model": "chat", "messages": USER}),
    ("POST", "/v1/responses", item()),
    ("GET", "/v1/responses/LAST", None),
    ("GET", "/v1/responses/LAST/input_items", None),
    ("POST", "/v1/responses", item(previous_response_id="LAST", instructions="Be kind.")),
    ("DELETE", "/v1/responses/LAST", None),
    ("GET", "/v1/responses/LAST", None),
    ("POST", "/v1/responses", item(stream=True, store=False)),
    ("POST", "/v1/responses", item(text=TEXT_FORMAT, max_output_tokens=64, metadata={"a": "b"})),
    ("POST", "/v1/responses", item(tools=[RESPONSES_TOOL], tool_choice="required", max_output_tokens=96)),
    ("POST", "/v1/responses", item(tools=[RESPONSES_TOOL], tool_choice="required", max_output_tokens=96, stream=True)),
    ("POST", "/v1/responses", item(tools=[{"type": "local_shell"}], tool_choice={"type": "local_shell"}, stream=True)),
    ("POST", "/v1/responses/input_tokens", {"model": "chat", "input": "hello"}),
    ("POST", "/v1/responses/resp_nobody/cancel", None),
    ("POST", "/api/chat", ollama(messages=USER)),
    ("POST", "/api/chat", ollama(messages=USER, stream=False)),
    (
        "POST",
        "/api/chat",
        ollama(messages=USER, stream=False, format=CITY, options={"num_predict": 64, "temperature": 0}),
    ),
    ("POST", "/api/generate", ollama(prompt="hello", stream=False)),
    ("POST", "/api/generate", ollama(prompt="hello")),
    ("POST", "/api/generate", {"model": "chat"}),
    ("POST", "/api/embed", {"model": "embedding", "input": ["a", "b"]}),
    ("POST", "/api/embeddings", {"model": "embedding", "prompt": "a"}),
    ("POST", "/api/show", {"model": "chat"}),
    ("GET", "/api/tags", None),
    ("GET", "/api/ps", None),
    ("GET", "/", None),
    ("POST", "/api/pull", {"model": "chat"}),
    ("POST", "/generate", {"prompt": "hello", "max_tokens": 4, "temperature": 0, "logprobs": True, "step_id": 7}),
    ("POST", "/generate", {"prompt": ["a", "b"], "max_tokens": 2, "temperature": 0, "policy_version": 3}),
    ("POST", "/generate", {"prompt": "hello", "max_tokens": 2, "temperature": 0, "stream": True, "step_id": 1}),
    ("POST", "/generate", {"prompt": "hello", "max_tokens": 2, "temperature": 0, "n": 2}),
    ("POST", "/generate", {"text": "hello", "sampling_params": SGLANG, "return_logprob": True}),
    (
        "POST",
        "/generate",
        {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "temperature": 0}, "stream": True},
    ),
    ("POST", "/generate/", {"prompts": ["a"], "n": 2, "max_tokens": 2, "temperature": 0}),
    ("POST", "/chat/", {"messages": [USER], "max_tokens": 2, "temperature": 0}),
    ("GET", "/get_world_size/", None),
    ("POST", "/init_communicator/", {}),
    ("POST", "/tokenize", {"model": "chat", "prompt": "hello", "return_token_strs": True}),
    ("POST", "/detokenize", {"model": "chat", "tokens": [5, 6]}),
    ("POST", "/v1/embeddings", {"model": "embedding", "input": ["a", "b"]}),
    ("POST", "/v1/embeddings", {"model": "embedding", "input": "a", "encoding_format": "base64"}),
    ("POST", "/v1/classifications", {"model": "classifier", "input": ["a", "b"]}),
    ("POST", "/v1/rewards/score", {"model": "reward", "input": ["a"]}),
    ("POST", "/v1/score", {"model": "reward", "text_1": "a", "text_2": ["b", "c"]}),
    ("POST", "/v1/rerank", {"model": "reward", "query": "a", "documents": ["b", "c"], "return_documents": True}),
    ("POST", "/v2/rerank", {"model": "reward", "query": "a", "documents": ["b", "c"], "top_n": 1}),
    ("POST", "/v1/predict", {"model_id": "network", "inputs": {"tokens": [[1, 2, 3]]}}),
    ("POST", "/v1/rl/act", {"model_id": "policy", "observations": [[0.0, 0.0, 0.0, 0.0]], "deterministic": True}),
    ("POST", "/v1/rl/rollout", {"model": "chat", "prompts": ["a"], "n": 2, "max_tokens": 2}),
    ("POST", "/v1/training/feedback", {"request_id": "mine", "reward": 1.0}),
    ("GET", "/v1/training/status", None),
    ("GET", "/debug/training", None),
    ("POST", "/v1/training/update", {}),
    ("POST", "/training/checkpoint", {"name": "golden"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/chat", None),
    ("GET", "/v1/adapters", None),
    ("POST", "/model/switch-lora", {"version": "base"}),
    ("POST", "/v1/adapters/load", {"name": "a", "path": "no/such/folder"}),
    ("POST", "/v1/adapters/unload", {"name": "nobody"}),
    ("POST", "/v1/models/load", {"model": "policy", "pin": True}),
    ("POST", "/v1/models/unload", {"model": "policy"}),
    ("POST", "/pause", None),
    ("GET", "/is_paused", None),
    ("POST", "/resume", None),
    ("GET", "/get_weight_version", None),
    ("GET", "/server_info", None),
    ("POST", "/flush_cache", None),
    ("GET", "/health", None),
    ("GET", "/debug/metrics", None),
    ("GET", "/dashboard/snapshot", None),
    ("GET", "/dashboard/requests?limit=1", None),
    ("GET", "/dashboard/rollouts?limit=1", None),
    ("GET", "/dashboard/session", None),
    ("POST", "/dashboard/login", {"key": "none"}),
    ("GET", "/no/such/path", None),
    ("DELETE", "/v1/completions", None),
    ("POST", "/v1/chat/completions", chat(model="nobody")),
    ("POST", "/v1/chat/completions", chat(temperature=-1)),
    ("POST", "/v1/chat/completions", chat(messages=[{"role": "user", "content": "long " * 4000}])),
    ("POST", "/v1/chat/completions", chat(stop=["x" * 1025])),
    ("POST", "/v1/messages", message(model="nobody")),
    ("POST", "/v1/messages", message(max_tokens=0)),
    ("POST", "/api/chat", ollama(messages=USER, model="nobody")),
    ("POST", "/v1/responses", item(previous_response_id="resp_nobody")),
    ("POST", "/v1/embeddings", {"model": "chat", "input": "a"}),
    ("POST", "/v1/completions", b"{no JSON"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("golden")
    flags = [*model_flags(folder), "--max-model-len", "1024", "--responses-dir", str(folder / "responses")]
    flags += ["--enable-rl-training", "--lora-rank", "4", "--checkpoint-dir", str(folder / "checkpoints")]
    with running(ours(None, flags)) as server:
        yield server


def test_answers_are_what_they_were(server: ServerProcess) -> None:
    found, last = {}, ""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for number, (method, path, body) in enumerate(REQUESTS):
            content = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
            content = content.replace("LAST", last) if isinstance(content, str) else content
            kind = {"Content-Type": "application/json"} if content is not None else {}
            answer = client.request(method, path.replace("LAST", last), content=content, headers=kind)
            if path == "/v1/responses" and answer.status_code == 200 and "stream" not in body:
                last = answer.json()["id"]
            told = found[f"{number} {method} {path}"] = described(answer)
            if path.startswith(("/debug/", "/dashboard/")):
                told["body"] = without_numbers(told["body"])
    if os.environ.get("WRITE_GOLDEN"):
        FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    known = json.loads(FILE.read_text())
    assert found.keys() == known.keys()
    different = [line for name in found for line in differences(name, found[name], known[name])]
    assert not different, "\n".join(different)


def differences(place: str, found: Any, known: Any) -> Iterator[str]:
    if isinstance(found, dict) and isinstance(known, dict) and found.keys() == known.keys():
        for name in found:
            yield from differences(f"{place} {name}", found[name], known[name])
    elif isinstance(found, list) and isinstance(known, list) and len(found) == len(known):
        for number, (one, other) in enumerate(zip(found, known, strict=True)):
            yield from differences(f"{place} {number}", one, other)
    elif found != known:
        yield f"{place}: {found!r}, was {known!r}"


def described(answer: httpx.Response) -> dict[str, Any]:
    headers = {name: answer.headers[name] for name in HEADERS if name in answer.headers}
    if headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson")):
        events: list[Any] = []
        for line in answer.text.splitlines():
            told = _event(line)
            if line and (not events or events[-1] != told):  # how many there are is the model's affair
                events.append(told)
        return {"status": answer.status_code, **headers, "events": events}
    try:
        return {"status": answer.status_code, **headers, "body": plain(answer.json())}
    except ValueError:
        return {"status": answer.status_code, **headers, "body": _masked(answer.text)}


def _event(line: str) -> Any:
    data = line.removeprefix("data: ")
    try:
        return plain(json.loads(data))
    except ValueError:
        return _masked(line)


def without_numbers(value: Any) -> Any:
    """Of counters, which tell of the machine and of all that came before."""
    if isinstance(value, dict):
        return {name: without_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_numbers(inner) for inner in value]
    return value if isinstance(value, bool) or not isinstance(value, int) else "<int>"


def plain(value: Any, key: str = "") -> Any:
    """A value without what differs from run to run."""
    if key in MOMENTS or key.endswith("_duration"):
        return type(value).__name__
    if isinstance(value, dict):
        return {name: plain(inner, name) for name, inner in value.items()}
    if key in MASKED and not isinstance(value, bool) and value is not None:
        return f"<{type(value).__name__}>"
    if isinstance(value, list):
        if value and all(isinstance(one, int | float) and not isinstance(one, bool) for one in value):
            return f"<numbers, {len(value)}>"
        return [plain(one, key) for one in value]
    if isinstance(value, float):
        return "<float>"
    if isinstance(value, str):
        return "<text>" if key in WRITTEN and value else _masked(value)
    return value


def _masked(text: str) -> str:
    return HEX.sub("<hex>", IDS.sub(r"\1\2<id>", text))
