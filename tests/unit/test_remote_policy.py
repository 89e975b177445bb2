"""What a learner asks of a server that draws its rollouts; e2e/test_remote_training.py has both."""

from typing import Any

from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.training.rl.remote_policy import RemotePolicy
from tests.support.recording import recording_server

SAMPLE: dict[str, Any] = {
    "request_id": "r-1",
    "policy_version": 2,
    "completion_ids": [7, 8],
    "text": "hi",
    "logprobs": [-0.5, -0.25],
    "finish_reason": "length",
    "policy_spans": [[0, 2, 2]],
    "reward": None,
}


def test_a_rollout_is_asked_for_with_all_that_its_sampling_says() -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=2, n=1, stop_token_ids=(3,))
    with recording_server() as server:
        server.answers["POST /v1/rl/rollout"] = {"groups": [{"prompt_ids": [5, 6], "samples": [SAMPLE]}]}
        policy = RemotePolicy(server.url)
        [[record]] = policy.sample([[5, 6]], sampling, adapter="math", seed=11, salt="step 1")
        policy.close()
    assert server.last.json == {
        "model": "math",
        "prompts": [[5, 6]],
        "n": 1,
        "max_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "stop_token_ids": [3],
        "cache_salt": "step 1",
        "seed": 11,
    }
    assert (record.prompt_ids, record.completion_ids, record.logprobs) == ((5, 6), (7, 8), (-0.5, -0.25))
    assert (record.temperature, record.policy, record.finish_reason) == (0.7, "math", "length")
