"""Ollama's routes on a real server: chats, prompts, options, embeddings, models, keep_alive, errors in its shape."""

import base64
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import BaseModel

from mlx_parallm.server.api.ollama.response_types import (
    OllamaChatResponse,
    OllamaEmbedResponse,
    OllamaError,
    OllamaGenerateResponse,
    OllamaProcesses,
    OllamaShown,
    OllamaTags,
)
from tests.support.embedding_folders import TEXTS, write_model
from tests.support.servers import ServerProcess, ours, running
from tests.support.shapes import read_as
from tests.support.thinking import thinking_folder

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "num_predict": 12}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER_OF_TWO = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    flags = ["--model-path", f"thinker={thinking_folder(folder / 'thinker')}"]
    flags += ["--model-path", f"words={write_model(folder / 'words', 'cls')}"]
    with running(ours(f"tiny={tiny_folder}", flags)) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def post(client: httpx.Client, path: str, shape: type[BaseModel], **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": "tiny", "stream": False, "options": GREEDY, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    read_as(shape, answer.json())
    found: dict[str, Any] = answer.json()
    return found


def chat(client: httpx.Client, **body: Any) -> dict[str, Any]:
    return post(client, "/api/chat", OllamaChatResponse, **{"messages": HELLO, **body})


def generate(client: httpx.Client, **body: Any) -> dict[str, Any]:
    return post(client, "/api/generate", OllamaGenerateResponse, **{"prompt": "hello", **body})


def lines(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={"model": "tiny", "options": GREEDY, **body}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "application/x-ndjson"
        found = [json.loads(line) for line in response.iter_lines()]
    for line in found:
        read_as(OllamaChatResponse if path == "/api/chat" else OllamaGenerateResponse, line)
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def test_a_chat_and_its_lines(client: httpx.Client) -> None:
    whole = chat(client)
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("tiny", True, "length")
    assert (whole["message"]["role"], whole["eval_count"]) == ("assistant", 12)
    assert whole["total_duration"] >= whole["prompt_eval_duration"] + whole["eval_duration"] > 1000
    assert whole["prompt_eval_count"] > 5
    datetime.fromisoformat(whole["created_at"])
    found = lines(client, "/api/chat", messages=HELLO)
    assert "".join(line["message"]["content"] for line in found) == whole["message"]["content"]
    assert len(found) > 3
    last = found[-1]
    assert (last["done_reason"], last["eval_count"], last["message"]["content"]) == ("length", 12, "")
    assert last["prompt_eval_count"] == whole["prompt_eval_count"]


def test_a_prompt_is_a_chat_of_one_message(client: httpx.Client) -> None:
    said = chat(client)["message"]["content"]
    assert generate(client)["response"] == said
    assert "".join(line["response"] for line in lines(client, "/api/generate", prompt="hello")) == said
    kind = [{"role": "system", "content": "Be kind."}, *HELLO]
    assert generate(client, system="Be kind.")["response"] == chat(client, messages=kind)["message"]["content"]


def test_a_raw_prompt_goes_as_it_is(client: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 12, "temperature": 0}
    plain = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    raw = generate(client, raw=True)
    assert raw["response"] == plain
    assert raw["prompt_eval_count"] < generate(client)["prompt_eval_count"]


def test_names_with_and_without_a_tag(client: httpx.Client) -> None:
    for name in ("tiny:latest", "default", "default:latest"):
        answer = chat(client, model=name)
        assert (answer["model"], answer["message"]) == (name, chat(client)["message"])
    assert client.post("/api/show", json={"name": "tiny:latest"}).status_code == 200
    for name in ("tiny:7b", "nobody", "nobody:latest"):
        refused = client.post("/api/chat", json={"model": name, "messages": HELLO})
        assert (refused.status_code, "there is no model" in refused.json()["error"]) == (404, True)


def test_a_body_needs_no_content_type(client: httpx.Client) -> None:
    """LiteLLM sends none, and `curl -d` says that it is a form. What a page in a browser sends is refused."""
    content = json.dumps({"model": "tiny", "messages": HELLO, "stream": False, "options": GREEDY}).encode()
    for headers in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):
        assert client.post("/api/chat", content=content, headers=headers).json()["message"] == chat(client)["message"]
    for kind, origin, code in (
        ("text/plain", None, 200),
        (None, "https://evil.example", 403),
        ("application/x-www-form-urlencoded", "null", 403),
    ):
        headers = {"Content-Type": kind, "Origin": origin}
        sent = {name: value for name, value in headers.items() if value is not None}
        assert client.post("/api/chat", content=content, headers=sent).status_code == code
    assert (
        client.post(
            "/api/chat", content=b"model=tiny", headers={"Content-Type": "application/x-www-form-urlencoded"}
        ).status_code
        == 400
    )


def test_options(client: httpx.Client) -> None:
    text = chat(client)["message"]["content"]
    stopped = chat(client, options=GREEDY | {"stop": [text[4:6]]})
    assert (stopped["message"]["content"], stopped["done_reason"]) == (text[: text.index(text[4:6])], "stop")
    assert chat(client, options=GREEDY | {"stop": text[4:6]})["message"] == stopped["message"]
    assert chat(client, options=GREEDY | {"num_ctx": 512, "num_gpu": 1, "use_mmap": True})["eval_count"] == 12
    hot = {"temperature": 1.5, "seed": 7, "num_predict": 12, "top_k": 50, "top_p": 0.95, "min_p": 0.01}
    hot |= {"repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    assert chat(client, options=hot)["message"] == chat(client, options=hot)["message"]
    assert chat(client, options=hot | {"seed": 8})["message"] != chat(client, options=hot)["message"]
    full = chat(client, messages=[{"role": "user", "content": "x" * 1990}], options={"num_predict": 10**6})
    assert full["prompt_eval_count"] + full["eval_count"] <= 2048, "it is cut to fit"
    greedy = chat(client, options={"num_predict": 12, "top_k": 1})
    assert greedy["message"]["content"] == text


def test_formats(client: httpx.Client) -> None:
    options = {"temperature": 0, "num_predict": 300}
    found = json.loads(chat(client, format=CITY, options=options)["message"]["content"])
    assert found["city"] in ("Rome", "Oslo")
    found = json.loads(generate(client, format=CITY, options=options, raw=True)["response"])
    assert found["city"] in ("Rome", "Oslo")
    assert chat(client, format="json", options=options)["message"]["content"].startswith("{")
    assert chat(client, format="")["message"] == chat(client)["message"]


def test_tools_in_a_conversation(client: httpx.Client) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    turns = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "sunny", "tool_name": "get_weather"}]
    with_tools = chat(client, messages=turns, tools=[WEATHER])
    assert with_tools["prompt_eval_count"] > chat(client, messages=turns)["prompt_eval_count"]


def test_calls_come_whole(client: httpx.Client) -> None:
    """Nothing forces a call here: with a format, the random model has to choose between the two, and does either."""
    fields: dict[str, Any] = {"tools": [WEATHER_OF_TWO], "format": {"enum": ["no"]}, "messages": HELLO}
    for seed in range(40):
        options = {"num_predict": 300, "temperature": 1, "seed": seed}
        whole = chat(client, **fields, options=options)
        if "tool_calls" in whole["message"]:
            break
    (call, *more) = whole["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["index"], whole["done_reason"]) == ("get_weather", 0, "stop")
    assert call["function"]["arguments"]["city"] in ("Rome", "Oslo")
    found = lines(client, "/api/chat", **fields, options=options)
    streamed = [one["function"] for line in found for one in line["message"].get("tool_calls", [])]
    assert streamed == [one["function"] for one in (call, *more)]


def test_logprobs(client: httpx.Client) -> None:
    whole = chat(client, logprobs=True, top_logprobs=2)
    assert len(whole["logprobs"]) == 12
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in whole["logprobs"])
    found = lines(client, "/api/chat", messages=HELLO, logprobs=True)
    assert [one["token"] for line in found for one in line.get("logprobs", [])] == [
        entry["token"] for entry in whole["logprobs"]
    ]


def test_thinking(client: httpx.Client) -> None:
    options = {"temperature": 0, "num_predict": 96}
    whole = chat(client, model="thinker", think=True, options=options)
    assert whole["message"]["thinking"]
    found = lines(client, "/api/chat", model="thinker", think=True, options=options, messages=HELLO)
    assert "".join(line["message"].get("thinking", "") for line in found) == whole["message"]["thinking"]
    assert "".join(line["message"]["content"] for line in found) == whole["message"]["content"]
    assert generate(client, model="thinker", think="low", options=options)["thinking"]
    assert "thinking" not in chat(client, model="thinker", think=False)["message"]
    refused = client.post("/api/chat", json={"model": "tiny", "messages": HELLO, "think": True})
    assert (refused.status_code, refused.json()["error"]) == (400, "think: tiny does not support thinking")
    assert chat(client, think=False)["message"] == chat(client)["message"]


def test_embeddings(client: httpx.Client) -> None:
    plain = client.post("/v1/embeddings", json={"model": "words", "input": TEXTS}).json()
    vectors = np.array([entry["embedding"] for entry in plain["data"]])
    answer = post(client, "/api/embed", OllamaEmbedResponse, model="words:latest", input=TEXTS)
    found = np.array(answer["embeddings"])
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(found, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), atol=1e-5)
    assert answer["prompt_eval_count"] == plain["usage"]["prompt_tokens"]
    one = post(client, "/api/embed", OllamaEmbedResponse, model="words", input=TEXTS[0])
    np.testing.assert_allclose(one["embeddings"], found[:1], atol=1e-5)
    assert post(client, "/api/embed", OllamaEmbedResponse, model="words", input=[])["embeddings"] == []
    legacy = client.post("/api/embeddings", json={"model": "words", "prompt": TEXTS[0]}).json()
    np.testing.assert_allclose(legacy["embedding"], vectors[0], atol=1e-5)
    long = "word " * 5000
    assert post(client, "/api/embed", OllamaEmbedResponse, model="words", input=long)["embeddings"]
    assert client.post("/api/embed", json={"model": "words", "input": long, "truncate": False}).status_code == 400


def test_models(client: httpx.Client) -> None:
    tags = client.get("/api/tags").json()
    read_as(OllamaTags, tags)
    assert [entry["name"] for entry in tags["models"]] == ["tiny:latest", "thinker:latest", "words:latest"]
    assert tags["models"][0]["details"]["family"] == "llama"
    running_now = client.get("/api/ps").json()
    read_as(OllamaProcesses, running_now)
    tiny = next(entry for entry in running_now["models"] if entry["model"] == "tiny:latest")
    assert (tiny["context_length"], tiny["size"] > 0) == (2048, True)
    assert datetime.fromisoformat(tiny["expires_at"]).year > 2100, "it stays"
    shown = client.post("/api/show", json={"model": "tiny"}).json()
    read_as(OllamaShown, shown)
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 2048
    assert "im_start" in shown["template"]
    for name, found in (("thinker", ["completion", "tools", "thinking"]), ("words", ["embedding"])):
        assert client.post("/api/show", json={"model": name}).json()["capabilities"] == found
    assert client.post("/api/show", json={"model": "nobody"}).status_code == 404
    assert client.get("/api/version").json()["version"].count(".") == 2


def test_it_looks_as_if_it_ran(client: httpx.Client) -> None:
    assert client.get("/").text == "Ollama is running"
    assert client.head("/").status_code == client.head("/api/tags").status_code == 200


def status(client: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/models/{name}").json()
    return found


def expires(client: httpx.Client, name: str) -> datetime:
    entries = client.get("/api/ps").json()["models"]
    return datetime.fromisoformat(next(one["expires_at"] for one in entries if one["name"] == f"{name}:latest"))


def test_keep_alive(client: httpx.Client) -> None:
    before = chat(client)["message"]
    assert chat(client, keep_alive="10m")["done"]
    assert 500 < (expires(client, "tiny") - datetime.now(UTC)).total_seconds() < 601
    assert chat(client, keep_alive=-1)["done"]
    assert (status(client, "tiny")["pinned"], expires(client, "tiny").year > 2100) == (True, True)
    assert lines(client, "/api/chat", messages=HELLO, keep_alive=0)[-1]["done"], "it is answered first"
    eventually(lambda: status(client, "tiny")["status"] == "unloaded")
    assert status(client, "tiny")["pinned"] is False
    loaded = generate(client, prompt="")
    assert (loaded["done_reason"], loaded["response"], loaded["load_duration"] > 0) == ("load", "", True)
    assert status(client, "tiny")["status"] == "ready"
    assert chat(client)["message"] == before
    time.sleep(0.2)
    assert status(client, "tiny")["status"] == "ready", "what was said before it left holds no more"
    assert chat(client, messages=[], keep_alive=0)["done_reason"] == "unload"
    eventually(lambda: status(client, "tiny")["status"] == "unloaded")
    assert post(client, "/api/embed", OllamaEmbedResponse, model="words", input="x", keep_alive=0.05)["embeddings"]
    eventually(lambda: status(client, "words")["status"] == "unloaded")
    assert client.post("/api/show", json={"model": "words"}).json()["capabilities"] == ["embedding"]
    assert status(client, "words")["status"] == "unloaded", "to show it does not load it"


def test_only_an_admin_changes_how_long_a_model_stays(tiny_folder: Path) -> None:
    flags = ["--api-key", "open", "--admin-key", "sesame"]
    with (
        running(ours(f"tiny={tiny_folder}", flags)) as process,
        httpx.Client(base_url=process.url, timeout=60) as client,
    ):
        refused = client.post("/api/chat", json={"model": "tiny", "messages": HELLO})
        assert (refused.status_code, refused.json()) == (
            401, {"error": "this server needs a key: send it as 'Authorization: Bearer KEY'"},
        )  # fmt: skip
        client.headers["Authorization"] = "Bearer open"
        assert chat(client, keep_alive=-1)["done"]
        assert status(client, "tiny")["pinned"] is False
        assert chat(client, keep_alive=0)["done"]
        time.sleep(0.2)
        assert status(client, "tiny")["status"] == "ready"
        unload = client.post("/api/generate", json={"model": "tiny", "keep_alive": 0})
        assert (unload.status_code, "admin key" in unload.json()["error"]) == (403, True)
        client.headers["Authorization"] = "Bearer sesame"
        assert chat(client, keep_alive=-1)["done"]
        assert status(client, "tiny")["pinned"] is True


@pytest.mark.parametrize("path", ["pull", "push", "create", "copy", "delete", "blobs/sha256:12"])
def test_files_of_models_are_refused_by_name(client: httpx.Client, path: str) -> None:
    answer = client.request("DELETE" if path == "delete" else "POST", f"/api/{path}", json={"model": "llama3"})
    assert (answer.status_code, "--model-path" in answer.json()["error"]) == (400, True)
    assert "/api/nothing" in client.get("/api/nothing").json()["error"]


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, **more}


def prompt(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", **more}


def option(**more: Any) -> dict[str, Any]:
    return body(options=more)


PIXELS = base64.b64encode(b"no image").decode()
BAD: list[tuple[str, Any, int, str]] = [
    ("chat", b"", 400, "JSON body"),
    ("chat", b"{", 400, "not valid JSON"),
    ("chat", b"[]", 400, "JSON object"),
    ("chat", b'{"options": {"temperature": NaN}}', 400, "not valid JSON"),
    ("chat", {"messages": HELLO}, 400, "model: "),
    ("chat", body(model=5), 400, "model: "),
    ("chat", body(model=""), 400, "model: "),
    ("chat", body(messages="hello"), 400, "messages: "),
    ("chat", body(messages=[{"content": "x"}]), 400, "messages.0.role: "),
    ("chat", body(messages=[{"role": "wizard", "content": "x"}]), 400, "messages.0.role: "),
    ("chat", body(messages=[{"role": "user", "content": 5}]), 400, "messages.0.content: "),
    ("chat", body(messages=[{"role": "user", "content": "x", "images": [PIXELS]}]), 400, "tiny reads text only"),
    ("chat", body(messages=[{"role": "user", "content": "x", "images": [5]}]), 400, "messages.0.images.0: "),
    ("chat", body(messages=[{"role": "assistant", "tool_calls": [{}]}]), 400, "messages.0.tool_calls.0.function: "),
    ("chat", body(stream="no"), 400, "stream: "),
    ("chat", body(format="xml"), 400, "format: Expected json, or a JSON schema"),
    ("chat", body(format=5), 400, "format: "),
    ("chat", body(format={"type": "banana"}), 400, "format can't be enforced"),
    ("chat", body(think="deeply"), 400, "think: "),
    ("chat", body(tools=[{"type": "function"}]), 400, "tools.0.function: "),
    ("chat", body(tools=[{"function": {"name": "a b"}}]), 400, "tools.0.function.name: "),
    *(("chat", body(keep_alive=value), 400, "keep_alive: ") for value in ("soon", "5 minutes", True, [], "1e9h")),
    ("chat", body(options=5), 400, "options: "),
    *(("chat", option(num_predict=value), 400, "options.num_predict: ") for value in ("8", 1.5, 2**70, True)),
    *(("chat", option(temperature=value), 400, "options.temperature: ") for value in (-1, 3, "1")),
    *(("chat", option(top_p=value), 400, "options.top_p: ") for value in (0, 1.5)),
    *(("chat", option(top_k=value), 400, "options.top_k: ") for value in (-2, 2**70)),
    *(("chat", option(min_p=value), 400, "options.min_p: ") for value in (-1, 2)),
    *(("chat", option(repeat_penalty=value), 400, "options.repeat_penalty: ") for value in (0, -1, 99)),
    *(("chat", option(stop=value), 400, "options.stop: ") for value in (5, [""], ["x"] * 99)),
    ("chat", option(seed="x"), 400, "options.seed: "),
    ("chat", option(mirostat=2), 400, "options.mirostat: "),
    ("chat", option(typical_p=0.5), 400, "options.typical_p: "),
    ("chat", body(top_logprobs=99, logprobs=True), 400, "top_logprobs: "),
    ("chat", body(model="words"), 400, "generates no text"),
    ("chat", body(messages=[{"role": "user", "content": "x" * 9000}]), 400, "maximum context length"),
    ("generate", prompt(prompt=5), 400, "prompt: "),
    ("generate", prompt(context=[1, 2]), 400, "context: Send earlier turns as messages to /api/chat"),
    ("generate", prompt(suffix="end"), 400, "suffix: "),
    ("generate", prompt(template="{{ .Prompt }}"), 400, "template: "),
    ("generate", prompt(raw=True, system="x"), 400, "raw prompt"),
    ("generate", prompt(images=["%%"]), 400, "images.0: tiny reads text only"),
    ("generate", {"prompt": "x"}, 400, "model: "),
    ("embed", {"model": "words"}, 400, "input: "),
    ("embed", {"model": "words", "input": 5}, 400, "input: "),
    ("embed", {"model": "words", "input": [5]}, 400, "input: "),
    ("embed", {"model": "words", "input": ["x"] * 3000}, 400, "input: "),
    ("embed", {"model": "words", "input": "x", "dimensions": 0}, 400, "dimensions: "),
    ("embed", {"model": "words", "input": "x", "dimensions": 3}, 400, "dimensions: "),
    ("embed", {"model": "tiny", "input": "x"}, 400, "of the kind chat"),
    ("embed", {"model": "nobody", "input": "x"}, 404, "there is no embedding model"),
    ("embeddings", {"model": "words"}, 400, "prompt: "),
    ("show", {}, 400, "model: "),
    ("show", {"model": "nobody"}, 404, "there is no model 'nobody'"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_input_is_refused_in_shape(client: httpx.Client, number: int) -> None:
    path, sent, code, words = BAD[number]
    content = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
    answer = client.post(f"/api/{path}", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == code, answer.text
    read_as(OllamaError, answer.json())
    assert words in answer.json()["error"]


def test_a_good_one_is_answered_after_all_that(client: httpx.Client) -> None:
    assert chat(client)["message"]["content"]


def test_a_client_that_leaves_frees_its_row(client: httpx.Client) -> None:
    sent = body(options={"num_predict": 1900, "temperature": 2})
    with client.stream("POST", "/api/chat", json=sent) as response:
        next(response.iter_lines())
    eventually(lambda: not client.get("/debug/metrics").json()["models"]["tiny"]["running"], 5)
