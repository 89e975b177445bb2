"""LangChain's chat models and embeddings as clients of four dialects: chat completions, responses, messages, Ollama."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.support.embedding_folders import TEXTS, write_model
from tests.support.servers import ServerProcess, ours, running

anthropic = pytest.importorskip("anthropic")
ollama = pytest.importorskip("ollama")
openai = pytest.importorskip("openai")
langchain_anthropic = pytest.importorskip("langchain_anthropic", reason="langchain-anthropic is not installed")
langchain_ollama = pytest.importorskip("langchain_ollama", reason="langchain-ollama is not installed")
langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
messages = pytest.importorskip("langchain_core.messages")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

DIALECTS = ("chat", "responses", "messages", "ollama")
Make = Callable[..., Any]


class Trip(BaseModel):
    """Where to go."""

    city: Literal["Rome", "Oslo"]


def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    words = write_model(tmp_path_factory.mktemp("models") / "words", "cls")
    with running(ours(f"tiny={tiny_folder}", ["--model-path", f"words={words}"])) as process:
        yield process


@pytest.fixture
def make(server: ServerProcess) -> Make:
    """A chat model of LangChain's that speaks a dialect."""

    def build(dialect: str, tokens: int = 12, **more: Any) -> Any:
        settings: dict[str, Any] = {"model": "tiny", "temperature": 0, **more}
        if dialect == "ollama":
            return langchain_ollama.ChatOllama(base_url=server.url, num_predict=tokens, **settings)
        settings |= {"api_key": "none", "max_retries": 0, "max_tokens": tokens}
        if dialect == "messages":
            return langchain_anthropic.ChatAnthropic(base_url=server.url, **settings)
        settings |= {"base_url": f"{server.url}/v1", "use_responses_api": dialect == "responses", "stream_usage": True}
        return langchain_openai.ChatOpenAI(**settings)

    return build


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_is_the_same_answer(make: Make, dialect: str) -> None:
    model = make(dialect)
    whole = model.invoke([("system", "Be kind."), ("user", "hello")])
    assert whole.text
    assert whole.usage_metadata["output_tokens"] <= 12
    chunks = list(model.stream([("system", "Be kind."), ("user", "hello")]))
    assert "".join(str(chunk.text) for chunk in chunks) == whole.text
    assert len(chunks) > 2
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


async def test_asynchronously(make: Make) -> None:
    """All in one event loop: langchain-openai keeps one client for all models."""
    for dialect in DIALECTS:
        model = make(dialect)
        whole = await model.ainvoke("hello")
        assert "".join([str(chunk.text) async for chunk in model.astream("hello")]) == whole.text, dialect
        batch = await model.abatch(["hello", "hello"])
        assert [one.text for one in batch] == [whole.text] * 2, dialect


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_a_tool_runs_over_two_turns(make: Make, dialect: str) -> None:
    model = make(dialect, 200)
    forced = model.bind_tools([get_weather], tool_choice="get_weather")
    answer = forced.invoke("hello")
    call = answer.tool_calls[0]
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Rome", "Oslo")
    assert answer.invalid_tool_calls == []
    total: Any = None
    for chunk in forced.stream("hello"):
        total = chunk if total is None else total + chunk
    assert total.tool_calls[0]["args"] == call["args"]
    results = [
        messages.ToolMessage(get_weather(one["args"]["city"]), tool_call_id=one["id"]) for one in answer.tool_calls
    ]
    last = make(dialect).bind_tools([get_weather]).invoke([("user", "hello"), answer, *results])
    assert last.text or last.tool_calls


def test_tools_of_ollama(make: Make) -> None:
    """Its API can't force a call: with a format the random model has to choose between that and a call."""
    for seed in range(40):
        model = make("ollama", 100, temperature=1, seed=seed, format={"enum": ["no"]})
        if calls := model.bind_tools([get_weather]).invoke("hello").tool_calls:
            break
    assert calls[0]["name"] == "get_weather"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(make: Make, dialect: str, method: str) -> None:
    if (dialect, method) == ("ollama", "function_calling"):
        pytest.skip("Ollama's API can't force a tool call")
    trip = make(dialect, 200).with_structured_output(Trip, method=method).invoke("hello")
    assert trip.city in ("Rome", "Oslo")


def test_a_response_goes_on_from_another(make: Make) -> None:
    model = make("responses", output_version="responses/v1")
    first = model.invoke("hello")
    identity = first.response_metadata["id"]
    second = model.invoke("and then?", previous_response_id=identity)
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
    chained = make("responses", use_previous_response_id=True).invoke([("user", "hello"), first, ("user", "and then?")])
    assert chained.text == second.text


def test_logprobs(make: Make) -> None:
    answer = make("chat").bind(logprobs=True, top_logprobs=2).invoke("hello")
    entries = answer.response_metadata["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_embeddings(server: ServerProcess) -> None:
    by_openai = langchain_openai.OpenAIEmbeddings(
        base_url=f"{server.url}/v1", api_key="none", model="words", check_embedding_ctx_length=False
    )
    by_ollama = langchain_ollama.OllamaEmbeddings(base_url=server.url, model="words")
    found = by_openai.embed_documents(TEXTS)
    assert len(found) == len(TEXTS)
    assert by_openai.embed_query(TEXTS[0]) == pytest.approx(found[0], abs=1e-6)
    assert by_ollama.embed_documents(TEXTS)[0] == pytest.approx(found[0], abs=1e-4)


@pytest.mark.parametrize(
    ("dialect", "missing", "bad"),
    [
        ("chat", "openai.NotFoundError", "openai.BadRequestError"),
        ("responses", "openai.NotFoundError", "openai.BadRequestError"),
        ("messages", "anthropic.NotFoundError", "anthropic.BadRequestError"),
        ("ollama", "ollama.ResponseError", "ollama.ResponseError"),
    ],
)
def test_errors_are_those_of_the_sdks(make: Make, dialect: str, missing: str, bad: str) -> None:
    kinds = {"openai": openai, "anthropic": anthropic, "ollama": ollama}

    def named(name: str) -> Any:
        package, _, error = name.partition(".")
        return getattr(kinds[package], error)

    with pytest.raises(named(missing), match="there is no model"):
        make(dialect, model="nobody").invoke("hello")
    with pytest.raises(named(bad), match="maximum context length"):
        make(dialect).invoke("x" * 9000)
    with pytest.raises(named(bad), match="maximum context length"):
        list(make(dialect).stream("x" * 9000))
