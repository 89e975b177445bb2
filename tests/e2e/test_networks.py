"""Networks and policies over HTTP: numbers, encodings, sessions, new weights, and what is refused."""

import base64
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from mlx_parallm.models.kinds import network, policy
from mlx_parallm.server.api.predict.bodies import Acted, Predicted
from mlx_parallm.signature import ActInput
from tests.support.networks import mlp_policy, recurrent_policy, sequence_network
from tests.support.servers import ours, running
from tests.support.shapes import read_as

SAFETENSORS = {"Content-Type": "application/x-safetensors"}
OBSERVATION = [0.1, -0.2, 0.3, 0.4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("networks")
    sequence_network(root / "sequence")
    mlp_policy(root / "mlp", width=16)
    mlp_policy(root / "mlp2", width=16, seed=1)
    gaussian = {"distribution": "tanh_gaussian", "mean": "head", "log_std": "log_std", "low": -2, "high": 2}
    mlp_policy(root / "gauss", gaussian, width=16)
    recurrent_policy(root / "memory")
    return root


@pytest.fixture(scope="module")
def client(folder: Path, tiny_folder: Path) -> Iterator[httpx.Client]:
    flags = [
        part for name in ("sequence", "mlp", "gauss", "memory") for part in ("--model-path", f"{name}={folder / name}")
    ]
    with running(ours(f"tiny={tiny_folder}", flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def encoded(array: Any, **changes: Any) -> dict[str, Any]:
    array = np.asarray(array)
    data = base64.b64encode(array.tobytes()).decode()
    return {"data": data, "shape": list(array.shape), "dtype": str(array.dtype)} | changes


def decoded(tensor: dict[str, Any]) -> Any:
    return np.frombuffer(base64.b64decode(tensor["data"]), tensor["dtype"]).reshape(tensor["shape"])


def test_predictions_are_the_models_in_every_encoding(client: httpx.Client, folder: Path) -> None:
    tokens = np.array([[1, 2, 3], [4, 5, 6]])
    [wanted] = network.load(folder / "sequence").predict([{"tokens": tokens}])
    answer = ask(client, "/v1/predict", model_id="sequence", inputs={"tokens": tokens.tolist()})
    read_as(Predicted, answer)
    np.testing.assert_allclose(answer["outputs"]["scores"], wanted["scores"], atol=1e-5)
    binary = ask(client, "/v1/predict", model="sequence", inputs={"tokens": encoded(tokens)}, encoding="base64")
    np.testing.assert_allclose(decoded(binary["outputs"]["scores"]), wanted["scores"], atol=1e-5)
    raw = client.post("/v1/predict?model_id=sequence", content=save({"tokens": tokens}), headers=SAFETENSORS)
    assert (raw.status_code, raw.headers["content-type"]) == (200, "application/x-safetensors")
    np.testing.assert_allclose(load(raw.content)["scores"], wanted["scores"], atol=1e-5)
    as_json = client.post(
        "/v1/predict?model_id=sequence",
        content=save({"tokens": tokens}),
        headers={"Content-Type": "application/octet-stream", "Accept": "application/json"},
    )
    assert as_json.json() == answer
    accepted = client.post(
        "/v1/predict", json={"inputs": {"tokens": tokens.tolist()}}, headers={"Accept": "application/octet-stream"}
    )
    assert load(accepted.content).keys() == {"scores"}


def test_many_rows_and_lengths_beside_each_other(client: httpx.Client) -> None:
    chance = np.random.default_rng(0)
    inputs = [
        chance.integers(0, 10, (rows, time)).tolist() for rows, time in ((300, 5), (1, 1), (7, 32), (1, 5), (64, 3))
    ]
    alone = [ask(client, "/v1/predict", inputs={"tokens": one})["outputs"]["scores"] for one in inputs]
    together: list[Any] = [None] * len(inputs)
    wrong: list[int] = []

    def one(place: int) -> None:
        with httpx.Client(base_url=client.base_url, timeout=60) as own:
            for _ in range(5):
                together[place] = ask(own, "/v1/predict", inputs={"tokens": inputs[place]})["outputs"]["scores"]

    def refused() -> None:
        with httpx.Client(base_url=client.base_url, timeout=60) as own:
            wrong.extend(own.post("/v1/predict", json={"inputs": {"tokens": [[99]]}}).status_code for _ in range(20))

    threads = [threading.Thread(target=one, args=[place]) for place in range(len(inputs))]
    threads.append(threading.Thread(target=refused))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(wrong) == {400}
    for found, wanted in zip(together, alone, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


TOKENS = np.array([[1, 2, 3]])
BAD_INPUTS: list[tuple[dict[str, Any], str, str]] = [
    ({"tokens": 3}, "inputs.tokens", "must be nested lists"),
    ({"tokens": []}, "inputs.tokens", "has 1 axes"),
    ({"tokens": [[]]}, "inputs.tokens", "has 0 of axis 'time', and 1 to 32 are taken"),
    ({"tokens": [1, 2]}, "inputs.tokens", "has 1 axes, and the model takes int64 of shape [batch, time]"),
    ({"tokens": [[[1]]]}, "inputs.tokens", "has more than 2 axes"),
    ({"tokens": [[1, 2], [3]]}, "inputs.tokens", "ragged"),
    ({"tokens": [[1.5]]}, "inputs.tokens", "holds floating-point numbers"),
    ({"tokens": [["1"]]}, "inputs.tokens", "holds strings"),
    ({"tokens": [["a" * 100_000, *[0] * 5000]]}, "inputs.tokens", "holds strings"),
    ({"tokens": [[True]]}, "inputs.tokens", "holds booleans"),
    ({"tokens": [[None]]}, "inputs.tokens", "something else than numbers"),
    ({"tokens": [[2**70]]}, "inputs.tokens", "holds floating-point numbers"),
    ({"tokens": [[10]]}, "inputs.tokens", "is 10 at index [0, 0]: it must be 0 to 9"),
    ({"tokens": [[-1]]}, "inputs.tokens", "is -1 at index [0, 0]"),
    ({"tokens": [[1] * 33]}, "inputs.tokens", "has 33 of axis 'time', and 1 to 32 are taken"),
    ({"tokens": [[1]] * 65537}, "inputs.tokens", "has 65537 of axis 'batch', and 1 to 65536 are taken"),
    ({"token": [[1]]}, "inputs", "no input 'token'; did you mean 'tokens'?"),
    ({}, "inputs.tokens", "is missing"),
    ({"tokens": encoded(TOKENS, dtype="int32")}, "inputs.tokens", "has dtype int32"),
    ({"tokens": encoded(TOKENS, dtype="int65")}, "inputs.tokens.dtype", "did you mean 'int64'"),
    (
        {"tokens": encoded(TOKENS, shape=[1, 4])},
        "inputs.tokens.data",
        "has 24 bytes, and int64 of shape [1, 4] needs 32",
    ),
    ({"tokens": encoded(TOKENS, shape=[1, -3])}, "inputs.tokens.shape", "none of them negative"),
    ({"tokens": encoded(TOKENS, shape=[2**39, 2**39])}, "inputs.tokens.data", "has 24 bytes"),
    ({"tokens": encoded(TOKENS, shape=[2**63, 3])}, "inputs.tokens.shape", "must be a list of sizes"),
    ({"tokens": encoded(TOKENS, shape="1,3")}, "inputs.tokens.shape", "must be a list of sizes"),
    ({"tokens": encoded(TOKENS, data="!!!")}, "inputs.tokens.data", "not base64"),
    ({"tokens": encoded(TOKENS, data="é")}, "inputs.tokens.data", "not base64"),
    ({"tokens": encoded(TOKENS, data=3)}, "inputs.tokens.data", "must be base64"),
]


@pytest.mark.parametrize(("inputs", "param", "message"), BAD_INPUTS)
def test_bad_inputs(client: httpx.Client, inputs: dict[str, Any], param: str, message: str) -> None:
    refused = client.post("/v1/predict", json={"model_id": "sequence", "inputs": inputs})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


def test_bad_models_and_bodies(client: httpx.Client) -> None:
    for model, status in (("nobody", 404), ("tiny", 400)):
        refused = client.post("/v1/predict", json={"model_id": model, "inputs": {}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, "model_id")
    assert client.post("/v1/rl/act", json={"model_id": "sequence", "observations": []}).status_code == 400
    for body, param in (({"inputs": [1]}, "inputs"), ({}, "inputs"), ({"inputs": {}, "encoding": "xml"}, "encoding")):
        refused = client.post("/v1/predict", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    for content in (b"", b"\xff" * 100, save({"tokens": TOKENS})[:-3]):
        refused = client.post("/v1/predict", content=content, headers=SAFETENSORS)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["code"] == "invalid_safetensors"
    acted = save({"observations": np.array([OBSERVATION], np.float32)})
    refused = client.post("/v1/rl/act?model_id=mlp&seed=--5", content=acted, headers=SAFETENSORS)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")
    refused = client.post("/v1/predict", content=save({"other": TOKENS}), headers=SAFETENSORS)
    assert refused.json()["error"]["code"] == "unknown_input"
    refused = client.post("/v1/predict", content=b"{", headers={"Content-Type": "application/json"})
    assert refused.json()["error"]["code"] == "invalid_json"
    refused = client.post("/v1/predict", content=b"x", headers={"Content-Type": "text/plain"})
    assert refused.json()["error"]["code"] == "unsupported_media_type"


def test_a_policy_acts_as_its_model_does(client: httpx.Client, folder: Path) -> None:
    observations = np.random.default_rng(0).standard_normal((2500, 4)).astype(np.float32)
    for name in ("mlp", "gauss"):
        [wanted] = policy.load(folder / name).predict([ActInput(inputs={"observation": observations}, seed=7)])
        answer = ask(client, "/v1/rl/act", model_id=name, observations=observations.tolist(), seed=7)
        read_as(Acted, answer)
        np.testing.assert_allclose(answer["actions"], wanted.actions, atol=1e-5)
        np.testing.assert_allclose(answer["action_log_probs"], wanted.log_probs, atol=1e-4)
        np.testing.assert_allclose(answer["value_estimates"], wanted.values, atol=1e-5)
        assert answer["policy_version"] == 1
        assert answer["policy_spans"] == [[0, 2500, 1]]
        binary = ask(client, "/v1/rl/act", model_id=name, observations=encoded(observations), seed=7, encoding="base64")
        np.testing.assert_allclose(decoded(binary["actions"]), wanted.actions, atol=1e-5)
        raw = client.post(
            f"/v1/rl/act?model_id={name}&seed=7", content=save({"observations": observations}), headers=SAFETENSORS
        )
        np.testing.assert_allclose(load(raw.content)["actions"], wanted.actions, atol=1e-5)
        header = json.loads(raw.content[8 : 8 + int.from_bytes(raw.content[:8], "little")])
        assert header["__metadata__"] == {"model_id": name, "policy_version": "1"}
    few = ask(client, "/v1/rl/act", model_id="mlp", observations=observations[:3].tolist(), seed=7)
    more = ask(client, "/v1/rl/act", model_id="mlp", observations=observations[:9].tolist(), seed=7)
    assert more["actions"][:3] == few["actions"], "a draw does not depend on the rows beside it"
    likely = [
        ask(client, "/v1/rl/act", model_id="mlp", observations=[OBSERVATION], deterministic=True) for _ in range(3)
    ]
    assert len({tuple(one["actions"]) for one in likely}) == 1
    outputs = ask(client, "/v1/predict", model_id="mlp", inputs={"observation": [OBSERVATION]})["outputs"]
    assert np.argmax(outputs["head"]) == likely[0]["actions"][0], "/v1/predict gives a policy's bare outputs"


def test_state_is_carried_by_the_client_or_kept_in_a_session(client: httpx.Client) -> None:
    steps = [[[0.1, 0.2], [0.3, 0.4]], [[0.5, -0.1], [0.0, 0.0]], [[1.0, 1.0], [-1.0, 0.5]]]
    carried, state = [], None
    for observations in steps:
        extra = {} if state is None else {"hidden_states": state}
        answer = ask(client, "/v1/rl/act", model_id="memory", observations=observations, seed=1, **extra)
        state = answer["new_hidden_states"]
        carried.append(answer["action_log_probs"])
    for field, value in (("session_id", "both"), ("session_ids", ["left", "right"])):
        for number, observations in enumerate(steps):
            answer = ask(client, "/v1/rl/act", model_id="memory", observations=observations, seed=1, **{field: value})
            np.testing.assert_allclose(answer["action_log_probs"], carried[number], atol=1e-5)
            assert "new_hidden_states" not in answer
            names = [value] if isinstance(value, str) else value
            assert answer["new_sessions"] == (names if number == 0 else [])
    again = ask(
        client,
        "/v1/rl/act",
        model_id="memory",
        observations=steps[0],
        seed=1,
        session_id="both",
        episode_starts=[True, True],
    )
    np.testing.assert_allclose(again["action_log_probs"], carried[0], atol=1e-5)
    raw = client.post(
        "/v1/rl/act?model_id=memory&seed=1",
        content=save(
            {"observations": np.array(steps[0], np.float32), "hidden_states.h": np.zeros((2, 1, 8), np.float32)}
        ),
        headers=SAFETENSORS,
    )
    tensors = load(raw.content)
    np.testing.assert_allclose(tensors["action_log_probs"], carried[0], atol=1e-5)
    assert tensors["new_hidden_states.h"].shape == (2, 1, 8)


PAIR = [[0.1, 0.2], [0.3, 0.4]]
STATE = np.zeros((2, 1, 8), np.float32)
BAD_ACTS: list[tuple[dict[str, Any], int, str, str]] = [
    ({}, 400, "observations", "Field required"),
    ({"observations": [[1, 2, 3]]}, 400, "observations.observation", "has size 3 in axis 1"),
    ({"observations": [[1, 1e39]]}, 400, "observations.observation", "is inf at index [0, 1]"),
    (
        {"observations": encoded(np.array([[1, np.nan]], "f4"))},
        400,
        "observations.observation",
        "is nan at index [0, 1]",
    ),
    ({"observations": encoded(np.ones((1, 2)))}, 400, "observations.observation", "has dtype float64"),
    (
        {"observations": PAIR, "hidden_states": {"c": STATE.tolist()}},
        400,
        "hidden_states",
        "no input 'c'; did you mean 'h'",
    ),
    (
        {"observations": PAIR, "hidden_states": STATE[:1].tolist()},
        400,
        "hidden_states",
        "has 1 rows, and observations has 2",
    ),
    (
        {"observations": PAIR, "hidden_states": encoded(STATE + np.inf)},
        400,
        "hidden_states.h",
        "is inf at index [0, 0, 0]",
    ),
    ({"observations": PAIR, "hidden_states": STATE.tolist(), "session_id": "x"}, 400, "", "not both"),
    ({"observations": PAIR, "session_ids": ["a"]}, 400, "session_ids", "has 1 names for 2 rows"),
    ({"observations": PAIR, "session_ids": ["a", "a"]}, 400, "session_ids", "a name twice"),
    ({"observations": PAIR, "session_id": ""}, 400, "session_id", "at least 1 character"),
    ({"observations": PAIR, "episode_starts": [True]}, 400, "episode_starts", "a boolean for each of the 2 rows"),
    ({"observations": PAIR, "episode_starts": [0, 1]}, 400, "episode_starts", "a boolean for each of the 2 rows"),
    ({"observations": PAIR, "session_id": "never", "episode_starts": [False, True]}, 404, "session_id", "is unknown"),
    ({"observations": PAIR, "seed": 2**63}, 400, "seed", "less than or equal"),
    ({"observations": PAIR, "seed": 1.5}, 400, "seed", "integer"),
    ({"observations": PAIR, "deterministic": "yes"}, 400, "deterministic", "boolean"),
]


@pytest.mark.parametrize(("body", "status", "param", "message"), BAD_ACTS)
def test_bad_acts(client: httpx.Client, body: dict[str, Any], status: int, param: str, message: str) -> None:
    refused = client.post("/v1/rl/act", json={"model_id": "memory"} | body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"] or "") == (status, param), error
    assert message in error["message"]


def test_a_session_ends_with_its_model_and_not_with_its_name(
    client: httpx.Client, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "memory", tmp_path / "copy")
    for path, new in ((folder / "memory", ["s"]), (tmp_path / "copy", ["s"]), (folder / "memory", [])):
        assert client.post("/v1/models/load", json={"model": "swapped", "path": str(path)}).status_code == 200
        acted = ask(client, "/v1/rl/act", model_id="swapped", observations=[[0.1, 0.2]], session_id="s")
        assert acted["new_sessions"] == new
        ask(client, "/v1/models/unload", model="swapped")


def test_a_session_keeps_its_rows_and_survives_a_refusal(client: httpx.Client) -> None:
    body = {"model_id": "memory", "observations": PAIR, "seed": 1, "session_id": "rows"}
    ask(client, "/v1/rl/act", **body)
    refused = client.post("/v1/rl/act", json=body | {"observations": [[1.0, 2.0]]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_id")
    assert ask(client, "/v1/rl/act", **body)["new_sessions"] == []
    assert (
        client.post("/v1/rl/act", json={"model_id": "mlp", "observations": [OBSERVATION], "hidden_states": [[1]]})
        .json()["error"]["message"]
        .startswith("this policy has no state")
    )


def test_new_weights_come_between_two_batches(client: httpx.Client, folder: Path) -> None:
    """While clients act, every answer is wholly of the version that it names."""
    body = {"model_id": "mlp", "observations": [OBSERVATION] * 3, "deterministic": True}
    wanted = {
        name: policy.load(folder / name).predict(
            [ActInput(inputs={"observation": np.array([OBSERVATION], np.float32)}, seed=0, deterministic=True)]
        )[0]
        for name in ("mlp", "mlp2")
    }
    files = {name: (folder / name / "model.safetensors").read_bytes() for name in wanted}
    seen: list[Any] = []
    done = threading.Event()

    def act() -> None:
        with httpx.Client(base_url=client.base_url, timeout=60) as own:
            while not done.is_set():
                seen.append(ask(own, "/v1/rl/act", **body))

    threads = [threading.Thread(target=act) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(2, 12):
        wait_for(seen, 3 * number)
        name = "mlp2" if number % 2 == 0 else "mlp"
        answer = client.post(
            "/update_adapter_weights?name=mlp",
            content=files[name],
            headers={"Content-Type": "application/octet-stream"},
        )
        assert (answer.status_code, answer.json()["policy_version"]) == (200, number), answer.text
    done.set()
    for thread in threads:
        thread.join()
    assert len({answer["policy_version"] for answer in seen}) > 1
    for answer in seen:
        name = "mlp2" if answer["policy_version"] % 2 == 0 else "mlp"
        np.testing.assert_allclose(answer["value_estimates"], np.repeat(wanted[name].values, 3), atol=1e-4)
    refused = ask_error(
        client, "/update_adapter_weights", name="mlp", tensors=base64.b64encode(files["mlp"][:-4]).decode()
    )
    assert refused["param"] == "tensors"
    wrong = base64.b64encode(save({"one.weight": np.zeros((2, 2), np.float32)})).decode()
    assert "mlp" in ask_error(client, "/update_adapter_weights", name="mlp", tensors=wrong)["message"]
    assert ask_error(client, "/update_adapter_weights", name="sequence", tensors=wrong)["param"] == "name"
    back = ask(client, "/v1/adapters/rollback", name="mlp")
    assert back["policy_version"] == 10
    assert ask(client, "/v1/rl/act", **body)["policy_version"] == 10
    assert ask_error(client, "/v1/adapters/rollback", name="mlp", version=3)["param"] == "version"


def wait_for(seen: list[Any], count: int) -> None:
    deadline = time.monotonic() + 30
    while len(seen) < count and time.monotonic() < deadline:
        time.sleep(0.005)


def ask_error(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code in (400, 404), answer.text
    return answer.json()["error"]
