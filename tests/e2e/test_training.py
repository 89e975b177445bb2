"""Training over HTTP, on a real server of the tiny model: every route, every source of trajectories, bad input."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mlx_parallm.server.api.dashboard import RolloutNotes
from mlx_parallm.server.api.training.response_types import (
    CheckpointWritten,
    FeedbackTaken,
    Rollout,
    TrainingInternals,
    TrainingStatus,
    Updated,
)
from mlx_parallm.server.http.schema import Error
from tests.e2e.http import Api
from tests.support.servers import ours, running
from tests.support.shapes import read_as

PROMPT = list(range(20, 50))
SCORES = """
import time

def shorter(prompts, completions, metadata):
    return [-float(len(text)) for text in completions]

def broken(prompts, completions, metadata):
    raise RuntimeError("no score today")

def slow(prompts, completions, metadata):
    time.sleep(60)

def nan(prompts, completions, metadata):
    return [float("nan") for _ in completions]
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("training")
    (folder / "scores.py").write_text(SCORES)
    functions = [f"{name}={folder / 'scores.py'}:{name}" for name in ("shorter", "broken", "slow", "nan")]
    return [
        "--enable-rl-training",
        *(flag for function in functions for flag in ("--scoring-function", function)),
        *("--scoring-timeout", "1", "--update-frequency", "0", "--learning-rate", "1e-3", "--lora-rank", "4"),
        *("--checkpoint-dir", str(folder / "checkpoints")),
    ]


@pytest.fixture(scope="module")
def client(tiny_folder: Path, flags: list[str]) -> Iterator[httpx.Client]:
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def status(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/v1/training/status").json()
    read_as(TrainingStatus, found)
    return found


def until(client: httpx.Client, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    for _ in range(200):
        found = status(client)
        if done(found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"it never came to that: {found}")


def rollout(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    settings = {"prompts": [PROMPT], "n": 4, "max_tokens": 8, "temperature": 1.0}
    found = post(client, "/v1/rl/rollout", settings | body)
    read_as(Rollout, found)
    return found["groups"]  # type: ignore[no-any-return]


def test_the_models_own_name_serves_what_learns(client: httpx.Client) -> None:
    found = status(client)
    assert found["training_enabled"]
    assert found["current_lora"] == "policy"
    names = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert "policy" in names
    answer = post(client, "/generate", {"prompt": PROMPT, "max_tokens": 4, "step_id": 1})
    assert answer["policy_version"] == found["policy_version"] >= 1


def test_an_update_from_the_body_is_served_at_once(client: httpx.Client) -> None:
    [group] = rollout(client, seed=1)
    trajectories = [
        {
            "group_id": "g",
            "prompt_ids": group["prompt_ids"],
            "completion_ids": sample["completion_ids"],
            "logprobs": sample["logprobs"],
            "reward": float(place),
            "request_id": sample["request_id"],
        }
        for place, sample in enumerate(group["samples"])
    ]
    before = status(client)["policy_version"]
    found = post(client, "/v1/training/update", {"trajectories": trajectories})
    read_as(Updated, found)
    assert found["policy_version"] == before + 1
    assert found["published"]
    assert found["trajectories_used"] == 4
    assert found["metrics"]["off_policy"] == 0  # the ledger knows them
    assert found["metrics"]["max_logprob_gap"] < 1e-3
    [after] = rollout(client, seed=1)
    assert {sample["policy_version"] for sample in after["samples"]} == {before + 1}
    assert [sample["policy_spans"][0][2] for sample in after["samples"]] == [before + 1] * 4
    assert [sample["logprobs"] for sample in after["samples"]] != [sample["logprobs"] for sample in group["samples"]]


def test_what_the_server_never_drew_is_off_policy(client: httpx.Client) -> None:
    made = [
        {"group_id": "x", "prompt_ids": PROMPT, "completion_ids": [5, 6, 7], "logprobs": [-1.0] * 3, "reward": reward}
        for reward in (0.0, 1.0)
    ]
    [group] = rollout(client, seed=5, n=2)
    twisted = [
        {
            "group_id": "y",
            "prompt_ids": group["prompt_ids"],
            "completion_ids": sample["completion_ids"],
            "logprobs": [value - 0.3 for value in sample["logprobs"]],
            "reward": float(place),
        }
        for place, sample in enumerate(group["samples"])
    ]
    found = post(client, "/v1/training/update", {"trajectories": made + twisted})
    assert found["metrics"]["off_policy"] == 4
    assert found["metrics"]["max_logprob_gap"] > 0.1


def test_log_probabilities_after_a_cut_are_those_of_the_same_policy(client: httpx.Client) -> None:
    """What /generate tells is after top_p; sent back with its request_id, it is known by what was recorded."""
    trajectories = []
    for place in range(4):
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.0, "top_p": 0.5, "request_id": f"cut-{place}"}
        found = post(client, "/generate", body)
        assert found["logprobs_mode"] == "processed"
        trajectories.append(
            {
                "group_id": "cut",
                "prompt_ids": found["prompt_ids"],
                "completion_ids": found["completion_ids"],
                "logprobs": found["logprobs"],
                "request_id": found["request_id"],
                "reward": float(place),
            }
        )
    metrics = post(client, "/v1/training/update", {"trajectories": trajectories})["metrics"]
    assert metrics["off_policy"] == 0
    assert metrics["clip_fraction"] == 0
    assert metrics["max_logprob_gap"] < 1e-3


def test_feedback_on_earlier_answers(client: httpx.Client) -> None:
    api = Api(client)
    ids = []
    for seed, name in enumerate((None, "mine-1", "mine-2", None)):
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 1.0, "seed": seed}
        answer = api.complete(**body, **({"request_id": name} if name else {}))
        ids.append(name or answer["id"])
    chat = api.chat("hello", temperature=1.0, max_tokens=4)
    before = status(client)
    for place, name in enumerate(ids):
        found = post(client, "/v1/training/feedback", {"request_id": name, "reward": float(place % 2)})
        read_as(FeedbackTaken, found)
    assert found["trajectories_ready"] == 4
    post(client, "/v1/training/feedback", {"request_id": chat["id"], "reward": 1.0})
    after = status(client)
    assert after["trajectories_collected"] == before["trajectories_collected"] + 5
    assert after["trajectories_ready"] == 4  # the chat has nothing to be compared with
    updated = post(client, "/v1/training/update", {})
    assert updated["trajectories_used"] == 4
    assert updated["metrics"]["off_policy"] == 0
    assert status(client)["trajectories_ready"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/responses", {"model": "default", "max_output_tokens": 16, "input": "hello"}),
        ("/v1/chat/completions", {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"max_tokens": 4, "prompt": "hello"}),
    ],
)
def test_feedback_finds_an_answer_by_the_id_that_its_dialect_gave_it(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = client.post(path, json=body)
    names = [answer.json()["id"], answer.headers["x-request-id"]]
    before = status(client)["trajectories_collected"]
    for name in names:
        post(client, "/v1/training/feedback", {"request_id": name, "reward": 1.0})
    assert status(client)["trajectories_collected"] == before + len(names)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["completions", "chat"])
def test_collected_answers_are_scored_and_buffered(client: httpx.Client, stream: bool, route: str) -> None:
    api = Api(client)
    before = status(client)["trajectories_buffered"]
    body: dict[str, Any] = {"collect_trajectory": True, "scoring_function": "shorter", "metadata": {"group_id": route}}
    body |= {"n": 3, "max_tokens": 8, "temperature": 1.0, "seed": 3}
    if route == "chat":
        found = api.stream_chat("hi", **body) if stream else [api.chat("hi", **body)]
    else:
        found = api.stream_completion(prompt=PROMPT, **body) if stream else [api.complete(prompt=PROMPT, **body)]
    assert any("policy_version" in choice for answer in found for choice in answer["choices"])
    assert status(client)["trajectories_buffered"] == before + 3, "they were taken before the answer was whole"
    if stream:
        (rewards,) = (answer["rewards"] for answer in found if "rewards" in answer)
    else:
        rewards = [choice["reward"] for choice in found[0]["choices"]]
    assert all(reward <= 0 for reward in rewards)
    assert len(rewards) == 3


def test_an_answer_ended_by_a_stop_string_is_learnt_from_as_the_client_saw_it(client: httpx.Client) -> None:
    api = Api(client)
    whole = api.complete(prompt=PROMPT, max_tokens=24, return_token_ids=True)["choices"][0]
    stop = whole["text"][len(whole["text"]) // 2 :][:2]
    before = status(client)["trajectories_buffered"]
    seen = 0
    for name in ("cut-1", "cut-2"):
        extra = {"collect_trajectory": True, "scoring_function": "shorter", "request_id": name}
        body = {"prompt": PROMPT, "max_tokens": 24, "stop": [stop], "return_token_ids": True}
        choice = api.complete(**body, **extra)["choices"][0]
        assert choice["finish_reason"] == "stop"
        seen += len(choice["token_ids"])
    assert seen < 2 * len(whole["token_ids"])
    until(client, lambda now: now["trajectories_buffered"] == before + 2)
    pair = [{"group_id": "cut", "request_id": f"cut-{number}", "reward": float(number)} for number in (1, 2)]
    assert post(client, "/v1/training/update", {"trajectories": pair})["metrics"]["tokens"] == seen


def test_feedback_right_after_a_stop_string_finds_the_answer(client: httpx.Client) -> None:
    """The engine hears of the end later than the client."""
    whole = Api(client).complete(prompt=PROMPT, max_tokens=12, ignore_eos=True)["choices"][0]["text"]
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "temperature": 0, "stop": [whole[2:6]]}
    for place in range(20):
        answer = post(client, "/v1/completions", {**body, "request_id": f"stopped-{place}"})
        assert answer["choices"][0]["finish_reason"] == "stop"
        post(client, "/v1/training/feedback", {"request_id": f"stopped-{place}", "reward": 1.0})
    sent = [{"request_id": f"stopped-{place}", "group_id": "stopped", "reward": float(place)} for place in range(20)]
    used = post(client, "/v1/training/update", {"trajectories": sent})
    assert used["trajectories_used"] == 20
    answer = client.post("/v1/training/feedback", json={"request_id": "never-asked", "reward": 1.0})
    assert answer.status_code == 404


def test_an_answer_that_is_being_given_is_waited_for(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "request_id": "running", "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        with httpx.Client(base_url=client.base_url, timeout=60) as other:
            post(other, "/v1/training/feedback", {"request_id": "running", "reward": 1.0})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "2 + 2 =", "collect_trajectory": True, "scoring_function": "gsm8k"}),
        ("/v1/rl/rollout", {"prompts": ["2 + 2 ="], "scoring_function": "gsm8k"}),
        ("/v1/rl/rollout", {"prompts": ["2 + 2 ="], "scoring_function": "gsm8k", "metadata": [{"answer": "four"}]}),
    ],
)
def test_a_score_without_what_it_needs_is_a_400(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert "metadata.answer" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "metadata"


def test_the_buffer_is_learnt_from(client: httpx.Client) -> None:
    ready = status(client)["trajectories_ready"]
    assert ready >= 6
    found = post(client, "/v1/training/update", {"checkpoint_name": "by-hand"})
    assert found["checkpoint"] == "by-hand"
    assert found["trajectories_used"] + found["trajectories_skipped"] >= 6
    assert "by-hand" in status(client)["available_checkpoints"]


def test_rollouts_are_scored_and_submitted(client: httpx.Client) -> None:
    before = status(client)["trajectories_buffered"]
    groups = rollout(client, prompts=[PROMPT, "hello", [{"role": "user", "content": "hi"}]], scoring_function="shorter")
    assert [len(group["samples"]) for group in groups] == [4, 4, 4]
    for group in groups:
        for sample in group["samples"]:
            assert sample["reward"] == -float(len(sample["text"]))
            assert len(sample["logprobs"]) == len(sample["completion_ids"])
            assert sample["policy_spans"][-1][1] == len(sample["completion_ids"])
    assert status(client)["trajectories_buffered"] == before
    rollout(client, scoring_function="shorter", submit=True)
    assert status(client)["trajectories_buffered"] == before + 4


@pytest.mark.parametrize("name", ["broken", "slow", "nan"])
def test_scores_that_fail_harm_nobody(client: httpx.Client, name: str) -> None:
    before = status(client)
    [group] = rollout(client, n=2, scoring_function=name, submit=True)
    assert [sample["reward"] for sample in group["samples"]] == [None, None]
    after = status(client)
    assert after["trajectories_buffered"] == before["trajectories_buffered"]
    assert after["scoring_failures"] == before["scoring_failures"] + 2


def test_checkpoints_on_demand_and_internals(client: httpx.Client) -> None:
    found = post(client, "/training/checkpoint", {"name": "named"})
    read_as(CheckpointWritten, found)
    folder = Path(found["path"])
    names = {"adapters.safetensors", "adapter_config.json", "buffer.jsonl", "state.json", "trainer.safetensors"}
    assert names == {file.name for file in folder.iterdir()}
    assert post(client, "/training/checkpoint", {})["checkpoint"].startswith("step-")
    loaded = post(client, "/load_adapter", {"name": "kept", "path": str(folder)})
    assert loaded["policy_version"] == 1
    greedy = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "request_id": "r"}
    answers_of = [post(client, "/generate", {**greedy, "model": name}) for name in ("kept", "policy")]
    assert answers_of[0]["completion_ids"] == answers_of[1]["completion_ids"]
    assert answers_of[0]["logprobs"] == pytest.approx(answers_of[1]["logprobs"], abs=1e-5)
    internals = client.get("/debug/training").json()
    read_as(TrainingInternals, internals)
    assert internals["trainer_bytes"] > 0


def test_an_adapters_name_means_the_adapter_and_no_checkpoint_of_that_name(client: httpx.Client) -> None:
    post(client, "/training/checkpoint", {"name": "policy"})
    answer = client.post("/v1/completions", json={"model": "policy", "prompt": PROMPT, "max_tokens": 1})
    assert answer.headers["X-Parallm-Adapter"].startswith("policy@")


def test_back_to_a_checkpoint(client: httpx.Client) -> None:
    greedy = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "request_id": "r", "model": "policy"}
    before = post(client, "/generate", greedy)
    post(client, "/training/checkpoint", {"name": "here"})
    for seed in range(6):  # the version of that checkpoint is no longer kept then
        rollout(client, n=8, seed=seed, scoring_function="shorter", submit=True)
        post(client, "/v1/training/update", {})
    updates = status(client)["updates"]
    found = post(client, "/v1/adapters/rollback", {"name": "policy", "version": before["policy_version"]})
    assert "checkpoint here" in found["message"]
    assert post(client, "/generate", greedy)["logprobs"] == pytest.approx(before["logprobs"], abs=1e-5)
    assert status(client)["updates"] < updates
    assert post(client, "/v1/adapters/rollback", {"name": "policy", "checkpoint": "here"})["status"] == "success"
    for wrong in ({"version": 10_000}, {"checkpoint": "nowhere"}, {"checkpoint": "../.."}):
        assert client.post("/v1/adapters/rollback", json={"name": "policy", **wrong}).status_code == 400


def test_metrics_have_the_promised_names(client: httpx.Client) -> None:
    text = client.get("/metrics").text
    for name in (
        "mlx_parallm_rl_trajectories_collected",
        "mlx_parallm_rl_training_loss",
        "mlx_parallm_rl_updates_per_second",
        "mlx_parallm_checkpoint_saves_total",
        "mlx_parallm_training_longest_stall_seconds",
    ):
        assert f"\n{name}" in text


@pytest.mark.parametrize(
    ("path", "body", "status_code", "word"),
    [
        ("/v1/training/update", {"trajectories": [{"reward": 1.0}]}, 400, "prompt_ids"),
        ("/v1/training/update", {"trajectories": [{"request_id": "never", "reward": 1.0}]}, 404, "never"),
        ("/v1/training/update", {"trajectories": []}, 400, "trajectories"),
        ("/v1/training/update", {"adapter": "nobody"}, 404, "nobody"),
        (
            "/v1/training/update",
            {"trajectories": [{"prompt_ids": [1], "completion_ids": [10**6], "reward": 1.0}]},
            400,
            "vocabulary",
        ),
        (
            "/v1/training/update",
            {"trajectories": [{"prompt_ids": [1], "completion_ids": [2, 3], "logprobs": [0.0], "reward": 1.0}]},
            400,
            "1 logprobs for 2",
        ),
        ("/v1/training/update", {"trajectories": [{"prompt_ids": [1], "completion_ids": [2], "reward": "1"}]}, 400, ""),
        ("/v1/training/update", {"checkpoint_name": "../../etc"}, 400, ""),
        ("/v1/training/feedback", {"request_id": "never", "reward": 1.0}, 404, "never"),
        ("/v1/training/feedback", {"request_id": "x"}, 400, "reward"),
        ("/v1/adapters/unload", {"name": "policy"}, 409, "trained"),
        ("/v1/adapters/load", {"name": "policy", "path": "anywhere"}, 409, "trained"),
        ("/v1/load_lora_adapter", {"lora_name": "policy", "lora_path": "x", "load_inplace": True}, 409, "trained"),
        ("/update_adapter_weights", {"name": "policy", "tensors": "eA=="}, 409, "trained"),
        ("/training/checkpoint", {"name": "../up"}, 400, "name"),
        ("/v1/rl/rollout", {"prompts": []}, 400, "prompts"),
        ("/v1/rl/rollout", {"prompts": [[]]}, 400, "empty"),
        ("/v1/rl/rollout", {"prompts": ["x"], "n": 1000}, 400, "n must"),
        ("/v1/rl/rollout", {"prompts": ["x"], "scoring_function": "os.system"}, 400, "os.system"),
        ("/v1/rl/rollout", {"prompts": ["x"], "submit": True}, 400, "scoring_function"),
        ("/v1/rl/rollout", {"prompts": ["x"], "model": "nobody"}, 404, "nobody"),
        ("/v1/rl/rollout", {"prompts": ["x"], "metadata": [{}, {}]}, 400, "metadata"),
        ("/v1/completions", {"prompt": "x", "collect_trajectory": True, "scoring_function": "y"}, 400, "y"),
    ],
)
def test_bad_input(client: httpx.Client, path: str, body: dict[str, Any], status_code: int, word: str) -> None:
    before = status(client)
    answer = client.post(path, json=body)
    assert answer.status_code == status_code, answer.text
    read_as(Error, answer.json())
    assert word in answer.json()["error"]["message"]
    after = status(client)
    assert after["policy_version"] == before["policy_version"]


def test_a_nan_reward_is_refused(client: httpx.Client) -> None:
    body = b'{"trajectories": [{"prompt_ids": [1], "completion_ids": [2], "reward": NaN}]}'
    answer = client.post("/v1/training/update", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


def test_a_server_that_does_not_train(tiny_server: Any) -> None:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        assert client.get("/v1/training/status").json()["training_enabled"] is False
        read_as(TrainingStatus, client.get("/v1/training/status").json())
        for path, body in (
            ("/v1/training/update", {}),
            ("/v1/training/feedback", {"request_id": "x", "reward": 1.0}),
            ("/v1/completions", {"prompt": "x", "collect_trajectory": True}),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 400
            assert "--enable-rl-training" in answer.json()["error"]["message"]
        [group] = rollout(client, n=2, model="default")  # rollouts work all the same
        assert np.isfinite(group["samples"][0]["logprobs"]).all()


def test_the_buffer_updates_by_itself_and_a_restart_goes_on(
    tiny_folder: Path, flags: list[str], tmp_path: Path
) -> None:
    flags = [*flags, "--update-frequency", "8", "--checkpoint-dir", str(tmp_path), "--checkpoint-interval", "1"]
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for seed in range(3):
            before = status(client)["updates"]
            rollout(client, n=8, seed=seed, scoring_function="shorter", submit=True)
            until(client, lambda now, before=before: now["updates"] == before + 1)  # type: ignore[misc]
        until(client, lambda now: "step-00000003" in now["available_checkpoints"])
        greedy = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "request_id": "r"}
        last = post(client, "/generate", greedy)
        server.process.kill()
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert status(client)["updates"] == 3
        assert post(client, "/generate", greedy)["logprobs"] == pytest.approx(last["logprobs"], abs=1e-5)


def test_several_adapters_learn_each_from_its_own(tiny_folder: Path, flags: list[str], tmp_path: Path) -> None:
    flags = [*flags, "--train-adapter", "one", "--train-adapter", "two", "--checkpoint-dir", str(tmp_path)]
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert status(client)["adapters"] == ["one", "two"]
        group = rollout(client, n=8, model="two", scoring_function="shorter", submit=True, seed=5)[0]
        assert len({sample["reward"] for sample in group["samples"]}) > 1, "nothing can be learnt from equal rewards"
        two = client.get("/v1/training/status", params={"adapter": "two"}).json()
        assert (status(client)["trajectories_ready"], two["trajectories_ready"]) == (0, 8)
        report = post(client, "/v1/training/update", {"adapter": "two"})
        assert report["published"], report
        assert status(client)["policy_version"] == 1
        assert client.get("/v1/training/status", params={"adapter": "two"}).json()["policy_version"] == 2


def test_gsm8k_scores_what_names_no_scoring_function_and_starts_nothing(
    tiny_folder: Path, flags: list[str], tmp_path: Path
) -> None:
    flags = [*flags, "--checkpoint-dir", str(tmp_path / "own"), "--environment", "gsm8k"]
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        body = {"prompt": PROMPT, "max_tokens": 4, "n": 2, "collect_trajectory": True}
        scored = post(client, "/v1/completions", {**body, "metadata": {"answer": 42}})
        assert [choice["reward"] for choice in scored["choices"]] == [0.0, 0.0]
        later = post(client, "/v1/completions", body)
        assert [choice.get("reward") for choice in later["choices"]] == [None, None]
        found = status(client)
        assert found["environment"] is None
        assert found["trajectories_collected"] == 2


@pytest.mark.parametrize("field", ["prompt_ids", "completion_ids"])
@pytest.mark.parametrize("token", [-1, -(2**40), 10**9])
def test_ids_outside_the_vocabulary_are_named(client: httpx.Client, field: str, token: int) -> None:
    """A negative one would wrap around, and another end the process."""
    good = {"group_id": "g", "prompt_ids": [5, 6], "completion_ids": [7, 8], "reward": 1.0}
    answer = client.post("/v1/training/update", json={"trajectories": [good, good | {field: [5, token]}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"trajectories.1.{field}.1"
    rollout = client.post("/v1/rl/rollout", json={"prompts": [[5, token]], "n": 2, "max_tokens": 2})
    assert rollout.status_code == 400
    assert client.get("/health").status_code == 200


def test_an_upload_to_what_is_trained_is_refused(client: httpx.Client) -> None:
    before = status(client)["policy_version"]
    answer = client.post("/v1/adapters/upload", data={"name": "policy"}, files={"weights": b"x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "adapter_in_training")
    assert status(client)["policy_version"] == before


def test_each_sample_has_an_id_of_its_own(client: httpx.Client) -> None:
    """Handed back by their ids alone, each is learnt from once."""
    [group] = rollout(client, n=4, seed=11)
    names = [sample["request_id"] for sample in group["samples"]]
    assert len(set(names)) == 4
    by_id = [{"group_id": "g", "request_id": name, "reward": float(place)} for place, name in enumerate(names)]
    found = post(client, "/v1/training/update", {"trajectories": by_id})
    lengths = [len(sample["completion_ids"]) for sample in group["samples"]]
    assert (found["trajectories_used"], found["metrics"]["tokens"]) == (4, sum(lengths))
    assert found["metrics"]["off_policy"] == 0
    twice = client.post("/v1/training/update", json={"trajectories": [by_id[0], by_id[1], by_id[0]]})
    assert twice.status_code == 400
    assert twice.json()["error"]["param"] == "trajectories.2.request_id"
    assert "trajectory 0" in twice.json()["error"]["message"]


def test_the_dashboard_shows_what_is_learnt_from(client: httpx.Client) -> None:
    rollout(client, n=4, seed=40, scoring_function="shorter", submit=True)
    shown = client.get("/dashboard/rollouts", params={"limit": 1}).json()
    read_as(RolloutNotes, shown)
    [group] = shown["groups"]
    assert (shown["adapters"], group["state"], len(group["samples"])) == (["policy"], "waiting", 4)
    sample = group["samples"][0]
    assert len(sample["tokens"]) == len(sample["logprobs"]) == sample["length"] == sample["policy_spans"][-1][1]
    post(client, "/v1/training/update", {})
    [group] = client.get("/dashboard/rollouts", params={"limit": 1}).json()["groups"]
    assert (group["state"], group["updates"]) == ("learnt", status(client)["updates"])
    assert {"flat_trajectories", "max_logprob_gap", "entropy"} <= set(status(client)["history"][-1])
    assert client.get("/dashboard/rollouts", params={"adapter": "nobody"}).status_code == 404
    current = [one for one in client.get("/v1/adapters").json()["data"] if one["current"]]
    [adapter] = [one for one in current if one["name"] == "policy"]
    assert len(adapter["digest"]) == 32


def test_an_answer_of_several_must_be_said_which(client: httpx.Client) -> None:
    answer = Api(client).complete(prompt=PROMPT, n=2, max_tokens=3, temperature=1.0)
    found = client.post("/v1/training/feedback", json={"request_id": answer["id"], "reward": 1.0})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "index")
    assert post(client, "/v1/training/feedback", {"request_id": answer["id"], "index": 1, "reward": 1.0})


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"logprobs": [0.5, -0.1]}, "logprobs"),
        ({"policy_version": 10_000}, "policy_version"),
        ({"policy_version": -1}, "policy_version"),
        ({"reward": 1e30}, "reward"),
        ({"mask": [True]}, "mask"),
        ({"logprobs": [-0.1]}, "logprobs"),
        ({"completion_ids": [5] * 5000}, "completion_ids"),
    ],
)
def test_a_wrong_field_is_named_with_its_trajectory(client: httpx.Client, wrong: dict[str, Any], param: str) -> None:
    good = {"group_id": "g", "prompt_ids": [5, 6], "completion_ids": [7, 8], "reward": 1.0, "logprobs": [-1.0, -1.0]}
    body = {"trajectories": [good, good | {"completion_ids": [8, 7]}, good | wrong]}
    answer = client.post("/v1/training/update", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == f"trajectories.2.{param}"


def test_a_refused_update_is_an_error_and_counted(client: httpx.Client) -> None:
    [group] = rollout(client, n=2, seed=12)
    same = [{"group_id": "g", "request_id": sample["request_id"], "reward": 1.0} for sample in group["samples"]]
    before = status(client)
    answer = client.post("/v1/training/update", json={"trajectories": same})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "update_refused")
    assert "different rewards" in answer.json()["error"]["message"]
    after = status(client)
    assert after["updates_refused"] == before["updates_refused"] + 1
    assert "different rewards" in after["last_refusal"]
    assert after["history"][-1]["refused"] == after["last_refusal"]
    assert after["policy_version"] == before["policy_version"]


def test_a_divergence_is_told_with_the_update_that_measured_it(client: httpx.Client) -> None:
    for seed in range(5):
        [group] = rollout(client, n=4, seed=20 + seed)
        pair = [
            {"group_id": "g", "request_id": sample["request_id"], "reward": float(place)}
            for place, sample in enumerate(group["samples"])
        ]
        found = post(client, "/v1/training/update", {"trajectories": pair})
        now = status(client)
        assert ("kl" in found["metrics"]) == (now["kl_measured_at_update"] == now["updates"])
        if "kl" in found["metrics"]:
            assert now["kl"] == found["metrics"]["kl"]


def test_a_rollback_over_http_takes_the_trainer_along(client: httpx.Client) -> None:
    greedy = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "request_id": "r", "model": "policy"}
    before, updates = post(client, "/generate", greedy), status(client)["updates"]
    for seed in (31, 32):
        rollout(client, n=8, seed=seed, scoring_function="shorter", submit=True)
        post(client, "/v1/training/update", {})
    newest = status(client)["policy_version"]
    found = post(client, "/v1/adapters/rollback", {"name": "policy", "version": before["policy_version"]})
    assert found["policy_version"] == before["policy_version"]
    assert status(client)["updates"] == updates
    assert post(client, "/generate", greedy)["completion_ids"] == before["completion_ids"]
    rollout(client, n=8, seed=33, scoring_function="shorter", submit=True)
    found = post(client, "/v1/training/update", {})
    assert found["policy_version"] > newest
    assert status(client)["updates"] == updates + found["published"]


def test_feedback_goes_to_the_adapter_that_answered(tiny_folder: Path, flags: list[str], tmp_path: Path) -> None:
    """And outlasts a kill, as does the answer that it is about."""
    flags = [*flags, "--train-adapter", "pa", "--train-adapter", "pb", "--checkpoint-dir", str(tmp_path)]

    def ready(client: httpx.Client, adapter: str) -> int:
        return int(client.get("/v1/training/status", params={"adapter": adapter}).json()["trajectories_ready"])

    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        api = Api(client)
        names = [
            api.complete(model="pb", prompt=PROMPT, max_tokens=4, temperature=1.0, seed=seed)["id"] for seed in range(3)
        ]
        for place, name in enumerate(names[:2]):
            found = post(client, "/v1/training/feedback", {"request_id": name, "reward": float(place)})
            assert found["adapter"] == "pb"
        assert (ready(client, "pa"), ready(client, "pb")) == (0, 2)
        elsewhere = post(client, "/v1/training/feedback", {"request_id": names[0], "reward": 1.0, "adapter": "pa"})
        assert elsewhere["adapter"] == "pa"
        post(client, "/model/switch-lora", {"version": "base"})
        base = api.complete(prompt=PROMPT, max_tokens=4)["id"]
        refused = client.post("/v1/training/feedback", json={"request_id": base, "reward": 1.0})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_trained")
        time.sleep(0.2)  # answers are written down within milliseconds
        server.process.kill()
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert (ready(client, "pa"), ready(client, "pb")) == (0, 2)
        found = post(client, "/v1/training/feedback", {"request_id": names[2], "reward": 0.5})
        assert (found["adapter"], found["trajectories_ready"]) == ("pb", 3)


def test_sigterm_writes_the_state(tiny_folder: Path, flags: list[str], tmp_path: Path) -> None:
    """With the default interval: an update from the buffer that nobody asked a checkpoint of."""
    flags = [*flags, "--update-frequency", "8", "--checkpoint-dir", str(tmp_path)]
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        rollout(client, n=8, seed=3, scoring_function="shorter", submit=True)
        before = until(client, lambda now: now["updates"] == 1 and now["policy_version"] == 2)
        greedy = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "request_id": "r"}
        last = post(client, "/generate", greedy)
        server.process.terminate()
        assert server.process.wait(30) == 0
    assert (tmp_path / "policy" / "latest" / "state.json").is_file()
    assert not list((tmp_path / "policy").glob("journal-*"))
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        after = status(client)
        assert (after["updates"], after["policy_version"]) == (1, before["policy_version"])
        assert after["history"] == before["history"]
        assert post(client, "/generate", greedy)["logprobs"] == pytest.approx(last["logprobs"], abs=1e-5)


def test_a_user_rewards_its_own_answers_and_a_trainer_all(tiny_folder: Path, tmp_path: Path) -> None:
    keys = ("dan:user=dan-key-123", "eve:user=eve-key-123", "tom:trainer=tom-key-123")
    flags = ["--enable-rl-training", "--update-frequency", "0", "--checkpoint-dir", str(tmp_path / "checkpoints")]
    flags += [part for key in keys for part in ("--named-key", key)]
    with running(ours(str(tiny_folder), flags)) as server, httpx.Client(base_url=server.url, timeout=60) as client:

        def post(who: str, path: str, **body: Any) -> httpx.Response:
            return client.post(path, json=body, headers={"Authorization": f"Bearer {who}-key-123"})

        def answer(who: str) -> dict[str, Any]:
            found = post(who, "/v1/completions", prompt="hello", max_tokens=3, model="policy", request_id="same")
            assert found.status_code == 200, found.text
            content: dict[str, Any] = found.json()
            return content | {"http": found.headers["x-request-id"]}

        def reward(who: str, name: str) -> int:
            return post(who, "/v1/training/feedback", request_id=name, reward=1.0).status_code

        dans = answer("dan")
        assert reward("eve", "same") == reward("eve", dans["id"]) == reward("eve", dans["http"]) == 404
        assert [reward("dan", name) for name in ("same", dans["id"], dans["http"])] == [200] * 3
        answer("eve")
        assert reward("tom", dans["id"]) == 200
        for name in ("latest", "journal-00000900.jsonl", "step-5"):
            refused = post("tom", "/training/checkpoint", name=name)
            assert (refused.status_code, "uses itself" in refused.text) == (400, True), refused.text
        assert post("tom", "/training/checkpoint", name="mine").status_code == 200
