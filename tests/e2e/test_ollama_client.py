"""The `ollama` package of PyPI against our server: what its users do must work as it does with Ollama."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.embedding_folders import TEXTS, write_model
from tests.support.servers import ServerProcess, ours, running
from tests.support.thinking import thinking_folder

ollama = pytest.importorskip("ollama")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "num_predict": 12}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    flags = ["--model-path", f"thinker={thinking_folder(folder / 'thinker')}"]
    flags += ["--model-path", f"words={write_model(folder / 'words', 'cls')}"]
    with running(ours(f"tiny={tiny_folder}", flags)) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    client = ollama.Client(host=server.url)
    yield client
    client._client.close()


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
      city: The name of the city
    """
    return f"sunny in {city}"


def test_chat(client: Any) -> None:
    answer = client.chat(model="tiny", messages=HELLO, options=GREEDY)
    assert (answer.message.role, answer.done, answer.done_reason) == ("assistant", True, "length")
    assert answer["message"]["content"] == answer.message.content
    assert answer.eval_count == 12
    assert answer.total_duration > answer.eval_duration > 0
    pieces = list(client.chat(model="tiny:latest", messages=HELLO, options=GREEDY, stream=True))
    assert "".join(piece.message.content for piece in pieces) == answer.message.content
    assert pieces[-1].prompt_eval_count == answer.prompt_eval_count


def test_generate(client: Any) -> None:
    answer = client.generate(model="tiny", prompt="hello", options=GREEDY)
    pieces = list(client.generate(model="tiny", prompt="hello", options=GREEDY, stream=True))
    assert "".join(piece.response for piece in pieces) == answer.response
    assert client.generate(model="tiny").done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="context"):
        client.generate(model="tiny", prompt="hello", context=[1, 2, 3])


async def test_async_client(server: ServerProcess) -> None:
    client = ollama.AsyncClient(host=server.url)
    answer = await client.chat(model="tiny", messages=HELLO, options=GREEDY)
    stream = await client.chat(model="tiny", messages=HELLO, options=GREEDY, stream=True)
    assert "".join([piece.message.content async for piece in stream]) == answer.message.content
    await client._client.aclose()


def test_tools_and_their_results(client: Any) -> None:
    """With a format the random model has to choose between that and a call: some seed makes one."""
    asked: dict[str, Any] = {"model": "tiny", "tools": [get_weather]}
    for seed in range(40):
        options = {"num_predict": 100, "temperature": 1, "seed": seed}
        answer = client.chat(messages=HELLO, format={"enum": ["no"]}, options=options, **asked)
        if answer.message.tool_calls:
            break
    call = answer.message.tool_calls[0].function
    assert call.name == "get_weather"
    turns = [*HELLO, answer.message]
    turns.append({"role": "tool", "content": get_weather(call.arguments.get("city", "Rome")), "tool_name": call.name})
    assert client.chat(messages=turns, options=GREEDY, **asked).message.content is not None


def test_format(client: Any) -> None:
    answer = client.chat(model="tiny", messages=HELLO, format=CITY, options={"temperature": 0, "num_predict": 100})
    assert json.loads(answer.message.content)["city"] in ("Rome", "Oslo")


def test_think(client: Any) -> None:
    options = {"temperature": 0, "num_predict": 96}
    assert client.chat(model="thinker", messages=HELLO, think=True, options=options).message.thinking
    pieces = client.chat(model="thinker", messages=HELLO, think=True, options=options, stream=True)
    assert any(piece.message.thinking for piece in pieces)
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        client.chat(model="tiny", messages=HELLO, think=True)


def test_embed(client: Any) -> None:
    found = np.array(client.embed(model="words", input=TEXTS).embeddings)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    assert len(client.embeddings(model="words", prompt=TEXTS[0]).embedding) == found.shape[1]


def test_list_show_ps(client: Any) -> None:
    assert [model.model for model in client.list().models] == ["tiny:latest", "thinker:latest", "words:latest"]
    shown = client.show("tiny")
    assert (shown.capabilities, shown.details.family) == (["completion", "tools"], "llama")
    assert shown.modelinfo["llama.context_length"] == 2048
    assert {model.model for model in client.ps().models} >= {"tiny:latest"}


def test_errors(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="there is no model") as missing:
        client.chat(model="nobody", messages=HELLO)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="--model-path"):
        client.pull("llama3")
    with pytest.raises(ollama.ResponseError, match="temperature"):
        list(client.chat(model="tiny", messages=HELLO, options={"temperature": 9}, stream=True))
