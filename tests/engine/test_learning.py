"""The embedded model learns what it is rewarded for, and nothing else. Minutes each: `make test-all`."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from mlx_parallm.config.train_config import LoopConfig
from mlx_parallm.config.training import Alarms, LoRAConfig, RLConfig
from mlx_parallm.models.loader import load
from mlx_parallm.training.rl.rollouts import Rollouts
from mlx_parallm.training.rl.session import Session, SessionOptions
from mlx_parallm.training.rl.task_loop import Loop, StepReport
from mlx_parallm.training.storage.ledger import Ledger
from mlx_parallm.training.tasks.built_in import Problem, Task
from mlx_parallm.training.tasks.environments import make_task_sampler
from mlx_parallm.training.tasks.find_task import find_task
from mlx_parallm.training.tasks.scorers import Rewards
from tests.engine.harness import driver_of

pytestmark = pytest.mark.slow
SMALL = LoRAConfig(8, 16.0, ("q_proj", "k_proj", "v_proj", "o_proj"), layers=8)


class Capitals(Task):
    """The share of capital letters: a reward that nothing here was tuned to. Four prompts are learnt from."""

    name = "capitals"
    max_tokens = 16
    learnt = ("Tell me about the sea.", "What is bread made of?", "Describe a horse.", "Why do leaves fall?")
    unseen = ("Tell me about rain.", "What is a clock for?", "Describe your kitchen.", "Why is the sky blue?")

    def problem(self, random: random.Random, level: int) -> Problem:
        return self._problem(random.choice(self.learnt))

    def held_out(self) -> list[Problem]:
        return [self._problem(text) for text in self.unseen]

    def score(self, completion: str, metadata: Mapping[str, Any]) -> float:
        letters = [letter for letter in completion if letter.isalpha()]
        return sum(letter.isupper() for letter in letters) / max(1, len(letters))

    def _problem(self, text: str) -> Problem:
        return Problem(({"role": "user", "content": text},))


def learn(task: Task, lora: LoRAConfig, learning_rate: float, **settings: Any) -> list[StepReport]:
    with driver_of(lambda: load(None, name="embedded")) as driver:
        ledger = Ledger()
        driver.engine.recorder = ledger
        sampler = make_task_sampler(driver.engine, Rollouts(driver.engine, ledger, 32), Rewards(), task)
        config = RLConfig(learning_rate=learning_rate, microbatch_tokens=160)
        session = Session(
            driver.engine, "policy", lora, config, options=SessionOptions(alarms=Alarms(reward_drop=None))
        )
        session.start(serve=False)
        return Loop(session, sampler, LoopConfig(prompts_per_step=4, group_size=8, **settings)).run()


@pytest.mark.parametrize("shuffled", [False, True], ids=["rewards", "shuffled"])
def test_an_untuned_reward_rises_and_only_with_its_own_rewards(own_cache: None, shuffled: bool) -> None:
    news = learn(Capitals(), LoRAConfig(), 2e-3, steps=14, shuffle_rewards=shuffled)
    own_before, own_after = news[1].reward, news[-1].reward
    unseen_before, unseen_after = news[0].held_out, news[-1].held_out
    assert unseen_before is not None
    assert unseen_after is not None
    print(f"own prompts {own_before:.3f} to {own_after:.3f}, unseen {unseen_before:.3f} to {unseen_after:.3f}")  # noqa: T201
    if shuffled:
        assert own_after < own_before + 0.05
        assert unseen_after < unseen_before + 0.05
    else:
        assert own_after > own_before + 0.1
        assert unseen_after > unseen_before + 0.1


def test_the_calculator_is_learnt(own_cache: None) -> None:
    news = learn(find_task("calculator"), SMALL, 1e-3, steps=20, eval_problems=24, eval_every=10)
    found = [one.held_out_components["success"] for one in news if one.held_out is not None]
    print(f"success on held-out sums: {found}")  # noqa: T201
    assert found[0] < 0.2
    assert found[-1] > 0.5
