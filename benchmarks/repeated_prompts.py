"""Throughput when prompts come again, beside the same load with new ones, in turn on one server.

    python benchmarks/repeated_prompts.py                                 # the embedded weights in float32
    python benchmarks/repeated_prompts.py --model FOLDER --clients 64 --prompt-words 64-384 --output-tokens 64-192

Each round sends new prompts, then the very same ones again: the second time all but the end of each is cached, so it
must not be slower. On CUDA it was, as long as what is left behind a hit came in shapes that had never been computed.
"""

import argparse
import statistics
import sys

import servers
import weights
from rich.console import Console
from rich.table import Table

from mlx_parallm.bench.load_test import BenchSummary, LoadSpec, run_load
from mlx_parallm.cli.bench_command import parse_span


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="mlx-lm folder (default: the embedded weights in float32)")
    add("--clients", type=int, default=8)
    add("--requests", type=int, help="of each part (default: 3 per client)")
    add("--prompt-words", type=parse_span, default=(64, 256), metavar="MIN-MAX")
    add("--output-tokens", type=parse_span, default=(16, 32), metavar="MIN-MAX")
    add("--rounds", type=int, default=3)
    add("--serve-flags", default="", help="more flags for the server, in one string")
    return parser.parse_args()


def measure(server: servers.ServerProcess, args: argparse.Namespace, salt: str) -> BenchSummary:
    spec = LoadSpec(
        url=server.url,
        endpoint="completions",
        concurrency=args.clients,
        requests=args.requests or 3 * args.clients,
        prompt_words=args.prompt_words,
        output_tokens=args.output_tokens,
        ignore_eos=True,
        salt=salt,
    )
    return run_load(spec).summary()


def main() -> int:
    args = parse_args()
    model = args.model or str(weights.embedded_float32())
    found: dict[str, list[BenchSummary]] = {"new": [], "again": []}
    with servers.running(servers.ours(model, args.serve_flags.split())) as server:
        measure(server, args, "warm-up")
        for number in range(args.rounds):
            for name, runs in found.items():
                runs.append(measure(server, args, f"round {number}"))
                rate, wait = runs[-1].output_rate, runs[-1].ttft.p50
                print(f"round {number}, {name}: {rate:,.1f} tok/s, first token {1000 * wait:,.0f} ms", flush=True)
    table = Table()
    for column in ("prompts", "output tok/s", "TTFT p50", "errors"):
        table.add_column(column)
    for name, runs in found.items():
        rate = statistics.median(run.output_rate for run in runs)
        wait = statistics.median(run.ttft.p50 for run in runs)
        table.add_row(
            name, f"{rate:,.1f}", f"{1000 * wait:,.0f} ms", str(sum(sum(run.errors.values()) for run in runs))
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    ratios = [again.output_rate / new.output_rate for new, again in zip(found["new"], found["again"], strict=True)]
    each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"again / new, by rounds: {each}; median {statistics.median(ratios):.3f}")
    return 0


if __name__ == "__main__":
    servers.script(main)
