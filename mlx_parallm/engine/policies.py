"""Adapters as the engine knows them: published and changed between two steps, held by rows, followed by some.

A row keeps the version that it began with. One that follows goes on with the newest from its next token; what it has
computed by then stays, so its keys and values are of several versions, and the prefix cache keeps none of them.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from mlx_parallm.engine.live_requests import LiveRequests
from mlx_parallm.engine.rows import Job, Row
from mlx_parallm.engine.runner import Runner
from mlx_parallm.engine.scheduler import Scheduler
from mlx_parallm.lora.registry import Registry, Route, Version
from mlx_parallm.lora.weights import Adapter, check_fit, check_name

T = TypeVar("T")


class BetweenSteps(Protocol):
    """Has the engine thread do something between two steps, and hands on what that gives or raises."""

    def __call__(self, change: Callable[[], T]) -> T: ...


class Policies:
    def __init__(
        self,
        registry: Registry,
        book: LiveRequests,
        scheduler: Scheduler,
        runner: Runner,
        *,
        identify: Callable[[Job], None],  # names the blocks of a prompt anew
        between_steps: BetweenSteps,
        max_rank: int,
        on_adapters: Callable[[float], None],  # what a change has cost the engine, in seconds
    ) -> None:
        self._between_steps = between_steps
        self._max_rank = max_rank
        self._on_adapters = on_adapters
        self.registry = registry
        self._live = book
        self._scheduler = scheduler
        self._runner = runner
        self._identify = identify
        self._stale = False  # a row may have to move

    # From any thread.

    def publish(
        self,
        name: str,
        adapter: Adapter,
        source: str,
        number: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Version:
        """Makes an adapter's weights what `name` means, for requests from now on."""
        check_name(name)
        check_fit(adapter, self.registry.targets, self._max_rank)
        packed = self.registry.pack(adapter)  # here, not on the engine thread

        def publish() -> Version:
            begun = time.perf_counter()
            version = self.registry.publish(name, packed, source, number, config)
            self._stale = True
            self._on_adapters(time.perf_counter() - begun)
            return version

        return self._between_steps(publish)

    def unload(self, name: str) -> None:
        self._between_steps(lambda: self.registry.unload(name))

    def rollback(self, name: str, number: int | None = None) -> Version:
        def rollback() -> Version:
            version = self.registry.rollback(name, number)
            self._stale = True
            return version

        return self._between_steps(rollback)

    def pin(self, name: str, number: int | None, pinned: bool) -> Version:
        return self._between_steps(lambda: self.registry.pin(name, number, pinned))

    def serve(self, routes: list[Route]) -> None:
        """What requests for the model's own name get from now on."""
        self._between_steps(lambda: self.registry.serve(routes))

    # The engine thread from here on.

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
        if not self._stale:
            return
        self._stale = False
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
        self._runner.moved(row)
        job = next((job for job in self._scheduler.jobs() if row in job.rows), None)
        if job is None:
            return
        job.chain = None
        if job.staged is None and all(other.adapter is newest for other in job.rows):
            self._scheduler.let_go(job)
            self._identify(job)
