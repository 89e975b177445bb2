"""Answers of the current policy, drawn by the engine like any request and taken from the ledger, not from text.

Blocks until all have ended: for threads of training, never the event loop.
"""

import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ConfigError, ParallmError, QueueFullError, UnavailableError
from mlx_parallm.training.trajectories import Ledger, Record
from mlx_parallm.types import Delta, Request, SamplingParams

PATIENCE = 3600.0  # seconds for all of them
RETRY_SECONDS = 0.05


class Rollouts:
    def __init__(self, engine: Engine, ledger: Ledger, max_rows: int) -> None:
        self._engine = engine
        self._ledger = ledger
        self._max_rows = max_rows

    def draw(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        adapter: str | None,
        seed: int | None = None,
        priority: int = 0,
        salt: str = "",
        label: str = "",
    ) -> list[list[Record]]:
        """`sampling.n` answers to each prompt, handed in at one moment where the queue has room for them."""
        if not 1 <= sampling.n <= self._max_rows:
            raise ConfigError(f"answers to a prompt must be between 1 and {self._max_rows}, not {sampling.n}")
        label = label or f"rollout-{uuid.uuid4().hex[:12]}"
        waiting = _Waiting(len(prompts) * sampling.n)
        requests = [
            Request(
                f"{label}-{number}",
                list(prompt),
                replace(sampling, seed=None if seed is None else seed + number),
                waiting.on_delta,
                priority=priority,
                cache_salt=salt,
                adapter=adapter,
                record=True,
                label=f"{label}-{number}",
            )
            for number, prompt in enumerate(prompts)
        ]
        names = [request.id for request in requests]
        self._ledger.listen(names, waiting.on_record)
        try:
            self._submit(requests)
            found = waiting.wait()
        except BaseException:
            for name in names:
                self._engine.cancel(name)
            raise
        finally:
            self._ledger.forget(names)
        return [[found[name, index] for index in range(sampling.n)] for name in names]

    def _submit(self, requests: list[Request]) -> None:
        room = len(requests)  # at one moment, if that is possible: then a run can be repeated exactly
        while requests:
            try:
                self._engine.submit_all(requests[:room])
            except QueueFullError:
                room = max(1, room // 2)
                time.sleep(RETRY_SECONDS)
            else:
                requests = requests[room:]


class _Waiting:
    """Records as they come in, and the first error."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._found: dict[tuple[str, int], Record] = {}
        self._error: ParallmError | None = None

    def on_record(self, record: Record) -> None:
        with self._changed:
            self._found[record.request, record.index] = record
            self._changed.notify_all()

    def on_delta(self, delta: Delta) -> None:
        if delta.error is not None or delta.finish_reason == "abort":
            with self._changed:
                self._error = delta.error or UnavailableError("the rollout was aborted")
                self._changed.notify_all()

    def wait(self) -> dict[tuple[str, int], Record]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._found) >= self._count or self._error is not None, PATIENCE)
            if self._error is not None:
                raise self._error
            if len(self._found) < self._count:
                raise UnavailableError("the engine has not answered in an hour")
            return self._found
