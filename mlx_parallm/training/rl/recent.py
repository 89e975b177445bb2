"""The groups of completions that came in last, for people to look at: a bounded number, each cut to a bounded length.

A session's buffer enters what it takes, and the session says what has become of it. Any thread; no MLX.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from mlx_parallm.policy_spans import within
from mlx_parallm.training.rl.trajectories import Trajectory
from mlx_parallm.types import RecentGroup, RecentSample

MAX_GROUPS = 48
MAX_SAMPLES = 16  # of a group
MAX_TOKENS = 512  # of a prompt, and of a completion


class RecentGroups:
    def __init__(self) -> None:
        self._groups: deque[RecentGroup] = deque(maxlen=MAX_GROUPS)  # the oldest first
        self._lock = threading.Lock()

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Completions that wait to be learnt from."""
        with self._lock:
            waiting = {group.group_id: group for group in self._groups if group.state == "waiting"}
            for one in trajectories:
                self._enter(waiting, one)

    def settle(self, trajectories: Sequence[Trajectory], updates: int, *, learnt: bool) -> None:
        """An update has taken these; those that it was handed without a buffer are entered now."""
        with self._lock:
            waiting = {group.group_id: group for group in self._groups if group.state == "waiting"}
            for one in trajectories:
                known = {sample.request_id for sample in _samples(waiting, one)}
                if one.request_id is None or one.request_id not in known:
                    self._enter(waiting, one)
            for name in {one.group_id for one in trajectories}:
                if name in waiting:
                    waiting[name].state = "learnt" if learnt else "refused"
                    waiting[name].updates = updates

    def latest(self, count: int) -> list[RecentGroup]:
        """The newest first."""
        with self._lock:
            groups = list(self._groups)[::-1][: max(0, count)]
            return [replace(group, samples=list(group.samples)) for group in groups]

    def _enter(self, waiting: dict[str, RecentGroup], trajectory: Trajectory) -> None:
        group = waiting.get(trajectory.group_id)
        if group is None:
            group = RecentGroup(
                group_id=trajectory.group_id,
                time=time.time(),
                prompt_ids=list(trajectory.prompt_ids[-MAX_TOKENS:]),
                samples=[],
            )
            waiting[trajectory.group_id] = group
            self._groups.append(group)
        name = trajectory.request_id
        group.samples[:] = [one for one in group.samples if name is None or one.request_id != name]  # a later reward
        if len(group.samples) < MAX_SAMPLES:
            group.samples.append(_sample(trajectory))


def _samples(groups: dict[str, RecentGroup], trajectory: Trajectory) -> Sequence[RecentSample]:
    group = groups.get(trajectory.group_id)
    return [] if group is None else group.samples


def _sample(trajectory: Trajectory) -> RecentSample:
    logprobs = trajectory.logprobs
    return RecentSample(
        request_id=trajectory.request_id,
        reward=trajectory.reward,
        completion_ids=list(trajectory.completion_ids[:MAX_TOKENS]),
        logprobs=None if logprobs is None else list(logprobs[:MAX_TOKENS]),
        policy_spans=within(trajectory.spans, MAX_TOKENS),
        length=len(trajectory.completion_ids),
    )
