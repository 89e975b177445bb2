"""The problems of a loop's steps: different ones, none that is held out, none whose prompt can't be answered.

The loop has one. What does not fit the model is left out, counted, and named in the log, once.
"""

import logging
import random
from collections.abc import Callable, Iterable, Sequence

from mlx_parallm.errors import ConfigError
from mlx_parallm.training.tasks.built_in import Problem, Task

log = logging.getLogger(__name__)

SHOWN = 60  # characters of a prompt in the log
TRIES = 100  # attempts for each problem that is wanted


class ProblemSource:
    def __init__(self, task: Task, misfit: Callable[[Problem], str]) -> None:
        """`misfit`: why a problem's prompt can't be answered; empty: it can."""
        self._task = task
        self._misfit = misfit
        self._fits: dict[object, bool] = {}  # by what is asked

    @property
    def skipped(self) -> int:
        """Different problems that were left out so far."""
        return list(self._fits.values()).count(False)

    def sample(self, chance: random.Random, count: int, level: int, without: Iterable[Problem]) -> list[Problem]:
        """So many different ones of a level."""
        problems = self.sample_some(chance, count, level, without)
        if len(problems) == count:
            return problems
        left_out = f"; {self.skipped} have prompts that are too long" if self.skipped else ""
        raise ConfigError(
            f"task {self._task.name} has not {count} different problems beside the held-out ones{left_out}"
        )

    def sample_some(self, chance: random.Random, count: int, level: int, without: Iterable[Problem]) -> list[Problem]:
        """The same; fewer where there are no more."""
        known = {problem.key for problem in without}
        problems: list[Problem] = []
        for _ in range(TRIES * count):
            problem = self._task.problem(chance, level)
            if problem.key not in known and self.fits(problem):
                problems.append(problem)
            known.add(problem.key)
            if len(problems) == count:
                break
        return problems

    def fitting(self, problems: Sequence[Problem]) -> list[Problem]:
        return [problem for problem in problems if self.fits(problem)]

    def fits(self, problem: Problem) -> bool:
        if problem.key not in self._fits:
            reason = self._misfit(problem)
            if reason:
                text = problem.messages[-1]["content"][:SHOWN]
                log.warning("%s is skipped (%r …): %s", problem.source or "a problem", text, reason)
            self._fits[problem.key] = not reason
        return self._fits[problem.key]
