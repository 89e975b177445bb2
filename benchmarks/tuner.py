"""Is what a start measures as good as the best that an exhaustive search finds?

    python benchmarks/tuner.py                   # the embedded model
    python benchmarks/tuner.py --model FOLDER    # a GPU

Every combination of the settings that a start measures is served by an engine of its own, which decodes several
numbers of rows and computes a long prompt. The best `--finalists` of them, the profile's own and what `--starts` starts
chose, each measured anew, are then served again in turns, `--rounds` times, and these rounds alone count: the first
place of a single round is as much luck as merit. A combination's score is the geometric mean of its rates beside the
profile's own just before and after, the median of all rounds. What is asked for: the median of the starts' scores
within 5% of the best.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  (a fast BLAS, before MLX)

import servers  # isort: skip
from rich.console import Console
from rich.table import Table

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import device_name, this_device
from mlx_parallm.devices.tuning import Tuning
from mlx_parallm.doctor.probes import Probe
from mlx_parallm.engine.compute.batching import slot_cache
from mlx_parallm.engine.compute.patch import patch_layers
from mlx_parallm.engine.compute.tuner import Tuner
from mlx_parallm.engine.delivery import deliver
from mlx_parallm.engine.start import start_engine
from mlx_parallm.models.forward import Forward
from mlx_parallm.models.loader import load

ROWS = (1, 3, 5, 6, 8)
TOKENS = 24  # of each row
PROMPT = 1536  # tokens
PIECE = 2048  # --prefill-step-size
MOST_ROWS = 32
VIEWS = (64, 128, 512)
BETWEEN = 2  # settings between two of the profile's own
ENOUGH = 0.95


def own_settings() -> Tuning:
    return Tuning.of(this_device().profile)


def combinations() -> Iterator[Tuning]:
    own = own_settings()
    steps = set(own.slot_steps)
    slot_steps = [own.slot_steps, tuple(sorted(steps | {3, 5, 6, 7})), tuple(sorted(steps - {2, 4}))]
    profile = this_device().profile
    views = VIEWS if profile.compiled and not profile.fused else (own.view_step,)  # a start measures no others
    for in_flight, slots, view, piece in itertools.product((0, 1, 2), slot_steps, views, (None, 512, 1024)):
        if in_flight <= max(1, own.steps_in_flight):
            yield Tuning(in_flight, slots, view, piece)


def measured_settings(source: str | None) -> tuple[Tuning, float]:
    """What a start would measure, and in how many seconds."""
    profile = this_device().profile
    model = load(source, name="model")
    layout = patch_layers(model.module, profile, None)
    cache = slot_cache(len(model.module.layers), MOST_ROWS, 1 << 31, profile)
    tuner = Tuner(Forward(model.module, layout.active), cache, profile, PIECE)
    return tuner.run(), float(tuner.measured["seconds"])


@contextmanager
def serving(source: str | None, tuning: Tuning) -> Iterator[Probe]:
    config = ServeConfig.of(ssd=False, max_batch_size=MOST_ROWS, prefill_step_size=PIECE)
    profile = tuning.applied_to(this_device().profile)
    engine = start_engine(partial(load, source, name="model"), config, deliver, profile=profile)
    try:
        yield Probe(engine)
    finally:
        engine.stop()


def rates(source: str | None, tuning: Tuning) -> list[float]:
    with serving(source, tuning) as probe:
        prompt = (probe.long * 4)[:PROMPT]
        probe.ask([prompt], max_tokens=1)
        found = []
        for rows in ROWS:
            probe.decode_rate(rows)
            found.append(max(probe.decode_rate(rows, max_tokens=TOKENS) for _ in range(2)))
        seconds = []
        for _ in range(2):
            begun = time.perf_counter()
            probe.ask([prompt], max_tokens=1)
            seconds.append(time.perf_counter() - begun)
        return [*found, len(prompt) / min(seconds)]


def score(found: list[float], own: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(one / other) for one, other in zip(found, own, strict=True)))


def scored(
    console: Console, source: str | None, own: Tuning, settings: list[Tuning], rounds: int
) -> dict[Tuning, list[float]]:
    """The scores of settings in each round, beside the profile's own just before and after: machines drift."""
    scores: dict[Tuning, list[float]] = {tuning: [] for tuning in settings if tuning != own}
    for number in range(rounds):
        order = random.Random(number).sample(list(scores), len(scores))
        before = rates(source, own)
        for first in range(0, len(order), BETWEEN):
            found = {tuning: rates(source, tuning) for tuning in order[first : first + BETWEEN]}
            after = rates(source, own)
            for tuning, some in found.items():
                scores[tuning].append(math.sqrt(score(some, before) * score(some, after)))
                told = f"{tuning.steps_in_flight}, {tuning.slot_steps}, {tuning.view_step}, {tuning.prefill_step}"
                console.print(f"round {number + 1} of {rounds}: {told}: {scores[tuning][-1]:.3f}")
            before = after
    return scores


def described(scores: dict[Tuning, float], chosen: list[Tuning]) -> list[dict[str, Any]]:
    return [{**tuning.as_json(), "score": value, "starts": chosen.count(tuning)} for tuning, value in scores.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder, GGUF file or hub id (default: the embedded model)")
    add("--rounds", type=int, default=3, help="in which each finalist has its turn (default: %(default)s)")
    add("--finalists", type=int, default=4, help="best combinations of the sweep (default: %(default)s)")
    add("--starts", type=int, default=5, help="that measure anew (default: %(default)s)")
    add("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    starts = [measured_settings(args.model) for _ in range(args.starts)]
    chosen = [tuning for tuning, _ in starts]
    own = own_settings()
    once = scored(console, args.model, own, list(dict.fromkeys(combinations())), rounds=1)
    best_once = sorted(once, key=lambda tuning: -once[tuning][0])[: args.finalists]
    scores = scored(console, args.model, own, list(dict.fromkeys([*best_once, *chosen])), args.rounds)
    medians = {own: 1.0} | {tuning: statistics.median(some) for tuning, some in scores.items()}
    best = max(medians, key=medians.__getitem__)
    share = statistics.median(medians[tuning] for tuning in chosen) / medians[best]
    table = Table(title=device_name())
    for column in ("steps in flight", "rows", "view", "piece", "score", "starts"):
        table.add_column(column, justify="right")
    for tuning, value in sorted(medians.items(), key=lambda item: -item[1]):
        slots = ", ".join(map(str, [step for step in tuning.slot_steps if step <= ROWS[-1]]))
        shown = [tuning.steps_in_flight, slots, tuning.view_step, tuning.prefill_step or PIECE, f"{value:.3f}"]
        table.add_row(*map(str, [*shown, chosen.count(tuning) or ""]))
    console.print(table)
    console.print(
        f"median of {len(chosen)} starts, measured in {', '.join(f'{seconds:.1f}' for _, seconds in starts)} s: "
        f"{share:.3f} of the best: {'passed' if share >= ENOUGH else 'FAILED'}"
    )
    if args.json is not None:
        document = {"device": device_name(), "share": share, "settings": described(medians, chosen)}
        swept = {tuning: some[0] for tuning, some in once.items()}
        args.json.write_text(json.dumps(document | {"swept": described(swept, [])}, indent=1))
    return 0 if share >= ENOUGH else 1


if __name__ == "__main__":
    servers.script(main)
