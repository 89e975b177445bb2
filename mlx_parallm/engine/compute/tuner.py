"""Measures at a start what a device's profile can only guess: see `Tuner`.

A constant that was right on one chip costs another: 5 rows computed as 8 take nearly the time of 8 on some, and 5 rows
as they are take longer than 8 on others. Whatever is not clearly better than the profile's own value, its slowest turn
than the other's fastest, is left alone: what other programs do meanwhile must not decide for months.
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.devices.tuning import Tuning
from mlx_parallm.kv.merged import state_arrays
from mlx_parallm.kv.slots import SlotCache
from mlx_parallm.models.forward import Forward

log = logging.getLogger(__name__)

SECONDS = 2.0  # in all; what is not measured by then stays as it is
CLEAR = 0.95  # of the time: what takes more is no gain
ROUNDS = 3  # in which everything that is compared has its turn
TURN_STEPS = 4  # with so many steps in flight, before another number's turn
ROWS = 4  # of measurements that are not about rows
PROMPT = 8  # tokens
# Numbers of rows to compare with the last of their line, what matters most first.
ROW_COUNTS = ((5, 6, 7, 4, 8), (3, 2, 4), (10, 12), (14, 16), (20, 24), (28, 32))
VIEW_STEPS = (64, 128, 256, 512)
NEAR, FAR = 120, 1000  # tokens of rows, to see what each token that is read costs
PREFILL_STEPS = (512, 1024)

Decode = Callable[[int], mx.array]  # starts the step of that number, after those before it
Rounds = Sequence[Mapping[int, float]]  # of each, the seconds of all that are compared


class OutOfTimeError(Exception):
    """What is left is not measured."""


class Tuner:
    """Times decode steps and prompts of a model, each in its own way, on the batch's own slots while nothing runs.

    How many steps are started ahead (a backend that copies a cache while a step in flight reads it is faster without),
    which numbers of rows are computed, how far attention reads at once, and how long the pieces of prompts are.
    """

    def __init__(
        self, forward: Forward, cache: SlotCache, profile: DeviceProfile, piece: int, seconds: float | None = None
    ) -> None:
        """`piece`: the most tokens of a piece of a prompt. `seconds`: `SECONDS` where none are given."""
        self._forward = forward
        self._cache = cache
        self._method = cache.method
        self._profile = profile
        self._piece = piece
        self._ends = time.perf_counter() + (SECONDS if seconds is None else seconds)
        self._rows = min(ROWS, cache.free)
        self.measured: dict[str, Any] = {}  # milliseconds, but for tokens a second of prompts

    def run(self) -> Tuning:
        begun = time.perf_counter()
        found = self._profile
        for choose in (self._steps_in_flight, self._slot_steps, self._view_step, self._prefill_step):
            try:
                found = replace(found, **choose())
            except OutOfTimeError:
                continue  # another may take less
            finally:
                self._restore()
        self.measured["seconds"] = round(time.perf_counter() - begun, 2)
        return Tuning.of(found)

    def _steps_in_flight(self) -> dict[str, Any]:
        default = self._profile.steps_in_flight
        counts = sorted({0, 1, default})
        with self._rows_of(self._rows) as decode:
            self._time_steps(decode, 0, 0, 1)  # traces it, and builds its kernels
            step = self._time_steps(decode, 0, 1, 1)
            self._check(ROUNDS * len(counts) * TURN_STEPS * step)
            rounds = [
                {count: self._time_steps(decode, count, 2 + turn * TURN_STEPS, TURN_STEPS) for count in counts}
                for turn in range(ROUNDS)
            ]
        self.measured["steps_in_flight"] = _milliseconds(rounds, TURN_STEPS)
        return {"steps_in_flight": clearly_best(rounds, default)}

    def _slot_steps(self) -> dict[str, Any]:
        steps = set(self._profile.slot_steps)
        self.measured["rows"] = {}
        for line in ROW_COUNTS:
            *fewer, most = line
            if most > self._cache.free or most not in steps:
                continue
            try:
                rounds = self._rounds(line, self._decode_seconds)
            except OutOfTimeError:
                break
            self.measured["rows"] |= _milliseconds(rounds)
            steps = worthwhile_steps(rounds, steps, fewer, most)
        return {"slot_steps": tuple(sorted(steps))}

    def _view_step(self) -> dict[str, Any]:
        """Reads to the end of a view cost each step; a trace for the next view costs once."""
        default = self._profile.view_step
        reads_rows = self._method.attend is not None or self._method.attend_written is not None
        if not self._method.compiled or reads_rows or not self._cache.fits(self._rows, FAR + 2 * ROUNDS):
            return {}
        near, first = self._step_and_first(NEAR)
        far, _ = self._step_and_first(FAR)
        trace = max(0.0, first - near)
        each = max(0.0, far - near) / (FAR - NEAR)
        costs = {step: trace / step + each * step / 2 for step in (default, *VIEW_STEPS)}
        self.measured["view_step"] = {
            name: round(1000 * value, 3) for name, value in (("trace", trace), ("near", near), ("far", far))
        }
        best = min(costs, key=costs.__getitem__)
        gain = costs[default] - costs[best]
        return {"view_step": best if gain > (1 - CLEAR) * near else default}

    def _prefill_step(self) -> dict[str, Any]:
        """Longer pieces delay other rows' tokens, and on some devices each of their tokens takes longer."""
        shorter = [step for step in PREFILL_STEPS if step < self._piece]
        if not shorter:
            return {}
        seconds = self._prefill_seconds(shorter[0])
        self._check(seconds * ROUNDS * (sum(shorter) + self._piece) / shorter[0])
        lengths = [*shorter, self._piece]
        rounds = self._rounds(lengths, lambda length: self._prefill_seconds(length) / length)
        medians = _medians(rounds)
        self.measured["prefill"] = {str(length): round(1 / value) for length, value in medians.items()}
        best = clearly_best(rounds, self._piece)
        return {"prefill_step": best if best != self._piece else None}

    def _check(self, needed: float = 0.0) -> None:
        if time.perf_counter() + needed > self._ends:
            raise OutOfTimeError

    def _rounds(self, keys: Sequence[int], measure: Callable[[int], float]) -> Rounds:
        for key in keys:
            measure(key)  # the first time builds kernels
        begun = time.perf_counter()
        rounds = [{key: measure(key) for key in keys}]
        self._check((ROUNDS - 1) * (time.perf_counter() - begun))
        return rounds + [{key: measure(key) for key in keys} for _ in range(ROUNDS - 1)]

    @contextmanager
    def _rows_of(self, count: int, length: int = PROMPT) -> Iterator[Decode]:
        """So many rows of one made-up prompt, as many as are computed."""
        self._check()
        self._cache.adopt_method(replace(self._method, slot_steps=(count,)))
        staged = self._cache.stage(1, length)
        self._forward.at(mx.ones((1, length), mx.int32), staged, mx.array([length - 1]))
        positions = self._cache.join(staged, [(0, length)] * count)
        tokens = mx.zeros((self._cache.positions,), mx.int32)

        def decode(number: int) -> mx.array:
            nonlocal tokens
            logits = self._cache.decode(self._forward, tokens, [length + number] * self._cache.positions)
            tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
            mx.async_eval(tokens, *self._cache.pending())
            return tokens

        try:
            yield decode
        finally:
            mx.eval(tokens)
            for position in positions:
                self._cache.leave(position)
            self._cache.compact(0)

    def _time_steps(self, decode: Decode, in_flight: int, first: int, count: int) -> float:
        self._check()
        started: deque[mx.array] = deque()
        begun = time.perf_counter()
        for number in range(count):
            started.append(decode(first + number))
            while len(started) > in_flight:
                mx.eval(started.popleft())
        while started:
            mx.eval(started.popleft())
        return time.perf_counter() - begun

    def _decode_seconds(self, rows: int) -> float:
        with self._rows_of(rows) as decode:
            self._time_steps(decode, 0, 0, 1)
            return self._time_steps(decode, 0, 1, 1)

    def _step_and_first(self, length: int) -> tuple[float, float]:
        """Returns how long a step takes that reads so far, and how long the first one took."""
        with self._rows_of(self._rows, length) as decode:
            first = self._time_steps(decode, 0, 0, 1)
            return min(self._time_steps(decode, 0, 1 + number, 1) for number in range(ROUNDS)), first

    def _prefill_seconds(self, tokens: int) -> float:
        self._check()
        staged = self._cache.stage(1, tokens)
        begun = time.perf_counter()
        logits = self._forward.at(mx.ones((1, tokens), mx.int32), staged, mx.array([tokens - 1]))
        mx.eval(logits, state_arrays(staged))
        return time.perf_counter() - begun

    def _restore(self) -> None:
        self._cache.reset()
        self._cache.adopt_method(self._method)
        self._forward.forget()


def clearly_best(rounds: Rounds, default: int) -> int:
    """Returns what takes least, where it does so beyond doubt."""
    medians = _medians(rounds)
    best = min(medians, key=medians.__getitem__)
    return best if _beats(rounds, best, default) else default


def worthwhile_steps(rounds: Rounds, steps: set[int], fewer: Sequence[int], most: int) -> set[int]:
    """Returns numbers of rows to compute, of `steps` and what was compared with `most`.

    Fewer rows that take clearly less are worth a number of their own; those that take clearly more, as between two
    kernels of a product, are computed as `most`.
    """
    gained = {count for count in fewer if _beats(rounds, count, most)}
    lost = {count for count in fewer if _beats(rounds, most, count)}
    found = (steps | gained) - lost
    for count in sorted(gained - steps, reverse=True):  # of numbers that take the same, the largest
        above = min(step for step in found if step > count)
        if above != most and not _beats(rounds, count, above):
            found.discard(count)
    return found


def _beats(rounds: Rounds, one: int, other: int) -> bool:
    return max(seconds[one] for seconds in rounds) < CLEAR * min(seconds[other] for seconds in rounds)


def _medians(rounds: Rounds) -> dict[int, float]:
    return {key: statistics.median(seconds[key] for seconds in rounds) for key in rounds[0]}


def _milliseconds(rounds: Rounds, parts: int = 1) -> dict[str, float]:
    return {str(key): round(1000 * value / parts, 3) for key, value in _medians(rounds).items()}
