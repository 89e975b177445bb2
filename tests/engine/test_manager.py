"""What learns from outside, and what its status tells: the manager of training, without a server around it."""

from pathlib import Path

import pytest

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.training.manager import TrainingManager
from mlx_parallm.training.rl.trajectories import Trajectory
from mlx_parallm.training.supervised.reward_model import RewardModel
from mlx_parallm.training.training_service import TrainingService
from tests.engine.test_reward_model import LORA, stirred, texts
from tests.engine.test_session import PROMPTS, school


def test_what_this_server_did_not_draw_is_marked_so(tmp_path: Path) -> None:
    """As from Atropos: an answer that its ledger knows counts as drawn here, with all that was recorded of it."""
    with school() as one:
        manager = TrainingManager(
            one.engine, ServeConfig.of(enable_rl_training=True, checkpoint_dir=str(tmp_path), lora_rank=4)
        )
        manager.start()
        try:
            assert manager.status()["atropos"] is None
            sampling = SamplingParams(temperature=0.9, max_tokens=4, n=2, ignore_eos=True)
            [drawn] = manager.rollouts.sample(PROMPTS[:1], sampling, adapter="policy", seed=1)
            sent = [
                Trajectory(record.prompt_ids, record.completion_ids, float(number), "g", record.logprobs)
                for number, record in enumerate(drawn)
            ]
            made_up = Trajectory(drawn[0].prompt_ids, (5, 6), 1.0, "g", (-1.0, -1.0))
            manager.learn(manager.session(), [*sent, made_up])
            assert [each.off_policy for each in (*sent, made_up)] == [False, False, True]
            assert sent[0].temperature == 0.9
            for token in (-1, one.model.vocab_size):
                wrong = Trajectory((5, 6), (token,), 1.0, "g", (-1.0,))
                with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
                    manager.learn(manager.session(), [wrong])
        finally:
            manager.close()


def test_reward_models_score_for_clients() -> None:
    with school() as one:
        manager, service = TrainingManager(one.engine, ServeConfig.of()), TrainingService()
        service.bind(manager)
        with pytest.raises(InvalidRequestError, match="no reward model"):
            service.reward_model_name(None)
        made = manager.add_reward_model("good", lambda: stirred(RewardModel(one.model, LORA)))
        assert service.reward_model_name(None) == "good"
        expected = one.engine.run(lambda: made.scores(texts(3)))
        assert service.score("good", texts(3)) == pytest.approx(expected, abs=1e-5)
        service.close()
