"""/v1/embeddings on a real server, beside a chat model: shapes, sizes, truncation, wrong input, and real clients."""

import base64
import importlib.util
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from safetensors.numpy import load_file, save_file

from mlx_parallm.server.api.openai.embeddings import EmbeddingResponse
from tests.support.embedding_folders import TEXTS, VECTORS, edit_json, write_model
from tests.support.servers import ServerProcess, ours, running
from tests.support.shapes import read_as

WAITING = 'mlx_parallm_predict_queue_depth{kind="embedding",model="bert"} 1.0'


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("embedding")
    qwen, cls = write_model(folder / "qwen", "qwen"), write_model(folder / "cls", "cls")
    edit_json(qwen / "config.json", matryoshka_dimensions=[8, 16])
    edit_json(qwen / "config_sentence_transformers.json", default_prompt_name="document")
    flags = ["--model-path", f"qwen={qwen}", "--model-path", f"bert={cls}"]
    with running(ours(f"tiny={tiny_folder}", flags)) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def embed(client: httpx.Client, texts: Any, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/embeddings", json={"input": texts, **fields})
    assert answer.status_code == 200, answer.text
    read_as(EmbeddingResponse, answer.json())
    content: dict[str, Any] = answer.json()
    return content


def vectors(answer: dict[str, Any]) -> Any:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return np.array([entry["embedding"] for entry in answer["data"]], np.float32)


def test_vectors_are_those_of_sentence_transformers(client: httpx.Client) -> None:
    answer = embed(client, TEXTS)
    assert answer["model"] == "qwen", "the first embedding model is the default"
    np.testing.assert_allclose(vectors(answer), VECTORS["qwen"], atol=1e-4)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > len(TEXTS)
    np.testing.assert_allclose(vectors(embed(client, TEXTS, model="bert")), VECTORS["cls"], atol=1e-4)
    np.testing.assert_allclose(vectors(embed(client, TEXTS, prompt_name="query")), VECTORS["qwen.query"], atol=1e-4)
    np.testing.assert_allclose(vectors(embed(client, TEXTS[0], model="default"))[0], VECTORS["qwen"][0], atol=1e-4)


def test_base64_holds_the_same_numbers(client: httpx.Client) -> None:
    plain, packed = embed(client, TEXTS), embed(client, TEXTS, encoding_format="base64", user="somebody")
    unpacked = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in packed["data"]]
    np.testing.assert_array_equal(np.stack(unpacked), vectors(plain))


def test_a_smaller_size_is_cut_and_normalised(client: httpx.Client) -> None:
    whole = vectors(embed(client, TEXTS))
    for size in (8, 16):
        cut = whole[:, :size] / np.linalg.norm(whole[:, :size], axis=1, keepdims=True)
        np.testing.assert_allclose(vectors(embed(client, TEXTS, dimensions=size)), cut, atol=1e-6)
    np.testing.assert_array_equal(vectors(embed(client, TEXTS, dimensions=32)), whole)


def test_token_ids_are_taken_as_they_are(client: httpx.Client) -> None:
    ids = [[4, 5, 6, 3], [9, 3]]
    together = vectors(embed(client, ids))
    np.testing.assert_allclose(vectors(embed(client, ids[0]))[0], together[0], atol=1e-5)
    texts = vectors(embed(client, ["the a of", "in"]))  # the tokenizer ends them with token 3
    np.testing.assert_allclose(texts[0], together[0], atol=1e-5)


def test_too_long_an_input_is_refused_or_cut(client: httpx.Client) -> None:
    long = "hot water " * 40
    answer = client.post("/v1/embeddings", json={"input": ["hot", long]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input.1")
    assert "81 tokens" in error["message"]
    whole = embed(client, ["hot", long], truncate_prompt_tokens=-1)
    assert whole["usage"]["prompt_tokens"] == 2 + 64
    cut = embed(client, [long], truncate_prompt_tokens=5)
    same = embed(client, ["hot water hot water"])
    np.testing.assert_allclose(vectors(cut), vectors(same), atol=1e-5, err_msg="the ending token stays")


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": []}, "input", "non-empty"),
        ({"input": [[]]}, "input", "non-empty"),
        ({"input": [["a"]]}, "input", "token ids"),
        ({"input": ["a", 3]}, "input", "only strings"),
        ({"input": [1.5]}, "input", "token ids"),
        ({"input": [-1]}, "input", "token ids"),
        ({"input": [10**15]}, "input.0", "vocabulary"),
        ({"input": [[3], [5000]]}, "input.1.0", "vocabulary"),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": {"text": "a"}}, "input", "a string"),
        ({"dimensions": 9}, "dimensions", "8, 16, 32"),
        ({"dimensions": 0}, "dimensions", "greater"),
        ({"dimensions": 10**30}, "dimensions", ""),
        ({"dimensions": "8"}, "dimensions", "integer"),
        ({"encoding_format": "int8"}, "encoding_format", "base64"),
        ({"prompt_name": "nobody"}, "prompt_name", "document, query"),
        ({"prompt_name": "query", "input": [3]}, "prompt_name", "token ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "nothing"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "64"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater"),
        ({"model": "tiny"}, "model", "kind chat"),
    ],
)
def test_wrong_input_is_named(client: httpx.Client, change: dict[str, Any], param: str, words: str) -> None:
    answer = client.post("/v1/embeddings", json={"input": "hot"} | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


def test_an_unknown_model_is_not_found(client: httpx.Client) -> None:
    answer = client.post("/v1/embeddings", json={"input": "hot", "model": "nobody"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("wrong", ["", ["", "a"], ["a", ""]])
def test_an_empty_text_is_refused(client: httpx.Client, wrong: Any) -> None:
    answer = client.post("/v1/embeddings", json={"input": wrong})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_many_clients_get_what_each_gets_alone(client: httpx.Client) -> None:
    """With wrong ones among them, and a chat beside them."""
    alone = vectors(embed(client, TEXTS))

    def ask(number: int) -> Any:
        if number % 5 == 4:
            assert client.post("/v1/embeddings", json={"input": [[10**6]]}).status_code == 400
            return None
        if number % 5 == 3:
            body = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200
            return None
        return vectors(embed(client, TEXTS[number % 3 :]))

    with ThreadPoolExecutor(10) as pool:
        for number, found in enumerate(pool.map(ask, range(40))):
            if found is not None:
                np.testing.assert_allclose(found, alone[number % 3 :], atol=1e-5)


def test_vectors_that_are_not_numbers_are_an_error(client: httpx.Client, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "damaged", "cls")
    file = next(folder.glob("*.safetensors"))
    save_file({name: array * np.nan for name, array in load_file(file).items()}, file)
    assert client.post("/v1/models/load", json={"model": "damaged", "path": str(folder)}).status_code == 200
    answer = client.post("/v1/embeddings", json={"input": ["the cat"], "model": "damaged"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "not_finite"), answer.text
    assert client.post("/v1/models/unload", json={"model": "damaged"}).status_code == 200


@pytest.mark.parametrize("beside_chat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sigterm_lets_embeddings_finish(tiny_folder: Path, tmp_path: Path, beside_chat: bool) -> None:
    models = [f"bert={write_model(tmp_path / 'cls', 'cls')}", *([f"tiny={tiny_folder}"] if beside_chat else [])]
    flags = [part for model in models[1:] for part in ("--model-path", model)]
    server = ours(models[0], [*flags, "--drain-timeout-seconds", "60"], fork=False)
    body = {"input": [f"the cat {number} of the dog " * 3 for number in range(2048)], "model": "bert"}
    with running(server), ThreadPoolExecutor(1) as threads:
        asked = threads.submit(httpx.post, f"{server.url}/v1/embeddings", json=body, timeout=60)
        while not asked.done() and WAITING not in httpx.get(f"{server.url}/metrics").text:
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        answer = asked.result()
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"]) == 2048
        assert server.process.wait(30) == 0


def test_a_client_that_leaves_in_its_body_is_no_error(server: ServerProcess, client: httpx.Client) -> None:
    address = httpx.URL(server.url)
    before = server.log().count("Traceback")
    for path in ("/v1/embeddings", "/v1/predict", "/v1/rl/act", "/update_adapter_weights"):
        with socket.create_connection((address.host, address.port or 80)) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 5000\r\n\r\n{{".encode())
            time.sleep(0.1)
    assert embed(client, "still here", model="bert")["usage"]["prompt_tokens"] > 0
    assert server.log().count("Traceback") == before


def test_openai(server: ServerProcess) -> None:
    """Which asks for base64 unless told otherwise."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        found = client.embeddings.create(model="qwen", input=TEXTS)
        np.testing.assert_allclose([entry.embedding for entry in found.data], VECTORS["qwen"], atol=1e-4)
        plain = client.embeddings.create(model="qwen", input=TEXTS[0], encoding_format="float", dimensions=8)
        assert len(plain.data[0].embedding) == 8
        with pytest.raises(BadRequestError) as caught:
            client.embeddings.create(model="qwen", input=TEXTS, dimensions=9)
        assert caught.value.param == "dimensions"


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # these packages' own
@needs("langchain_openai")
def test_langchain(server: ServerProcess) -> None:
    from langchain_openai import OpenAIEmbeddings  # type: ignore[import-not-found, unused-ignore]

    client = OpenAIEmbeddings(
        model="qwen", base_url=f"{server.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    np.testing.assert_allclose(client.embed_documents(TEXTS), VECTORS["qwen"], atol=1e-4)
    np.testing.assert_allclose(client.embed_query(TEXTS[0]), VECTORS["qwen"][0], atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # these packages' own
@needs("llama_index")
def test_llama_index(server: ServerProcess) -> None:
    from llama_index.embeddings.openai_like import (  # type: ignore[import-not-found, unused-ignore]
        OpenAILikeEmbedding,
    )

    client = OpenAILikeEmbedding(model_name="qwen", api_base=f"{server.url}/v1", api_key="none")
    np.testing.assert_allclose(client.get_text_embedding_batch(TEXTS), VECTORS["qwen"], atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # these packages' own
@needs("litellm")
def test_litellm(server: ServerProcess) -> None:
    import litellm  # type: ignore[import-not-found, unused-ignore]

    found = litellm.embedding("openai/qwen", input=TEXTS, api_base=f"{server.url}/v1", api_key="none")
    np.testing.assert_allclose([entry["embedding"] for entry in found.data], VECTORS["qwen"], atol=1e-4)
