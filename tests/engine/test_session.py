"""Sessions and the loop on a real engine: what is published, what is rolled back, what a restart goes on with."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.train_config import LoopConfig
from mlx_parallm.config.training import Alarms, LoRAConfig, RLConfig
from mlx_parallm.errors import ConfigError, InvalidRequestError, UnavailableError
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.loader import load
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.text.prompts import Conversation, Prompts
from mlx_parallm.training.rl.batches import PaddedPrompts
from mlx_parallm.training.rl.objectives import chosen_logprobs
from mlx_parallm.training.rl.records import Record
from mlx_parallm.training.rl.rollouts import Rollouts
from mlx_parallm.training.rl.session import Session, SessionOptions
from mlx_parallm.training.rl.task_loop import Loop, StepReport, TaskSampler
from mlx_parallm.training.rl.trajectories import Trajectory
from mlx_parallm.training.storage.checkpoints import Checkpoints
from mlx_parallm.training.storage.ledger import Ledger
from mlx_parallm.training.tasks.built_in import Problem, Rows, Task
from mlx_parallm.training.tasks.components import parse_components
from mlx_parallm.training.tasks.scorers import Rewards
from mlx_parallm.training.trainable_model import completion_logits
from tests.engine.harness import Answer, Driver, as_served, driver_of

LORA = LoRAConfig(rank=4, alpha=8)
PROMPTS = [list(range(20, 45)), list(range(60, 90))]
GREEDY = {"max_tokens": 12, "ignore_eos": True, "logprobs": 0}


def hold(found: Answer, expected: Answer) -> None:
    assert found.tokens == expected.tokens
    values = ([scored.logprob for scored in one.logprobs] for one in (found, expected))
    assert next(values) == pytest.approx(next(values), abs=1e-4)


class School:
    """An engine with a ledger, and what draws from it."""

    def __init__(self, driver: Driver, model: LanguageModel) -> None:
        self.driver = driver
        self.engine = driver.engine
        self.model = model
        self.ledger = Ledger()
        self.engine.recorder = self.ledger
        self.rollouts = Rollouts(self.engine, self.ledger, 32)

    def session(
        self, name: str = "policy", folder: Path | None = None, lora: LoRAConfig = LORA, **options: object
    ) -> Session:
        alarms = options.pop("alarms", None)
        interval = options.pop("checkpoint_interval", 1)
        seconds = options.pop("checkpoint_seconds", 60.0)
        resume = bool(options.pop("resume", True))
        at_most = options.pop("follows_buffer_at", None)
        config = RLConfig(**{"learning_rate": 1e-3, "microbatch_tokens": 64, "max_kl": 100.0, **options})  # type: ignore[arg-type]
        checkpoints = None if folder is None else Checkpoints(folder, 3)
        found = Session(
            self.engine,
            name,
            lora,
            config,
            checkpoints=checkpoints,
            options=SessionOptions(
                checkpoint_interval=interval,  # type: ignore[arg-type]
                checkpoint_seconds=seconds,  # type: ignore[arg-type]
                alarms=alarms or Alarms(),  # type: ignore[arg-type]
                update_trajectories=at_most,  # type: ignore[arg-type]
                follows_buffer=at_most is not None,
            ),
        )
        found.start(resume=resume)
        return found

    def draw(self, adapter: str | None = "policy", seed: int = 1, n: int = 4) -> list[list[Record]]:
        sampling = SamplingParams(temperature=0.9, max_tokens=8, n=n, ignore_eos=True)
        return self.rollouts.sample(PROMPTS, sampling, adapter=adapter, seed=seed)

    def trajectories(self, adapter: str = "policy", seed: int = 1) -> list[Trajectory]:
        groups = self.draw(adapter, seed)
        return [
            Trajectory.recorded(record, float(sum(record.completion_ids) % 7), str(number))
            for number, group in enumerate(groups)
            for record in group
        ]


@contextmanager
def school(**config: object) -> Iterator[School]:
    models: list[LanguageModel] = []

    def load() -> LanguageModel:
        models.append(as_served("llama"))
        return models[0]

    with driver_of(load, block_size=8, **config) as driver:
        yield School(driver, models[0])


def test_rollouts_are_the_trees_own_numbers_before_and_after_each_publish() -> None:
    with school() as one:
        session = one.session()
        for seed in range(3):
            trajectories = one.trajectories(seed=seed)
            gaps = []
            for each in trajectories:
                tokens = mx.array([each.completion_ids])
                logits = completion_logits(
                    session.trainer.tree.module, PaddedPrompts.of([each.prompt_ids], [1]), tokens, False
                )
                found = chosen_logprobs(logits, tokens, 0.9)[0]
                gaps.append(float(mx.max(mx.abs(found - mx.array(each.logprobs)))))
            assert max(gaps) < 1e-4
            report = session.update(trajectories)
            assert report.published
            assert report.outcome.metrics["max_logprob_gap"] < 1e-4
            assert {each.version for each in one.trajectories(seed=9)} == {seed + 2}
        one.driver.settle()


@pytest.mark.long
def test_requests_go_on_while_it_learns_and_keep_their_version() -> None:
    with school() as one:
        session = one.session()
        trajectories = one.trajectories()
        alone = one.driver.ask(PROMPTS[0], adapter="policy", adapter_version=1, max_tokens=200, ignore_eos=True)
        _, pending = one.driver.submit(PROMPTS[0], adapter="policy", max_tokens=200, ignore_eos=True)
        pending.wait_for_tokens(3)
        for _ in range(3):
            assert session.update(trajectories).published
        answer = pending.wait()[0]
        assert answer.tokens == alone.tokens
        assert [(span.first, span.version) for span in answer.last.spans] == [(0, 1)]
        one.driver.settle()


def test_a_client_that_sees_an_update_counted_sees_it_in_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    with school() as one:
        session = one.session()
        seen = list[dict[str, Any]]()
        publish = session.versions.publish

        def published_and_looked_at(*args: Any) -> int:
            number = publish(*args)
            seen.append(session.status())
            return number

        monkeypatch.setattr(session.versions, "publish", published_and_looked_at)
        session.update(one.trajectories())
        seen.append(session.status())
        assert [(status["policy_version"], status["updates"]) for status in seen] == [(2, 0), (2, 1)]
        assert [len(status["history"]) for status in seen] == [0, 1]


def test_an_update_that_is_not_to_be_served_is_kept() -> None:
    with school() as one:
        session = one.session()
        before = one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY)
        report = session.update(one.trajectories(), publish=False)
        assert not report.published
        assert session.version == 1
        assert session.trainer.updates == 1
        hold(one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY), before)
        assert session.update(one.trajectories()).version == 2


@pytest.mark.parametrize("poison", [{"learning_rate": 1e4, "max_kl": 1.0}, {"max_parameter_norm": 1e-6}])
def test_a_poisoned_update_is_refused_and_clients_see_nothing(poison: dict[str, float]) -> None:
    with school() as one:
        session = one.session(**poison)
        before = one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY)
        report = session.update(one.trajectories())
        assert not report.published
        assert report.outcome.reason
        assert session.totals.refused == 1
        after = one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY)
        hold(after, before)


@pytest.mark.parametrize(
    ("alarms", "word"),
    [
        (Alarms(kl=1e-9, reward_drop=None), "KL"),
        (Alarms(entropy=100.0, kl=None, reward_drop=None), "entropy"),
        (Alarms(reward_drop=1.0), "fallen"),
    ],
)
def test_an_alarm_brings_the_last_good_version_back(alarms: Alarms, word: str) -> None:
    with school() as one:
        calm = Alarms(kl=None, entropy=None, reward_drop=alarms.reward_drop)
        session = one.session(alarms=calm, learning_rate=3e-3)
        for seed in range(6):
            assert session.update(one.trajectories(seed=seed)).published
        good = session.good
        assert good is not None
        kept = {name: np.array(array) for name, array in good.state.parameters.items()}
        session.monitor.alarms = alarms
        report = None
        for seed in range(8):
            trajectories = one.trajectories(seed=seed)
            if alarms.reward_drop is not None:
                for place, each in enumerate(trajectories):
                    each.reward = -50.0 + 0.1 * (place % 4)
            good = session.good
            kept = {name: np.array(array) for name, array in good.state.parameters.items()} if good else kept
            report = session.update(trajectories)
            if report.rolled_back:
                break
        assert report is not None
        assert word in report.rolled_back
        assert good is not None
        assert session.version == good.number
        assert session.totals.rollbacks == 1
        session.monitor.alarms = Alarms(kl=None, entropy=None, reward_drop=None)
        assert all(np.array_equal(kept[name], np.array(array)) for name, array in session.trainer.parameters.items())


def test_a_restart_goes_on_where_the_last_checkpoint_was(tmp_path: Path) -> None:
    with school() as one:
        session = one.session(folder=tmp_path)
        for seed in range(4):
            session.extra = {"step": seed}
            session.update(one.trajectories(seed=seed))
        state = session.trainer.state()
        answer = one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY)
        assert session.update(one.trajectories(), checkpoint_name="mine").checkpoint == "mine"
        (tmp_path / "mine" / "state.json").unlink()
    with school() as one:
        session = one.session(folder=tmp_path)
        assert session.trainer.updates == 5
        assert session.version == 6
        session = one.session("again", folder=tmp_path / "none")
        assert session.trainer.updates == 0
        assert session.version == 1
        session = one.session("anew", folder=tmp_path, resume=False)
        assert session.trainer.updates == 0
        assert session.version == 7, "2 to 6 are other policies, and rollbacks find them here"
    (tmp_path / "step-00000005" / "trainer.safetensors").unlink()
    with school() as one:
        session = one.session(folder=tmp_path)
        assert session.trainer.updates == 4
        assert session.version == 5, "these are the weights of version 5"
        assert session.last_version == 7
        assert session.extra == {"step": 3}
        assert all(np.array_equal(array, session.trainer.state()[name]) for name, array in state.items())
        again = one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY)
        hold(again, answer)


def random_trajectories(seed: int) -> list[Trajectory]:
    random = np.random.default_rng(seed)
    return [
        Trajectory(PROMPTS[place // 4], random.integers(3, 90, 6).tolist(), float(random.random()), str(place // 4))
        for place in range(8)
    ]


class Unreachable:
    """Where versions are to be served, and can't be."""

    def publish(self, name: str, adapter: object, number: int) -> None:
        raise UnavailableError("nobody answers")

    def roll_back(self, name: str, number: int) -> None:
        raise UnavailableError("nobody answers")


def test_groups_are_put_back_after_an_update_that_failed() -> None:
    """The first to be taken again, in their order, and the trainer as it was."""
    with school() as one:
        session = one.session()
        first, later = random_trajectories(1), random_trajectories(2)
        for each in later:
            each.group_id = f"later-{each.group_id}"
        session.buffer.add(first)
        before = session.trainer.state()
        session.versions.publisher = Unreachable()
        with pytest.raises(UnavailableError, match="nobody answers"):
            session.update(at_most=8)
        assert (session.trainer.updates, session.version) == (0, 1)
        assert all(np.array_equal(array, session.trainer.state()[name]) for name, array in before.items())
        session.buffer.add(later)
        assert (len(session.buffer), session.buffer.ready()) == (16, 16)
        session.versions.publisher = None
        assert session.buffer.take(8, session.version) == first
        session.buffer.put_back(first)
        assert session.update(at_most=8).published
        assert len(session.buffer) == 8


class Elsewhere(Unreachable):
    """Where versions are served too; it writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def roll_back(self, name: str, number: int) -> None:
        self.told.append((name, number))


def test_a_rollback_is_one_wherever_versions_are_served() -> None:
    with school() as one:
        session = one.session()
        assert session.update(random_trajectories(1)).published
        session.versions.publisher = Unreachable()
        with pytest.raises(UnavailableError, match="nobody answers"):
            session.rollback(1)
        assert session.version == 2, "nowhere, or everywhere"
        session.versions.publisher = elsewhere = Elsewhere()
        assert session.rollback(None).version == session.version == 1
        assert elsewhere.told == [("policy", 1)]


def test_after_a_rollback_training_goes_on() -> None:
    """Rewards of another scale give one alarm, not one in every five updates."""
    with school() as one:
        session = one.session(alarms=Alarms(kl=None, entropy=None), learning_rate=1e-4)
        rolled_back = []
        for number in range(24):
            trajectories = random_trajectories(number)
            for each in trajectories:
                each.reward += 50.0 if number < 10 else 0.0
            if session.update(trajectories).rolled_back:
                rolled_back.append(number)
        assert rolled_back == [12]
        assert session.trainer.updates == 24 - 2, "the alarm takes its own update and the one before"


def test_training_begins_with_an_adapter_as_its_first_version(tmp_path: Path) -> None:
    with school() as one:
        random = np.random.default_rng(3)
        other = one.session("other")
        other.trainer.tree.set_parameters(
            {
                name: mx.array(0.1 * random.standard_normal(array.shape).astype(np.float32))
                for name, array in other.trainer.parameters.items()
            }
        )
        adapter = other.trainer.adapter()
        session = Session(one.engine, "policy", LORA, RLConfig(), checkpoints=Checkpoints(tmp_path, 3))
        session.start(initial=adapter)
        assert session.version == 1
        assert all(np.array_equal(part.a, adapter.parts[path].a) for path, part in session.adapter().parts.items())
        assert session.trainer.reference is not None
        session.update(random_trajectories(1))
        session.close()
        again = Session(one.engine, "again", LORA, RLConfig(), checkpoints=Checkpoints(tmp_path, 3))
        again.start(initial=adapter)
        assert again.trainer.updates == 1, "a checkpoint is gone on from"


def test_the_divergence_is_measured_to_the_adapter_that_training_began_with(tmp_path: Path) -> None:
    """And a restart finds it again; --reference base measures it to the model."""

    def divergences(folder: Path, numbers: range, **options: object) -> list[float]:
        with school() as one:
            session = one.session(folder=folder, beta=0.05, alarms=Alarms(kl=None), **options)
            if not session.trainer.updates:
                random = np.random.default_rng(3)
                parameters = {
                    name: mx.array(0.1 * random.standard_normal(array.shape).astype(np.float32))
                    for name, array in session.trainer.parameters.items()
                }
                session.trainer.tree.set_parameters(parameters)
                adapter = session.trainer.adapter()
                session.trainer.learner.restore()
                session.begin_with(adapter)
            found = [session.update(random_trajectories(number)).outcome.metrics["kl"] for number in numbers]
            session.checkpoint()
            return found

    first, *later = divergences(tmp_path / "whole", range(3))
    assert first == pytest.approx(0.0, abs=1e-6)
    assert min(later) > 0.0
    assert divergences(tmp_path / "cut", range(2)) + divergences(tmp_path / "cut", range(2, 3)) == [first, *later]
    assert divergences(tmp_path / "base", range(1), reference="base")[0] > 0.05


def test_answers_of_versions_that_a_rollback_has_left_are_dropped(tmp_path: Path) -> None:
    """At once where they wait, and whenever they come later; after a restart too."""
    with school() as one:
        session = one.session(folder=tmp_path)
        for seed in range(2):
            assert session.update(one.trajectories(seed=seed)).published
        kept, left = one.trajectories(seed=5), one.trajectories(seed=7)  # of version 3
        session.rollback(2)
        assert {each.version for each in left} == {3}
        fresh = one.trajectories(seed=6)
        assert {each.version for each in fresh} == {2}
        session.buffer.add([*left[:4], *fresh])
        report = session.update(at_most=99)
        assert report.outcome.used + report.outcome.skipped == len(fresh)
        assert report.outcome.metrics["staleness"] == 0.0
        assert session.buffer.counts.stale == 4
        assert session.version == 4
        with pytest.raises(InvalidRequestError, match="a rollback has left"):
            session.update(left)
        report = session.update([*left, *fresh])
        assert report.outcome.metrics["staleness"] == 2.0, "4 has taken the place of 3"
        session.buffer.add(kept)
        session.rollback(4)
        assert len(session.buffer) == 0
        session.checkpoint()
    with school() as one:
        session = one.session(folder=tmp_path)
        assert session.versions.abandoned == {3, 5}
        session.buffer.add(left)
        with pytest.raises(InvalidRequestError, match="no trajectories"):
            session.update()


def test_answers_of_what_an_alarm_has_left_are_dropped() -> None:
    with school() as one:
        session = one.session(alarms=Alarms(kl=None, reward_drop=None))
        for seed in range(3):
            session.update(one.trajectories(seed=seed))
        session.buffer.add(one.trajectories(seed=4))  # of version 4
        session.monitor.alarms = Alarms(entropy=100.0)
        assert session.update(one.trajectories(seed=5)).rolled_back
        assert session.version == 3
        assert len(session.buffer) == 0
        assert session.buffer.counts.stale == 8


def test_a_checkpoint_of_another_rank_or_of_other_layers_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with school() as one:
        session = one.session(folder=tmp_path)
        session.update(random_trajectories(0))
        session.checkpoint("mine")
        for other, words in (
            (LoRAConfig(rank=8, alpha=8), [r"\(64, 4\), and \(64, 8\) learns", "--lora-rank 4"]),
            (LoRAConfig(rank=4, target_modules=("q_proj",)), ["do not learn here", "v_proj", "--lora-target-modules"]),
            (LoRAConfig(rank=4, target_modules=("q_proj", "k_proj", "v_proj")), ["lacks", "k_proj", "--no-resume"]),
        ):
            with pytest.raises(ConfigError) as error:
                one.session("other", folder=tmp_path, lora=other)
            for word in [re.escape(str(tmp_path / "mine")), "--checkpoint-dir", *words]:
                assert re.search(word, error.value.message), (word, error.value.message)


@pytest.mark.long
def test_an_alarm_after_a_restart_goes_back_as_far_as_without(tmp_path: Path) -> None:
    calm, alarmed = Alarms(kl=None, entropy=None, reward_drop=None), Alarms(entropy=100.0)

    def learn(folder: Path, numbers: range) -> tuple[dict[str, np.ndarray], Answer]:
        with school() as one:
            session = one.session(folder=folder, alarms=calm)
            for number in numbers:
                session.monitor.alarms = alarmed if number in (3, 4) else calm
                report = session.update(random_trajectories(number))
                assert bool(report.rolled_back) == (number in (3, 4))
                assert session.trainer.updates == (1, 2, 3, 2, 2, 3, 4)[number]
            kept = session.checkpoints.latest()  # type: ignore[union-attr]
            assert kept is not None
            return kept.arrays, one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY)

    whole, answer = learn(tmp_path / "whole", range(7))
    for number in range(7):  # a restart before each update
        arrays, again = learn(tmp_path / "cut", range(number, number + 1))
        earlier = {name for name in arrays if name.startswith("good.parameters.")}
        assert bool(earlier) == (number not in (3, 4))  # after a rollback the good one is the one that is kept
    assert sorted(arrays) == sorted(whole)
    assert all(np.array_equal(array, arrays[name]) for name, array in whole.items())
    hold(again, answer)


def test_nothing_to_learn_from() -> None:
    with school() as one:
        session = one.session()
        with pytest.raises(InvalidRequestError, match="no trajectories"):
            session.update()
        flat = one.trajectories()
        for each in flat:
            each.reward = 1.0
        report = session.update(flat)
        assert (report.published, report.outcome.skipped) == (False, 8)
        with pytest.raises(InvalidRequestError, match="no checkpoints"):
            session.checkpoint()
        with pytest.raises(InvalidRequestError, match="no checkpoints"):
            session.update(one.trajectories(), checkpoint_name="mine")
        assert session.trainer.updates == 0


def test_several_learn_at_once() -> None:
    with school() as one:
        sessions = [one.session(name) for name in ("left", "right")]
        batches = [one.trajectories(session.name) for session in sessions]
        threads = [
            threading.Thread(target=session.update, args=(batch,))
            for session, batch in zip(sessions, batches, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [session.version for session in sessions] == [2, 2]
        one.driver.settle()


class LowTokens(Task):
    """Small token ids are good: a tiny random model can learn that."""

    name = "low"
    levels = 3
    max_tokens = 6

    def problem(self, random: object, level: int) -> Problem:
        return Problem(({"role": "user", "content": f"{level} {random.random():.6f}"},))  # type: ignore[attr-defined]

    def score(self, completion: str, metadata: object) -> float:
        return sum(letter in "abcdefgh" for letter in completion) / max(1, len(completion))


def run_loop(one: School, session: Session, **options: object) -> list[StepReport]:
    sampler = TaskSampler(one.engine, one.rollouts, Rewards(), LowTokens())
    settings = {"steps": 4, "prompts_per_step": 3, "group_size": 4, "eval_problems": 4, **options}
    return Loop(session, sampler, LoopConfig(**settings)).run()  # type: ignore[arg-type]


@pytest.mark.long
def test_the_loop_goes_on_after_a_restart_as_if_nothing_had_happened(tmp_path: Path) -> None:
    with school() as one:
        session = one.session(folder=tmp_path / "whole")
        news = run_loop(one, session, steps=6)
        whole = session.trainer.state()
        assert [each.step for each in news] == [0, 1, 2, 3, 4, 5, 6]
        assert news[0].held_out is not None
        assert news[-1].held_out is not None
    for steps in (2, 3, 6):
        with school() as one:
            session = one.session(folder=tmp_path / "cut")
            run_loop(one, session, steps=steps)
            cut = session.trainer.state()
            assert session.version == 1 + steps
    assert all(np.array_equal(array, cut[name]) for name, array in whole.items())


@pytest.mark.slow
def test_the_loop_goes_on_after_a_restart_between_alarms(tmp_path: Path) -> None:
    options = {"learning_rate": 1e-2, "alarms": Alarms(kl=0.2, reward_drop=0.1)}
    with school() as one:
        session = one.session(folder=tmp_path / "whole", **options)
        alarms = [each.report.rolled_back for each in run_loop(one, session, steps=12)[1:] if each.report is not None]
        whole, best = session.trainer.state(), session.monitor.best_reward
    assert any("KL" in alarm for alarm in alarms)
    for steps in range(1, 13):
        with school() as one:
            session = one.session(folder=tmp_path / "cut", **options)
            report = run_loop(one, session, steps=steps)[-1].report
            assert report is not None
            assert report.rolled_back == alarms[steps - 1]
            cut = session.trainer.state()
    assert session.monitor.best_reward == best > -np.inf
    assert all(np.array_equal(array, cut[name]) for name, array in whole.items())


def test_a_prompt_that_is_too_long_is_skipped_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"Say {word}.", "answer": word} for word in ("ape", "bat", "cow", "dog", "elk", "fox")]
    rows[2]["prompt"] = "Say cow, " * 2000
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with school() as one:
        task = Rows(str(path), 0.2)
        rewards = parse_components(["length=3"], task)
        sampler = TaskSampler(one.engine, one.rollouts, Rewards(), task, rewards)
        config = LoopConfig(steps=2, prompts_per_step=4, group_size=2, eval_problems=1, answer_tokens=4)
        told: list[StepReport] = []
        reports = Loop(one.session(), sampler, config, on_step=told.append).run()
    assert (told, len(told)) == (reports, 3), "each is told as it comes"
    assert reports[-1].flat()["skipped_problems"] == 1
    named = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert len(named) == 1
    assert "questions.jsonl, line 3" in named[0]
    assert "tokens" in named[0]


class Sometimes(LowTokens):
    """Every other problem gives all answers the same reward."""

    def score(self, completion: str, metadata: object) -> float:
        return float(sum(map(ord, completion)) % 7) if metadata["differs"] else 0.5  # type: ignore[index]

    def problem(self, random: object, level: int) -> Problem:
        asked = super().problem(random, level)
        return Problem(asked.messages, {"differs": int(asked.messages[0]["content"][-1]) % 2 == 0})


def test_problems_whose_answers_teach_nothing_give_way_to_others() -> None:
    with school() as one:
        for rounds in (0, 6):
            sampler = TaskSampler(one.engine, one.rollouts, Rewards(), Sometimes())
            config = LoopConfig(
                steps=2, prompts_per_step=4, group_size=4, eval_problems=1, top_p=0.9, top_k=50, dynamic_sampling=rounds
            )
            _, *reports = Loop(one.session(f"policy-{rounds}"), sampler, config).run()
            flat = [report.report.outcome.metrics["flat_trajectories"] for report in reports if report.report]
            again = [report.flat()["resampled_problems"] for report in reports]
            if rounds:
                assert flat == [0.0, 0.0]
                assert sum(again) > 0
            else:
                assert sum(flat) > 0
                assert again == [0, 0]
            *_, drawn = one.ledger.records()
            assert drawn.policy == f"policy-{rounds}"


@pytest.mark.long
def test_placebos_and_levels() -> None:
    with school() as one:
        still = one.session("still", learning_rate=0.0)
        before = still.trainer.state()
        news = run_loop(one, still)
        assert news[0].held_out == news[-1].held_out
        after = still.trainer.state()
        assert all(np.array_equal(before[name], after[name]) for name in before if name.startswith("parameters."))
        harder = one.session("harder")
        levels = [each.level for each in run_loop(one, harder, steps=12, raise_level_at=0.0)]
        assert levels[-1] == 3
        run_loop(one, one.session("shuffled"), shuffle_rewards=True)
    for wrong in ({"steps": 0}, {"group_size": 1}, {"temperature": 0.0}):
        with pytest.raises(ConfigError):
            LoopConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_learns_from_its_own_answers_gets_better() -> None:
    with school() as one:
        session = one.session(learning_rate=5e-3)
        news = run_loop(one, session, steps=25, prompts_per_step=4, group_size=8, eval_problems=16)
        rewards = [each.reward for each in news[1:]]
        assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1


@pytest.mark.parametrize("cuts", [{"top_p": 0.5}, {"top_k": 3}, {"repetition_penalty": 1.5}, {"logit_bias": {5: 4.0}}])
def test_cuts_and_penalties_do_not_look_like_another_policy(cuts: dict[str, object]) -> None:
    with school() as one:
        session = one.session(learning_rate=1e-5)
        sampling = SamplingParams(temperature=0.9, max_tokens=8, n=4, ignore_eos=True, **cuts)  # type: ignore[arg-type]
        groups = one.rollouts.sample(PROMPTS, sampling, adapter="policy", seed=1)
        trajectories = [
            Trajectory.recorded(record, float(place), str(number))
            for number, group in enumerate(groups)
            for place, record in enumerate(group)
        ]
        metrics = session.update(trajectories).outcome.metrics
        assert metrics["max_logprob_gap"] < 1e-4
        assert metrics["clip_fraction"] == 0


def test_tokens_that_a_grammar_left_no_choice_of_are_not_learnt_from() -> None:
    with school() as one:
        session = one.session()
        sampling = SamplingParams(temperature=1.0, max_tokens=20, n=4, grammar='start: "ab" ("c"|"d") "ef" /[a-z]{2}/')
        groups = one.rollouts.sample(PROMPTS, sampling, adapter="policy", seed=3)
        records = [record for group in groups for record in group]
        for record in records:
            assert record.mask is not None
            assert record.mask[:5] == (False, False, True, False, False)
            assert record.mask[5]
            assert not record.mask[-1], "it may only end"
            assert record.sampled == sum(record.mask) < len(record.completion_ids)
            assert record.cut(3).mask == record.mask[:3]
        learnt = [
            Trajectory.recorded(record, float(place), str(number))
            for number, group in enumerate(groups)
            for place, record in enumerate(group)
        ]
        metrics = session.update(learnt).outcome.metrics
        assert metrics["tokens"] == sum(record.sampled for record in records)
        assert metrics["max_logprob_gap"] < 1e-4
        sent = Trajectory(records[0].prompt_ids, records[0].completion_ids, 1.0, request_id=records[0].id)
        one.ledger.check(sent)
        assert sent.mask == records[0].mask
        free = one.rollouts.sample(PROMPTS[:1], SamplingParams(max_tokens=4), adapter="policy")[0][0]
        assert free.mask is None


def test_an_alarm_at_once_leaves_what_is_served() -> None:
    with school() as one:
        session = one.session(alarms=Alarms(entropy=100.0))
        before = session.trainer.state()
        report = session.update(one.trajectories())
        assert "entropy" in report.rolled_back
        assert (session.version, session.trainer.updates) == (1, 0)
        assert all(np.array_equal(array, session.trainer.state()[name]) for name, array in before.items())


@pytest.mark.parametrize("options", [{}, {"resample": False}])
def test_a_rollout_that_a_pause_aborts_is_drawn_again_or_an_error(options: dict[str, bool]) -> None:
    """What was aborted is no answer: nothing of it is kept, and nobody learns from it."""
    sampling = SamplingParams(temperature=0.9, max_tokens=60, n=3, ignore_eos=True)
    with school() as one:
        one.session()
        whole = one.rollouts.sample(PROMPTS, sampling, adapter="policy", seed=3)
        kept = len(one.ledger)
        found: list[list[list[Record]]] = []
        errors: list[UnavailableError] = []

        def draw() -> None:
            try:
                found.append(one.rollouts.sample(PROMPTS, sampling, adapter="policy", seed=3, **options))
            except UnavailableError as error:
                errors.append(error)

        thread = threading.Thread(target=draw)
        thread.start()
        while not any(row.tokens for row in list(one.engine._parts.base.live.rows())):
            time.sleep(0.001)
        assert one.engine.pause("abort", 10)
        assert len(one.ledger) == kept
        time.sleep(0.1)
        assert bool(errors) == bool(options)
        one.engine.resume()
        thread.join(30)
        if not options:
            answers = [[record.completion_ids for record in group] for group in found[0]]
            assert answers == [[record.completion_ids for record in group] for group in whole]
        else:
            assert "aborted by a pause" in errors[0].message
        one.driver.settle()


def test_updates_are_made_while_requests_are_paused() -> None:
    with school() as one:
        session = one.session()
        trajectories = one.trajectories()
        assert one.engine.pause("keep", 10)
        assert session.update(trajectories).published
        one.engine.resume()
        one.driver.settle()


@pytest.mark.slow
def test_the_embedded_models_rollouts_are_the_trainers_numbers(own_cache: None) -> None:
    """From cached prompts too, and again after a publish: within 1e-4 in float32."""
    with driver_of(lambda: load(None, name="embedded")) as driver:
        one = School(driver, driver.engine.model)
        session = one.session(learning_rate=1e-4)
        prompts = [
            Prompts(one.model.tokenizer).chat(Conversation([{"role": "user", "content": text}])).tokens
            for text in ("Name a river in one word.", "Say hello.")
        ]
        sampling = SamplingParams(temperature=0.8, max_tokens=6, n=3)
        for version in (1, 2):
            for _ in range(2):
                groups = one.rollouts.sample(prompts, sampling, adapter="policy", seed=version)
            trajectories = [
                Trajectory.recorded(record, float(place), str(number))
                for number, group in enumerate(groups)
                for place, record in enumerate(group)
            ]
            assert {each.version for each in trajectories} == {version}
            report = session.update(trajectories)
            assert report.outcome.metrics["max_logprob_gap"] < 1e-4
        assert driver.engine.metrics.prefix.hit_tokens > 0
