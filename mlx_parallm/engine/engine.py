"""The engine: one thread that owns the model and everything MLX. The server and `LLM` talk to it through an inbox.

A turn of the loop is: take the inbox, plan, start what was planned, read what is done, hand all news over at once.
On a GPU steps are started before those before them are read; the CPU backend runs a step while it is being started,
so there each is read at once.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import TypeVar

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.accounts import Accounts
from mlx_parallm.engine.admission import Admission
from mlx_parallm.engine.background import Background, Steps
from mlx_parallm.engine.batching import batch_cache, check_room, prefix_cache, warm_blocks, warm_up
from mlx_parallm.engine.describe import describe
from mlx_parallm.engine.device_profile import PROMPT_STEP, DeviceProfile
from mlx_parallm.engine.live_requests import LiveRequests
from mlx_parallm.engine.patch import patch_layers
from mlx_parallm.engine.policies import Policies
from mlx_parallm.engine.recovery import FAULT_WINDOW_SECONDS, MAX_FAULTS, FaultCounter, discard_device_state, requeue
from mlx_parallm.engine.rows import Job, Reader, Row
from mlx_parallm.engine.runner import Runner, Step
from mlx_parallm.engine.scheduler import Limits, Scheduler, wants_prompt_logprobs
from mlx_parallm.engine.ssd_transfers import SsdTransfers
from mlx_parallm.errors import (
    GrammarError,
    ModelLoadError,
    ParallmError,
    QueueFullError,
    RequestTimeoutError,
    UnavailableError,
)
from mlx_parallm.kv.blocks import Chain
from mlx_parallm.kv.prefix import BlockPrefix, Prefix
from mlx_parallm.kv.slots import SlotCache
from mlx_parallm.lora.layout import Layout
from mlx_parallm.lora.registry import Registry
from mlx_parallm.metrics import EngineMetrics
from mlx_parallm.models.device import device_kind, give_memory_back, spare
from mlx_parallm.models.forward import Forward
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.memory import LORA_RANK, plan_memory, wire_memory
from mlx_parallm.models.native.draws import drawer
from mlx_parallm.text.grammar import GrammarCompiler
from mlx_parallm.text.prompts import Prompts
from mlx_parallm.types import Delta, MemoryPlan, OnDelta, PauseMode, Request

log = logging.getLogger(__name__)

T = TypeVar("T")
StepEvents = list[tuple[OnDelta, Delta]]
Recorder = Callable[[Request, int, Row, int | None], None]
DEADLINE_CHECK_SECONDS = 0.1
SPARE_SECONDS = 2.0  # for which an idle engine keeps freed memory: fresh memory costs more than it seems
FLUSH_SECONDS = 30.0
SLOW_STEP_SECONDS = 1.0  # worth a line in the log


class Engine:
    def __init__(
        self,
        load: Callable[[], LanguageModel],
        config: ServeConfig,
        dispatch: Callable[[StepEvents], None],
        *,
        tuning: DeviceProfile | None = None,  # None: what suits the device
    ) -> None:
        self._load = load
        self._config = config
        self._dispatch = dispatch
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._loaded = threading.Event()
        self._plans: queue.SimpleQueue[MemoryPlan | None] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._idle = threading.Event()
        self._load_error: ParallmError | None = None
        self._closed: str | None = None  # why new requests are refused
        self._stopping = False
        self._paused = False
        self._quiet = threading.Event()  # a pause has begun
        self._pending = 0  # requests in the inbox
        self._pending_lock = threading.Lock()
        self._live = LiveRequests(share=config.dedupe)
        self._events: StepEvents = []
        self._deadline_check = 0.0
        self._admissions = 0
        self._in_flight: deque[Step] = deque()  # started and not read, the oldest first
        self._read_at = 0.0
        self._faults = FaultCounter()
        self._tuning = tuning
        self.metrics = EngineMetrics()
        self._background = Background(config.serving_share, self.metrics.background)
        self.recorder: Recorder | None = None  # is told of every recorded choice that has ended
        self.records_all = False  # else only what asks for it
        self.failure: str | None = None
        self.on_failure: Callable[[str], None] | None = None
        self.model: LanguageModel
        self.layout: Layout
        self.memory: MemoryPlan
        self.grammars: GrammarCompiler
        self.adapters: Registry
        self._admission: Admission
        self._prefix: Prefix | None
        self._ssd_transfers: SsdTransfers | None = None
        self._runner: Runner
        self._scheduler: Scheduler
        self._accounts: Accounts
        self._policies: Policies
        self._max_in_flight: int

    # From any thread.

    def load(self) -> None:
        """Starts the thread and waits until the weights are in memory; `start` comes next."""
        self._thread.start()
        self._loaded.wait()
        self._raise_load_error()

    def start(self, plan: MemoryPlan | None = None) -> None:
        """Waits until the model is loaded and warm. `plan`: its part of the memory; None: it is the only model."""
        if not self._thread.is_alive():
            self.load()
        if plan is None:
            plan = self._plan_alone()
        self._plans.put(plan)
        self._ready.wait()
        self._raise_load_error()

    def _plan_alone(self) -> MemoryPlan:
        try:
            return plan_engines([self], self._config)[0]
        except ParallmError:
            self.stop()  # the thread holds the weights and waits for a plan
            raise

    def _raise_load_error(self) -> None:
        if self._load_error is not None:
            self._thread.join()  # it still puts MLX in order
            raise self._load_error

    def submit(self, request: Request, on_delta: OnDelta) -> None:
        """Takes a request or raises at once; its deltas come through `dispatch`, with the handler that takes them."""
        self.submit_all([request], on_delta)

    def submit_all(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        """Takes requests that arrive at one moment: all or none."""
        if self._closed is not None:
            raise UnavailableError(self._closed)
        made = [(request, self._rows_of(request)) for request in requests]
        with self._pending_lock:
            waiting = self._pending + self._scheduler.queued
            if waiting + len(made) > self._config.max_queue_size:
                self.metrics.requests_rejected += len(made)
                raise QueueFullError(f"{waiting} requests are waiting already: try again later")
            self._pending += len(made)
        arrival = time.monotonic()

        def take() -> None:
            for request, rows in made:
                self._take(request, rows, arrival, on_delta)

        self._inbox.put(take)

    def _rows_of(self, request: Request) -> list[Row]:
        rows = self._admission.rows(request)
        if request.adapter is not None:
            version = self.adapters.find(request.adapter, request.adapter_version)
            for row in rows:
                row.adapter = version
        for row in rows:
            row.recorded = self.recorder is not None and (self.records_all or request.record)
        return rows

    def work(self, steps: "Steps[T]") -> "Future[T]":
        """Has the engine thread run something in short steps, beside serving; what it returns comes in the future.

        It may be asked for until the engine stops: training writes its state when all requests have ended.
        """
        future: Future[T] = Future()
        if self._stopping or self.failure is not None:
            future.set_exception(UnavailableError(self._closed or "the engine has stopped"))
        else:
            self._inbox.put(lambda: self._background.add(steps, future))
        return future

    def cancel(self, request_id: str, index: int | None = None, visible: int | None = None) -> None:
        """Frees the rows of a request, or of one of its choices, within a step.

        `visible`: a stop string has ended it, and its reader saw so many tokens.
        """
        self._inbox.put(lambda: self._drop(request_id, index, visible=visible))

    def drain(self, timeout: float) -> bool:
        """Refuses new work and waits until the running is done."""
        self._closed = self._closed or "the server is shutting down"
        if self.failure is not None or not self._thread.is_alive():
            return True
        self._inbox.put(self._end_pause)  # what runs must be able to end
        checked = threading.Event()
        self._inbox.put(checked.set)  # what was handed in before has been taken by then
        deadline = time.monotonic() + timeout
        return checked.wait(timeout) and self._idle.wait(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        self._closed = self._closed or "the server is shutting down"
        self._stopping = True
        self._plans.put(None)
        self._inbox.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join()

    def pause(self, mode: PauseMode, timeout: float) -> bool:
        """Stops between two steps, until `resume`; what is sent meanwhile waits.

        keep: what runs stops where it is and goes on later. wait: what runs is finished first. abort: it ends now.
        False when it did not come to that: what runs was not finished in time, or somebody else resumed.
        """
        self._quiet.clear()
        self._ask(lambda: self._begin_pause(mode))
        if self._quiet.wait(timeout):
            return self._paused
        self.resume()
        return False

    def resume(self) -> None:
        self._ask(self._end_pause)

    @property
    def tokenizer(self) -> TokenizerWrapper:
        return self.model.tokenizer

    def check_grammar(self, grammar: str, param: str) -> None:
        """Raises InvalidRequestError, about the field `param`, unless the grammar can be followed."""
        self.grammars.check(grammar, param)

    @property
    def paused(self) -> bool:
        return self._paused

    def is_serving(self) -> bool:
        """Whether there are requests that run or wait."""
        return not self._scheduler.idle

    def flush_cache(self) -> int:
        """Forgets every cached block that is not in use, and says how many."""
        flushed = self._ask(self._flush)
        if self._prefix is not None and self._prefix.disk is not None:
            self._prefix.disk.settle(FLUSH_SECONDS)
        return flushed

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not balance; the engine thread looks, between two steps."""
        error = self._ask(lambda: self._accounts.imbalance(self._live, self.adapters, bool(self._in_flight)))
        if error is not None:
            raise error

    def _ask(self, change: Callable[[], T]) -> T:
        """Has the engine thread do something between two steps, and returns or raises what comes of it."""
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(change())
            except ParallmError as error:  # a refusal, which is the caller's alone
                future.set_exception(error)
            except Exception as error:
                future.set_exception(error)
                raise

        self._inbox.put(answer)
        while True:
            try:
                return future.result(timeout=0.5)
            except FutureTimeout:
                if not self._thread.is_alive() and not future.done():
                    raise UnavailableError(self._closed or "the engine has stopped") from None

    def describe(self) -> list[tuple[str, str]]:
        """What start-up tells people: label and value."""
        return describe(self.model, self._runner.cache, self._prefix, self.memory, self._config)

    # The engine thread from here on.

    def _main(self) -> None:
        try:
            self.model = self._load()
            self.layout = patch_layers(self.model.module, self._tuning or DeviceProfile.of(device_kind()))
            self._loaded.set()
            plan = self._plans.get()
            if plan is not None:
                self._set_up(plan)
        except ParallmError as error:
            self._load_error = error
        except Exception as error:
            log.exception("loading failed")
            self._load_error = ModelLoadError(f"the model can't be loaded: {error}")
        self._loaded.set()
        self._ready.set()
        if self._load_error is None and plan is not None:
            self._run()
        # MLX aborts the process at exit when a thread leaves streams behind.
        mx.synchronize()
        mx.clear_streams()
        spare.release(self)

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._turn()
                except Exception as error:
                    self._recover(error)
            self._take_what_is_left()
            self._end_all(UnavailableError("the server is shutting down"))
            if self._ssd_transfers is not None:
                self._ssd_transfers.save()
        except BaseException as error:
            log.exception("the engine has died")
            self.failure = f"{type(error).__name__}: {error}"
            self._closed = f"the engine has died: {self.failure}"
            self._take_what_is_left()
            self._end_all(UnavailableError(self._closed))
            if self.on_failure is not None:
                self.on_failure(self.failure)
        finally:
            self._background.close()
            self._idle.set()
            self._quiet.set()

    def _recover(self, error: Exception) -> None:
        """After a fault rows go back to the queue and the step is tried again, unless there were too many."""
        self.metrics.faults += 1
        if self._faults.add():
            log.critical("%d faults within %g seconds: the engine gives up", MAX_FAULTS, FAULT_WINDOW_SECONDS)
            raise error
        log.error("a step has failed; its rows are computed again: %s", error, exc_info=error)
        self._in_flight.clear()
        discard_device_state(self._runner, self.adapters, self._prefix)
        for row in self._live.rows():
            if row.finish_reason is not None:  # its end was read, and not told yet
                self._tell(row)
        count = requeue(self._scheduler, self._live, self._put_back)
        log.warning("%d rows go on from the tokens that they have", count)
        self._hand_over()

    def _set_up(self, plan: MemoryPlan) -> None:
        config = self._config
        self.grammars = GrammarCompiler(self.model.tokenizer, self.model.vocab_size, self.model.eos_token_ids)
        tuning = self._tuning or DeviceProfile.of(device_kind())
        self._max_in_flight = tuning.steps_in_flight
        self.memory = plan
        wire_memory()
        spare.allow(self, plan.kept)
        layout = self.layout
        self.adapters = Registry(
            layout,
            config.max_loras,
            config.max_cpu_loras,
            config.max_lora_rank,
            run_between_steps=self._ask,
            observe=self.metrics.adapter_seconds.observe,
        )
        forward = Forward(self.model.module, layout.active)
        cache = batch_cache(self.model, forward, config.max_batch_size, plan.rows, tuning)
        check_room(cache, plan, self.model.context_length)
        warm_up(forward, layout, cache, self.model.vocab_size, tuning)
        self._prefix = prefix_cache(self.model, cache, config, plan.blocks, tuning)
        if isinstance(self._prefix, BlockPrefix) and isinstance(cache, SlotCache) and device_kind() == "cuda":
            warm_blocks(forward, cache, self._prefix, PROMPT_STEP)
        self._runner = Runner(
            forward,
            cache,
            self.model.vocab_size,
            self._hand_over,
            tuning.round_prompts,
            self._prefix,
            self.adapters,
            self.metrics.adapter_seconds.observe,
            None if tuning.compiled else drawer(),
        )
        self._admission = Admission(self.model, self.grammars, cache.max_length, config.max_batch_size)
        limits = Limits(
            max_rows=config.max_batch_size,
            max_streams=config.max_concurrent_streams,
            step_tokens=config.prefill_step_size,
            gather_seconds=config.batch_timeout if config.scheduler == "default" else 0.0,
            max_padding=tuning.max_padding if cache.stages_many else None,
            worth_waiting=max(64, tuning.min_match),
            round_to=PROMPT_STEP if tuning.round_prompts and cache.stages_many else 1,
            pass_tokens=tuning.pass_tokens if isinstance(self._prefix, BlockPrefix) else 0,
            max_adapters=config.max_loras,
        )
        self._scheduler = Scheduler(
            limits, cache.fits, look_up=self._look_up, release=self._let_go, shorten=self._shorten
        )
        self._accounts = Accounts(self.metrics, self._scheduler, self._runner, self._prefix)
        self._policies = Policies(self.adapters, self._live, self._scheduler, self._runner, self._identify)
        if self._prefix is not None and self._prefix.disk is not None:
            self._ssd_transfers = SsdTransfers(self._prefix, self._prefix.disk, self._scheduler, self._inbox.put)
        self.metrics.slots_total = config.max_batch_size
        self.metrics.kv_bytes_limit = plan.rows
        blocks = 0 if self._prefix is None else self._prefix.max_bytes
        self.metrics.memory = self.memory = replace(plan, blocks=blocks)
        self._runner.precompute(Prompts(self.model.tokenizer).beginning())
        self._release_memory()

    def _turn(self) -> None:
        self._read_inbox()
        if self._stopping:
            return
        spare.trim()
        self._expire()
        if self._paused:
            self._finish_steps()
            if self._background.due(serving=False):  # nobody is served, so nobody waits for it
                self._work(serving=False)
            return
        begun, serving = time.perf_counter(), not self._scheduler.idle or bool(self._in_flight)
        self._policies.follow()
        self._make_room()
        scheduler = self._scheduler
        plan = scheduler.plan()
        if plan.decode:
            self._advance(self._runner.decode(plan.decode))
        for work in plan.prefills:
            self._runner.cache.expect(len(self._live.rows()))
            self._advance(self._runner.prefill(work))
        if not plan and self._in_flight:
            self._finish_step(self._in_flight.popleft())
        # While a step is under way, news waits until the next is being started: the interpreter is free then.
        if not self._in_flight:
            self._hand_over()
        if serving:
            self._background.served(time.perf_counter() - begun)
        self._do_other_work()
        if not scheduler.admitting and not scheduler.running and not scheduler.partial:
            self._stand_still()

    def _do_other_work(self) -> None:
        serving = not self._scheduler.idle
        if not self._background.due(serving):
            return
        self._finish_steps()  # rows get what is theirs before they wait
        if not serving and not self._idle.is_set():
            self._release_memory()
        self._work(serving)
        while serving and self._background.due(serving):  # steps that are shorter than what serving has earned them
            self._work(serving)
        self._read_at = time.perf_counter()

    def _work(self, serving: bool) -> None:
        with self._accounts.background_work():
            self._background.step(serving)

    def _stand_still(self) -> None:
        self._paused = True
        self._finish_steps()
        if self._scheduler.idle:
            self._release_memory()
        self._quiet.set()

    def _finish_steps(self) -> None:
        while self._in_flight:
            self._finish_step(self._in_flight.popleft())
        self._hand_over()

    def _begin_pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            for request in self._live.requests():
                self._abort(request)
        if mode == "wait" and not self._paused:
            self._scheduler.admitting = False  # the turn in which nothing runs any more is the pause
            return
        self._stand_still()

    def _end_pause(self) -> None:
        self._paused, self._scheduler.admitting = False, True
        self._quiet.set()

    def _abort(self, request: Request) -> None:
        """Ends a request with what it has."""
        for row, reader in self._live.entries(request.id):
            delta = row.delta_for(reader)
            delta.finish_reason = "abort"
            self._events.append((reader.on_delta, delta))
            self._end(row, reader, "abort")

    def _read_inbox(self) -> None:
        """Does what was handed in; sleeps while there is nothing else to do."""
        scheduler = self._scheduler
        if self._paused and not self._in_flight and not self._background.waiting:
            try:
                self._inbox.get(timeout=DEADLINE_CHECK_SECONDS if len(self._live) else None)()
            except queue.Empty:
                return
        elif not self._in_flight and scheduler.idle and scheduler.admitting and not self._background.waiting:
            if self._inbox.empty():
                self._release_memory()
            self._await_work()
        elif not self._in_flight and scheduler.only_waiting and not self._background.waiting:
            try:
                self._inbox.get(timeout=scheduler.seconds_until_admission() + 0.001)()
            except queue.Empty:
                return
        elif self._ssd_transfers is not None:
            self._ssd_transfers.write_some()
        while not self._inbox.empty():
            self._inbox.get()()

    def _await_work(self) -> None:
        """Sleeps until something is handed in, and meanwhile brings what is worth keeping to the SSD."""
        if self._ssd_transfers is not None:
            self._ssd_transfers.write_while(self._inbox.empty)
        try:
            self._inbox.get(timeout=SPARE_SECONDS)()
        except queue.Empty:
            mx.clear_cache()
            self._inbox.get()()

    def _release_memory(self) -> None:
        """Nothing runs: memory goes back, and whoever waits for that is told."""
        self._runner.release_memory()
        self._accounts.gauge()
        self._idle.set()

    def _take(self, request: Request, rows: list[Row], arrival: float, on_delta: OnDelta) -> None:
        self._idle.clear()
        needed = self._live.add(request, rows, arrival, on_delta)
        if needed:
            self._policies.take(rows)
            job = Job(list(rows), request.prompt, request.priority, arrival)
            self._identify(job)
            self._scheduler.add(job)
            if self._ssd_transfers is not None:
                self._ssd_transfers.fetch(job)
        else:
            self.metrics.deduplicated += 1
        with self._pending_lock:
            self._pending -= 1

    def _identify(self, job: Job) -> None:
        """Names the blocks of a prompt, so that the prefix cache can find and keep them."""
        if self._prefix is None:
            return
        adapter, salt = job.rows[0].adapter, job.rows[0].readers[0].request.cache_salt
        job.chain = self._prefix.chain(job.tokens, salt, "" if adapter is None else adapter.packed.digest)
        for row in job.rows:
            row.chain = Chain(job.chain.root, job.chain.size, list(job.chain.hashes))

    def _look_up(self, job: Job) -> None:
        # A prompt whose own log-probabilities are asked for must be computed in whole.
        if self._prefix is not None and job.chain is not None and job.match is None and not wants_prompt_logprobs(job):
            self._runner.share(job.chain)
            job.match = self._prefix.match(job.chain, job.tokens)
            job.computed = job.match.length

    def _shorten(self, job: Job, length: int) -> None:
        assert isinstance(self._prefix, BlockPrefix)
        assert job.match is not None
        self._prefix.shorten(job.match, length)
        job.computed = length

    def _let_go(self, job: Job) -> None:
        if self._prefix is not None and job.match is not None:
            self._prefix.release(job.match)
            job.match, job.computed = None, 0

    def _drop(
        self, request_id: str, index: int | None, error: ParallmError | None = None, visible: int | None = None
    ) -> None:
        """Ends choices from outside: a client left, a stop string was found, time ran out."""
        for row, reader in self._live.entries(request_id, index):
            if error is not None:
                self._events.append(
                    (reader.on_delta, Delta(request_id, reader.index, finish_reason="error", error=error))
                )
            reader.visible = visible
            self._end(row, reader, "error" if error else "abort")

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._deadline_check:
            return
        self._deadline_check = now + DEADLINE_CHECK_SECONDS
        for request in self._live.overdue(now):
            message = f"the request took longer than {request.timeout:g} seconds"
            self._drop(request.id, None, RequestTimeoutError(message))

    def _make_room(self) -> None:
        """When the rows' next tokens would not fit, the last in line gives up its place and is computed again later."""
        running = self._scheduler.running
        while len(running) > 1 and not self._runner.cache.fits(len(running), max(row.length for row in running) + 1):
            row = self._scheduler.victim()
            running.remove(row)
            self._runner.leave(row)
            self._put_back(row)
            self.metrics.preemptions += 1

    def _put_back(self, row: Row) -> None:
        """A row without a place waits for one; what it has generated becomes part of its prompt."""
        row.rewind()
        if not row.tokens:
            row.prompt_logprobs = None  # they are computed again
        job = Job([row], row.prompt + row.tokens, row.priority, row.readers[0].arrival)
        if row.chain is not None:
            job.chain = Chain(row.chain.root, row.chain.size, list(row.chain.hashes)).extend(job.tokens)
        else:  # it had moved to another adapter: all of it is computed anew, with that one alone
            self._identify(job)
        self._scheduler.requeue(job, row)

    def _advance(self, step: Step) -> None:
        """Takes note of a step just started, and reads those that are far enough behind it."""
        step.started_at = time.perf_counter()
        if step.kind == "prefill":
            for _, row, _ in step.rows:
                self._admissions += 1
                row.order = self._admissions
                self._scheduler.running.append(row)
        self._in_flight.append(step)
        # A grammar must see each token before it can allow the next.
        ahead = 0 if any(row.matcher is not None for row in self._scheduler.running) else self._max_in_flight
        while len(self._in_flight) > ahead:
            self._finish_step(self._in_flight.popleft())

    def _finish_step(self, step: Step) -> None:
        asked = time.perf_counter()
        tokens = self._runner.read(step)
        now = time.perf_counter()
        self._accounts.step(step, now - max(step.launched_at, self._read_at), now - asked)
        if now - step.launched_at > SLOW_STEP_SECONDS:
            begun = step.started_at - step.launched_at
            log.debug(
                "a %s of %d %s took %.2f s, %.2f of them to start",
                step.kind,
                step.count,
                step.shape,
                now - step.launched_at,
                begun,
            )
        self._read_at = now
        for item in tokens:
            row = item.row
            if row.finish_reason is not None:
                continue
            if not row.tokens:
                self.metrics.time_to_first_token.observe(time.monotonic() - row.readers[0].arrival)
            if row.matcher is not None and (problem := row.follow_grammar(item.token)):
                self._fail(row, GrammarError(f"the grammar can't be followed any further: {problem}"))
                continue
            row.accept(item.token, item.logprob, item.sampled_logprob)
            self._tell(row)

    def _fail(self, row: Row, error: ParallmError) -> None:
        for reader in list(row.readers):
            delta = row.delta_for(reader)
            delta.finish_reason, delta.error = "error", error
            self._events.append((reader.on_delta, delta))
            self._end(row, reader, "error")

    def _tell(self, row: Row) -> None:
        for reader in list(row.readers):
            if row.finish_reason is not None or reader.eager:
                self._events.append((reader.on_delta, row.delta_for(reader)))
            if row.finish_reason is not None:
                self._end(row, reader, row.finish_reason)

    def _end(self, row: Row, reader: Reader, reason: str) -> None:
        self._live.remove(row, reader)
        if self.recorder is not None and row.recorded and reason != "error":
            self.recorder(reader.request, reader.index, row, reader.visible)
        if not self._live.entries(reader.request.id):
            self.metrics.count_finish(reason)
            self.metrics.request_seconds.observe(time.monotonic() - reader.arrival)
        if not row.readers:
            row.finish_reason = row.finish_reason or "abort"
            self._scheduler.remove(row)
            self._runner.leave(row)
            self._policies.release(row)

    def _hand_over(self) -> None:
        if self._events:
            news, self._events = self._events, []
            self._dispatch(news)

    def _flush(self) -> int:
        if self._prefix is None:
            return 0
        metrics = self._prefix.metrics
        before = metrics.blocks_cached + metrics.snapshots
        self._prefix.flush()
        give_memory_back()
        self._accounts.gauge()
        return before - metrics.blocks_cached - metrics.snapshots

    def _take_what_is_left(self) -> None:
        """At the end: requests and work that were handed in meanwhile must be told as well."""
        while not self._inbox.empty():
            try:
                self._inbox.get()()
            except Exception:  # it was about a model that no longer runs; the requests count
                log.debug("after the end", exc_info=True)

    def _end_all(self, error: ParallmError) -> None:
        for request in self._live.requests():
            for row, reader in self._live.entries(request.id):
                delta = Delta(request.id, reader.index, finish_reason="error", error=error)
                self._events.append((reader.on_delta, delta))
                self._live.remove(row, reader)
        self._hand_over()


def deliver(events: StepEvents) -> None:
    """The simplest `dispatch`: hands each delta to its handler, on the engine thread."""
    for on_delta, delta in events:
        on_delta(delta)


def plan_engines(engines: "Sequence[Engine]", config: ServeConfig) -> list[MemoryPlan]:
    """How loaded models share the memory; the first is the one that trains."""
    weights = [engine.model.weight_bytes for engine in engines]
    return plan_memory(weights, [engine.layout.adapter_bytes(LORA_RANK) for engine in engines], config)
