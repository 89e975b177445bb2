"""Completions of the current policy, sampled by the engine like any request and taken from the ledger, not from text.

Blocks until all have ended: for threads of training, never the event loop.
"""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ConfigError, ParallmError, QueueFullError, RequestTimeoutError, UnavailableError
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.training.rl.records import ChoiceKey, Record
from mlx_parallm.training.storage.ledger import Ledger
from mlx_parallm.types import CompletionNames, Delta, Request

CHECK_SECONDS = 1.0  # between looks at whether the engine still runs
RETRY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class RolloutClient:
    """The client that completions are sampled for: they end with it, or with its time, and a full queue is an error."""

    owner: str = ""  # the name of its key
    timeout: float | None = None  # seconds for all completions together
    left: "Future[None] | None" = None  # done when it has left


class RolloutSource(Protocol):
    """Whoever samples answers: the engine of this process, or servers elsewhere (`remote`)."""

    def sample(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        adapter: str | None,
        seed: int | None = None,
        salt: str = "",
    ) -> list[list[Record]]: ...

    def check_prompt(self, prompt: list[int], completions: int) -> None:
        """Raises ContextLengthError where `sample` would: the prompt is too long for so many completions."""


class Rollouts:
    def __init__(self, engine: Engine, ledger: Ledger, max_rows: int) -> None:
        self._engine = engine
        self._ledger = ledger
        self._max_rows = max_rows

    def check_prompt(self, prompt: list[int], completions: int) -> None:
        self._engine.check_prompt(prompt, completions)

    def sample(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        adapter: str | None,
        seed: int | None = None,
        priority: int = 0,
        salt: str = "",
        label: str = "",
        resample: bool = True,
        client: RolloutClient | None = None,
    ) -> list[list[Record]]:
        """`sampling.n` completions to each prompt, handed in at one moment where the queue has room for them; those for
        a client some at a time.

        What a pause aborts is sampled again once the engine goes on; without `resample`, that is an error.
        """
        if not 1 <= sampling.n <= self._max_rows:
            raise ConfigError(f"completions to a prompt must be between 1 and {self._max_rows}, not {sampling.n}")
        label = label or f"rollout-{uuid.uuid4().hex[:12]}"
        samplings = {
            f"{label}-{number}": replace(sampling, seed=None if seed is None else seed + number)
            for number in range(len(prompts))
        }
        left = dict(zip(samplings, prompts, strict=True))
        records: dict[ChoiceKey, Record] = {}
        while left:
            waiting = _Waiting(dict.fromkeys(left, sampling.n), None if client is None else client.timeout)
            requests = [
                Request(
                    id=name,
                    prompt=list(prompt),
                    sampling=samplings[name],
                    priority=priority,
                    cache_salt=salt,
                    adapter=adapter,
                    record=True,
                    rollout=True,
                    names=CompletionNames(client=name),
                    owner="" if client is None else client.owner,
                )
                for name, prompt in left.items()
            ]
            records |= self._sampled(requests, waiting, client)
            if waiting.aborted and not resample:
                raise UnavailableError("the rollout was aborted by a pause: send it again")
            left = {name: prompt for name, prompt in left.items() if name in waiting.aborted}
        return [[records[ChoiceKey(name, index)] for index in range(sampling.n)] for name in samplings]

    def _sampled(
        self, requests: list[Request], waiting: "_Waiting", client: RolloutClient | None
    ) -> dict[ChoiceKey, Record]:
        names = [request.id for request in requests]
        self._ledger.listen(names, waiting.on_record)
        try:
            if client is None:
                self._submit(requests, waiting)
            else:
                if client.left is not None:
                    client.left.add_done_callback(lambda _: waiting.fail(UnavailableError("the client has left")))
                self._feed(requests, waiting)
            return waiting.wait(self._engine)
        except BaseException:
            for name in names:
                self._engine.cancel(name)
            raise
        finally:
            self._ledger.forget(names)

    def _submit(self, requests: list[Request], waiting: "_Waiting") -> None:
        room = len(requests)  # at one moment, if that is possible: then a run can be repeated exactly
        while requests:
            try:
                self._engine.submit_all(requests[:room], waiting.on_delta)
            except QueueFullError:
                room = max(1, room // 2)
                time.sleep(RETRY_SECONDS)
            else:
                requests = requests[room:]

    def _feed(self, requests: list[Request], waiting: "_Waiting") -> None:
        """Never more than a batch and its successors at a time: a client's rollout leaves the queue to others."""
        window = max(1, 2 * self._max_rows // requests[0].sampling.n)
        for number, request in enumerate(requests):
            waiting.wait_until_open(self._engine, number - window)
            while True:
                try:
                    self._engine.submit_all([request], waiting.on_delta)
                except QueueFullError:
                    if not number:
                        raise
                    waiting.sleep(RETRY_SECONDS)
                else:
                    break


class _Waiting:
    """Records as they come in, requests that were aborted, and the first error."""

    def __init__(self, choices: dict[str, int], timeout: float | None = None) -> None:
        """`choices`: that each request has."""
        self._missing = dict(choices)  # choices that have not ended, by request
        self._ended = 0  # requests
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._changed = threading.Condition()
        self._records: dict[ChoiceKey, Record] = {}
        self._error: ParallmError | None = None
        self.aborted: set[str] = set()

    def on_record(self, record: Record) -> None:
        with self._changed:
            if record.key not in self._records:
                self._missing[record.request] -= 1
                self._ended += not self._missing[record.request] and record.request not in self.aborted
            self._records[record.key] = record
            self._changed.notify_all()

    def on_delta(self, delta: Delta) -> None:
        if delta.error is not None or delta.finish_reason == "abort":
            with self._changed:
                if delta.error is None:
                    self._ended += delta.request_id not in self.aborted and bool(self._missing[delta.request_id])
                    self.aborted.add(delta.request_id)
                else:
                    self._error = delta.error
                self._changed.notify_all()

    def fail(self, error: ParallmError) -> None:
        """Ends the wait with an error: nobody waits any longer. May be called from any thread."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)
            self._check()

    def wait_until_open(self, engine: Engine, ended: int) -> None:
        """Waits until so many requests have ended."""
        if ended > 0:
            self._wait_for(engine, lambda: self._ended >= ended)

    def wait(self, engine: Engine) -> dict[ChoiceKey, Record]:
        """Those of requests that were not aborted, when all have ended. A pause may take any time."""
        self._wait_for(engine, lambda: self._ended == len(self._missing))
        with self._changed:
            return {key: record for key, record in self._records.items() if key.request not in self.aborted}

    def _wait_for(self, engine: Engine, condition: Callable[[], bool]) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: self._error is not None or condition(), self._patience()):
                if engine.failure is not None:
                    raise UnavailableError(f"the engine has died: {engine.failure}")
                self._check()
            self._check()

    def _patience(self) -> float:
        left = CHECK_SECONDS if self._deadline is None else self._deadline - time.monotonic()
        return max(0.0, min(CHECK_SECONDS, left))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise RequestTimeoutError(f"the rollout took longer than {self._timeout:g} seconds")
