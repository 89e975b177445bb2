"""The built-in loop: sample problems, have the current policy answer, score, update, and evaluate on held-out ones.

How it departs from the papers: rollouts come from the engine that serves, so what was sampled and its log-probabilities
are the sampler's own; one update per batch by default, so every batch is on-policy; groups without a difference are
skipped. All randomness comes from the seed and the step's number, so a run that was killed goes on as it would have.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.config.train_config import LoopConfig
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ConfigError, ContextLengthError
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.text.detokenize import Vocabulary
from mlx_parallm.text.prompts import Conversation, Prompts
from mlx_parallm.training.rl.records import Record
from mlx_parallm.training.rl.rollouts import RolloutSource
from mlx_parallm.training.rl.session import Session
from mlx_parallm.training.rl.totals import Report
from mlx_parallm.training.rl.trajectories import Trajectory
from mlx_parallm.training.tasks.built_in import Problem, Task
from mlx_parallm.training.tasks.components import Component
from mlx_parallm.training.tasks.problems import ProblemSource
from mlx_parallm.training.tasks.scorers import Item, Rewards

log = logging.getLogger(__name__)

CURRICULUM_WINDOW = 5  # steps whose success decides about the level


@dataclass(slots=True)
class StepReport:
    """How a step went."""

    step: int
    reward: float = 0.0
    level: int = 1
    rollout_seconds: float = 0.0
    rollout_tokens: int = 0
    update_seconds: float = 0.0
    report: Report | None = None
    held_out: float | None = None
    samples: list[str] = field(default_factory=list)
    components: Mapping[str, float] = field(default_factory=dict)  # the mean of each part of the reward
    held_out_components: Mapping[str, float] = field(default_factory=dict)
    skipped_problems: int = 0  # whose prompts are too long, so far
    resampled_problems: int = 0  # sampled in the place of those whose completions all got the same reward

    def parts(self) -> list[str]:
        """Returns the parts of a line in the terminal."""
        parts: list[str] = []
        if self.report is not None:
            metrics = self.report.outcome.metrics
            rate = self.rollout_tokens / max(self.rollout_seconds, 1e-6)
            parts += [
                f"reward [bold]{self.reward:.3f}[/]",
                *(f"{name} {value:.3f}" for name, value in self.components.items()),
                *([f"KL {metrics['kl']:.3f}"] if "kl" in metrics else []),
                f"entropy {metrics.get('entropy', 0.0):.2f}",
                f"{rate:.0f} tok/s",
                f"{self.rollout_seconds:.1f} + {self.update_seconds:.1f} s",
                f"v{self.report.version}",
            ]
            if self.report.rolled_back:
                parts.append(f"[red]rolled back: {self.report.rolled_back}[/]")
            elif self.report.outcome.reason:
                parts.append(f"[yellow]refused: {self.report.outcome.reason}[/]")
        if self.held_out is not None:
            parts.append(f"held out [bold green]{self.held_out:.3f}[/]")
        return parts

    def flat(self) -> dict[str, Any]:
        """Returns the values for a line of JSON."""
        entry: dict[str, Any] = {
            "step": self.step,
            "reward": self.reward,
            "level": self.level,
            "rollout_seconds": self.rollout_seconds,
            "rollout_tokens": self.rollout_tokens,
            "update_seconds": self.update_seconds,
            "held_out": self.held_out,
            "skipped_problems": self.skipped_problems,
            "resampled_problems": self.resampled_problems,
        }
        entry |= {f"reward/{name}": value for name, value in self.components.items()}
        entry |= {f"held_out/{name}": value for name, value in self.held_out_components.items()}
        if self.report is not None:
            entry |= {
                "policy_version": self.report.version,
                "published": self.report.published,
                "refused": self.report.outcome.reason or None,
                "rolled_back": self.report.rolled_back or None,
                **self.report.outcome.metrics,
            }
        return entry


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """`score`: None where a part of the reward could not be had. `parts`: of the reward, by name, before weights."""

    record: Record
    score: float | None
    parts: Mapping[str, float | None]


Groups = Sequence[Sequence[ScoredCompletion]]


class TaskSampler:
    """Puts problems to a policy and scores its completions: by the task, or by components of a reward."""

    def __init__(
        self,
        engine: Engine,
        rollouts: RolloutSource,
        rewards: Rewards,
        task: Task,
        components: Sequence[Component] = (),
    ) -> None:
        self.task = task
        self._engine = engine
        self._components = components
        self._rollouts = rollouts
        self._rewards = rewards
        self._prompts = Prompts(engine.model.tokenizer)
        self._vocabulary = Vocabulary(engine.model.tokenizer)
        rewards.add(task.name, task.scores)
        for one in components:
            rewards.add(_scorer(one), one.scores)

    def tokens(self, problem: Problem) -> list[int]:
        return self._prompts.chat(Conversation([dict(message) for message in problem.messages])).tokens

    def misfit(self, problem: Problem, completions: int) -> str:
        """Returns why so many completions to a problem can't be had: its prompt is too long. Empty: they can."""
        tokens = self.tokens(problem)
        try:
            if len(tokens) >= self._engine.model.context_length:
                raise ContextLengthError.of(self._engine.model.context_length, len(tokens))
            self._rollouts.check_prompt(tokens, completions)
        except ContextLengthError as error:
            return error.message
        return ""

    def sample(
        self, problems: Sequence[Problem], sampling: SamplingParams, adapter: str | None, seed: int | None, salt: str
    ) -> list[list[ScoredCompletion]]:
        """Returns, for each problem, its completions with their scores."""
        sampled = self._rollouts.sample(
            [self.tokens(problem) for problem in problems], sampling, adapter=adapter, seed=seed, salt=salt
        )
        items = [
            Item(
                prompt=problem.messages[-1]["content"],
                completion=self.text(record),
                metadata={**problem.metadata, "finish_reason": record.finish_reason},
                tokens=record.prompt_ids + record.completion_ids,
            )
            for problem, records in zip(problems, sampled, strict=True)
            for record in records
        ]
        scored = iter(self._scored([record for records in sampled for record in records], items))
        return [[next(scored) for _ in records] for records in sampled]

    def _scored(self, records: Sequence[Record], items: Sequence[Item]) -> list[ScoredCompletion]:
        if not self._components:
            scores = self._rewards.score(self.task.name, items)
            return [ScoredCompletion(record, score, {}) for record, score in zip(records, scores, strict=True)]
        columns = {one.name: self._rewards.score(_scorer(one), items) for one in self._components}
        completions = []
        for record, row in zip(records, zip(*columns.values(), strict=True), strict=True):
            known = [score for score in row if score is not None]
            weighted = (one.weight * score for one, score in zip(self._components, known, strict=False))
            score = sum(weighted) if len(known) == len(row) else None
            completions.append(ScoredCompletion(record, score, dict(zip(columns, row, strict=True))))
        return completions

    def text(self, record: Record) -> str:
        return self._vocabulary.decode(record.completion_ids, skip_special=True)


def _scorer(component: Component) -> str:
    """Returns what it is called among the scoring functions."""
    return f"reward/{component.name}"


def _mean(scores: Iterable[float | None]) -> float:
    known = [score for score in scores if score is not None]
    return sum(known) / max(1, len(known))


def _differs(group: Sequence[ScoredCompletion]) -> bool:
    """Whether a group can teach anything."""
    return len({one.score for one in group if one.score is not None}) > 1


def _means(groups: Groups) -> dict[str, float]:
    """Returns the mean of each part of the reward; an episode that has failed may not have them all."""
    completions = [one for group in groups for one in group]
    names = dict.fromkeys(name for one in completions for name in one.parts)
    return {name: _mean(one.parts.get(name) for one in completions) for name in names}


class Loop:
    def __init__(
        self,
        session: Session,
        sampler: TaskSampler,
        config: LoopConfig,
        on_step: Callable[[StepReport], None] = lambda report: None,
    ) -> None:
        self._session = session
        self._sampler = sampler
        self._config = config
        self._on_step = on_step
        self._stopping = threading.Event()
        task = sampler.task
        self._length = config.answer_tokens or task.max_tokens
        self._sampling = SamplingParams(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=self._length,
            n=config.group_size,
        )
        self._problems = ProblemSource(task, lambda problem: sampler.misfit(problem, config.group_size))
        kept_apart = task.held_out()
        self._held_out = (
            self._problems.sample(random.Random(f"held-out {task.name}"), config.eval_problems, config.level, ())
            if kept_apart is None
            else self._problems.fitting(kept_apart)[: config.eval_problems]
        )
        self._never_learnt = self._held_out if kept_apart is None else kept_apart
        self._level = config.level
        self._successes: list[float] = []
        self._any_scored = False  # of the completions of this process

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> list[StepReport]:
        """All steps that are left."""
        session = self._session
        config = self._config
        begin = int(session.extra.get("step", 0))
        self._level = int(session.extra.get("level", config.level))
        self._successes = list(session.extra.get("successes", []))
        reports: list[StepReport] = []
        if not begin:
            self._report(reports, self._evaluated(StepReport(step=0, level=self._level)))
        for step in range(begin + 1, config.steps + 1):
            if self._stopping.is_set():
                break
            report = self._step(step)
            if not self._any_scored:
                raise ConfigError(
                    f"no completion got a reward up to the end of step {step}, so nothing can be learnt: the warnings "
                    "before this line say why"
                )
            if step == config.steps or (config.eval_every and step % config.eval_every == 0):
                self._evaluated(report)
            self._report(reports, report)
        return reports

    def _report(self, reports: list[StepReport], report: StepReport) -> None:
        reports.append(report)
        self._on_step(report)

    def _step(self, step: int) -> StepReport:
        """Samples, scores and updates; decides about the level of the next step."""
        config = self._config
        session = self._session
        level = self._level
        chance = random.Random(f"{config.seed} {step}")
        problems = self._problems.sample(chance, config.prompts_per_step, level, self._never_learnt)
        begun = time.perf_counter()
        # A salt for each step: nothing is reused from before, so a step is the same after a restart.
        completions = self._sample(problems, self._sampling, chance.getrandbits(31), f"step {step}")
        learnt, others = self._resampled(step, chance, problems, completions)
        sampled = time.perf_counter()
        trajectories = self._trajectories(step, learnt, chance)
        completions = [*completions, *others]
        reward = _mean(one.score for group in completions for one in group)
        self._level = self._next_level(level, reward)
        # With the update's checkpoint: where to go on from.
        notes = {"step": step, "level": self._level, "successes": self._successes[-CURRICULUM_WINDOW:]}
        harder = self._level != level
        update = session.update(trajectories, extra=notes, new_level=harder) if trajectories else None
        if update is None:
            session.extra = notes
        records = [one.record for group in completions for one in group]
        return StepReport(
            step=step,
            reward=reward,
            level=level,
            rollout_seconds=sampled - begun,
            rollout_tokens=sum(record.sampled for record in records),
            update_seconds=time.perf_counter() - sampled,
            report=update,
            samples=[self._sampler.text(record) for record in records[:2]],
            components=_means(completions),
            skipped_problems=self._problems.skipped,
            resampled_problems=len(others),
        )

    def _resampled(
        self, step: int, chance: random.Random, problems: Sequence[Problem], completions: Groups
    ) -> tuple[Groups, Groups]:
        """The groups to learn from: those whose completions all got one reward give way to others, a few times. And all
        groups that were sampled for that."""
        learnt = list(completions)
        others = list[Sequence[ScoredCompletion]]()
        asked = list(problems)
        for number in range(self._config.dynamic_sampling):
            flat = [place for place, group in enumerate(learnt) if not _differs(group)]
            if not flat:
                break
            again = self._problems.sample_some(chance, len(flat), self._level, [*self._never_learnt, *asked])
            asked += again
            sampled = self._sample(again, self._sampling, chance.getrandbits(31), f"step {step} again {number}")
            for place, group in zip(flat, sampled, strict=False):
                learnt[place] = group
            others += sampled
        return learnt, others

    def _trajectories(self, step: int, completions: Groups, chance: random.Random) -> list[Trajectory]:
        trajectories = []
        for number, group in enumerate(completions):
            records = [one.record for one in group if one.score is not None]
            scores = [one.score for one in group if one.score is not None]
            if self._config.shuffle_rewards:
                chance.shuffle(scores)
            trajectories += [
                Trajectory.recorded(record, score, f"{step}-{number}")
                for record, score in zip(records, scores, strict=True)
            ]
        return trajectories

    def evaluate(self) -> float:
        """The mean score of greedy completions to problems that are never learnt from."""
        return _mean(one.score for group in self._held_out_completions() for one in group)

    def _evaluated(self, report: StepReport) -> StepReport:
        """Adds the scores of held-out problems to a report."""
        completions = self._held_out_completions()
        report.held_out = _mean(one.score for group in completions for one in group)
        report.held_out_components = _means(completions)
        return report

    def _held_out_completions(self) -> Groups:
        sampling = SamplingParams(temperature=0.0, max_tokens=self._length)
        return self._sample(self._held_out, sampling, None, "held out")

    def _sample(self, problems: Sequence[Problem], sampling: SamplingParams, seed: int | None, salt: str) -> Groups:
        groups: Groups = self._sampler.sample(problems, sampling, self._session.name, seed, salt)
        self._any_scored |= any(one.score is not None for group in groups for one in group)
        return groups

    def _next_level(self, level: int, success: float) -> int:
        threshold = self._config.raise_level_at
        self._successes.append(success)
        recent = self._successes[-CURRICULUM_WINDOW:]
        if threshold is None or level >= self._sampler.task.levels or len(recent) < CURRICULUM_WINDOW:
            return level
        if sum(recent) / len(recent) < threshold:
            return level
        self._successes.clear()
        log.info("problems get harder: level %d", level + 1)
        return level + 1
