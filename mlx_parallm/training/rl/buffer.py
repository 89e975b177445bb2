"""The buffer of a session: groups of trajectories that wait to be learnt from. Any thread; no MLX."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.training.rl.recent import RecentGroups
from mlx_parallm.training.rl.trajectories import Trajectory

T = TypeVar("T")


@dataclass(slots=True)
class BufferCounts:
    collected: int = 0
    dropped: int = 0  # to make room
    stale: int = 0  # too old, or of a version that a rollback has left
    flat: int = 0  # of groups whose rewards are all the same: nothing to learn

    def restore(self, state: Mapping[str, int]) -> None:
        for name, value in state.items():
            if hasattr(self, name):
                setattr(self, name, int(value))


@dataclass(frozen=True, slots=True)
class FrozenBuffer(Generic[T]):
    """A buffer at one moment, and what was done in that moment."""

    waiting: list[Trajectory]
    counts: dict[str, int]
    result: T


class Buffer:
    """Groups that wait to be learnt from, the oldest first; a bounded number of trajectories."""

    def __init__(self, max_trajectories: int, max_staleness: int | None = None) -> None:
        self._max = max_trajectories
        self._max_staleness = max_staleness
        self._groups: OrderedDict[str, list[Trajectory]] = OrderedDict()
        self._changed = threading.Condition()
        self._size = 0
        self._woken = 0
        self.counts = BufferCounts()
        self.recent = RecentGroups()
        self.on_add: Callable[[Sequence[Trajectory]], None] = lambda trajectories: None  # may raise: none is taken then

    def __len__(self) -> int:
        return self._size

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Takes all of them, or none: a group must fit in the buffer."""
        with self._changed:
            new = Counter(one.group_id for one in trajectories if not self._has(one))
            for name, count in new.items():
                total = len(self._groups.get(name, ())) + count
                if total > self._max:
                    raise InvalidRequestError(
                        f"group {name!r} would have {total} trajectories, and the "
                        f"buffer holds {self._max}: use another group_id, or a larger --trajectory-buffer-size",
                        param="group_id",
                    )
            self.on_add(trajectories)
            self._put(trajectories)
            self.counts.collected += len(trajectories)
            self.recent.add(trajectories)
            self._make_room({one.group_id for one in trajectories})
            self._changed.notify_all()

    def count(self, collected: int = 0, flat: int = 0, stale: int = 0) -> None:
        """Trajectories that an update took from elsewhere, and those that it could not learn from."""
        with self._changed:
            self.counts.collected += collected
            self.counts.flat += flat
            self.counts.stale += stale

    def _make_room(self, keep: Collection[str] = ()) -> None:
        """Drops the oldest groups, those to keep last."""
        while self._size > self._max:
            oldest = next((name for name in self._groups if name not in keep), next(iter(self._groups)))
            dropped = self._groups.pop(oldest)
            self._size -= len(dropped)
            self.counts.dropped += len(dropped)

    def _has(self, trajectory: Trajectory) -> bool:
        """Whether another reward for the same completion waits in its group."""
        group = self._groups.get(trajectory.group_id, ())
        return trajectory.source is not None and any(one.source == trajectory.source for one in group)

    def _put(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            group = self._groups.setdefault(trajectory.group_id, [])
            if self._has(trajectory):
                group[:] = [one for one in group if one.source != trajectory.source]  # the later reward counts
                self._size -= 1
            group.append(trajectory)
            self._size += 1

    def put_back(self, trajectories: Sequence[Trajectory]) -> None:
        """Those that were taken for an update that did not come about: the first to be taken again."""
        with self._changed:
            waiting = [one for group in self._groups.values() for one in group]
            self._groups.clear()
            self._size = 0
            self._put([*trajectories, *waiting])
            self._make_room()
            self._changed.notify_all()

    def restore(self, trajectories: Sequence[Trajectory], counts: Mapping[str, int], later: int) -> None:
        """Takes what an earlier process has kept, without `on_add`. The last ones, `later`, were not counted yet."""
        with self._changed:
            self.counts.restore(counts)
            self.counts.collected += later
            self._put(trajectories)
            self._make_room()
            self._changed.notify_all()

    def freeze(self, work: Callable[[], T]) -> FrozenBuffer[T]:
        """Returns what waits, the counts, and what `work` returns, with nothing added in between."""
        with self._changed:
            waiting = [one for group in self._groups.values() for one in group]
            return FrozenBuffer(waiting, asdict(self.counts), work())

    def status(self) -> dict[str, int]:
        """Returns the counters that clients see."""
        return {
            "trajectories_collected": self.counts.collected,
            "trajectories_buffered": len(self),
            "trajectories_ready": self.ready(),
            "trajectories_flat": self.counts.flat,
            "trajectories_stale": self.counts.stale,
            "trajectories_dropped": self.counts.dropped,
        }

    def ready(self) -> int:
        """Trajectories that have others to be compared with."""
        with self._changed:
            return sum(len(group) for group in self._groups.values() if _comparable(group))

    def wait(self, count: int, timeout: float) -> bool:
        """Returns whether so many are ready, within that time, or once somebody calls `wake`."""
        with self._changed:
            woken = self._woken
            self._changed.wait_for(lambda: self.ready() >= count or self._woken != woken, timeout)
            return self.ready() >= count

    def take(self, at_most: int, version: int, abandoned: Collection[int] = ()) -> list[Trajectory]:
        """Whole groups, about so many trajectories; those too old for this version, and those of versions that were
        abandoned, are dropped and counted."""
        taken: list[Trajectory] = []
        oldest = None if self._max_staleness is None else version - self._max_staleness
        with self._changed:
            self._drop(lambda one: one.comes_from(abandoned) or (oldest is not None and one.version < oldest))
            for name, group in list(self._groups.items()):
                if _comparable(group) and len(taken) < at_most:
                    taken += self._groups.pop(name)
                    self._size -= len(group)
        return taken

    def drop_abandoned(self, abandoned: Collection[int]) -> None:
        """Those that versions have sampled which a rollback has left."""
        with self._changed:
            self._drop(lambda one: one.comes_from(abandoned))

    def without_abandoned(self, trajectories: Sequence[Trajectory], abandoned: Collection[int]) -> list[Trajectory]:
        """The same for an update that is handed these; where none is left, an error says so."""
        kept = [one for one in trajectories if not one.comes_from(abandoned)]
        self.count(stale=len(trajectories) - len(kept))
        if trajectories and not kept:
            raise InvalidRequestError(
                "all of these trajectories are of versions that a rollback has left: sample new ones",
                param="trajectories",
            )
        return kept

    def _drop(self, stale: Callable[[Trajectory], bool]) -> None:
        for name, group in list(self._groups.items()):
            fresh = [one for one in group if not stale(one)]
            self.counts.stale += len(group) - len(fresh)
            self._size -= len(group) - len(fresh)
            group[:] = fresh
            if not fresh:
                del self._groups[name]

    def wake(self) -> None:
        """Ends the waiting of all who wait now."""
        with self._changed:
            self._woken += 1
            self._changed.notify_all()


def _comparable(group: Sequence[Trajectory]) -> bool:
    return len(group) > 1 or any(one.advantage is not None for one in group)
