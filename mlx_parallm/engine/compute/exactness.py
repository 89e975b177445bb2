"""Proves with how many rows a pass gives a row the same numbers alone and beside others, and measures what that costs.

In 16 bits a product's order of summation depends on how many rows it has, so that a row's numbers change with the rows
beside it. Where passes always compute one of a few numbers of rows, whoever they belong to, and those numbers give
equal results, they don't. `tuned` asks for the numbers at a start, and keeps them with what the tuner has found.
"""

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.devices.profile import CHUNK
from mlx_parallm.host import to_numpy
from mlx_parallm.kv.slots import SlotCache
from mlx_parallm.models.forward import Forward

log = logging.getLogger(__name__)

LENGTHS = (5, 23, 90, 300)  # of prompts that are computed alone and together; the last moves how far attention reads
STEPS = 2  # of which the last is compared
LEAST_ROWS = 8  # fewer are hardly faster anywhere
ROUNDS = 5  # of each, in turns, for the time that a step of one row takes
MOST_COST = 1.05  # beyond which `auto` leaves it
SECONDS = 20.0  # after which `auto` leaves it too: a device that takes so long is not made for 16 bits

Numbers = np.ndarray[Any, np.dtype[Any]]


class Exactness:
    def __init__(self, forward: Forward, cache: SlotCache, vocab_size: int) -> None:
        self._forward = forward
        self._cache = cache
        self._method = cache.method
        self._most = cache.free
        random = np.random.default_rng(11)
        lengths = [length for length in LENGTHS if cache.fits(len(LENGTHS), CHUNK)][: cache.free] or [LENGTHS[0]]
        self._prompts = [random.integers(0, vocab_size, length).tolist() for length in lengths]
        self._ends = float("inf")
        self.cost = 1.0  # of a step of one row, as a multiple of what it takes without

    def rows(self, always: bool) -> tuple[int, ...]:
        """Returns the numbers of rows to compute; none where that gives no equal numbers, or costs too much unless it
        shall `always` be done."""
        begun = time.perf_counter()
        self._ends = float("inf") if always else begun + SECONDS
        try:
            steps = self._equal_steps()
            if steps:
                self.cost = self._cost(steps[0])
        except TimeoutError:
            steps = ()
        finally:
            self._cache.reset()
            self._cache.adopt_method(self._method)
            self._forward.forget()
        log.info(
            "rows computed together for equal numbers: %s; a step of one row takes %.2f times as long; %.1f s",
            steps or "none",
            self.cost,
            time.perf_counter() - begun,
        )
        return steps if always or self.cost <= MOST_COST else ()

    def _equal_steps(self) -> tuple[int, ...]:
        """Returns the largest number of rows, and smaller ones that give the same; none where rows differ."""
        largest = next((step for step in self._method.slot_steps if step >= self._most), self._most)
        self._compute((largest,))
        alone = [self._logits([prompt])[0] for prompt in self._prompts]
        together = self._logits(self._prompts)
        if not all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True)):
            return ()
        steps = [largest]
        for step in sorted((step for step in self._method.slot_steps if LEAST_ROWS <= step < largest), reverse=True):
            self._compute((step,))
            found = [self._logits([prompt])[0] for prompt in self._prompts]
            if not all(np.array_equal(one, other) for one, other in zip(alone, found, strict=True)):
                break
            steps.insert(0, step)
        return tuple(steps)

    def _compute(self, rows: tuple[int, ...]) -> None:
        if time.perf_counter() > self._ends:
            raise TimeoutError
        self._cache.reset()
        self._cache.adopt_method(replace(self._method, pass_rows=rows))

    def _logits(self, prompts: Sequence[list[int]]) -> list[Numbers]:
        """Returns each prompt's logits after some steps of all of them together."""
        self._compute(self._cache.method.pass_rows)
        positions = self._join(prompts)
        lengths = [0] * self._cache.positions
        tokens = [0] * self._cache.positions
        logits = mx.zeros(())
        for step in range(STEPS):
            for position, prompt in zip(positions, prompts, strict=True):
                lengths[position] = len(prompt) + step
                tokens[position] = prompt[step]
            logits = self._cache.decode(self._forward, mx.array(tokens, mx.int32), lengths)
            mx.eval(logits, self._cache.pending())
        found = to_numpy(logits.astype(mx.float32))
        self._leave(positions)
        return [found[position] for position in positions]

    def _join(self, prompts: Sequence[list[int]]) -> list[int]:
        positions = []
        for prompt in prompts:
            staged = self._cache.stage(1, CHUNK)
            self._forward.at(mx.array([prompt]), staged, mx.array([len(prompt) - 1]))
            positions += self._cache.join(staged, [(0, len(prompt))])
        return positions

    def _leave(self, positions: Sequence[int]) -> None:
        for position in positions:
            self._cache.leave(position)
        self._cache.compact(0)

    def _cost(self, rows: int) -> float:
        """Returns how much longer a step of one row takes that computes so many."""
        seconds: dict[tuple[int, ...], list[float]] = {(): [], (rows,): []}
        for number in range(ROUNDS + 1):
            for way, times in seconds.items():
                self._compute(way)
                self._join(self._prompts[:1])
                tokens = mx.zeros((self._cache.positions,), mx.int32)
                length = len(self._prompts[0])
                for step in range(2):  # the first traces it
                    begun = time.perf_counter()
                    logits = self._cache.decode(
                        self._forward, tokens, [length + step] + [0] * (self._cache.positions - 1)
                    )
                    mx.eval(logits, self._cache.pending())
                if number:  # the first round builds kernels
                    times.append(time.perf_counter() - begun)
        return statistics.median(seconds[(rows,)]) / max(statistics.median(seconds[()]), 1e-9)
