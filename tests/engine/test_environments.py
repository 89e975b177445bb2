"""Episodes of several turns on a real engine: what is learnt from, and with which numbers."""

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.train_config import LoopConfig
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.text.parsers.calls import CallDelta, Piece
from mlx_parallm.text.prompts import Message
from mlx_parallm.training.rl.batches import PaddedPrompts
from mlx_parallm.training.rl.objectives import chosen_logprobs
from mlx_parallm.training.rl.task_loop import Loop, ScoredCompletion
from mlx_parallm.training.rl.trajectories import Trajectory
from mlx_parallm.training.tasks.built_in import Problem
from mlx_parallm.training.tasks.environments import (
    Calculator,
    Environment,
    EnvironmentTask,
    EpisodeSampler,
    _calls,
    evaluate,
)
from mlx_parallm.training.tasks.find_task import find_task
from mlx_parallm.training.trainable_model import completion_logits
from tests.engine.test_session import School, school


class Echo(Environment):
    """Says the seed after each answer, for three turns."""

    max_turns = 3

    def reset(self, seed: int, level: int = 1) -> list[Message]:
        self.seed = seed
        return [{"role": "user", "content": f"seed {seed % 97}"}]

    def step(self, messages: list[Message]) -> tuple[list[Message], float, bool]:
        answers = [message for message in messages if message["role"] == "assistant"]
        self.metrics["turns"] = float(len(answers))
        return [{"role": "user", "content": "and then"}], 0.5, len(answers) == 3


class Broken(Echo):
    def step(self, messages: list[Message]) -> tuple[list[Message], float, bool]:
        if len(messages) > 2:
            raise RuntimeError("no more")
        return super().step(messages)


def sampler(one: School, kind: type[Environment]) -> EpisodeSampler:
    return EpisodeSampler(one.engine, one.rollouts, EnvironmentTask("t", kind))


def test_an_episode_is_one_trajectory_with_the_samplers_own_numbers() -> None:
    with school() as one:
        session = one.session()
        plays = sampler(one, Echo)
        problems = [plays.task.problem(random.Random(seed), 1) for seed in (1, 2)]
        sampling = SamplingParams(temperature=1.0, max_tokens=6, n=3, ignore_eos=True)
        groups = plays.sample(problems, sampling, "policy", 7, "salt")
        assert [len(group) for group in groups] == [3, 3]
        for answer in (answer for group in groups for answer in group):
            record = answer.record
            assert (answer.score, answer.parts) == (1.5, {"turns": 3.0})
            assert record.mask is not None
            assert sum(record.mask) == 18
            assert record.mask[0]
            assert record.mask[-1]
            assert not all(record.mask), "others wrote in between"
            assert record.spans[-1].end == len(record.completion_ids)
            tokens = mx.array([record.completion_ids])
            prompts = PaddedPrompts.of([record.prompt_ids], [1])
            logits = completion_logits(session.trainer.tree.module, prompts, tokens, False)
            gaps = np.abs(np.array(chosen_logprobs(logits, tokens, 1.0)[0]) - np.array(record.logprobs))
            assert gaps[np.array(record.mask)].max() < 1e-4
        learnt = [
            Trajectory.recorded(answer.record, float(place), str(number))
            for number, group in enumerate(groups)
            for place, answer in enumerate(group)
        ]
        report = session.update(learnt)
        assert report.published
        assert report.outcome.metrics["tokens"] == 6 * 18, "what others wrote is not learnt from"
        assert report.outcome.metrics["max_logprob_gap"] < 1e-4
        one.driver.settle()


def test_calls_that_came_in_pieces_are_put_together() -> None:
    pieces = [
        Piece(calls=(CallDelta(0, "a", "look", '{"at"'), CallDelta(0, arguments=": 1}"))),
        Piece(calls=(CallDelta(1, "b", "hear"),)),
        Piece(calls=(CallDelta(1, arguments="{}"),)),
    ]
    assert [(call["id"], call["function"]) for call in _calls(pieces)] == [
        ("a", {"name": "look", "arguments": '{"at": 1}'}),
        ("b", {"name": "hear", "arguments": "{}"}),
    ]


def test_an_environment_that_fails_costs_its_episode_alone() -> None:
    with school() as one:
        one.session()
        plays = sampler(one, Broken)
        problem = plays.task.problem(random.Random(1), 1)
        sampling = SamplingParams(temperature=1.0, max_tokens=4, n=2, ignore_eos=True)
        (group,) = plays.sample([problem], sampling, "policy", 7, "salt")
        assert [answer.score for answer in group] == [None, None]
        assert plays.failures == 2
        one.driver.settle()


class Fragile(Echo):
    """Half of the problems have a step that raises; the others pay by what was said."""

    def step(self, messages: list[Message]) -> tuple[list[Message], float, bool]:
        if self.seed % 2:
            raise ValueError("broken")
        said, _, done = super().step(messages)
        return said, float(len(messages[-1]["content"]) % 5), done


class Remembering(EpisodeSampler):
    """Keeps what it has drawn."""

    def sample(self, *args: Any, **options: Any) -> list[list[ScoredCompletion]]:
        self.drawn = super().sample(*args, **options)
        return self.drawn


def test_a_run_goes_on_where_steps_of_an_environment_raise() -> None:
    """Their episodes are not learnt from, those of the others are; tokens are counted that the model drew itself."""
    with school() as one:
        session = one.session()
        plays = Remembering(one.engine, one.rollouts, EnvironmentTask("fragile", Fragile))
        config = LoopConfig(steps=1, prompts_per_step=6, group_size=3, eval_problems=1, answer_tokens=4, eval_every=5)
        learnt: list[int] = []
        update = session.update

        def watched(trajectories: Any, **options: Any) -> Any:
            learnt.append(len(trajectories))
            drawn = [answer.record for group in plays.drawn for answer in group]
            assert sum(record.sampled for record in drawn) < sum(len(record.completion_ids) for record in drawn)
            tokens.append(sum(record.sampled for record in drawn))
            return update(trajectories, **options)

        tokens: list[int] = []
        session.update = watched  # type: ignore[method-assign]
        report = Loop(session, plays, config).run()[-1]
        assert plays.failures > 0
        assert 0 < learnt[0] < 18
        assert report.rollout_tokens == tokens[0]
        one.driver.settle()


class Locked(Echo):
    """Can't begin at the second level; an episode is worth more where it was cut off."""

    max_turns = 2

    def reset(self, seed: int, level: int = 1) -> list[Message]:
        if level == 2:
            raise RuntimeError("locked")
        return super().reset(seed, level)

    def cut_off(self) -> float:
        return 10.0


def test_episodes_that_can_not_begin_and_those_that_are_cut_off() -> None:
    with school() as one:
        one.session()
        plays = sampler(one, Locked)
        problem = plays.task.problem(random.Random(1), 1)
        locked = Problem(problem.messages, {"seed": 1, "level": 2})
        sampling = SamplingParams(temperature=1.0, max_tokens=4, n=2, ignore_eos=True)
        group, none = plays.sample([problem, locked], sampling, "policy", 7, "salt")
        assert [answer.score for answer in group] == [11.0, 11.0], "two turns of three, and what was left"
        assert none == []
        assert plays.failures == 2
        with pytest.raises(InvalidRequestError, match="no episode of t could begin"):
            plays.sample([locked], sampling, "policy", 7, "salt")
        one.driver.settle()


@pytest.mark.parametrize(
    ("text", "value"),
    [("2 + 3", 5), ("-4*5", -20), ("1e3", None), ("2 ** 9", None), ("id(1)", None), ("1 +", None), ("9" * 99, None)],
)
def test_the_calculator_computes_sums_and_nothing_else(text: str, value: int | None) -> None:
    assert evaluate(text) == value


def test_the_calculators_rewards() -> None:
    def play(*answers: str) -> tuple[float, float]:
        episode = Calculator()
        messages = episode.reset(5)
        total = 0.0
        for answer in (one.format(*episode.numbers, right=sum(episode.numbers)) for one in answers):
            messages.append({"role": "assistant", "content": answer})
            said, reward, done = episode.step(messages)
            messages += said
            total += reward
            if done:
                break
        assert episode.metrics["success"] == total
        return total, episode.metrics["call"]

    assert play("calc({0} + {1})", "{right}") == (1.0, 1.0)
    assert play("calc({0} + {1})", "It is {right}, not 7.") == (1.0, 1.0)
    assert play("calc({0} + {1})", "calc({right})") == (0.0, 1.0)
    assert play("calc({0} + {1})", "{0} + {1} = {right}") == (0.0, 1.0)
    assert play("calc({0} + 1)", "7") == (0.0, 1.0)
    assert play("calc(id)", "{right}") == (1.0, 1.0)
    assert play("{right}") == (1.0, 0.0)
    assert play("no idea") == (0.0, 0.0)
    assert isinstance(find_task("calculator"), EnvironmentTask)
    assert isinstance(find_task("tests.engine.test_environments:Echo"), EnvironmentTask)
