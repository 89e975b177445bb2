"""`parallm bench`: flags to `LoadSpec`s, results to a table, JSON and a PNG plot. Called by `cli`."""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from mlx_parallm.bench.load_test import BenchSummary, LoadResult, LoadSpec, Percentiles, RequestRecord, Span, run_load
from mlx_parallm.errors import ConfigError
from mlx_parallm.http_client import add_tls_flags

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table


def parse_span(text: str) -> Span:
    """'32-128', or '64' for a fixed number."""
    low, _, high = text.partition("-")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range: write 32-128, or 64") from None


def parse_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers: write 1,8,32") from None


def add_flags(parser: argparse.ArgumentParser) -> None:
    _add_server_flags(parser.add_argument_group("the server"))
    _add_request_flags(parser.add_argument_group("requests"))
    _add_load_flags(parser.add_argument_group("load"))
    results = parser.add_argument_group("results")
    results.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file (default: none)")
    results.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw the results with matplotlib into this file (default: none)",
    )


def _add_server_flags(group: Any) -> None:
    add = group.add_argument
    add("--url", default="http://127.0.0.1:8000", help="an OpenAI-compatible server (default: %(default)s)")
    add("--model", default="", help="model id (default: the first that the server lists)")
    add("--endpoint", choices=("chat", "completions"), default="chat", help="route to load (default: %(default)s)")
    add("--api-key", help="bearer token (default: none)")
    add_tls_flags(group)
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for a request (default: %(default)s)")


def _add_request_flags(group: Any) -> None:
    add = group.add_argument
    words = (32, 128)
    tokens = (16, 48)
    add("--prompt-words", type=parse_span, default=words, metavar="MIN-MAX", help="words of a prompt (default: 32-128)")
    add(
        "--shared-prefix-words",
        type=int,
        default=0,
        metavar="N",
        help="words that all prompts begin with (default: none)",
    )
    add("--output-tokens", type=parse_span, default=tokens, metavar="MIN-MAX", help="max_tokens (default: 16-48)")
    add("--ignore-eos", action="store_true", help="ask for exactly max_tokens; not every server knows ignore_eos")
    add(
        "--stream-share",
        type=float,
        default=0.5,
        metavar="0…1",
        help="share of requests that stream (default: %(default)s)",
    )
    add("--temperature", type=float, default=0.0, help="sampling temperature (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of prompts, lengths and arrivals (default: %(default)s)")


def _add_load_flags(group: Any) -> None:
    add = group.add_argument
    add(
        "--concurrency",
        type=parse_list,
        default=[8],
        metavar="N[,N…]",
        help="clients; a list runs one load after another (default: 8)",
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--num-requests", type=int, metavar="N", help="requests per load (default: 4 per client, at least 32)"
    )
    size.add_argument("--duration", type=float, metavar="S", help="send requests for this many seconds instead")
    closed = "default: inf, each client sends when its last has ended"
    add(
        "--rate",
        type=float,
        default=math.inf,
        metavar="R",
        help=f"Poisson arrivals a second, times from arrival ({closed})",
    )
    add(
        "--warmup",
        type=int,
        default=None,
        metavar="N",
        help="uncounted requests before each load (default: one per client)",
    )


def specs(args: argparse.Namespace) -> list[LoadSpec]:
    same = {item.name: getattr(args, item.name) for item in fields(LoadSpec) if hasattr(args, item.name)}
    return [LoadSpec(**(same | _sizes(args, clients))) for clients in args.concurrency]


def _sizes(args: argparse.Namespace, clients: int) -> dict[str, Any]:
    """Returns what depends on the number of clients."""
    requests = max(32, 4 * clients) if args.num_requests is None else args.num_requests
    warmup = clients if args.warmup is None else args.warmup
    return {"concurrency": clients, "warmup": warmup, "requests": None if args.duration is not None else requests}


def run(args: argparse.Namespace) -> int:
    """0 when every request ended right, else 1."""
    loads = specs(args)
    if args.plot:
        _require_matplotlib()
    results = [_measure(spec) for spec in loads]
    _print(results)
    if args.json:
        args.json.write_bytes(orjson.dumps([as_dict(result) for result in results], option=orjson.OPT_INDENT_2))
    if args.plot:
        draw(results, args.plot)
    return 1 if any(result.summary().errors for result in results) else 0


def _measure(spec: LoadSpec) -> LoadResult:
    """Runs one load; on a terminal with a progress bar, redrawn seldom since it shares the server's cores."""
    if not sys.stderr.isatty():
        return run_load(spec)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2, transient=True) as progress:
        task = progress.add_task(f"{spec.concurrency} clients", total=spec.requests)

        def advance(record: RequestRecord) -> None:
            progress.advance(task)

        return run_load(spec, advance)


def as_dict(result: LoadResult) -> dict[str, Any]:
    summary = result.summary()
    spec = {name: value for name, value in asdict(result.spec).items() if name != "api_key"}
    spec["rate"] = None if math.isinf(result.spec.rate) else result.spec.rate
    rates = {"output_rate": summary.output_rate, "total_rate": summary.total_rate, "request_rate": summary.request_rate}
    return {"spec": spec, "summary": asdict(summary) | rates}


def _print(results: Sequence[LoadResult]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    spec = results[0].spec
    summaries = [result.summary() for result in results]
    console.print(table(summaries, title=f"{spec.model} at {spec.url}"))
    for line in notes(summaries):
        console.print(line, style="dim", highlight=False)


def table(summaries: Sequence[BenchSummary], title: str) -> "Table":
    """A column per load, a row per measure."""
    from rich.table import Table

    grid = Table(title=title, title_justify="left")
    grid.add_column("clients")
    for summary in summaries:
        grid.add_column(str(summary.concurrency), justify="right")
    for label, cells in rows(summaries):
        grid.add_row(label, *cells, end_section=label in ("requests/s", "TTFT p99", "inter-token max", "latency p99"))
    return grid


def rows(summaries: Sequence[BenchSummary]) -> list[tuple[str, list[str]]]:
    lines: list[tuple[str, list[str]]] = [
        ("output tokens/s", [f"{s.output_rate:,.1f}" for s in summaries]),
        ("total tokens/s", [f"{s.total_rate:,.1f}" for s in summaries]),
        ("requests/s", [f"{s.request_rate:,.2f}" for s in summaries]),
    ]
    for name, pick, with_max in (("TTFT", "ttft", False), ("inter-token", "itl", True), ("latency", "latency", False)):
        for level in ("p50", "p95", "p99") + (("max",) if with_max else ()):
            cells = [_time(getattr(s, pick), level) for s in summaries]
            lines += [(f"{name} {level}", cells)]
    lines += [
        ("requests", [f"{s.requests_finished}/{s.requests}" for s in summaries]),
        ("streams", [str(s.streams) for s in summaries]),
        ("prompt tokens", [f"{s.prompt_tokens:,}" for s in summaries]),
        ("output tokens", [f"{s.output_tokens:,}" for s in summaries]),
        ("seconds", [f"{s.seconds:,.1f}" for s in summaries]),
        ("client CPU seconds", [f"{s.client_cpu:.2f}" for s in summaries]),
    ]
    kinds = sorted({kind for summary in summaries for kind in summary.errors})
    return lines + [(f"error: {kind}", [str(s.errors.get(kind, 0)) for s in summaries]) for kind in kinds]


def _time(values: Percentiles, level: str) -> str:
    if not values.count:
        return "-"
    seconds = float(getattr(values, level))
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def notes(summaries: Sequence[BenchSummary]) -> list[str]:
    lines = ["TTFT and inter-token times are those of the streams; a response in one piece has neither."]
    if any(summary.estimated for summary in summaries):
        lines.append("Some responses came without usage: their tokens are counted by stream events.")
    return lines


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'mlx-parallm[plot]'") from None


def draw(results: Sequence[LoadResult], path: Path) -> None:
    """Throughput and percentiles over the number of clients, and how TTFT and inter-token times are distributed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    summaries = [result.summary() for result in results]
    clients = [str(summary.concurrency) for summary in summaries]
    _bars(axes[0, 0], clients, [summary.output_rate for summary in summaries])
    _lines(axes[0, 1], clients, summaries)
    firsts = [[record.first for record in result.finished if record.first is not None] for result in results]
    gaps = [[gap for record in result.finished for gap in record.gaps] for result in results]
    _distribution(axes[1, 0], clients, firsts, "time to first token", "share of streams")
    _distribution(axes[1, 1], clients, gaps, "time between tokens", "share of gaps")
    figure.suptitle(f"{results[0].spec.model}: load at {results[0].spec.url}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(axis: "Axes", clients: Sequence[str], rates: Sequence[float]) -> None:
    axis.bar_label(axis.bar(clients, rates, color="#4477aa"), fmt="%.0f")
    axis.margins(y=0.12)
    axis.set(xlabel="clients", ylabel="output tokens/s", title="throughput")


def _lines(axis: "Axes", clients: Sequence[str], summaries: Sequence[BenchSummary]) -> None:
    for name, pick, color in (("TTFT", "ttft", "#aa3377"), ("inter-token", "itl", "#228833")):
        for level, style in (("p50", "-"), ("p95", "--")):
            values = [1000 * getattr(getattr(summary, pick), level) for summary in summaries]
            axis.plot(clients, values, style, marker="o", color=color, label=f"{name} {level}")
    axis.set(xlabel="clients", ylabel="ms", title="latency", yscale="log")
    axis.legend()


def _distribution(
    axis: "Axes", clients: Sequence[str], samples: Sequence[Sequence[float]], title: str, label: str
) -> None:
    for name, sample in zip(clients, samples, strict=True):
        shares = [(i + 1) / len(sample) for i in range(len(sample))]
        axis.plot(sorted(1000 * value for value in sample), shares, label=f"{name} clients")
    axis.set(xlabel="ms", ylabel=label, title=title, ylim=(0, 1.01))
    axis.legend()
