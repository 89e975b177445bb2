"""The RL data plane over HTTP: /generate in three shapes, versions and spans, shares, and what trainers ask beside."""

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from mlx_parallm.server.api.adapters.bodies import Switched
from mlx_parallm.server.api.control import ServerInfo
from mlx_parallm.server.api.generate.own import Generated
from tests.e2e.http import Api
from tests.engine.harness import Bare, bare_with
from tests.support.servers import ours, running
from tests.support.shapes import read_as
from tests.unit.test_adapters import written

PROMPT = list(range(20, 50))
KINDS = ("few", "all")
NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("adapters")
    return {name: written(base, name) for name in KINDS}


@pytest.fixture(scope="module")
def bare(folders: dict[str, Path]) -> dict[str | None, Bare]:
    return bare_with(folders)


@pytest.fixture(scope="module")
def client(tiny_folder: Path) -> Iterator[httpx.Client]:
    with running(ours(str(tiny_folder))) as server, httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


@pytest.fixture
def policy(client: httpx.Client, folders: dict[str, Path]) -> Iterator[str]:
    """An adapter of two versions: few, then all. A name of its own each time: numbers are never given out again."""
    name = f"p{next(NUMBERS)}"
    for kind in KINDS:
        assert client.post("/load_adapter", json={"name": name, "path": str(folders[kind])}).status_code == 200
    yield name
    assert client.post("/model/switch-lora", json={"version": "base"}).status_code == 200
    assert client.post("/v1/adapters/unload", json={"name": name}).status_code == 200


def generate(client: httpx.Client, **body: Any) -> Any:
    answer = client.post("/generate", json={"prompt": PROMPT, "max_tokens": 10, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def scored(bare: Bare, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
    logits = bare.model.module(mx.array([prompt + tokens]))[0, len(prompt) - 1 : -1].astype(mx.float32) / temperature
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [logprobs[place, token].item() for place, token in enumerate(tokens)]


def test_our_own_shape(client: httpx.Client, bare: dict[str | None, Bare]) -> None:
    tokens, logprobs = bare[None].greedy(PROMPT, 10, ignore_eos=True)
    found = generate(client, ignore_eos=True, step_id=7, request_id="r-1", metadata={"task": "sum"})
    read_as(Generated, found)
    assert (found["request_id"], found["step_id"], found["policy_version"]) == ("r-1", 7, 0)
    assert (found["prompt_ids"], found["completion_ids"]) == (PROMPT, tokens)
    assert found["logprobs"] == pytest.approx(logprobs, abs=1e-4)
    assert (found["finish_reason"], found["policy_spans"]) == ("length", [[0, 10, 0]])
    assert found["metadata"]["task"] == "sum"
    assert found["metadata"]["batch_size"] >= 1
    assert found["metadata"]["latency_ms"] > 0
    assert found["metadata"]["current_policy_version"] == 0
    assert generate(client, logprobs=False, ignore_eos=True)["logprobs"] is None
    assert generate(client, policy_version=12)["policy_version"] == 12  # there are no versions: it is the client's own
    text = client.post("/generate", json={"prompt": "the and of", "step_id": "s"}).json()
    assert len(text["prompt_ids"]) > 1
    assert len(text["completion_ids"]) <= 128


def test_the_token_that_ends_it_is_part_of_it(client: httpx.Client, bare: dict[str | None, Bare]) -> None:
    tokens, logprobs = bare[None].greedy(PROMPT, 6, ignore_eos=True)
    end = tokens.index(tokens[4])
    found = generate(client, stop_token_ids=[tokens[4]])
    assert found["completion_ids"] == tokens[: end + 1]
    assert found["logprobs"] == pytest.approx(logprobs[: end + 1], abs=1e-4)
    assert (found["finish_reason"], found["policy_spans"]) == ("stop", [[0, end + 1, 0]])
    completion = Api(client).complete(
        prompt=PROMPT, max_tokens=10, stop_token_ids=[tokens[4]], logprobs=0, return_token_ids=True
    )["choices"][0]
    assert completion["token_ids"] == tokens[: end + 1]
    assert completion["logprobs"]["token_logprobs"] == pytest.approx(logprobs[: end + 1], abs=1e-4)


def test_logprobs_as_drawn_or_of_the_model(client: httpx.Client, bare: dict[str | None, Bare]) -> None:
    hot = {"temperature": 1.6, "seed": 3, "ignore_eos": True}
    drawn = generate(client, **hot)
    raw = generate(client, **hot, logprobs_mode="raw")
    assert drawn["completion_ids"] == raw["completion_ids"]
    assert drawn["logprobs"] == pytest.approx(scored(bare[None], PROMPT, drawn["completion_ids"], 1.6), abs=1e-4)
    assert raw["logprobs"] == pytest.approx(scored(bare[None], PROMPT, raw["completion_ids"]), abs=1e-4)


def test_our_own_shape_as_a_stream(client: httpx.Client) -> None:
    whole = generate(client, ignore_eos=True, step_id=1)
    body = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0, "ignore_eos": True, "step_id": 1, "stream": True}
    with client.stream("POST", "/generate", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert [token for chunk in chunks for token in chunk["completion_ids"]] == whole["completion_ids"]
    assert [one for chunk in chunks for one in chunk["logprobs"]] == pytest.approx(whole["logprobs"], abs=1e-5)
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert all(chunk["policy_version"] == 0 for chunk in chunks)
    assert chunks[-1]["policy_spans"] == [[0, 10, 0]]


def test_vllms_shape(client: httpx.Client, bare: dict[str | None, Bare]) -> None:
    """As Atropos sends it."""
    tokens, logprobs = bare[None].greedy(PROMPT, 10, ignore_eos=True)
    body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, "n": 2, "ignore_eos": True}
    found = generate(client, **body)
    assert len(found["text"]) == len(found["logprobs"]) == len(found["finish_reasons"]) == 2
    for choice in found["logprobs"]:
        assert [int(next(iter(item[0]))) for item in choice] == tokens
        assert [next(iter(item[0].values())) for item in choice] == pytest.approx(logprobs, abs=1e-4)
    assert found["token_ids"] == [tokens, tokens]
    assert (found["finish_reasons"], found["prompt_token_ids"]) == (["length", "length"], PROMPT)
    scores = generate(client, prompt={"prompt_token_ids": PROMPT}, prompt_logprobs=1, max_tokens=1)["prompt_logprobs"]
    assert scores[0] is None
    expected = scored(bare[None], PROMPT[:1], PROMPT[1:])
    known = [entry[str(token)] for entry, token in zip(scores[1:], PROMPT[1:], strict=True)]
    assert known == pytest.approx(expected, abs=1e-4)
    text = client.post("/generate", json={"prompt": "the and", "n": 1, "max_tokens": 3}).json()["text"]
    assert text[0].startswith("the and")
    with client.stream(
        "POST", "/generate", json={"prompt": "the and", "n": 1, "stream": True, "max_tokens": 3}
    ) as response:
        lines = [json.loads(line) for line in response.iter_lines() if line]
    assert [line["text"][0][: len("the and")] for line in lines] == ["the and"] * len(lines)
    assert len(lines[-1]["token_ids"][0]) <= 3


def test_sglangs_shape(client: httpx.Client, bare: dict[str | None, Bare]) -> None:
    tokens, logprobs = bare[None].greedy(PROMPT, 10, ignore_eos=True)
    sampling = {"max_new_tokens": 10, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "rid": "a"}
    found = client.post("/generate", json=body).json()
    meta = found["meta_info"]
    assert found["output_ids"] == tokens
    assert [token for _, token, _ in meta["output_token_logprobs"]] == tokens
    assert [one for one, _, _ in meta["output_token_logprobs"]] == pytest.approx(logprobs, abs=1e-4)
    assert (meta["id"], meta["finish_reason"]) == ("a", {"type": "length", "length": 10})
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (30, 10, "0")
    several = client.post(
        "/generate",
        json={"input_ids": [PROMPT, PROMPT[:9]], "sampling_params": [sampling | {"n": 2}] * 2, "return_logprob": False},
    ).json()
    assert [one["output_ids"] for one in several[:2]] == [tokens, tokens]
    assert several[2]["output_ids"] == bare[None].greedy(PROMPT[:9], 10, ignore_eos=True)[0]
    assert "output_token_logprobs" not in several[0]["meta_info"]
    twice = client.post("/generate", json={"input_ids": PROMPT, "sampling_params": sampling | {"n": 2}}).json()
    assert [one["output_ids"] for one in twice] == [tokens, tokens]
    stopped = client.post(
        "/generate",
        json={"input_ids": PROMPT, "sampling_params": sampling | {"stop_token_ids": [tokens[4]]}},
    ).json()
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[4]}
    prompt = client.post("/generate", json=body | {"logprob_start_len": 0}).json()["meta_info"]["input_token_logprobs"]
    assert prompt[0][:2] == [None, PROMPT[0]]
    assert [one for one, _, _ in prompt[1:]] == pytest.approx(scored(bare[None], PROMPT[:1], PROMPT[1:]), abs=1e-4)
    with client.stream("POST", "/generate", json=body | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert chunks[-1]["output_ids"] == tokens
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert [len(chunk["text"]) for chunk in chunks] == sorted(len(chunk["text"]) for chunk in chunks)


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"a": found}
    return found


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": ["a", "b"], "stream": True}, None),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "step_id": 1, "n": 2}, "n"),
        ({"prompt": "a", "logprobs": "yes"}, "logprobs"),
        ({"prompt": "a", "logprobs_mode": "cooked"}, "logprobs_mode"),
        ({"prompt": "a", "policy_version": -1}, "policy_version"),
        ({"prompt": "a", "metadata": deep(300)}, None),
        ({"prompt": "a", "metadata": {"a": "x" * 70_000}}, "metadata"),
        ({"prompt": "a", "lora_adapter": "p@" + "9" * 5000}, "lora_adapter"),
        ({"prompt": "a", "max_tokens": 10**9}, "max_tokens"),
        ({"prompt": {"prompt_token_ids": []}}, "prompt"),
        ({"prompt": {"prompt_token_ids": "x"}}, "prompt"),
        ({"prompt": {"prompt": [1]}}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": {"prompt_token_ids": [10**9]}}, "prompt.0"),
        ({"text": "a", "input_ids": [1]}, None),
        ({"sampling_params": {}}, None),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        ({"input_ids": []}, None),
        ({"input_ids": [[]]}, None),
    ],
)
def test_what_is_wrong_is_said(client: httpx.Client, body: dict[str, Any], param: str | None) -> None:
    answer = client.post("/generate", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param, error


def test_versions_are_named_asked_for_and_followed(
    client: httpx.Client, bare: dict[str | None, Bare], policy: str, folders: dict[str, Path]
) -> None:
    few, many = (bare[kind].greedy(PROMPT, 10, ignore_eos=True)[0] for kind in KINDS)
    newest = generate(client, ignore_eos=True, lora_adapter=policy)
    assert (newest["completion_ids"], newest["policy_version"]) == (many, 2)
    assert newest["metadata"]["current_policy_version"] == 2
    older = generate(client, ignore_eos=True, lora_adapter=f"{policy}@1", policy_version=7)
    assert (older["completion_ids"], older["policy_version"]) == (few, 1)
    for asked in (0, 1, 9):  # a number selects nothing
        found = generate(client, ignore_eos=True, lora_adapter=policy, policy_version=asked)
        assert (found["completion_ids"], found["policy_version"]) == (many, 2)
        assert found["metadata"]["requested_policy_version"] == asked
    for plain in (generate(client, policy_version=1), generate(client, lora_adapter="base", policy_version=1)):
        assert (plain["policy_version"], plain["policy_spans"][0][2]) == (0, 0)
    gone = client.post("/generate", json={"prompt": PROMPT, "lora_adapter": f"{policy}@9", "step_id": 1})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    sglang = {"input_ids": PROMPT, "lora_path": policy, "sampling_params": {"max_new_tokens": 10, "temperature": 0}}
    assert client.post("/generate", json=sglang).json()["meta_info"]["weight_version"] == "2"
    assert client.get("/get_weight_version").json() == {"weight_version": "2", "policy_version": 2}
    assert client.get("/metrics", headers={"Accept": "application/json"}).json()["current_policy_version"] == 0
    long = {"prompt": PROMPT, "max_tokens": 700, "lora_adapter": policy, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=long | {"follow_policy": True, "temperature": 0}) as stream:
        lines = stream.iter_lines()
        chunks = [json.loads(next(line for line in lines if line.startswith("data: {"))[6:])]
        third = client.post("/load_adapter", json={"name": policy, "path": str(folders["few"])})
        assert third.json()["policy_version"] == 3
        chunks += [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    first, second = choices[-1]["policy_spans"]
    assert (first[0], first[1], first[2]) == (0, second[0], 2)
    assert (second[1], second[2]) == (700, 3)
    assert [choice["policy_version"] for choice in choices[:1] + choices[-1:]] == [2, 3]


def test_versions_are_the_requests_own(client: httpx.Client, policy: str, folders: dict[str, Path]) -> None:
    """Whatever was published last, a request hears of its own adapter, and of none when it has none."""
    assert client.post("/load_adapter", json={"name": "q", "path": str(folders["few"])}).status_code == 200
    try:
        for body, own, newest in (
            ({"lora_adapter": policy}, 2, 2),
            ({"lora_adapter": f"{policy}@1"}, 1, 2),
            ({"model": "q"}, 1, 1),
            ({}, 0, 0),
            ({"lora_adapter": "base"}, 0, 0),
        ):
            found = generate(client, **body)
            assert (found["policy_version"], found["metadata"]["current_policy_version"]) == (own, newest), body
        assert generate(client, policy_version=1)["policy_version"] == 0
    finally:
        assert client.post("/v1/adapters/unload", json={"name": "q"}).status_code == 200


def test_what_every_dialect_has_tells_none(client: httpx.Client) -> None:
    with client.stream("POST", "/generate", json={"prompt": PROMPT, "stream": True, "max_tokens": 3}) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert all("completion_ids" in chunk for chunk in chunks)
    found = generate(client, logprobs=3)
    assert len(found["logprobs"]) == len(found["completion_ids"])
    for beside in ({"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT, "stream": False}):
        answer = client.post("/generate", json={**beside, "max_tokens": 3, "temperature": 0})
        assert answer.status_code == 200, answer.text
        assert answer.json()["prompt_token_ids"] == PROMPT
    both = client.post("/generate", json={"prompt": "a", "prompt_token_ids": PROMPT})
    assert both.status_code == 400


@pytest.mark.parametrize("path", ["/pause", "/pause_generation"])
@pytest.mark.parametrize("sent", [{"params": {"mode": "keep"}}, {"json": {"mode": "keep"}}])
def test_a_pause_takes_its_mode_from_query_or_body(client: httpx.Client, path: str, sent: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert client.post(path, **sent).json() == {"status": "paused"}
        assert client.get("/is_paused").json() == {"is_paused": True}
        assert client.post("/resume").status_code == 200
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    both = client.post(path, params={"mode": "keep"}, json={"mode": "abort"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "mode")
    assert client.post(path, json={"mode": "nap"}).status_code == 400
    assert client.post(path, params={"mode": "nap"}).status_code == 400


def test_openais_routes_tell_versions_to_trainers(client: httpx.Client, policy: str) -> None:
    api = Api(client)
    plain = api.complete(model=policy, prompt=PROMPT, max_tokens=4)
    assert "policy_version" not in plain["choices"][0]
    told = api.complete(model=policy, prompt=PROMPT, max_tokens=4, step_id=3, request_id="x", metadata={"a": 1})
    assert (told["step_id"], told["request_id"], told["metadata"]) == (3, "x", {"a": 1})
    assert told["choices"][0]["policy_version"] == 2
    tokens = told["usage"]["completion_tokens"]
    assert told["choices"][0]["policy_spans"] == [[0, tokens, 2]]
    chat = api.chat(model=policy, max_tokens=4, policy_version=1)
    assert chat["choices"][0]["policy_version"] == 2
    stream = api.stream_chat(model=policy, max_tokens=4, step_id=1)
    assert stream[-1]["choices"][0]["policy_spans"][0][2] == 2


def test_shares_of_the_models_own_name(client: httpx.Client, bare: dict[str | None, Bare], policy: str) -> None:
    def switch(**body: Any) -> dict[str, Any]:
        answer = client.post("/model/switch-lora", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        read_as(Switched, found)
        return found

    base, few, many = (bare[kind].greedy(PROMPT, 10, ignore_eos=True)[0] for kind in (None, *KINDS))

    def ask(**more: Any) -> tuple[list[int], int]:
        found = generate(client, ignore_eos=True, **more)
        return found["completion_ids"], found["policy_version"]

    assert ask() == (base, 0)
    for version, expected in (
        (policy, (many, 2)),
        (f"{policy}@1", (few, 1)),
        (1, (few, 1)),
        ("v2", (many, 2)),
        ("base", (base, 0)),
    ):
        switch(version=version)
        assert ask() == expected, version
    switch(version=policy)
    assert ask(lora_adapter="base") == (base, 0)
    assert switch(split={"v1": 0.7, "v2": 0.3})["serves"] == {f"{policy}@1": 0.7, f"{policy}@2": 0.3}
    before = counted(client)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: ask(), range(40)))
    assert sorted(version for _, version in found) == [1] * 28 + [2] * 12
    assert all(tokens == (few if version == 1 else many) for tokens, version in found)
    after = counted(client)
    assert [after[policy, version] - before.get((policy, version), 0) for version in ("1", "2")] == [28, 12]
    refused = client.post("/v1/adapters/unload", json={"name": policy})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")
    for body, status in (
        ({}, 400),
        ({"version": "nobody"}, 404),
        ({"version": "p@7"}, 404),
        ({"version": "v9"}, 404),
        ({"version": 1.5}, 400),
        ({"split": {"v1": 0.7, "v2": 0.7}}, 400),
        ({"split": {"v1": -1, "v2": 2}}, 400),
        ({"split": {}}, 400),
        ({"split": {"v1": 1}, "version": policy}, 400),
        ({"version": "v" + "9" * 5000}, 404),
    ):
        refused = client.post("/model/switch-lora", json=body)
        assert refused.status_code == status, body
        assert "JSON object" not in refused.json()["error"]["message"], body
    info = client.get("/server_info").json()
    read_as(ServerInfo, info)
    assert info["models"][0]["serves"] == {f"{policy}@1": 0.7, f"{policy}@2": 0.3}


def counted(client: httpx.Client) -> dict[tuple[str, str], int]:
    text = client.get("/metrics").text
    assert "mlx_parallm_lora_swaps_total" in text
    pattern = r'mlx_parallm_adapter_requests_total\{adapter="([^"]+)",model="[^"]+",version="(\d+)"\} ([\d.]+)'
    return {(name, version): int(float(count)) for name, version, count in re.findall(pattern, text)}


def test_an_upload_to_a_name_in_use_is_refused(client: httpx.Client, policy: str, folders: dict[str, Path]) -> None:
    files = {name: (folders["few"] / name).read_bytes() for name in ("adapters.safetensors", "adapter_config.json")}
    form = {"weights": ("w", files["adapters.safetensors"]), "config": ("c", files["adapter_config.json"])}
    body = {"prompt": PROMPT, "model": policy, "max_tokens": 600, "ignore_eos": True, "stream": True, "temperature": 0}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        before = client.get("/v1/adapters").json()["data"]
        refused = client.post("/v1/adapters/upload", data={"name": policy}, files=form)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_in_use"), refused.text
        after = client.get("/v1/adapters").json()["data"]
        assert [one["version"] for one in before] == [one["version"] for one in after] == [1, 2]
        for version, status in (("x", 400), ("2", 400), ("next", 200)):
            answer = client.post("/v1/adapters/upload", data={"name": policy, "version": version}, files=form)
            assert answer.status_code == status, answer.text
        assert sum(line.startswith("data: {") for line in lines) > 100
    assert [one["version"] for one in client.get("/v1/adapters").json()["data"]] == [1, 2, 3]
    for path, pinned in (("pin", True), ("unpin", False)):
        assert client.post(f"/v1/adapters/{path}", json={"name": policy, "version": 1}).status_code == 200
        assert client.get("/v1/adapters").json()["data"][0]["pinned"] is pinned


def test_a_pause_that_aborts_gives_what_there_is(client: httpx.Client) -> None:
    long = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(3) as pool:
        bodies = [
            long | {"step_id": 1},
            long | {"n": 1},
            {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}},
        ]
        asked = [pool.submit(client.post, "/generate", json=body) for body in bodies]
        while client.get("/debug/metrics").json()["running"] < 3:
            continue
        assert client.post("/pause", params={"mode": "abort"}).status_code == 200
        own, vllm, sglang = (one.result().json() for one in asked)
    client.post("/resume")
    assert own["finish_reason"] == "abort"
    assert 0 < len(own["completion_ids"]) == len(own["logprobs"]) < 1900
    assert vllm["finish_reasons"] == ["abort"]
    assert sglang["meta_info"]["finish_reason"]["type"] == "abort"
    assert generate(client)["finish_reason"] in ("stop", "length")


def test_a_prompt_is_only_scored(client: httpx.Client, bare: dict[str | None, Bare]) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    found = client.post("/generate", json=body).json()
    assert found["output_ids"] == []
    scores = [one for one, _, _ in found["meta_info"]["input_token_logprobs"][1:]]
    assert scores == pytest.approx(scored(bare[None], PROMPT[:1], PROMPT[1:]), abs=1e-4)
