"""The way of a request into the engine: checked and counted on the caller's thread, queued on the engine's."""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlx_parallm.engine.delivery import Recording
from mlx_parallm.engine.live_requests import LiveRequests
from mlx_parallm.engine.pause import IdleState
from mlx_parallm.engine.policies import Policies
from mlx_parallm.engine.prefix_lookup import PrefixLookup, SsdTransfers
from mlx_parallm.engine.rows import Job, Row, row_seed
from mlx_parallm.engine.scheduler import Scheduler
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.errors import ContextLengthError, InvalidRequestError, QueueFullError, UnavailableError
from mlx_parallm.lora.registry import Registry
from mlx_parallm.metrics import EngineMetrics
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.sampling_params import check_sampling
from mlx_parallm.text.compiled_grammar import CompiledGrammar
from mlx_parallm.text.grammar import GrammarCompiler
from mlx_parallm.types import OnDelta, Request
from mlx_parallm.validation import check_choices, check_ids


class Admission:
    def __init__(
        self, model: LanguageModel, grammars: GrammarCompiler, max_length: Callable[[int], int], max_rows: int
    ) -> None:
        self._model = model
        self._grammars = grammars
        self._max_length = max_length  # the longest that so many rows may get in the memory there is
        self._max_rows = max_rows

    def rows(self, request: Request) -> list[Row]:
        """A row for each choice, or an error that says what is wrong."""
        sampling = request.sampling
        check_sampling(sampling, self._model.vocab_size)
        check_choices(sampling.n, self._max_rows)
        room = self._room(request)
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= self._model.eos_token_ids
        rows = [
            Row(
                request.prompt,
                sampling,
                request.priority,
                row_seed(seed, index),
                max_tokens,
                stop_ids,
                owner=request.owner,
                rollout=request.rollout,
                follows=request.follow,
                images=request.images,
            )
            for index in range(sampling.n)
        ]
        if sampling.grammar is not None:
            grammar: CompiledGrammar = request.compiled_grammar or self._grammars.compile(sampling.grammar)
            for row in rows:
                row.matcher = grammar.matcher()
                row.end_ids = grammar.end_ids
        return rows

    def _room(self, request: Request) -> int:
        """Returns how many tokens may follow the prompt."""
        length = len(request.prompt)
        model = self._model
        if not length:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if length >= model.context_length:
            raise ContextLengthError.of(model.context_length, length)
        check_ids(request.prompt, model.vocab_size, "prompt")
        if request.images is not None and model.vision is None:
            raise InvalidRequestError(f"{model.name} reads text only", param="messages")
        fitting = self._max_length(request.sampling.n)
        if length >= fitting:
            raise ContextLengthError(
                f"the prompt has {length} tokens, and the memory for keys and values holds {fitting}"
                f" for each of {request.sampling.n}",
                param="prompt",
            )
        return min(model.context_length, fitting) - length


@dataclass(eq=False, repr=False)
class Intake:
    thread: EngineThread
    admission: Admission
    adapters: Registry
    recording: Recording
    live: LiveRequests
    policies: Policies
    lookup: PrefixLookup
    scheduler: Scheduler
    ssd_transfers: SsdTransfers | None
    idle: IdleState
    metrics: EngineMetrics
    max_queue_size: int
    # Requests in the inbox by their owner; None: rollouts.
    _pending: Counter[str | None] = field(default_factory=Counter, init=False)
    _pending_lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def check(self, request: Request) -> None:
        """Raises what is wrong with a request, and takes none."""
        self.admission.rows(request)

    def submit_all(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        """Takes all requests or raises; any thread may call it."""
        if self.thread.closed is not None:
            raise UnavailableError(self.thread.closed)
        self._reserve(requests)
        try:
            accepted = [(request, self._rows(request)) for request in requests]
        except BaseException:
            self._release(requests)
            raise
        arrival = time.monotonic()

        def add_all() -> None:
            for request, rows in accepted:
                self._add(request, rows, arrival, on_delta)

        self.thread.inbox.put(add_all)

    def _rows(self, request: Request) -> list[Row]:
        rows = self.admission.rows(request)
        if request.adapter is not None:
            version = self.adapters.find(request.adapter, request.adapter_version)
            for row in rows:
                row.adapter = version
        for row in rows:
            # Training sees tokens alone. Where arms share the traffic, each may get rewards.
            row.recorded = request.images is None and self.recording.wants(request, self.adapters.traffic.compares)
        return rows

    def _reserve(self, requests: Sequence[Request]) -> None:
        """Rollouts have a queue of their own size. Where several keys wait, each has its part of the queue, whoever was
        there first."""
        count = len(requests)
        owner = _queue_of(requests[0])
        with self._pending_lock:
            waiting = Counter(self._pending)
            for job in list(self.scheduler.waiting):
                waiting[None if job.rollout else job.owner] += 1
            queued = waiting[None] if owner is None else waiting.total() - waiting[None]
            owners = len({owner, *(other for other, number in waiting.items() if number and other is not None)})
            share = 0 if owner is None or owners == 1 else self.max_queue_size // owners
            if queued + count > self.max_queue_size and waiting[owner] + count > share:
                self.metrics.requests_rejected += count
                raise QueueFullError(
                    f"{queued} requests are waiting already, and the queue has room for {self.max_queue_size}, "
                    f"not for {count} more: try again later"
                )
            self._pending[owner] += count

    def _add(self, request: Request, rows: list[Row], arrival: float, on_delta: OnDelta) -> None:
        """Queues the rows of a request that was accepted; the engine thread calls it."""
        self.idle.leave()
        needed = self.live.add(request, rows, arrival, on_delta)
        if needed:
            self.policies.take(rows)
            job = Job(list(rows), request.prompt, request.priority, arrival)
            self.lookup.hash_blocks(job)
            self.scheduler.add(job)
            if self.ssd_transfers is not None:
                self.ssd_transfers.fetch(job)
        else:
            self.metrics.deduplicated += 1
        self._release([request])

    def _release(self, requests: Sequence[Request]) -> None:
        """They wait in the inbox no longer."""
        with self._pending_lock:
            self._pending[_queue_of(requests[0])] -= len(requests)


def _queue_of(request: Request) -> str | None:
    return None if request.rollout else request.owner
