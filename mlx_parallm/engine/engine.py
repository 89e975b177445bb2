"""`Engine`: one model that serves, as callers see it. Every method may be called from any thread but the engine's own.

The server, `LLM` and training use it; `StartingEngine` makes it. What it is asked for goes into the inbox of the engine
thread, where `EngineLoop` does it between two steps.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import device_name
from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.engine.background import Background
from mlx_parallm.engine.build import ComputeParts, EngineParts
from mlx_parallm.engine.compute.batching import check_room
from mlx_parallm.engine.delivery import Recorder
from mlx_parallm.engine.thread import SHUTTING_DOWN
from mlx_parallm.kv.prefix import Prefix
from mlx_parallm.lora.layout import Layout
from mlx_parallm.lora.registry import Registry
from mlx_parallm.metrics import EngineMetrics, MemoryPlan
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.memory import size_text
from mlx_parallm.models.vision.processor import ImageProcessor
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.steps import Steps
from mlx_parallm.text.compiled_grammar import CompiledGrammar
from mlx_parallm.types import OnDelta, PauseMode, Request


def describe(model: LanguageModel, parts: ComputeParts, plan: MemoryPlan, config: ServeConfig) -> list[tuple[str, str]]:
    return [
        ("model", f"{model.name} ({model.precision}, {size_text(model.weight_bytes)} of weights)"),
        ("device", device_name()),
        ("context", f"{model.context_length} tokens"),
        ("batch", f"up to {config.batch.max_batch_size} answers at once, {parts.runner.cache.described}"),
        ("exactness", _exactness(model.precision, parts.profile, config)),
        ("memory", _memory(plan)),
        ("cache", _cache(parts.prefix, config)),
    ]


def _exactness(precision: str, profile: DeviceProfile, config: ServeConfig) -> str:
    if precision == "float32" or profile.exact_rows:
        return "a completion is the same alone and in a batch, token for token"
    told = f"in {precision}, rounding differs between batch sizes: a completion may differ from the one computed alone"
    return told if config.batch.exact == "off" else f"{told} (--exact always, --dtype float32)"


def _memory(plan: MemoryPlan) -> str:
    parts = {
        "weights": plan.weights,
        "running rows": plan.rows,
        "cached prompts": plan.blocks,
        "adapters": plan.adapters,
        "training": plan.training,
        "freed memory that MLX keeps": plan.kept,
    }
    told = ", ".join(f"{size_text(part)} {name}" for name, part in parts.items() if part)
    return f"at most {size_text(plan.limit)} in all: {told}"


def _cache(prefix: Prefix | None, config: ServeConfig) -> str:
    if prefix is None:
        return "prompts are not kept (--num-blocks 0)"
    disk = prefix.disk
    kept = f"prompts are kept in memory ({size_text(prefix.max_bytes)})"
    if disk is None:
        return f"{kept}; not on SSD{' (--no-ssd)' if not config.cache.ssd else ''}"
    if disk.problem is not None:
        return f"{kept}; not on SSD: {disk.problem}"
    return f"{kept} and on SSD in {disk.folder} (at most {config.cache.ssd_max_bytes / 1e9:g} GB)"


T = TypeVar("T")
FLUSH_SECONDS = 30.0


class Engine:
    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._thread = parts.base.thread
        self._recording = parts.base.recording
        self.metrics: EngineMetrics = parts.base.metrics
        self.model: LanguageModel = parts.compute.model
        self.layout: Layout = parts.compute.layout
        self.memory: MemoryPlan = parts.compute.memory
        self.adapters: Registry = parts.compute.adapters

    @property
    def tokenizer(self) -> TokenizerWrapper:
        return self.model.tokenizer

    @property
    def image_reader(self) -> ImageProcessor | None:
        return None if self.model.vision is None else self.model.vision.processor

    @property
    def block_size(self) -> int:
        """Tokens in a block of the prefix cache; 0: there is none."""
        prefix = self._parts.compute.prefix
        return 0 if prefix is None else prefix.block_size

    @property
    def failure(self) -> str | None:
        """Why it has stopped for good; None while it runs."""
        return self._thread.failure

    @property
    def on_failure(self) -> Callable[[str], None] | None:
        """Is called, on the engine thread, when it has stopped for good."""
        return self._thread.on_failure

    @on_failure.setter
    def on_failure(self, handler: Callable[[str], None] | None) -> None:
        self._thread.on_failure = handler

    @property
    def recorder(self) -> Recorder | None:
        """Is told of every recorded choice that has ended, on the engine thread."""
        return self._recording.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._recording.recorder = recorder

    @property
    def records_all(self) -> bool:
        """Whether every request is recorded; else only those that ask for it."""
        return self._recording.records_all

    @records_all.setter
    def records_all(self, records_all: bool) -> None:
        self._recording.records_all = records_all

    @property
    def paused(self) -> bool:
        return self._parts.pause.active

    def is_serving(self) -> bool:
        """Returns whether there are requests that run or wait."""
        return not self._parts.compute.scheduler.idle

    def check_grammar(self, grammar: str, param: str, quick: bool = False) -> CompiledGrammar | None:
        """Compiles it, or raises InvalidRequestError about the field `param`: it can't be followed, or too complex."""
        return self._parts.grammars.check(grammar, param, quick)

    def check_prompt(self, prompt: list[int], choices: int) -> None:
        """Raises ContextLengthError where so many completions to this prompt can't be had."""
        self._parts.intake.check(Request("", prompt, SamplingParams(n=choices)))

    def submit(self, request: Request, on_delta: OnDelta) -> None:
        """Takes a request or raises at once; its deltas come through `dispatch`, with the handler that takes them."""
        self._parts.intake.submit_all([request], on_delta)

    def submit_all(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        """Takes requests that arrive at one moment: all or none."""
        self._parts.intake.submit_all(requests, on_delta)

    def live_requests(self) -> list[Request]:
        """Returns the requests that have not ended, at a moment between two steps: what was cancelled before has ended
        by then, and its recorder was told."""
        return self._thread.run_between_steps(self._parts.base.live.requests)

    def run(self, work: Callable[[], T]) -> T:
        """Has the engine thread do something short beside serving, and waits for it. Never on that thread itself."""

        def step() -> Steps[T]:
            yield from ()
            return work()

        return self._hand_in(self._parts.base.predictions, step()).result()

    def cancel(self, request_id: str, index: int | None = None, visible: int | None = None) -> None:
        """Frees the rows of a request, or of one of its choices, within a step.

        `visible`: a stop string has ended it, and its reader saw so many tokens.
        """
        self._thread.inbox.put(lambda: self._parts.delivery.cancel(request_id, index, visible=visible))

    def work(self, steps: "Steps[T]") -> "Future[T]":
        """Has the engine thread run something in short steps, beside serving; what it returns comes in the future.

        It may be asked for until the engine stops: training writes its state when all requests have ended.
        """
        return self._hand_in(self._parts.base.background, steps)

    @property
    def slice_seconds(self) -> float:
        """The seconds that the step of a prediction that runs now should take."""
        return self._parts.base.predictions.slice_seconds

    def predict(self, steps: "Steps[T]") -> "Future[T]":
        """Computes steps as `work` does, with the share of the time that predictive models have."""
        return self._hand_in(self._parts.base.predictions, steps)

    def _hand_in(self, background: Background, steps: "Steps[T]") -> "Future[T]":
        future: Future[T] = Future()
        if self._thread.stopping or self.failure is not None:
            future.set_exception(self._thread.unavailable())
        else:
            self._thread.inbox.put(lambda: background.add(steps, future))
        return future

    def drain(self, timeout: float, reason: str = SHUTTING_DOWN) -> bool:
        """Refuses new work and waits until the running is done. Whom `stop` cuts off later is told the `reason`."""
        self._thread.close(reason)
        if self.failure is not None or not self._thread.is_alive:
            return True
        self._thread.inbox.put(self._parts.pause.end)  # what runs must be able to end
        checked = threading.Event()
        self._thread.inbox.put(checked.set)  # what was handed in before has been taken by then
        deadline = time.monotonic() + timeout
        return checked.wait(timeout) and self._parts.idle.wait(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """Ends the engine thread; what still runs is cut off."""
        self._thread.stop()

    def release(self) -> None:
        """Frees weights and caches at once, whoever still knows this engine; to be called after `stop`."""
        compute = self._parts.compute
        compute.runner.cache.reset()
        if compute.prefix is not None:
            compute.prefix.reset()
        for _, layer in self.model.module.named_modules():
            layer.clear()

    def pause(self, mode: PauseMode, timeout: float) -> bool:
        """Stops between two steps, until `resume`; what is sent meanwhile waits.

        keep: what runs stops where it is and goes on later. wait: what runs is finished first. abort: it ends now.
        False when it did not come to that: what runs was not finished in time, or somebody else resumed.
        """
        return self._parts.pause.request(mode, timeout)

    def resume(self) -> None:
        self._parts.pause.resume()

    def flush_cache(self) -> int:
        """Forgets every cached block that is not in use, and says how many."""
        flushed = self._thread.run_between_steps(self._flush)
        prefix = self._parts.compute.prefix
        if prefix is not None and prefix.disk is not None:
            prefix.disk.settle(FLUSH_SECONDS)
        return flushed

    def _flush(self) -> int:
        flushed = self._parts.compute.lookup.flush()
        self._parts.accounts.gauge()
        return flushed

    def resize(self, plan: MemoryPlan) -> None:
        """Another share of the memory: rows that no longer fit wait, cached blocks that no longer fit are forgotten."""
        self.memory = self._thread.run_between_steps(partial(self._parts.resize, plan))

    def check_room(self, plan: MemoryPlan) -> None:
        """MemoryLimitError where no row would fit into that share."""
        check_room(self._parts.compute.runner.cache, plan, self.model.context_length)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not balance; the engine thread looks, between two steps."""
        error = self._thread.run_between_steps(self._imbalance)
        if error is not None:
            raise error

    def _imbalance(self) -> AssertionError | None:
        in_flight = bool(self._parts.pipeline.in_flight)
        return self._parts.accounts.imbalance(self._parts.base.live, self.adapters, in_flight)

    @property
    def batches(self) -> bool:
        """Whether a step computes its rows together."""
        return self._parts.compute.runner.cache.batches

    def describe(self) -> list[tuple[str, str]]:
        """Returns what start-up tells people: label and value."""
        compute = self._parts.compute
        return describe(self.model, compute, self.memory, self._parts.base.config)
