"""Our server and `mlx_lm.server` under the same load, on the same weights, in the same precision, with the same BLAS.

    python benchmarks/serve_vs_mlx_lm.py                                   # the embedded weights in float32
    python benchmarks/serve_vs_mlx_lm.py --model FOLDER --clients 64 --prompt-words 64-384 --output-tokens 64-192 \\
        --decode-concurrency 64 --temperature 0,0.8 --bare                 # a GPU
    python benchmarks/serve_vs_mlx_lm.py --tree-before CHECKOUT            # what have our changes since then cost?

The two take turns, each alone on the machine; medians over --repeats are compared. A ratio above 1 in a rate, or below
1 in a time, is in our favour. Both stop at their end-of-sequence token: the table shows how many tokens each made.
"""

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import servers
import weights
from rich.console import Console
from rich.table import Table

from mlx_parallm.bench.load_test import BenchSummary, LoadResult, LoadSpec, run_load
from mlx_parallm.cli.bench_command import as_dict, parse_list, parse_span

OURS, PEER, BEFORE = "mlx_parallm", "mlx_lm.server", "before"


@dataclass(frozen=True, slots=True)
class Load:
    """What is measured in each turn."""

    clients: int
    temperature: float


@dataclass(slots=True)
class Run:
    server: str
    load: Load
    result: LoadResult


def parse_floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="mlx-lm folder (default: the embedded weights in float32)")
    add("--clients", type=parse_list, default=[8, 32], metavar="N[,N…]")
    add(
        "--temperature",
        type=parse_floats,
        default=[0.0],
        metavar="T[,T…]",
        help="mlx_lm.server is measured at the first only",
    )
    add("--prompt-words", type=parse_span, default=(32, 128), metavar="MIN-MAX")
    add("--output-tokens", type=parse_span, default=(16, 48), metavar="MIN-MAX")
    add("--stream-share", type=float, default=0.5)
    add("--requests", type=int, help="per load (default: 4 per client)")
    add("--endpoint", choices=("chat", "completions"), default="chat")
    add("--repeats", type=int, default=3, help="turns of each server (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--decode-concurrency", type=int, default=32, help="rows that both decode together (default: %(default)s)")
    add("--tree-before", type=Path, metavar="CHECKOUT", help="measure our server of that checkout as the peer instead")
    add("--skip-peer", action="store_true", help="measure only our server")
    add("--bare", action="store_true", help="measure the bare forward pass too")
    add("--serve-flags", default="", help="more flags for our server, in one string")
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def start(name: str, model: str, args: argparse.Namespace) -> servers.ServerProcess:
    rows = str(args.decode_concurrency)
    if name == PEER:
        return servers.mlx_lm(model, ["--decode-concurrency", rows])
    flags = ["--max-batch-size", rows, *args.serve_flags.split()]
    return servers.ours(model, flags, tree=args.tree_before if name == BEFORE else None)


def peer_of(args: argparse.Namespace) -> str:
    return BEFORE if args.tree_before else PEER


def turns(args: argparse.Namespace) -> Iterator[str]:
    """Who is measured when. The first of a pair changes, so that neither always meets the cooler machine."""
    pair = [OURS] if args.skip_peer else [OURS, peer_of(args)]
    for repeat in range(args.repeats):
        yield from pair if repeat % 2 == 0 else reversed(pair)


def measure(name: str, model: str, loads: Sequence[Load], args: argparse.Namespace) -> list[Run]:
    runs = []
    with servers.running(start(name, model, args)) as server:
        for load in loads:
            if name == PEER and load.temperature != args.temperature[0]:
                continue
            spec = LoadSpec(
                url=server.url,
                model=server.model,
                endpoint=args.endpoint,
                concurrency=load.clients,
                requests=args.requests or 4 * load.clients,
                prompt_words=args.prompt_words,
                output_tokens=args.output_tokens,
                stream_share=args.stream_share,
                temperature=load.temperature,
                seed=args.seed,
                salt=f"{load.clients} {load.temperature}",  # no load meets prompts that another has left in a cache
                warmup=load.clients,
            )
            runs.append(Run(name, load, run_load(spec)))
            report(runs[-1])
    return runs


def report(run: Run) -> None:
    summary, load = run.result.summary(), run.load
    errors = f", errors {summary.errors}" if summary.errors else ""
    print(
        f"{run.server:14} {load.clients:3} clients, T={load.temperature:g}: {summary.output_rate:8.1f} tok/s, "
        f"TTFT {summary.ttft.p50:.2f} / {summary.ttft.p95:.2f} s, {summary.output_tokens} tokens in "
        f"{summary.seconds:.1f} s, client CPU {summary.client_cpu:.1f} s{errors}",
        flush=True,
    )


MEASURES = {
    "output tok/s": lambda s: s.output_rate,
    "requests/s": lambda s: s.request_rate,
    "TTFT p50": lambda s: s.ttft.p50,
    "TTFT p95": lambda s: s.ttft.p95,
    "inter-token p50": lambda s: s.itl.p50,
    "inter-token p99": lambda s: s.itl.p99,
    "output tokens": lambda s: float(s.output_tokens),
}


def medians(runs: Sequence[Run], server: str, load: Load) -> dict[str, float]:
    summaries: list[BenchSummary] = [run.result.summary() for run in runs if (run.server, run.load) == (server, load)]
    return {name: statistics.median(map(pick, summaries)) for name, pick in MEASURES.items()} if summaries else {}


def compare(runs: Sequence[Run], loads: Sequence[Load], peer: str) -> list[dict[str, Any]]:
    rows = []
    for load in loads:
        mine, theirs = medians(runs, OURS, load), medians(runs, peer, load)
        ratios = {name: mine[name] / theirs[name] for name in theirs if theirs[name]}
        rows.append(
            {"clients": load.clients, "temperature": load.temperature, OURS: mine, peer: theirs, "ratio": ratios}
        )
    return rows


def show(console: Console, comparison: Sequence[dict[str, Any]], peer: str) -> None:
    table = Table(title="medians", title_justify="left")
    for column in ("load", "measure", OURS, peer, "ratio"):
        table.add_column(column, justify="left" if column in ("load", "measure") else "right")
    for row in comparison:
        for number, name in enumerate(MEASURES):
            label = f"{row['clients']} clients, T={row['temperature']:g}" if number == 0 else ""
            cells = [_cell(row[server].get(name), name) for server in (OURS, peer)]
            ratio = row["ratio"].get(name)
            table.add_row(label, name, *cells, f"{ratio:.2f}×" if ratio is not None else "-")
        table.add_section()
    console.print(table)


def _cell(value: float | None, name: str) -> str:
    if value is None:
        return "-"
    if name.startswith(("TTFT", "inter-token")):
        return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
    return f"{value:,.0f}" if name == "output tokens" else f"{value:,.2f}"


def compare_temperatures(console: Console, comparison: Sequence[dict[str, Any]]) -> None:
    """How much sampling costs, where greedy was measured too."""
    for row in comparison:
        greedy = next((r for r in comparison if (r["clients"], r["temperature"]) == (row["clients"], 0.0)), None)
        if greedy is not None and row["temperature"] > 0:
            share = row[OURS]["output tok/s"] / greedy[OURS]["output tok/s"]
            console.print(f"{row['clients']} clients: temperature {row['temperature']:g} runs at {share:.1%} of greedy")


def measure_bare(model: str, args: argparse.Namespace, runs: Sequence[Run]) -> dict[str, Any]:
    """The forward pass alone at the lengths that the load had."""
    done = [record for run in runs for record in run.result.finished]
    prompt = round(statistics.mean(record.prompt_tokens for record in done))
    output = round(statistics.mean(record.output_tokens for record in done))
    rows = sorted({min(clients, args.decode_concurrency) for clients in args.clients})
    command = [
        sys.executable,
        str(Path(__file__).with_name("bare.py")),
        model,
        "--steps",
        str(max(16, min(128, output))),
    ]
    command += ["--rows", ",".join(map(str, rows)), "--prompt-tokens", str(prompt + output // 2)]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode != 0:
        sys.exit(f"bare.py failed:\n{answer.stderr[-2000:]}")
    rates = json.loads(answer.stdout.splitlines()[-1])
    # What those rates allow: a request's prompt at the prefill rate, its answer at the decode rate.
    allowed = {rows: output / (prompt / rates["prefill"] + output / rate) for rows, rate in rates["decode"].items()}
    return {**rates, "prompt_tokens": prompt, "output_tokens": output, "allowed": allowed}


def show_bare(console: Console, bare: dict[str, Any], comparison: Sequence[dict[str, Any]], rows_limit: int) -> None:
    for row in comparison:
        rows = str(min(row["clients"], rows_limit))
        rate, decode, allowed = row[OURS]["output tok/s"], bare["decode"][rows], bare["allowed"][rows]
        console.print(
            f"{row['clients']} clients, T={row['temperature']:g}: {rate:,.0f} tok/s is {rate / decode:.0%} of the bare "
            f"decode loop at {rows} rows ({decode:,.0f}), and {rate / allowed:.0%} of what it allows with prefill at "
            f"{bare['prefill']:,.0f} tok/s ({allowed:,.0f})",
            soft_wrap=True,
        )


def main() -> int:
    args = parse_args()
    model = args.model or str(weights.embedded_float32())
    loads = [Load(*pair) for pair in itertools.product(args.clients, args.temperature)]
    runs = [run for name in turns(args) for run in measure(name, model, loads, args)]
    comparison = compare(runs, loads, peer_of(args))
    console = Console(width=None if sys.stdout.isatty() else 110)
    show(console, comparison, peer_of(args))
    compare_temperatures(console, comparison)
    bare = measure_bare(model, args, runs) if args.bare else None
    if bare:
        show_bare(console, bare, comparison, args.decode_concurrency)
    if args.json:
        machine = {"platform": platform.platform(), "python": platform.python_version()}
        raw = [{"server": run.server, **as_dict(run.result)} for run in runs]
        args.json.write_text(
            json.dumps({"machine": machine, "bare": bare, "comparison": comparison, "runs": raw}, indent=2)
        )
    return 1 if any(run.server == OURS and run.result.summary().errors for run in runs) else 0


if __name__ == "__main__":
    servers.script(main)
