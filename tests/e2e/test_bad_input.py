"""Malformed requests, each with the status and the place that the answer must name; then a good one still answers."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.servers import ServerProcess

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
CALL = {"role": "assistant", "content": None}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
NAMELESS = {"type": "json_schema", "json_schema": {"schema": {}}}
BANANA = {"type": "function", "function": {"name": "f", "parameters": {"type": "banana"}}}


@dataclass
class Bad:
    path: str
    body: Any  # JSON, or bytes to send as they are
    param: str | None
    status: int = 400
    code: str | None = "invalid_value"
    headers: dict[str, str] = field(default_factory=dict)


def chat(param: str, code: str | None = "invalid_value", /, **fields: Any) -> Bad:
    return Bad(CHAT, {"messages": HELLO, **fields}, param, code=code)


def text(param: str, code: str | None = "invalid_value", /, **fields: Any) -> Bad:
    return Bad(TEXT, {"prompt": "hello", **fields}, param, code=code)


def message(param: str, **fields: Any) -> Bad:
    return Bad(CHAT, {"messages": [*HELLO, {"role": "user", **fields}]}, param)


def schema(value: Any, param: str = "response_format.json_schema.schema", code: str | None = None) -> Bad:
    return chat(param, code, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": value}})


MISSING = "missing_required_parameter"
TOO_LONG = "context_length_exceeded"
NO_JSON = "invalid_json"


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": value}
    return value


DEEP = {"type": "function", "function": {"name": "f", "parameters": nested(300)}}

LONG_STOP = "x" * 1025

TABLE = [
    # stop strings that are too long to look for
    chat("stop", stop=LONG_STOP),
    text("stop", stop=["a", LONG_STOP]),
    Bad("/generate", {"text": "a", "sampling_params": {"stop": LONG_STOP}}, "sampling_params.stop"),
    Bad("/generate", {"prompt": "a", "stop": [LONG_STOP], "use_beam_search": False}, "stop"),
    Bad("/generate/", {"prompts": ["a"], "generation_kwargs": {"stop": LONG_STOP}}, "stop"),
    # nested so deeply that nothing can be made of it
    chat(None, chat_template_kwargs={"x": nested(300)}),  # type: ignore[arg-type]
    chat(None, tools=[DEEP]),  # type: ignore[arg-type]
    chat(None, metadata=nested(300)),  # type: ignore[arg-type]
    text(None, guided_json=nested(300)),  # type: ignore[arg-type]
    Bad("/tokenize", {"messages": HELLO, "chat_template_kwargs": nested(300)}, None),
    # more choices than there are rows, and far more than there is memory to make an object for each
    text("n", None, n=33),
    text("n", None, n=2**62),
    chat("n", None, n=10**12),
    Bad("/generate/", {"prompts": ["a"], "n": 10**12}, "n", code=None),
    Bad("/generate", {"prompt": "a", "n": 10**12, "use_beam_search": False}, "n", code=None),
    Bad("/generate", {"text": "a", "sampling_params": {"n": 10**12}}, "n", code=None),
    # what OpenAI has replaced, and what a tool's answer needs
    chat("functions", functions=[{"name": "f"}]),
    chat("function_call", function_call="auto"),
    Bad(CHAT, {"messages": [*HELLO, {"role": "tool", "content": "4"}]}, "messages.1.tool_call_id"),
    Bad(CHAT, {"messages": [*HELLO, {"role": "tool", "content": "4", "tool_call_id": ""}]}, "messages.1.tool_call_id"),
    # not JSON, or no object
    Bad(CHAT, b"", None, code=NO_JSON),
    Bad(CHAT, b"{", None, code=NO_JSON),
    Bad(CHAT, b'{"messages": [', None, code=NO_JSON),
    Bad(CHAT, b"[1, 2]", None, code=NO_JSON),
    Bad(CHAT, b'"hello"', None, code=NO_JSON),
    Bad(CHAT, b"null", None, code=NO_JSON),
    Bad(CHAT, b"\xff\xfe\x00", None, code=NO_JSON),
    Bad(TEXT, b'{"prompt": "x", "temperature": NaN}', None, code=NO_JSON),
    Bad(TEXT, b'{"prompt": "x", "temperature": Infinity}', None, code=NO_JSON),
    Bad(TEXT, b"prompt=x", None, code="unsupported_media_type", headers={"Content-Type": "text/plain"}),
    Bad(TEXT, b"x" * 50_000, None, code="unsupported_media_type", headers={"Content-Type": "text/plain"}),
    Bad(TEXT, b'{"prompt": "\xed\xa0\x80"}', None, code=NO_JSON),
    # required fields
    Bad(CHAT, {}, "messages", code=MISSING),
    Bad(CHAT, {"messages": None}, "messages", code=MISSING),
    Bad(TEXT, {}, "prompt", code=MISSING),
    Bad(TEXT, {"prompt": None}, "prompt", code=MISSING),
    # prompts
    text("prompt", prompt=5),
    text("prompt", prompt=True),
    text("prompt", prompt=[]),
    text("prompt", prompt=[[]]),
    text("prompt", prompt={"a": 1}),
    text("prompt", prompt=["a", 1]),
    text("prompt", prompt=[1, 2.5]),
    text("prompt", prompt=[1, True]),
    text("prompt", prompt=[-1]),
    text("prompt", prompt=[[1], "a"]),
    text("prompt", prompt=[None]),
    text("prompt.1", None, prompt=[1, 999_999]),
    text("prompt.1.0", None, prompt=[[1], [999_999]]),
    text("prompt", TOO_LONG, prompt=[5] * 2048),
    text("prompt", TOO_LONG, prompt="a b c " * 2000),
    text("max_tokens", TOO_LONG, max_tokens=2048),
    text("max_tokens", TOO_LONG, max_tokens=10**15),
    # messages
    Bad(CHAT, {"messages": []}, "messages"),
    Bad(CHAT, {"messages": "hello"}, "messages"),
    Bad(CHAT, {"messages": {"role": "user", "content": "x"}}, "messages"),
    Bad(CHAT, {"messages": ["hello"]}, "messages.0"),
    Bad(CHAT, {"messages": [{"content": "hello"}]}, "messages.0.role", code=MISSING),
    Bad(CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    Bad(CHAT, {"messages": [{"role": 7, "content": "x"}]}, "messages.0.role"),
    message("messages.1.content"),
    message("messages.1.content", content=None),
    message("messages.1.content", content=5),
    message("messages.1.content", content={"type": "text", "text": "x"}),
    message("messages.1.content.0", content=["x"]),
    message("messages.1.content.0", content=[{"type": "text"}]),
    message("messages.1.content.0.text", content=[{"type": "text", "text": 5}]),
    message("messages.1.content.1", content=[{"type": "text", "text": "x"}, {"type": "hologram"}]),
    message("messages.1.content.0", content=[{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]),
    message("messages.1.content.0", content=[{"type": "input_audio", "input_audio": {}}]),
    Bad(CHAT, {"messages": [CALL | {"tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls.0.function", code=MISSING),
    Bad(
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages.0.tool_calls.0.function.arguments",
        code=None,
    ),
    Bad(CHAT, {"messages": [{"role": "user", "content": "a b c " * 2000}]}, "messages", code=TOO_LONG),
    chat("max_tokens", TOO_LONG, max_tokens=2048),
    chat("max_completion_tokens", TOO_LONG, max_completion_tokens=2048),
    # sampling
    text("stop", stop=5),
    text("stop", stop=[5]),
    text("stop", stop=["a", None]),
    text("stop", stop=""),
    text("stop", stop={"a": 1}),
    text("stop", stop=["a"] * 17),
    chat("stop", stop=5),
    text("stop_token_ids", stop_token_ids=5),
    text("stop_token_ids.0", stop_token_ids=["a"]),
    text("stop_token_ids.1", stop_token_ids=[1, -1]),
    text("stop_token_ids", None, stop_token_ids=[999_999]),
    text("max_tokens", max_tokens="x"),
    text("max_tokens", max_tokens="5"),
    text("max_tokens", max_tokens=True),
    text("max_tokens", max_tokens=1.5),
    text("max_tokens", max_tokens=-1),
    text("max_tokens", max_tokens=0),
    chat("max_tokens", max_tokens=0),
    chat("max_completion_tokens", max_completion_tokens=[1]),
    text("min_tokens", min_tokens=-1),
    text("min_tokens", None, min_tokens=5, max_tokens=4),
    text("temperature", temperature="hot"),
    text("temperature", temperature=True),
    text("temperature", temperature=-0.1),
    text("temperature", temperature=2.1),
    text("temperature", temperature=[1]),
    Bad(TEXT, b'{"prompt": "x", "temperature": 1e999}', None, code=NO_JSON),
    text("top_p", top_p=0),
    text("top_p", top_p=1.1),
    text("top_k", top_k=-2),
    text("top_k", top_k=1.5),
    text("min_p", min_p=-0.5),
    text("min_p", min_p=2),
    text("presence_penalty", presence_penalty=3),
    text("frequency_penalty", frequency_penalty=-2.5),
    text("repetition_penalty", repetition_penalty=0),
    text("repetition_penalty", repetition_penalty="1"),
    text("logit_bias", logit_bias=[1]),
    text("logit_bias", logit_bias={"a": 1}),
    text("logit_bias", logit_bias={"-1": 1}),
    text("logit_bias", logit_bias={"1": 101}),
    text("logit_bias", logit_bias={"1": "x"}),
    text("logit_bias", logit_bias={"1": None}),
    text("logit_bias", None, logit_bias={"999999": 1}),
    text("seed", seed="x"),
    text("seed", seed=1.5),
    text("seed", seed=2**63),
    text("n", n=0),
    text("n", n=-1),
    text("n", n="2"),
    text("n", None, n=10_000),
    text("best_of", best_of=3),
    # what would change the answer, and is not done
    text("allowed_token_ids", allowed_token_ids=[5]),
    text("bad_words", bad_words=["re"]),
    chat("chat_template", chat_template="{{ messages }}"),
    chat("modalities", modalities=["text", "audio"]),
    chat("audio", audio={"voice": "x"}),
    text("structured_outputs.regex", None, structured_outputs={"json": {}, "regex": "a"}),
    Bad(TEXT, b"\x1f\x8b", None, code="unsupported_media_type", headers={"Content-Encoding": "gzip"}),
    text("suffix", suffix="end"),
    text("echo", echo="yes"),
    text("logprobs", logprobs=21),
    text("logprobs", logprobs=-1),
    text("logprobs", logprobs=True),
    chat("logprobs", logprobs=5),
    chat("top_logprobs", logprobs=True, top_logprobs=21),
    chat("top_logprobs", top_logprobs=2),
    text("prompt_logprobs", prompt_logprobs=-1),
    text("prompt_logprobs", stream=True, prompt_logprobs=1),
    text("stream", stream="yes"),
    text("stream", stream=1),
    text("stream_options", stream_options={"include_usage": True}),
    text("stream_options.include_usage", stream=True, stream_options={"include_usage": 1}),
    text("stream_options", stream=True, stream_options=True),
    text("priority", priority="high"),
    text("user", user=5),
    text("cache_salt", cache_salt=5),
    text("cache_salt", cache_salt=""),
    text("model", model=5),
    Bad(TEXT, {"prompt": "x", "model": "nobody"}, "model", 404, "model_not_found"),
    Bad(CHAT, {"messages": HELLO, "model": "nobody"}, "model", 404, "model_not_found"),
    # structure
    chat("response_format", response_format="json"),
    chat("response_format.type", response_format={"type": "xml"}),
    chat("response_format.type", MISSING, response_format={}),
    chat("response_format", response_format={"type": "json_schema"}),
    chat("response_format.json_schema.name", MISSING, response_format=NAMELESS),
    schema(5, code="invalid_value"),
    schema({"type": "banana"}),
    schema({"$ref": "#/nowhere"}),
    schema({"type": "string", "pattern": "("}),
    text("guided_regex", None, guided_regex="(a"),
    text("guided_json", None, guided_json="{"),
    text("guided_choice", guided_choice=[]),
    text("guided_choice.0", guided_choice=[5]),
    text("guided_grammar", None, guided_grammar="no grammar ["),
    text("guided_regex", None, guided_regex="a", response_format={"type": "json_object"}),
    text("structured_outputs", structured_outputs={}),
    text("use_beam_search", use_beam_search=True),
    text("logprobs_mode", logprobs_mode="raw_logits"),
    text("structured_outputs.structural_tag", structured_outputs={"structural_tag": "{"}),
    text("structured_outputs.structural_tag", structured_outputs={"structural_tag": {}}),
    text("structured_outputs", structured_outputs={"regex": "a", "choice": ["a"]}),
    # tools
    chat("tools", tools="look"),
    chat("tools.0", tools=["look"]),
    chat("tools.0.type", tools=[{**TOOL, "type": "magic"}]),
    chat("tools.0.function", MISSING, tools=[{"type": "function"}]),
    chat("tools.0.function.name", MISSING, tools=[{"type": "function", "function": {}}]),
    chat("tools.0.function.name", tools=[{"type": "function", "function": {"name": "no spaces"}}]),
    chat("tools.0.function.parameters", tools=[{"type": "function", "function": {"name": "f", "parameters": 5}}]),
    chat("tool_choice", tools=[TOOL], tool_choice="maybe"),
    chat("tool_choice", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
    chat("tool_choice", tool_choice="required"),
    chat("tool_choice.function", MISSING, tools=[TOOL], tool_choice={"type": "function"}),
    chat("tool_choice.function.name", tools=[TOOL], tool_choice={"type": "function", "function": {"name": 5}}),
    chat("tools", None, tools=[BANANA], tool_choice="required"),
    chat("parallel_tool_calls", parallel_tool_calls="no"),
    chat("chat_template_kwargs", chat_template_kwargs=5),
    chat("chat_template_kwargs", None, chat_template_kwargs={"tokenize": True}),
    chat("continue_final_message", continue_final_message=True, add_generation_prompt=True),
    chat("reasoning_effort", reasoning_effort="maximal"),
    # other routes
    Bad("/tokenize", {}, "prompt", code=MISSING),
    Bad("/tokenize", {"prompt": 5}, "prompt"),
    Bad("/tokenize", {"prompt": "x", "messages": HELLO}, "messages", code=None),
    Bad("/tokenize", {"messages": []}, "messages"),
    Bad("/tokenize", {"prompt": "x", "model": "nobody"}, "model", 404, "model_not_found"),
    Bad("/detokenize", {}, "tokens", code=MISSING),
    Bad("/detokenize", {"tokens": "x"}, "tokens"),
    Bad("/detokenize", {"tokens": [-1]}, "tokens.0"),
    Bad("/detokenize", {"tokens": [1, 999_999]}, "tokens.1", code=None),
    Bad("/nowhere", {}, None, 404, None),
    Bad("/health", {}, None, 405, None),
    Bad("/v1/models", {}, None, 405, None),
]  # fmt: skip


@pytest.fixture(scope="module")
def client(tiny_server: ServerProcess) -> Any:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


def post(client: httpx.Client, bad: Bad) -> httpx.Response:
    content = {"content": bad.body} if isinstance(bad.body, bytes) else {"json": bad.body}
    return client.post(bad.path, headers={"Content-Type": "application/json", **bad.headers}, **content)


def check(response: httpx.Response, bad: Bad) -> None:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status_code, error["param"], error["code"]) == (bad.status, bad.param, bad.code), error
    assert error["message"]
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: f"{bad.path}:{str(bad.body)[:60]}")
def test_is_refused_with_its_place(client: httpx.Client, bad: Bad) -> None:
    check(post(client, bad), bad)


STREAMABLE = [bad for bad in TABLE if isinstance(bad.body, dict) and "stream" not in f"{bad.param} {bad.body}"]


@pytest.mark.parametrize("bad", STREAMABLE[::7], ids=lambda bad: f"{bad.path}:{str(bad.body)[:60]}")
def test_is_refused_in_the_same_way_when_streaming(client: httpx.Client, bad: Bad) -> None:
    bad = Bad(bad.path, {**bad.body, "stream": True}, bad.param, bad.status, bad.code, bad.headers)
    check(post(client, bad), bad)


def test_a_good_request_still_answers_after_all_of_it(client: httpx.Client) -> None:
    for bad in TABLE:
        post(client, bad)
    answer = client.post(CHAT, json={"messages": HELLO, "max_tokens": 3, "stop": None, "nonsense": 5})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"
    assert client.get("/health").json() == {"status": "healthy", "model_loaded": True}


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) >= 60


WORDS = ("This model's maximum context length is 2048 tokens. However, ", "Please reduce the length of the")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": "hello " * 3000}, "prompt"),
        (TEXT, {"prompt": [5] * 2048}, "prompt"),
        (TEXT, {"prompt": "hello", "max_tokens": 2048}, "max_tokens"),
        (TEXT, {"prompt": "x" * 10_000_000}, "prompt"),
        (TEXT, {"prompt": "hello there " * 800_000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "hello " * 3000}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "hello there " * 800_000}]}, "messages"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 5000}, "max_completion_tokens"),
        ("/generate", {"prompt": [5] * 2048}, "prompt"),
        ("/generate/", {"prompts": [[5] * 2048]}, "prompt"),
    ],
)
def test_what_does_not_fit_is_said_in_openais_words(
    tiny_server: ServerProcess, path: str, body: dict[str, Any], param: str
) -> None:
    answer = httpx.post(tiny_server.url + path, json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, TOO_LONG, param)
    assert all(words in error["message"] for words in WORDS), error["message"]


def test_a_long_text_of_which_only_the_end_is_kept_is_fine(tiny_server: ServerProcess) -> None:
    body = {"prompt": "hello there " * 30_000, "truncate_prompt_tokens": 100, "max_tokens": 2}
    answer = httpx.post(tiny_server.url + TEXT, json=body, timeout=60)
    assert answer.json()["usage"]["prompt_tokens"] == 100


@pytest.mark.parametrize("count", [15_900_000, 8_000_000, 4_000_000])
def test_millions_of_ids_do_not_hold_others_up(tiny_server: ServerProcess, count: int) -> None:
    """32 MB of ids are refused by their number; a probe beside them is answered meanwhile."""
    body = b'{"prompt": [' + b"5," * count + b"5]}"
    waits: list[float] = []
    done = threading.Event()

    def probe() -> None:
        while not done.is_set():
            begun = time.perf_counter()
            httpx.get(tiny_server.url + "/health", timeout=30)
            waits.append(time.perf_counter() - begun)

    thread = threading.Thread(target=probe)
    thread.start()
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(tiny_server.url + TEXT, content=body, headers=headers, timeout=60)
    done.set()
    thread.join()
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        400,
        "invalid_value" if count > 1 << 21 else TOO_LONG,
    )
    assert max(waits) < 2.0, "a probe waited for seconds"
