"""Classifiers, reward models and rerankers on a real server: shapes, numbers, wrong input, and real clients."""

import importlib.util
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mlx_parallm.models.kinds.classifier import load
from mlx_parallm.server.api.scoring.response_types import Classifications, Ranking, Scored
from mlx_parallm.types import TextTokens
from tests.support.classifiers import with_labels, write_classifier
from tests.support.embedding_folders import write_model
from tests.support.servers import ServerProcess, ours, running
from tests.support.shapes import read_as

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/heads.json").read_text())
ENTITIES = GOLDEN["entities"]
TEMPLATE = "{{ sep_token }}{% for m in messages %}{{ m.role }}. {{ m.content }}[SEP]{% endfor %}"
MODELS: dict[str, tuple[str, list[str], dict[str, Any]]] = {  # family, labels, what else its config says
    "mood": ("distilbert", ["bad", "so so", "good"], {}),
    "topics": ("modernbert_mean", ["art", "law", "sea"], {"problem_type": "multi_label_classification"}),
    "names": ("bert_tokens", ENTITIES["labels"], {}),
    "ranker": ("bert", ["score"], {}),
    "plain-ranker": ("bert", ["score"], {"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}),
    "judge": ("qwen3", ["score"], {}),
}
CHATS = [
    [{"role": "user", "content": "who is it"}, {"role": "assistant", "content": word}] for word in ("ann", "nobody. go")
]
DOCUMENTS = ["in the sea", "rome", "a b c d e f g", "not here", "rome is far", "x"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("scoring")
    for name, (family, labels, changes) in MODELS.items():
        config, shapes = with_labels(GOLDEN["families"][family]["config"], GOLDEN["families"][family]["shapes"], labels)
        write_classifier(root / name, config | changes, shapes)
    special = {"chat_template": TEMPLATE, "sep_token": {"content": "[SEP]"}}
    (root / "judge/tokenizer_config.json").write_text(json.dumps(special))
    write_model(root / "vectors", "cls")
    return {name: root / name for name in (*MODELS, "vectors")}


@pytest.fixture(scope="module")
def server(tiny_folder: Path, folders: dict[str, Path]) -> Iterator[ServerProcess]:
    flags = [part for name, folder in folders.items() for part in ("--model-path", f"{name}={folder}")]
    with running(ours(f"tiny={tiny_folder}", flags)) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    shape = Ranking if "rerank" in path else Classifications if "class" in path else Scored
    read_as(shape, found)
    return found


def logits(folder: Path, *texts: str | tuple[str, str], special: bool = True) -> Any:
    """What the model itself gives each text or pair, alone."""
    model = load(folder)
    encodings = [
        model.tokenizer.encode(*([text] if isinstance(text, str) else text), add_special_tokens=special)
        for text in texts
    ]
    return np.array([model.predict([TextTokens(one.ids, one.type_ids)])[0] for one in encodings], np.float64)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def scores(answer: dict[str, Any]) -> list[float]:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["score"] for entry in answer["data"]]


def test_models_say_what_they_are(client: httpx.Client) -> None:
    kinds = {model["id"]: model["kind"] for model in client.get("/v1/models").json()["data"]}
    assert kinds == dict.fromkeys(MODELS, "classifier") | {"judge": "reward", "vectors": "embedding", "tiny": "chat"}


def test_labels_and_probabilities(client: httpx.Client, folders: dict[str, Path]) -> None:
    texts = ["it is good", "b", "why not? " * 5]
    wanted = np.exp(logits(folders["mood"], *texts))
    wanted /= wanted.sum(axis=1, keepdims=True)
    for path in ("/v1/classifications", "/classify"):
        answer = post(client, path, input=texts)
        assert answer["model"] == "mood", "the first classifier is the default"
        np.testing.assert_allclose([entry["probs"] for entry in answer["data"]], wanted, atol=1e-5)
    for entry, right in zip(answer["data"], wanted, strict=True):
        assert (entry["label"], entry["num_classes"]) == (MODELS["mood"][1][right.argmax()], 3)
        assert entry["probabilities"] == dict(zip(MODELS["mood"][1], entry["probs"], strict=True))
        assert entry["score"] == max(entry["probs"])
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 20
    [alone] = post(client, "/classify", input=texts[2], model="mood")["data"]
    np.testing.assert_allclose(alone["probs"], wanted[2], atol=1e-5)
    [raw] = post(client, "/classify", input=texts[1], use_activation=False)["data"]
    np.testing.assert_allclose(raw["probs"], logits(folders["mood"], texts[1])[0], atol=1e-5)


def test_several_labels_at_once(client: httpx.Client, folders: dict[str, Path]) -> None:
    texts = ["the law of the sea", "paint"]
    wanted = sigmoid(logits(folders["topics"], *texts))
    for entry, right in zip(post(client, "/classify", model="topics", input=texts)["data"], wanted, strict=True):
        np.testing.assert_allclose(entry["probs"], right, atol=1e-5)
        assert entry["labels"] == [
            label for label, value in zip(MODELS["topics"][1], right, strict=True) if value > 0.5
        ]


def test_pairs_and_token_ids(client: httpx.Client, folders: dict[str, Path]) -> None:
    wanted = sigmoid(logits(folders["ranker"], ("who", "ann"), ("who", "bob"), "who"))[:, 0]
    forms: list[Any] = [["who", "ann"], {"text": "who", "text_pair": "bob"}, {"text": "who"}]
    found = post(client, "/classify", model="ranker", input=forms)["data"]
    np.testing.assert_allclose([entry["score"] for entry in found], wanted, atol=1e-5)
    assert [entry["label"] for entry in found] == ["score"] * 3
    ids = load(folders["mood"]).tokenizer.encode("why not?").ids
    by_ids, by_text = post(client, "/classify", input=[ids, "why not?"])["data"]
    np.testing.assert_allclose(by_ids["probs"], by_text["probs"], atol=1e-5)
    assert post(client, "/classify", input=ids)["data"][0]["probs"] == pytest.approx(by_ids["probs"], abs=1e-5)


def test_entities_are_those_of_the_pipeline(client: httpx.Client) -> None:
    text = ENTITIES["text"]
    for aggregation in ("simple", "none"):
        answer = post(client, "/v1/classifications", model="names", input=["why", text], aggregation=aggregation)
        found = answer["data"][1]["entities"]
        assert [[one["label"], one["start"], one["end"]] for one in found] == [
            [label, start, end] for label, _, start, end in ENTITIES[aggregation]
        ]
        np.testing.assert_allclose(
            [one["score"] for one in found], [one[1] for one in ENTITIES[aggregation]], atol=1e-5
        )
        assert all(one["word"] == text[one["start"] : one["end"]] for one in found)
    by_ids = post(client, "/classify", model="names", input=[[2, 5, 6, 3]], aggregation="none")["data"][0]["entities"]
    assert {one["start"] for one in by_ids} <= {None}


def test_rewards_of_texts_and_chats(client: httpx.Client, folders: dict[str, Path]) -> None:
    turns = [[f"{turn['role']}. {turn['content']}[SEP]" for turn in chat] for chat in CHATS]
    rendered = ["".join(["[SEP]", *chat]) for chat in turns]
    wanted = logits(folders["judge"], *rendered, special=False)[:, 0]
    for path in ("/v1/rewards/score", "/pooling", "/v1/score"):
        answer = post(client, path, input=CHATS, task="reward")
        assert answer["model"] == "judge", "the first reward model is the default"
        np.testing.assert_allclose(scores(answer), wanted, atol=1e-5)
        assert {entry["object"] for entry in answer["data"]} == {"reward"}
    np.testing.assert_allclose(scores(post(client, "/v1/rewards/score", messages=CHATS[1])), wanted[1:], atol=1e-5)
    text = scores(post(client, "/v1/rewards/score", model="judge", input="ann is it"))
    np.testing.assert_allclose(text, logits(folders["judge"], "ann is it")[0], atol=1e-5)
    encoder = scores(post(client, "/v1/rewards/score", model="ranker", input=[["who", "ann"]]))
    np.testing.assert_allclose(encoder, logits(folders["ranker"], ("who", "ann"))[0], atol=1e-5)


def test_scores_of_two_texts(client: httpx.Client, folders: dict[str, Path]) -> None:
    pairs = [("rome", document) for document in DOCUMENTS]
    wanted = sigmoid(logits(folders["ranker"], *pairs))[:, 0]
    for path, body in (
        ("/v1/score", {"text_1": "rome", "text_2": DOCUMENTS}),
        ("/score", {"queries": "rome", "documents": DOCUMENTS, "model": "ranker"}),
        ("/v1/score", {"text_1": ["rome"] * 6, "text_2": DOCUMENTS}),
    ):
        answer = post(client, path, **body)
        assert answer["model"] == "ranker"
        assert {entry["object"] for entry in answer["data"]} == {"score"}
        np.testing.assert_allclose(scores(answer), wanted, atol=1e-5)
    raw = scores(post(client, "/v1/score", text_1="rome", text_2=DOCUMENTS, model="plain-ranker"))
    np.testing.assert_allclose(raw, logits(folders["plain-ranker"], *pairs)[:, 0], atol=1e-5)
    assert scores(post(client, "/v1/score", text_1="rome", text_2="rome", model="vectors")) == pytest.approx(
        [1], abs=1e-5
    )


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_by_relevance(client: httpx.Client, folders: dict[str, Path], path: str) -> None:
    wanted = sigmoid(logits(folders["ranker"], *[("rome", document) for document in DOCUMENTS]))[:, 0]
    answer = post(client, path, query="rome", documents=DOCUMENTS)
    order = [result["index"] for result in answer["results"]]
    assert order == np.argsort(-wanted).tolist()
    np.testing.assert_allclose([result["relevance_score"] for result in answer["results"]], wanted[order], atol=1e-5)
    has_documents = path != "/v2/rerank"
    assert all(("document" in result) is has_documents for result in answer["results"])
    objects = [{"text": text, "id": number} for number, text in enumerate(DOCUMENTS)]
    best = post(client, path, query="rome", documents=objects, top_n=2, return_documents=True, model="ranker")
    assert [result["document"] for result in best["results"]] == [objects[place] for place in order[:2]]
    assert answer["meta"]["tokens"]["input_tokens"] == answer["usage"]["total_tokens"]
    assert len(post(client, path, query="rome", documents=DOCUMENTS, top_n=99)["results"]) == len(DOCUMENTS)


def test_an_embedding_model_ranks_by_cosine(client: httpx.Client) -> None:
    answer = post(client, "/v1/rerank", model="vectors", query="the cat", documents=["of", "the cat", "a dog of the"])
    assert answer["results"][0]["index"] == 1
    assert answer["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-5)
    body = {"model": "vectors", "input": ["the cat", "of"]}
    one, other = (np.array(entry["embedding"]) for entry in client.post("/v1/embeddings", json=body).json()["data"])
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    found = next(result["relevance_score"] for result in answer["results"] if result["index"] == 0)
    assert found == pytest.approx(cosine, abs=1e-5)


def test_long_inputs_are_refused_or_cut(client: httpx.Client, folders: dict[str, Path]) -> None:
    long = "rome " * 40
    for path, body, param in (
        ("/classify", {"input": ["a", long]}, "input.1"),
        ("/v1/rewards/score", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/v1/rerank", {"query": "a", "documents": ["a", "b", long]}, "documents.2"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", long]}, "text_2.1"),
        ("/v1/rerank", {"query": "a", "documents": ["of", "of " * 900], "model": "vectors"}, "documents.1"),
        ("/v1/rerank", {"query": "of " * 900, "documents": ["of", "a"], "model": "vectors"}, "query"),
        ("/v1/score", {"text_1": "of " * 900, "text_2": ["of", "a"], "model": "vectors"}, "text_1"),
    ):
        refused = client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded"), refused.text
        assert refused.json()["error"]["param"] == param
        cut = client.post(path, json=body | {"truncate_prompt_tokens": 8})
        assert cut.status_code == 200, cut.text
    per_document = post(client, "/v2/rerank", query="a", documents=[long, "rome"], max_tokens_per_doc=4)
    assert per_document["results"][0]["relevance_score"] == pytest.approx(per_document["results"][1]["relevance_score"])
    for most in (1, 4, 4096):
        cut = post(
            client,
            "/v1/rerank",
            model="vectors",
            query="of",
            documents=["of the " * 9, "of the"],
            max_tokens_per_doc=most,
        )
        scores_ = [result["relevance_score"] for result in cut["results"]]
        assert (scores_[0] == pytest.approx(scores_[1], abs=1e-5)) == (most == 1)
    left = post(client, "/classify", input=long + "why", truncate_prompt_tokens=5, truncation_side="left")
    np.testing.assert_allclose(
        left["data"][0]["probs"], post(client, "/classify", input="why")["data"][0]["probs"], atol=1e-5
    )


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/classify", {}, 400, None),
        ("/classify", {"input": []}, 400, "input"),
        ("/classify", {"input": [[]]}, 400, "input.0"),
        ("/classify", {"input": ["a", 5]}, 400, "input.1"),
        ("/classify", {"input": ["a", [1, 99999]]}, 400, "input.1.1"),
        ("/classify", {"input": [[-1]]}, 400, None),
        ("/classify", {"input": "a", "model": "nobody"}, 404, "model"),
        ("/classify", {"input": "a", "model": "tiny"}, 400, "model"),
        ("/classify", {"input": "a", "model": "vectors"}, 400, "model"),
        ("/classify", {"input": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ("/classify", {"input": "a", "truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens"),
        ("/classify", {"input": "a", "truncate_prompt_tokens": 10**30}, 400, "truncate_prompt_tokens"),
        ("/classify", {"input": "a", "aggregation": "max"}, 400, "aggregation"),
        ("/classify", {"input": ["a"] * 2049}, 400, "input"),
        ("/classify", {"input": [["a", "b"]], "model": "names"}, 400, "input"),
        ("/classify", {"messages": CHATS[0]}, 400, "messages"),  # no chat template
        ("/v1/rewards/score", {"input": "a", "model": "mood"}, 400, "model"),
        ("/v1/rewards/score", {"input": "a", "model": "names"}, 400, "model"),
        ("/v1/rewards/score", {"input": "a", "model": "nobody"}, 404, "model"),
        ("/v1/rewards/score", {"input": "a", "messages": CHATS[0]}, 400, None),
        ("/v1/rewards/score", {"messages": []}, 400, "messages"),
        ("/v1/rewards/score", {"input": [[{"role": "nobody", "content": "a"}]]}, 400, "input.0.0.role"),
        ("/pooling", {"input": "a", "task": "embed"}, 400, "task"),
        ("/v1/score", {"text_1": "a"}, 400, None),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400, None),
        ("/v1/score", {"text_1": "a", "text_2": []}, 400, "text_2"),
        ("/v1/rerank", {"documents": ["a"]}, 400, "query"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, 400, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 2049}, 400, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"title": "b"}]}, 400, "documents.1.text"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, 400, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, 400, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "model": "mood"}, 400, "model"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 0}, 400, "max_tokens_per_doc"),
    ],
)
def test_wrong_bodies(client: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None) -> None:
    refused = client.post(path, json=body)
    assert refused.status_code == status, refused.text
    error = refused.json()["error"]
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error


def test_a_wrong_request_harms_nobody_beside_it(client: httpx.Client, server: ServerProcess) -> None:
    """Many clients at once, of all kinds, every third of them wrong, and a chat beside them."""
    alone = {
        text: post(client, "/classify", input=text)["data"][0]["probs"] for text in ("ann", "why not", "a b c d e f")
    }
    order = post(client, "/rerank", query="rome", documents=DOCUMENTS)["results"]

    def ask(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as own:
            if number % 3 == 0:
                assert own.post("/classify", json={"input": ["ann", [70_000]]}).status_code == 400
            elif number % 3 == 1:
                for entry, wanted in zip(
                    post(own, "/classify", input=list(alone))["data"], alone.values(), strict=True
                ):
                    np.testing.assert_allclose(entry["probs"], wanted, atol=1e-5)
            else:
                found = post(own, "/rerank", query="rome", documents=DOCUMENTS)["results"]
                assert [one["index"] for one in found] == [one["index"] for one in order]
                chat = own.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4, "model": "tiny"})
                assert chat.status_code == 200

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(24)))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cohere") is None, reason="cohere is not installed")
def test_the_cohere_client(server: ServerProcess, client: httpx.Client) -> None:
    cohere = importlib.import_module("cohere")
    newest = cohere.ClientV2(api_key="none", base_url=server.url, httpx_client=client)
    ranked = newest.rerank(model="ranker", query="rome", documents=DOCUMENTS, top_n=3)
    assert len(ranked.results) == 3
    assert ranked.results[0].relevance_score >= ranked.results[1].relevance_score
    first = cohere.Client(api_key="none", base_url=server.url, httpx_client=client)
    older = first.rerank(model="ranker", query="rome", documents=DOCUMENTS, top_n=3, return_documents=True)
    assert [one.index for one in older.results] == [one.index for one in ranked.results]
    assert older.results[0].document.text == DOCUMENTS[older.results[0].index]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the package's own
@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="litellm is not installed")
def test_litellm_ranks(server: ServerProcess, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it looks for prices on the network
    litellm = importlib.import_module("litellm")
    wanted = [one["index"] for one in post(client, "/rerank", query="rome", documents=DOCUMENTS)["results"]][:3]
    for provider, base in (("cohere", server.url), ("jina_ai", f"{server.url}/v1"), ("hosted_vllm", server.url)):
        ranked = litellm.rerank(
            model=f"{provider}/ranker", query="rome", documents=DOCUMENTS, top_n=3, api_base=base, api_key="none"
        )
        assert [one["index"] for one in ranked.results] == wanted, provider
