"""Drives a real engine on a tiny model, and computes by hand what it must answer."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import load_adapters

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.freed_memory import AllocatorCache, process_allocator_cache
from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.engine.compute.patch import use_device_kernels
from mlx_parallm.engine.delivery import deliver
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.start import start_engine
from mlx_parallm.engine.thread import engine_threads
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.types import Delta, Request, TokenLogprob
from tests.tiny import tiny


@dataclass
class Answer:
    """What came back for one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)

    @property
    def last(self) -> Delta:
        return self.deltas[-1]


class Pending:
    """A request under way."""

    def __init__(self, choices: int) -> None:
        self.answers = [Answer() for _ in range(choices)]
        self._left = choices
        self.done = threading.Event()
        self.progress = threading.Condition()

    def on_delta(self, delta: Delta) -> None:
        answer = self.answers[delta.index]
        with self.progress:
            answer.deltas.append(delta)
            answer.tokens += delta.tokens
            answer.logprobs += delta.logprobs or []
            self._left -= delta.finish_reason is not None
            self.progress.notify_all()
        if not self._left:
            self.done.set()

    def wait(self) -> list[Answer]:
        assert self.done.wait(60), "the request was never answered"
        return self.answers

    def wait_for_tokens(self, count: int) -> None:
        with self.progress:
            self.progress.wait_for(lambda: len(self.answers[0].tokens) >= count or self.done.is_set(), 60)


HAIR = 3e-7  # of a number in float32: some units in its last place
TIE = 3e-6  # between two logits: what float32 leaves open
FIELDS = ("priority", "timeout", "cache_salt", "adapter", "adapter_version", "follow", "images")


class Driver:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = itertools.count()

    def submit(self, prompt: list[int], *, stream: bool = False, **options: object) -> tuple[str, Pending]:
        fields = {key: options.pop(key) for key in FIELDS if key in options}
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **options})  # type: ignore[arg-type]
        pending = Pending(sampling.n)
        request = Request(f"r{next(self._ids)}", prompt, sampling, stream=stream, **fields)  # type: ignore[arg-type]
        self.engine.submit(request, pending.on_delta)
        return request.id, pending

    def ask(self, prompt: list[int], **options: object) -> Answer:
        return self.submit(prompt, **options)[1].wait()[0]

    def settle(self) -> None:
        """Waits until nothing runs, and checks the books."""
        settled = self.engine._parts.idle.wait(30)  # the public way, drain(), would close the engine
        assert settled
        self.engine.check_integrity()
        assert self.engine.metrics.slots_free == self.engine.metrics.slots_total
        assert self.engine.metrics.kv_bytes == 0


def no_engine_runs() -> bool:
    """Whether every thread that engines have had is free for another, within a moment."""
    deadline = time.monotonic() + 5
    while engine_threads.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    return not engine_threads.busy


def as_served(kind: str) -> LanguageModel:
    """A tiny model with the CPU's own kernels, as the loader would hand it over."""
    model = tiny(kind)
    use_device_kernels(model.module, this_device().profile)
    return model


def driver(kind: str, *, profile: DeviceProfile | None = None, **options: Any) -> AbstractContextManager[Driver]:
    return driver_of(lambda: as_served(kind) if profile is None else tiny(kind), profile=profile, **options)


@contextmanager
def driver_of(
    load: Callable[[], LanguageModel],
    *,
    profile: DeviceProfile | None = None,
    allocator_cache: AllocatorCache = process_allocator_cache,
    **options: Any,
) -> Iterator[Driver]:
    config = ServeConfig.of(**{"ssd": False, **options})
    engine = start_engine(load, config, deliver, profile=profile, allocator_cache=allocator_cache)
    try:
        yield Driver(engine)
    finally:
        engine.stop()


def logprob(logits: mx.array, token: int) -> float:
    """In float64: MLX's own sum over a vocabulary is off by up to 1e-4 on the CPU."""
    exact = np.array(logits).astype(np.float64)
    return float(exact[token] - exact.max() - np.log(np.exp(exact - exact.max()).sum()))


class Bare:
    """The model called by hand, one row, mlx-lm's own cache."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def greedy(
        self, prompt: list[int], count: int, ignore_eos: bool = False, answer: Sequence[int] = ()
    ) -> tuple[list[int], list[float]]:
        """Tokens until the end-of-sequence token or `count`, and their log-probabilities. Where two tokens' logits are
        equal but for the order of additions, the one of `answer`."""
        cache = make_prompt_cache(self.model.module)
        tokens: list[int] = []
        logprobs: list[float] = []
        step = prompt
        while len(tokens) < count:
            logits = self.model.module(mx.array([step]), cache=cache)[0, -1].astype(mx.float32)
            token = int(mx.argmax(logits).item())
            if len(tokens) < len(answer) and (logits[token] - logits[answer[len(tokens)]]).item() < TIE:
                token = answer[len(tokens)]
            if token in self.model.eos_token_ids and not ignore_eos:
                break
            tokens.append(token)
            logprobs.append(logprob(logits, token))
            step = [token]
        return tokens, logprobs

    def hold(self, prompt: list[int], tokens: list[int], expected: list[float], found: list[float]) -> None:
        """Log-probabilities within 1e-4, or within what the model itself leaves open: some texts hang by a hair."""
        if found != pytest.approx(expected, abs=1e-4):
            assert found == pytest.approx(expected, abs=self._doubt(prompt, tokens, expected))

    def _doubt(self, prompt: list[int], tokens: list[int], expected: list[float]) -> float:
        """How far its log-probabilities move when the prompt is computed in pieces of one size or another, and when
        what goes into it is a hair off: where two experts are all but equal, the other one is as right."""
        moved = [one for size in (1, 2, 3, 5, 8, 16) for one in self._moved(prompt, tokens, expected, size)]
        embedding = next(layer for _, layer in self.model.module.named_modules() if isinstance(layer, nn.Embedding))
        exact = embedding.weight
        for seed in range(6):
            noise = mx.random.normal(exact.shape, key=mx.random.key(seed))
            embedding.weight = exact * (1 + HAIR * noise)
            moved += self._moved(prompt, tokens, expected, len(prompt))
        embedding.weight = exact
        assert max(moved) < 1e-3, "the model is no measure"
        return max(moved)

    def _moved(self, prompt: list[int], tokens: list[int], expected: list[float], size: int) -> list[float]:
        cache = make_prompt_cache(self.model.module)
        for first in range(0, len(prompt), size):
            logits = self.model.module(mx.array([prompt[first : first + size]]), cache=cache)
        moved = []
        for token, before in zip(tokens, expected, strict=True):
            moved.append(abs(logprob(logits[0, -1].astype(mx.float32), token) - before))
            logits = self.model.module(mx.array([[token]]), cache=cache)
        return moved


def bare_with(adapters: Mapping[str, Path]) -> dict[str | None, Bare]:
    """The tiny Llama without an adapter, and with each of these folders', as mlx-lm loads them."""
    found: dict[str | None, Bare] = {None: Bare(tiny())}
    for name, folder in adapters.items():
        model = tiny()
        load_adapters(model.module, str(folder))
        found[name] = Bare(model)
    return found
