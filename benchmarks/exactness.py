"""Is an answer the same alone and in any batch, and what does that cost?

    python benchmarks/exactness.py --model FOLDER               # a GPU, 64 rows
    python benchmarks/exactness.py --model FOLDER --rows 8 --ways always --dtype float16 --prompts 12

Two engines of one model in this process, with `--exact always` and with `--exact off`. Prompts of 8 to 300 words are
answered alone, then all at once, in other orders, with their prompts cached, and with adapters in every other row;
each answer is compared with the one alone, token for token and logarithm for logarithm. Then both engines answer the
same load in turns: many requests at once, and one at a time. A ratio above 0.95 is what `--exact auto` accepts.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  (a fast BLAS, before MLX)

import servers  # isort: skip
from rich.console import Console

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import device_name
from mlx_parallm.doctor.probes import Measured, Probe
from mlx_parallm.doctor.selftest import random_adapter
from mlx_parallm.engine.delivery import deliver
from mlx_parallm.engine.engine import Engine
from mlx_parallm.runtime.startup import Runtime, start

WAYS = ("always", "off")
ADAPTERS = 8
SAMPLED = {"temperature": 0.8, "seed": 5}


def runtime_of(args: argparse.Namespace, exact: str) -> Runtime:
    options: dict[str, Any] = {"max_batch_size": args.rows, "max_queue_size": 4096, "ssd": False, "dtype": args.dtype}
    options["max_loras"] = ADAPTERS
    return start(ServeConfig.of(model_path=(args.model,) if args.model else (), exact=exact, **options), deliver)


def prompts_of(engine: Engine, count: int) -> list[list[int]]:
    numbers = random.Random(1)
    vocab = min(engine.model.vocab_size, 20_000)
    return [[numbers.randrange(3, vocab) for _ in range(numbers.randint(8, 300))] for _ in range(count)]


def equal(one: Sequence[Measured], other: Sequence[Measured]) -> int:
    return sum(a.tokens == b.tokens and a.logprobs == b.logprobs for a, b in zip(one, other, strict=True))


def count_equal(engine: Engine, count: int, tokens: int) -> dict[str, int]:
    """How many answers are as they are alone."""
    probe = Probe(engine)
    prompts = prompts_of(engine, count)
    names: list[str | None] = [f"bench-{number % ADAPTERS}" if number % 2 else None for number in range(count)]
    for number in range(ADAPTERS):
        engine.adapters.publish(f"bench-{number}", random_adapter(engine.adapters.targets, number), "benchmark")
    found: dict[str, int] = {}
    for label, sampling in (("greedy", {}), ("sampled", SAMPLED)):
        options: dict[str, Any] = {"max_tokens": tokens, "logprobs": 0, **sampling}
        alone = [probe.ask([prompt], **options)[0] for prompt in prompts]
        for order in range(3):
            chosen = random.Random(order).sample(range(count), count)
            together = probe.ask([prompts[number] for number in chosen], **options)
            by_number = dict(zip(chosen, together, strict=True))
            found[f"{label}, together, order {order + 1}"] = equal(
                alone, [by_number[number] for number in range(count)]
            )
        probe.ask(prompts, salt=f"warm {label}", **options)
        found[f"{label}, cached"] = equal(alone, probe.ask(prompts, salt=f"warm {label}", **options))
        mixed = [
            probe.ask([prompt], adapters=[name], **options)[0] for prompt, name in zip(prompts, names, strict=True)
        ]
        together = probe.ask(prompts, adapters=names, **options)
        found[f"{label}, {ADAPTERS} adapters"] = equal(mixed, together)
        found[f"{label}, the base beside adapters"] = equal(alone[::2], together[::2])
    return found


def rates(engine: Engine, rows: int, requests: int) -> dict[str, float]:
    """Tokens a second of many requests at once on new prompts, on the same again, and of one request after another."""
    probe = Probe(engine)
    numbers = random.Random(time.time_ns())
    vocab = min(engine.model.vocab_size, 20_000)
    prompts = [[numbers.randrange(3, vocab) for _ in range(numbers.randint(90, 540))] for _ in range(requests)]
    lengths = [numbers.randint(64, 192) for _ in range(requests)]
    found = {}
    for label in ("fresh", "repeated"):
        begun = time.perf_counter()
        answers: list[Measured] = []
        for first in range(0, requests, 4 * rows):
            part = slice(first, first + 4 * rows)
            answers += probe.ask(prompts[part], salt="rates", max_tokens=statistics.median_low(lengths[part]))
        found[label] = sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - begun)
    found["one row"] = statistics.median(probe.decode_rate(1, max_tokens=64) for _ in range(3))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder, GGUF file or hub id (default: the embedded model)")
    add("--dtype", default="auto", help="as of `parallm serve` (default: %(default)s)")
    add("--rows", type=int, default=64, help="of a batch (default: %(default)s)")
    add("--prompts", type=int, default=48, help="to compare (default: %(default)s)")
    add("--tokens", type=int, default=48, help="of each answer that is compared (default: %(default)s)")
    add("--turns", type=int, default=5, help="of each engine, to measure (default: %(default)s)")
    add("--requests", type=int, help="of a turn (default: 4 per row)")
    add("--ways", default=",".join(WAYS), help="of --exact (default: %(default)s)")
    add("--compare", default=WAYS[0], help="the ways whose answers are compared (default: %(default)s)")
    add("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    console.print(device_name())
    ways = args.ways.split(",")
    runtimes = {way: runtime_of(args, way) for way in ways}
    found: dict[str, Any] = {}
    wrong = 0
    for way, runtime in runtimes.items():
        engine = runtime.engine
        console.print(f"--exact {way}: tuning {engine.metrics.tuning}")
        if way not in args.compare.split(","):
            continue
        found[way] = count_equal(engine, args.prompts, args.tokens)
        for what, count in found[way].items():
            of = len(range(0, args.prompts, 2)) if "beside" in what else args.prompts
            console.print(f"  {what}: {count} of {of} answers as alone")
            wrong += way == "always" and count < of
    turns: list[dict[str, dict[str, float]]] = []
    for turn in range(args.turns + 1 if len(ways) > 1 else 0):  # the first computes new shapes
        order = list(runtimes.items())
        measured = {
            way: rates(runtime.engine, args.rows, args.requests or 4 * args.rows)
            for way, runtime in (order if turn % 2 else order[::-1])
        }
        turns += [measured] if turn else []
        told = {way: {what: round(rate) for what, rate in some.items()} for way, some in measured.items()}
        console.print(f"turn {turn} (0: new shapes, not counted): {told}")
    if turns:
        first, second = ways[:2]
        for what in turns[0][first]:
            ratios = [turn[first][what] / turn[second][what] for turn in turns]
            rate = statistics.median(turn[first][what] for turn in turns)
            console.print(
                f"{what}: {rate:,.0f} tok/s with --exact {first}, {statistics.median(ratios):.3f} of --exact {second} "
                f"({min(ratios):.3f} to {max(ratios):.3f})"
            )
            found[what] = {"rate": rate, "ratio": statistics.median(ratios)}
    for runtime in runtimes.values():
        runtime.close()
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    servers.script(main)
