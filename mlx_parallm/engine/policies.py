"""Which rows hold which adapter version, and which of them follow its name to a newer one. The engine thread's.

A row keeps the version that it began with. One that follows goes on with the newest from its next token; what it has
computed by then stays, so its keys and values are of several versions, and the prefix cache keeps none of them.
"""

from collections.abc import Callable
from typing import Any

from mlx_parallm.engine.compute.runner import Runner
from mlx_parallm.engine.live_requests import LiveRequests
from mlx_parallm.engine.rows import Job, Row
from mlx_parallm.engine.scheduler import Scheduler
from mlx_parallm.lora.registry import Registry, Version


class Policies:
    def __init__(
        self,
        registry: Registry,
        live: LiveRequests,
        scheduler: Scheduler,
        runner: Runner,
        identify: Callable[[Job], None],  # names the blocks of a prompt anew
    ) -> None:
        self.registry = registry
        self._live = live
        self._scheduler = scheduler
        self._runner = runner
        self._identify = identify
        self._stale = False  # a row may have to move
        self._seen = 0  # the registry's changes that rows were moved for

    def take(self, rows: list[Row]) -> None:
        """Rows of a new request."""
        version = rows[0].adapter
        for row in rows:
            row.take_adapter(version)
            if version is not None:
                self.registry.hold(version)
        self.registry.count_request(version)
        self._stale |= rows[0].follows

    def release(self, row: Row) -> None:
        """A row has ended."""
        for (first, version), end in zip(
            row.policies, [*(first for first, _ in row.policies[1:]), len(row.tokens)], strict=True
        ):
            self.registry.count_tokens(version, max(0, end - first))
        if row.adapter is not None:
            self.registry.release(row.adapter)

    def follow(self) -> None:
        """Moves rows that follow to what their adapter's name means now, as far as there are places for it."""
        if not self._stale and self._seen == self.registry.changes:
            return
        self._stale = False
        self._seen = self.registry.changes
        movers: dict[Version, list[Row]] = {}
        for row in self._live.rows():
            if row.follows and row.adapter is not None and (newest := self.registry.newest(row.adapter)) != row.adapter:
                movers.setdefault(newest, []).append(row)
        waiting = {row for job in self._scheduler.waiting for row in job.rows}
        for newest, rows in movers.items():
            begun = {row for row in rows if row not in waiting}
            have_place = self._have_place(begun, newest)
            for row in rows:
                if have_place or row not in begun:
                    self._move(row, newest)
            self._stale |= not have_place  # at a later turn, when others have ended

    def _have_place(self, movers: set[Row], version: Version) -> bool:
        partial = self._scheduler.partial
        begun = [*self._scheduler.running, *(partial.rows if partial else ())]
        used: set[Any] = {version if row in movers else row.adapter for row in begun}
        return len(used - {None}) <= self._scheduler.limits.max_adapters

    def _move(self, row: Row, newest: Version) -> None:
        old = row.adapter
        self.registry.hold(newest)
        row.take_adapter(newest)
        self.registry.release(old)
        self._runner.change_adapter(row)
        job = next((job for job in self._scheduler.jobs() if row in job.rows), None)
        if job is None:
            return
        job.chain = None
        if job.staged is None and all(other.adapter is newest for other in job.rows):
            self._scheduler.release(job)
            self._identify(job)
