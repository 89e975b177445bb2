"""Every route on which a request names an adapter, with keys that are bound to one: theirs and another's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_parallm.server.auth.key_files import changing
from mlx_parallm.server.auth.keys import Role, entry_of, new_key
from tests.rights import ADAPTER_ROUTES, ALL, rights_of
from tests.support.servers import ServerProcess, ours, running
from tests.unit.test_adapters import written

ROLES: tuple[Role, ...] = ("user", "trainer")
NAMING = {"model", "adapter", "lora_adapter", "lora_name"}  # fields of bodies
# These ask other kinds of models, or name no adapter, or are for admins, who are bound to none.
OTHERS = {
    "/v1/embeddings", "/api/embed", "/api/embeddings", "/v1/predict", "/v1/rl/act", "/v1/score", "/score", "/pooling",
    "/v1/pool", "/v1/classifications", "/classify", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/rewards/score",
    "/v1/models/load", "/v1/models/unload", "/v1/training/feedback", "/model/switch-lora",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("adapters"), "few")


@pytest.fixture(scope="module")
def bound(
    tiny_folder: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, dict[str, str]]]:
    base, secrets = tmp_path_factory.mktemp("bound"), dict[str, str]()
    with changing(base / "keys.json") as document:
        for role in ROLES:
            secrets[role], key = new_key(role, role, adapters=frozenset({"mine"}))
            document[role] = entry_of(key)
        secrets["admin"], key = new_key("root", "admin")
        document["root"] = entry_of(key)
    flags = ["--keys-file", str(base / "keys.json"), "--enable-rl-training", "--update-frequency", "0"]
    flags += ["--train-adapter", "mine", "--train-adapter", "theirs", "--lora-rank", "4"]
    flags += ["--checkpoint-dir", str(base / "checkpoints"), "--model-dir", str(folder.parent)]
    with running(ours(str(tiny_folder), flags)) as server:
        yield server, secrets


def call(url: str, path: str, secret: str, name: str, folder: Path) -> httpx.Response:
    text = json.dumps(ADAPTER_ROUTES[path][0]).replace("NAME", name).replace("FOLDER", str(folder))
    return httpx.post(url + path, json=json.loads(text), headers={"Authorization": f"Bearer {secret}"}, timeout=60)


def test_a_bound_key_has_its_own_adapter_alone(bound: tuple[ServerProcess, dict[str, str]], folder: Path) -> None:
    server, secrets = bound
    wrong = []
    for path, (_, refusal) in ADAPTER_ROUTES.items():
        for role in ROLES:
            low = ROLES.index(role) < [*ROLES, "admin"].index(rights_of(path))
            theirs = call(server.url, path, secrets[role], "theirs", folder)
            if theirs.status_code != (403 if low else refusal):
                wrong.append(f"{path}, {role}, another's: {theirs.status_code} {theirs.text:.200}")
            own = call(server.url, path, secrets[role], "mine", folder)
            if (own.status_code in (401, 403, 404)) != low:
                wrong.append(f"{path}, {role}, its own: {own.status_code} {own.text:.200}")
    assert not wrong, "\n".join(wrong)


def test_a_bound_key_gets_no_other_adapter_by_the_model_s_own_name(bound: tuple[ServerProcess, dict[str, str]]) -> None:
    server, secrets = bound

    def client(role: str) -> httpx.Client:
        return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {secrets[role]}"}, timeout=60)

    body = {"model": "default", "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}
    with client("admin") as admin, client("user") as user, client("trainer") as trainer:
        assert admin.post("/model/switch-lora", json={"version": "theirs"}).status_code == 200
        refused = user.post("/v1/completions", json=body)
        assert refused.status_code == 404, refused.text
        assert "theirs" not in refused.text
        assert user.post("/v1/completions", json=body | {"lora_adapter": "base"}).status_code == 200
        assert "theirs" not in user.get("/server_info").text
        assert trainer.get("/v1/training/status?adapter=mine").json()["adapters"] == ["mine"]
        answer = admin.post("/v1/completions", json=body).json()
        theirs = {"request_id": answer["id"], "reward": 1.0, "adapter": "mine"}
        assert trainer.post("/v1/training/feedback", json=theirs).status_code == 404
        own = trainer.post("/v1/completions", json=body | {"model": "mine"}).json()
        assert trainer.post("/v1/training/feedback", json={"request_id": own["id"], "reward": 1.0}).status_code == 200
        for bad in (1e300, -2e6):
            sent = {"request_id": own["id"], "reward": bad}
            assert trainer.post("/v1/training/feedback", json=sent).status_code == 400
        assert admin.post("/model/switch-lora", json={"version": "mine"}).status_code == 200
        assert user.post("/v1/completions", json=body).status_code == 200


def test_every_route_that_names_an_adapter_is_in_the_table(bound: tuple[ServerProcess, dict[str, str]]) -> None:
    server, secrets = bound
    document: dict[str, Any] = httpx.get(
        f"{server.url}/openapi.json", headers={"Authorization": f"Bearer {secrets['admin']}"}
    ).json()
    schemas = document["components"]["schemas"]
    missing = []
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        text = json.dumps(content.get("application/json", {}))
        named = {name for name in schemas if f'"#/components/schemas/{name}"' in text}
        fields = {field for name in named for field in schemas[name].get("properties", ())}
        if fields & NAMING and path not in ADAPTER_ROUTES and path not in OTHERS:
            missing.append(path)
    assert set(ADAPTER_ROUTES) <= ALL
    assert not missing
