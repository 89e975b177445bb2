"""An hour of mixed load over every dialect: does a request fail, does memory grow, do tokens come later?

    python benchmarks/mixed_load.py --seconds 3600 --json mixed.json      # a tiny random model
    python benchmarks/mixed_load.py --model SmolLM2-135M-Instruct         # the embedded one

A few clients send chats, completions, responses, messages, Ollama's requests, `/generate` in three shapes, embeddings,
tools, schemas, adapter uploads and publishes, rollouts with an update, rewards, streams and rollouts that they leave,
requests that must be refused, and those that once did harm to others. Recorded: every unexpected status and broken
stream, every greedy answer that is not the one of its prompt alone, the server's memory and threads, and percentiles of
the time to the first token and between tokens, per interval. `--kills` ends the server so many times with SIGKILL and
starts it anew: responses, rewards and updates that were acknowledged must be there. Exit code 1 if a request went
wrong, something was lost, or memory or threads grew; docs/RELIABILITY.md has the figures of an hour.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  (a fast BLAS, before MLX)

import httpx  # isort: skip
import numpy as np
import servers
from mixed_lives import Lives, moments
from mixed_requests import Mixed, Timings
from rich.console import Console
from rich.table import Table
from stress import settled

from mlx_parallm.config.model_config import EMBEDDED
from mlx_parallm.http_client import Endpoint
from mlx_parallm.lora.layout import Layout
from mlx_parallm.models.loader import load
from tests.support.embedding_folders import write_model
from tests.tiny import save_tiny, tiny

MIB = 1 << 20
SAMPLE_SECONDS = 5.0
MORE_THREADS = 2  # allowed over the second half
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Sample:
    """What the server held at a moment."""

    second: float
    rss: int
    active: int  # bytes that MLX holds
    spare: int  # bytes that MLX keeps for later, up to a limit: they come and go
    cpu: float  # seconds of CPU since the server's start
    machine: float  # processes that ran or wanted to, over the last minute, others' included
    threads: int  # of the server; 0 where there is no /proc

    @property
    def held(self) -> int:
        """Bytes of the process without what MLX keeps for later."""
        return self.rss - self.spare


@dataclass(slots=True)
class Interval:
    """What happened within some minutes."""

    requests: Counter[str] = field(default_factory=Counter)  # by kind
    faults: list[str] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    cut_off: int = 0  # by a kill


@dataclass(slots=True)
class Record:
    interval: float
    begun: float = field(default_factory=time.perf_counter)
    intervals: list[Interval] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def now(self) -> float:
        return time.perf_counter() - self.begun

    def current(self) -> Interval:
        while len(self.intervals) <= self.now // self.interval:
            self.intervals.append(Interval())
        return self.intervals[-1]

    @property
    def faults(self) -> list[str]:
        return [fault for interval in self.intervals for fault in interval.faults]


async def client(mixed: Mixed, record: Record, lives: Lives, args: argparse.Namespace, number: int) -> None:
    """One request after the other, with pauses, so that all clients together send `--rate` a second."""
    chance = random.Random(f"{args.seed}/{number}")
    while (now := record.now) < args.seconds:
        await asyncio.sleep(min(chance.expovariate(args.rate / args.clients), args.seconds - now))
        await lives.up.wait()
        kind, interval, life = mixed.choose(chance), record.current(), lives.kills
        interval.requests[kind] += 1
        try:
            await mixed.send(kind, chance, interval.timings)
        except (AssertionError, httpx.HTTPError, ValueError, KeyError) as error:
            if lives.kills != life and isinstance(error, httpx.TransportError):
                interval.cut_off += 1
                continue
            interval.faults.append(f"{record.now:.1f} s, {kind}: {type(error).__name__} {error}"[:500])


async def watch(http: httpx.AsyncClient, lives: Lives, record: Record) -> None:
    """Samples memory until it is cancelled."""
    while True:
        await lives.up.wait()
        with contextlib.suppress(httpx.TransportError):  # killed meanwhile
            await sample(http, lives.server, record)
        await asyncio.sleep(SAMPLE_SECONDS)


async def sample(http: httpx.AsyncClient, server: servers.ServerProcess, record: Record) -> None:
    found = (await http.get("/debug/metrics")).json()
    first = next(iter(found.get("models", {}).values()), found)
    sizes = server.memory(), first["active_memory"], first["spare_memory"]
    pid = server.process.pid
    record.samples.append(Sample(record.now, *sizes, cpu_seconds(pid), os.getloadavg()[0], threads(pid)))


def threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU that a process has used; 0 where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


async def report(record: Record, args: argparse.Namespace, console: Console) -> None:
    """Prints each interval when it is over, and writes the file anew."""
    for number in range(max(1, round(args.seconds / args.interval))):
        await asyncio.sleep((number + 1) * args.interval - record.now)
        console.print(row_text(record, number), soft_wrap=True)
        write(record, args, None)


async def drive(
    lives: Lives, mixed: Mixed, http: httpx.AsyncClient, args: argparse.Namespace, console: Console
) -> Record:
    await mixed.prepare()
    record = Record(args.interval)
    killing = moments(args.kills, args.seconds, random.Random(args.seed))
    tasks = [
        asyncio.create_task(watch(http, lives, record)),
        asyncio.create_task(report(record, args, console)),
    ]
    killer = asyncio.create_task(lives.kill_at(killing, http, mixed.told, mixed.prepare))
    try:
        await asyncio.gather(*(client(mixed, record, lives, args, number) for number in range(args.clients)))
        await killer
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    record.current().faults += [f"LOST: {one}" for one in lives.lost]
    await settled(Endpoint.parse(lives.server.url))  # raises where the engine's books do not balance
    return record


def percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, 100 * share)) if values else float("nan")


def milliseconds(values: list[float]) -> dict[str, float]:
    return {"p50": round(1000 * percentile(values, 0.5), 2), "p99": round(1000 * percentile(values, 0.99), 2)}


def summary(record: Record, number: int) -> dict[str, Any]:
    """One interval in numbers."""
    interval, begin = record.intervals[number], number * record.interval
    within = [one for one in record.samples if begin <= one.second < begin + record.interval]
    seconds = within[-1].second - within[0].second if len(within) > 1 else 0.0
    return {
        "minutes": round((begin + record.interval) / 60, 2),
        "requests": sum(interval.requests.values()),
        "aborted": interval.requests["abort"],
        "refused": interval.requests["refused"],
        "faults": len(interval.faults),
        "first_token_ms": milliseconds(interval.timings.first),
        "between_tokens_ms": milliseconds(interval.timings.between),
        "rss_mib": round(float(np.median([one.rss for one in within])) / MIB, 1) if within else None,
        "held_mib": round(float(np.median([one.held for one in within])) / MIB, 1) if within else None,
        "mlx_mib": round(float(np.median([one.active for one in within])) / MIB, 2) if within else None,
        "cpu_share": round((within[-1].cpu - within[0].cpu) / seconds, 2) if seconds else None,
        "machine_load": round(float(np.median([one.machine for one in within])), 1) if within else None,
    }


def row_text(record: Record, number: int) -> str:
    found = summary(record, number)
    return (
        f"{found['minutes']:g} min: {found['requests']} requests, {found['faults']} faults, first token "
        f"{found['first_token_ms']}, between tokens {found['between_tokens_ms']}, {found['rss_mib']} MiB"
    )


def slope(samples: list[Sample], attribute: str) -> float:
    """MiB an hour by which memory grew over the second half, as a straight line through the samples."""
    half = samples[len(samples) // 2 :]
    if len(half) < 3:
        return float("nan")
    fit = np.polyfit([one.second for one in half], [getattr(one, attribute) / MIB for one in half], 1)
    return float(fit[0] * 3600)


def verdict(record: Record, args: argparse.Namespace) -> dict[str, Any]:
    """Memory and p99 are compared from the second interval on: the first one fills caches."""
    rows = [summary(record, number) for number in range(len(record.intervals))]
    full = [row for row in rows if row["minutes"] * 60 <= args.seconds + 1]
    ratios = {}
    if len(full) > 1:
        for name in ("first_token_ms", "between_tokens_ms"):
            ratios[name] = round(full[-1][name]["p99"] / full[1][name]["p99"], 3)
    growth = slope(record.samples, "held")
    grew = growth * args.seconds / 3600 / 2  # over the half that was looked at
    counts = [one.threads for one in record.samples[len(record.samples) // 2 :]]
    ends = [int(np.median(some)) for some in (counts[:10], counts[-10:])]  # of the second half
    return {
        "requests": sum(row["requests"] for row in rows),
        "by_kind": dict(sum((one.requests for one in record.intervals), Counter()).most_common()),
        "faults": len(record.faults),
        "cut_off_by_kills": sum(one.cut_off for one in record.intervals),
        "threads": ends,
        "held_mib_per_hour": round(growth, 2),
        "rss_mib_per_hour": round(slope(record.samples, "rss"), 2),
        "mlx_mib_per_hour": round(slope(record.samples, "active"), 3),
        "p99_last_over_second": ratios,
        "passed": not record.faults and not grew > args.memory_growth and ends[1] - ends[0] <= MORE_THREADS,
    }


def write(record: Record, args: argparse.Namespace, found: dict[str, Any] | None) -> None:
    if args.json is None:
        return
    rows = [summary(record, number) for number in range(len(record.intervals))]
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    samples = [asdict(sample) for sample in record.samples]
    document = {"settings": settings, "verdict": found, "intervals": rows, "faults": record.faults, "samples": samples}
    args.json.write_text(json.dumps(document, indent=1))


def show(record: Record, found: dict[str, Any], args: argparse.Namespace, console: Console) -> None:
    table = Table()
    for column in ("minutes", "requests", "aborted", "refused", "faults", "first token, ms", "between tokens, ms"):
        table.add_column(column, justify="right")
    for column in ("RSS, MiB", "without spare", "MLX, MiB", "cores", "load"):
        table.add_column(column, justify="right")
    for number in range(len(record.intervals)):
        row = summary(record, number)
        if row["minutes"] * 60 > args.seconds + 1:
            continue  # a moment after the end
        pairs = [f"{row[name]['p50']:g} / {row[name]['p99']:g}" for name in ("first_token_ms", "between_tokens_ms")]
        counts = [row[name] for name in ("requests", "aborted", "refused", "faults")]
        sizes = [row[name] for name in ("rss_mib", "held_mib", "mlx_mib", "cpu_share", "machine_load")]
        table.add_row(*map(str, [f"{row['minutes']:g}", *counts, *pairs, *sizes]))
    console.print(table)
    for fault in record.faults[:20]:
        console.print(f"FAULT: {fault}", style="red", markup=False)
    console.print(f"requests by kind: {found['by_kind']}", soft_wrap=True)
    console.print(
        f"{found['requests']} requests, {found['faults']} faults; over the second half memory without what MLX keeps "
        f"spare changes by {found['held_mib_per_hour']:g} MiB an hour, RSS by {found['rss_mib_per_hour']:g}, MLX's "
        f"memory by {found['mlx_mib_per_hour']:g}; threads {found['threads'][0]} and then {found['threads'][1]}; "
        f"{args.kills} kills cut {found['cut_off_by_kills']} requests off; p99 of the last interval over the second: "
        f"{found['p99_last_over_second']}: {'passed' if found['passed'] else 'FAILED'}",
        soft_wrap=True,
    )


@contextlib.contextmanager
def serving(args: argparse.Namespace) -> Iterator[tuple[Lives, Mixed, httpx.AsyncClient]]:
    """A server with a language model that learns and an embedding model; its files go with it."""
    with tempfile.TemporaryDirectory(prefix="mixed-load-") as scratch:
        folder = Path(scratch)
        model = args.model
        if model is None:
            (folder / "tiny").mkdir()
            save_tiny(tiny("llama"), folder / "tiny")
            model = str(folder / "tiny")
        targets = Layout(load(None if model == EMBEDDED else model, name="model").module).targets
        flags = ["--model-path", f"words={write_model(folder / 'words', 'cls')}", "--enable-rl-training"]
        flags += ["--update-frequency", "0", "--learning-rate", "1e-6", "--lora-rank", "4"]
        flags += ["--checkpoint-dir", str(folder / "checkpoints"), "--responses-dir", str(folder / "responses")]
        # Caches that are full within minutes: memory that grows after that is a leak.
        flags += ["--num-blocks", "2048", "--responses-max-bytes", "4MB", "--ssd-max-bytes", "16MB"]
        port = servers.free_port()
        with Lives(lambda: servers.ours(f"chat={model}", flags, port)).running() as lives:
            url, limits = lives.server.url, httpx.Limits(max_connections=64)
            http = httpx.AsyncClient(base_url=url, timeout=120, limits=limits)
            yield lives, Mixed(http, targets), http


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder, GGUF file, hub id or embedded model (default: a tiny random model, made for the run)")
    add("--seconds", type=float, default=3600.0, help="of load (default: %(default)s)")
    add("--clients", type=int, default=6, help="most requests at once (default: %(default)s)")
    add("--rate", type=float, default=8.0, help="requests a second, of all clients together (default: %(default)s)")
    add("--interval", type=float, default=300.0, help="seconds of a row of the table (default: %(default)s)")
    add("--memory-growth", type=float, default=16.0, metavar="MIB", help="allowed in the second half (default: 16)")
    add("--kills", type=int, default=0, help="of the server, at random moments of the first sixth (default: 0)")
    add("--json", type=Path, help="write the results to this file, after every interval")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    with serving(args) as (lives, mixed, http):
        record = asyncio.run(drive(lives, mixed, http, args, console))
    found = verdict(record, args)
    write(record, args, found)
    show(record, found, args, console)
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    servers.script(main)
