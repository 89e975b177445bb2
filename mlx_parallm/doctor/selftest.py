"""`parallm doctor --selftest`: whether everything that serving rests on works on this device, in three minutes.

No network: the embedded model, and random ones in 16 and 4 bits. What an engine answers is held against the same model
computed the plain way, in float32, without caches, one text at a time; speeds are ratios to mlx-lm in the same process.
"""

import logging
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.doctor import machine, operations
from mlx_parallm.doctor.findings import Finding, TimeLimit, look
from mlx_parallm.doctor.probes import Measured, Probe
from mlx_parallm.doctor.random_models import Reference, random_model
from mlx_parallm.engine.delivery import deliver
from mlx_parallm.engine.start import start_engine
from mlx_parallm.lora.adapter import Adapter, Part
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.loader import load
from mlx_parallm.models.memory import size_text

log = logging.getLogger(__name__)

ROWS = (1, 2, 5, 6, 8, 16, 32)  # on both sides of where devices change the order of sums
SPEED_ROWS = (1, 8, 32)
PRECISIONS = {"16-bit model": None, "4-bit model": 4}
CORES_OF_PART = 2  # where parts run beside each other
BOUND = 0.5  # how far a log-probability in 16 or 4 bits may be from float32's; of a wrong context it is several
EXACT = 1e-3  # … and one in float32
LIMIT_BYTES = 96 << 20  # for a model and its rows, which would take twice as much
LONG = 300  # tokens of a prompt of which a part is found in the cache, on every device
SECONDS = 160.0  # after which no check begins: the longest takes 20 s on two CPU cores
REMEDY = "report this with the file: serving gives wrong tokens here"
PARTS = (*operations.CHECKS, *PRECISIONS)
BUSY_SPREAD = 1.5  # how much longer than the fastest the slowest of several equal products takes on a quiet machine


def examine() -> Iterator[Finding]:
    limit = TimeLimit(SECONDS)
    yield from machine.essentials()
    yield look("quiet", _quiet)
    if this_device().builds_slowly:
        yield from _parts_beside_each_other(limit)
    else:
        for name in PARTS:
            yield from _part(name, limit)
    embedded = load(None, name="embedded")
    yield limit.look("limit", partial(_memory_limit, embedded))
    yield from Speed(embedded, limit).examine()
    yield look("still quiet", _quiet)


def _part(name: str, limit: TimeLimit) -> Iterator[Finding]:
    """Runs the checks of one operation, or of one random model."""
    if limit.over:
        yield limit.skipped(name)
    elif name in operations.CHECKS:
        yield from operations.examine([name])
    else:
        yield from RandomModelTest(PRECISIONS[name], load(None, name="embedded"), limit).examine()


def _parts_beside_each_other(limit: TimeLimit) -> Iterator[Finding]:
    """Runs each part in a process of its own: a process compiles one kernel at a time."""
    workers = max(1, min(len(PARTS), (os.cpu_count() or 1) // CORES_OF_PART))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        ends = time.time() + limit.left  # a clock that all processes share
        parts = [(name, pool.submit(_whole_part, name, ends)) for name in PARTS]
        for name, part in parts:
            try:
                yield from part.result()
            except Exception as error:  # a process that has died
                yield Finding(name, f"{type(error).__name__}: {error}", "wrong", "report this line")


def _whole_part(name: str, ends: float) -> list[Finding]:
    return list(_part(name, TimeLimit(ends - time.time())))


def _quiet() -> Finding:
    """Returns whether other programs use the machine: figures of a busy one mean little."""
    matrix = mx.ones((1024, 1024))
    times = []
    for _ in range(12):
        begun = time.perf_counter()
        mx.eval(matrix @ matrix)
        times.append(time.perf_counter() - begun)
    spread = statistics.quantiles(times[2:], n=10)[-1] / min(times[2:])
    load_average = os.getloadavg()[0]
    numbers = {"load_average": load_average, "spread": spread, "cores": os.cpu_count()}
    busy = load_average > 0.5 * (os.cpu_count() or 1) + 1 or spread > BUSY_SPREAD
    found = f"load average {load_average:.1f}; equal products take up to {spread:.2f} times as long as the fastest"
    return Finding(
        "quiet",
        found,
        "slow" if busy else "ok",
        "other programs run: close them for speeds that mean something",
        numbers,
    )


@contextmanager
def served(
    load_model: Callable[[], LanguageModel], profile: DeviceProfile | None = None, **options: Any
) -> Iterator[Probe]:
    """An engine of its own, for as long as it is needed."""
    config = ServeConfig.of(**{"ssd": False, "max_batch_size": max(ROWS), **options})
    engine = start_engine(load_model, config, deliver, profile=profile)
    try:
        yield Probe(engine)
    finally:
        engine.stop()


class RandomModelTest:
    """One random model, served in every way that this device has."""

    def __init__(self, bits: int | None, embedded: LanguageModel, limit: TimeLimit) -> None:
        self._limit = limit
        self._name = "16-bit" if bits is None else f"{bits}-bit"
        self._model = partial(random_model, bits, embedded.tokenizer)
        self._precision = self._model().precision  # in which it is served here
        self._reference = Reference(bits, len(embedded.tokenizer))

    def examine(self) -> Iterator[Finding]:
        look = self._limit.look
        with served(self._model) as probe:
            yield look(f"rows {self._name}", partial(self._rows, probe))
            yield look(f"prefix {self._name}", partial(self._prefix, probe))
            yield look(f"LoRA {self._name}", partial(self._adapters, probe))
        profile = this_device().profile
        traced = replace(profile, compiled=not profile.compiled, fused=False)
        name = "traced" if traced.compiled else "untraced"
        yield look(f"{name} {self._name}", partial(self._profile, f"{name} {self._name}", traced))
        for steps in (0, 1):
            if steps != profile.steps_in_flight:
                name = f"ahead {steps} {self._name}"
                yield look(name, partial(self._profile, name, replace(profile, steps_in_flight=steps)))

    def _gap(self, prompts: Sequence[list[int]], completions: Sequence[Measured], reference: Reference) -> float:
        """Returns the largest difference of a log-probability; infinity where tokens are missing."""
        gaps = [0.0]
        for prompt, completion in zip(prompts, completions, strict=True):
            if len(completion.tokens) != len(completion.logprobs) or not completion.tokens:
                return float("inf")
            expected = reference.logprobs(prompt, completion.tokens)
            gaps += [abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)]
        return float(np.max(gaps))  # NaN stays NaN

    def _finding(self, probe: Probe, name: str, gaps: Mapping[str, float], **numbers: Any) -> Finding:
        bound = EXACT if self._precision == "float32" else BOUND
        wrong = [what for what, gap in gaps.items() if not gap <= bound]
        numbers |= {"gaps": dict(gaps)}
        if not probe.engine.batches:  # what it found at its start
            return Finding(name, "rows together give other logits than alone", "wrong", REMEDY, numbers)
        if wrong:
            told = ", ".join(f"{what}: {gaps[what]:.2f}" for what in wrong)
            return Finding(name, f"log-probabilities are off ({told})", "wrong", REMEDY, numbers)
        return Finding(
            name,
            f"log-probabilities in {self._precision} within {max(gaps.values()):.1g} of float32's",
            numbers=numbers,
        )

    def _rows(self, probe: Probe) -> Finding:
        gaps = {}
        for count in ROWS:
            prompts = probe.prompts[:count]
            gaps[f"{count} rows"] = self._gap(prompts, probe.ask(prompts, logprobs=0), self._reference)
        return self._finding(probe, f"rows {self._name}", gaps)

    def _prefix(self, probe: Probe) -> Finding:
        """Texts with one prefix, which the second and the third find in the cache."""
        prefix = (probe.prompts[7] * 20)[:LONG]
        gaps = {}
        cached = []
        for number in range(3):
            prompt = prefix + probe.prompts[number]
            (completion,) = probe.ask([prompt], logprobs=0, salt="selftest")
            cached.append(completion.cached)
            gaps[f"{completion.cached} tokens cached"] = self._gap([prompt], [completion], self._reference)
        finding = self._finding(probe, f"prefix {self._name}", gaps, cached=cached)
        if not all(cached[1:]):
            return Finding(
                finding.name, "a prefix that was just computed is not found", "wrong", REMEDY, finding.numbers
            )
        return finding

    def _adapters(self, probe: Probe) -> Finding:
        """Two adapters and the base in one batch, and the base again once they are gone."""
        adapters = probe.engine.adapters
        made = {f"selftest-{number}": random_adapter(adapters.targets, number) for number in (1, 2)}
        references: dict[str | None, Reference] = {None: self._reference}
        prompts = probe.prompts[:6]
        try:
            for made_name, adapter in made.items():
                adapters.publish(made_name, adapter, "selftest")
                references[made_name] = self._reference.with_adapter(adapter)
            names = [None, *made, *made, None]
            completions = probe.ask(prompts, logprobs=0, adapters=names)
        finally:
            for published in made:
                adapters.unload(published)
        gaps: dict[str, float] = {}
        for prompt, name, completion in zip(prompts, names, completions, strict=True):
            what = name or "base"
            gaps[what] = max(gaps.get(what, 0.0), self._gap([prompt], [completion], references[name]))
        gaps["base afterwards"] = self._gap(prompts, probe.ask(prompts, logprobs=0), self._reference)
        return self._finding(probe, f"LoRA {self._name}", gaps)

    def _profile(self, name: str, profile: DeviceProfile) -> Finding:
        with served(self._model, profile) as probe:
            prompts = probe.prompts[:6]
            return self._finding(
                probe, name, {"6 rows": self._gap(prompts, probe.ask(prompts, logprobs=0), self._reference)}
            )


def random_adapter(targets: Mapping[str, Any], seed: int, rank: int = 8) -> Adapter:
    """Makes an adapter of all linear layers but the head, large enough to change every completion."""
    random = np.random.default_rng(seed)
    return Adapter(
        {
            path: Part(
                0.3 * random.standard_normal((rank, target.size)).astype(np.float32) / target.size**0.5,
                random.standard_normal((target.out_features, rank)).astype(np.float32),
            )
            for path, target in targets.items()
            if target.kind == "linear" and not path.endswith("lm_head")
        }
    )


def _memory_limit(embedded: LanguageModel) -> Finding:
    """Fills an engine with more than its limit holds: what is held between two passes stays below it."""
    model = partial(random_model, None, embedded.tokenizer)
    before = mx.get_active_memory()
    with served(model, memory_limit=LIMIT_BYTES) as probe:
        probe.ask([(prompt * 90)[:2000] for prompt in probe.prompts], max_tokens=4)
        held = mx.get_active_memory() - before
    numbers = {"limit": LIMIT_BYTES, "held": held}
    found = (
        f"{len(probe.prompts)} prompts of 2,000 tokens leave {size_text(held)}; the limit was {size_text(LIMIT_BYTES)}"
    )
    return Finding("limit", found, "wrong" if held > LIMIT_BYTES else "ok", "report this with the file", numbers)


class Speed:
    """The embedded model's rates beside mlx-lm's in this process, in turns."""

    def __init__(self, embedded: LanguageModel, limit: TimeLimit) -> None:
        self._peer = embedded
        self._limit = limit

    def examine(self) -> Iterator[Finding]:
        if self._limit.over:
            yield self._limit.skipped("speed")
            return
        look = self._limit.look
        with served(partial(load, None, name="embedded")) as probe:
            yield look("parity", probe.parity)
            for rows in SPEED_ROWS:
                yield look(f"speed {rows}", partial(self._decode, probe, rows))
            yield look("speed prefill", partial(self._prefill, probe))

    def _decode(self, probe: Probe, rows: int) -> Finding:
        _, *pairs = [(probe.decode_rate(rows), self._peer_rate(probe.prompts[:rows])) for _ in range(4)]
        return self._compared(f"speed {rows}", f"decoding {rows} rows", pairs)

    def _prefill(self, probe: Probe) -> Finding:
        def ours() -> float:
            begun = time.perf_counter()
            (completion,) = probe.ask([probe.long], max_tokens=1)
            return len(probe.long) / (completion.times[0] - begun)

        return self._compared(
            "speed prefill",
            f"a prompt of {len(probe.long)} tokens",
            [(ours(), self._peer_prefill(probe.long)) for _ in range(3)],
        )

    @staticmethod
    def _compared(name: str, what: str, pairs: Sequence[tuple[float, float]]) -> Finding:
        rate, peer = (statistics.median(rates) for rates in zip(*pairs, strict=True))
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        numbers = {"rate": rate, "mlx_lm": peer, "ratio": ratio}
        found = f"{what}: {rate:,.0f} tok/s, {ratio:.2f} times mlx-lm's {peer:,.0f}"
        return Finding(name, found, "slow" if ratio < 0.9 else "ok", "tell us, with the file", numbers)

    def _peer_rate(self, prompts: Sequence[list[int]], tokens: int = 8) -> float:
        """Returns mlx-lm's tokens a second, once all rows run."""
        generator = BatchGenerator(self._peer.module, max_tokens=tokens, completion_batch_size=len(prompts))
        generator.insert([list(prompt) for prompt in prompts])
        counts = dict.fromkeys(range(len(prompts)), 0)
        begun = ended = time.perf_counter()
        counted = 0
        running = len(prompts)
        while running:
            _, responses = generator.next()
            ended = time.perf_counter()
            began = all(counts.values())
            for response in responses:
                counts[response.uid] = counts.get(response.uid, 0) + 1
                running -= response.finish_reason is not None
            counted += len(responses) if began else 0
            if not began and all(counts.values()):
                begun = ended
        return counted / max(ended - begun, 1e-9)

    def _peer_prefill(self, prompt: list[int]) -> float:
        generator = BatchGenerator(self._peer.module, max_tokens=1)
        begun = time.perf_counter()
        generator.insert([list(prompt)])
        while not generator.next()[1]:
            pass
        return len(prompt) / (time.perf_counter() - begun)
