"""What an open dashboard costs those who are served: the same load with one viewer and without, in turns.

    python benchmarks/dashboard.py                              # the embedded model
    python benchmarks/dashboard.py --model FOLDER --clients 32 --turns 12

The viewer reads the event stream and asks for what all views ask for, every two seconds: more than a page, which shows
one of them. Said: tokens a second of each turn, the medians and their ratio, and the bytes that a viewer gets; on Linux
also the CPU time that the server uses for a token, and with nobody to serve: other work here disturbs that less.
"""

import argparse
import os
import statistics
import threading
import time
from pathlib import Path

import httpx
import servers
from rich.console import Console

from mlx_parallm.bench.load_test import LoadSpec, run_load

ASKED = ("/v1/training/status", "/v1/models", "/v1/adapters", "/server_info")
IDLE_SECONDS = 15


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder, GGUF or hub id (default: the embedded model)")
    add("--clients", type=int, default=8)
    add("--seconds", type=float, default=10.0, help="of each turn (default: %(default)s)")
    add("--turns", type=int, default=8, help="of each kind (default: %(default)s)")
    return parser.parse_args()


class Viewer:
    """Reads what a page would, until it is closed."""

    def __init__(self, url: str) -> None:
        self.bytes = 0
        self._over = threading.Event()
        self._client = httpx.Client(base_url=url, timeout=30)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._watch, self._ask)]
        for thread in self._threads:
            thread.start()

    def _watch(self) -> None:
        with self._client.stream("GET", "/dashboard/events") as response:
            for data in response.iter_raw():
                self.bytes += len(data)
                if self._over.is_set():
                    return

    def _ask(self) -> None:
        last = 0
        while not self._over.is_set():
            for path in ASKED:
                self.bytes += len(self._client.get(path).content)
            answer = self._client.get("/dashboard/requests", params={"limit": 500, "after": last})
            self.bytes += len(answer.content)
            last = max([last, *(one["number"] for one in answer.json()["requests"])])
            self._over.wait(2.0)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(10)
        self._client.close()


def cpu_seconds(pid: int) -> float:
    """That a process has used; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_cost(server: servers.ServerProcess, watched: bool) -> float:
    """Milliseconds of CPU time a second."""
    viewer = Viewer(server.url) if watched else None
    time.sleep(1.0)
    used, begun = cpu_seconds(server.process.pid), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    cost = 1000 * (cpu_seconds(server.process.pid) - used) / (time.perf_counter() - begun)
    if viewer is not None:
        viewer.close()
    return cost


def said(name: str, values: dict[bool, list[float]]) -> str:
    without, watched = statistics.median(values[False]), statistics.median(values[True])
    return f"{name}: medians {without:.4g} without, {watched:.4g} with a viewer: {100 * (watched / without - 1):+.1f} %"


def main() -> int:
    args, console = parse_args(), Console()
    rates: dict[bool, list[float]] = {False: [], True: []}
    costs: dict[bool, list[float]] = {False: [], True: []}
    with servers.running(servers.ours(args.model)) as server:
        for turn in range(-1, 2 * args.turns):
            watched = turn % 4 in (1, 2)  # without, with, with, without: a drift hits both alike
            viewer, begun = Viewer(server.url) if watched else None, time.perf_counter()
            spec = LoadSpec(
                url=server.url,
                concurrency=args.clients,
                duration=args.seconds,
                stream_share=1.0,
                ignore_eos=True,
                salt=str(turn),
            )
            used = cpu_seconds(server.process.pid)
            found = run_load(spec).summary()
            used = cpu_seconds(server.process.pid) - used
            if found.errors:
                console.print(f"requests have failed: {found.errors}")
                return 1
            rate, told = found.output_tokens / found.seconds, ""
            if viewer is not None:
                viewer.close()
                told = f", the viewer got {viewer.bytes / (time.perf_counter() - begun) / 1024:.1f} KiB/s"
            if turn >= 0:  # the first one warms up
                rates[watched].append(rate)
                costs[watched].append(1000 * used / found.output_tokens)
                console.print(f"{'with a viewer' if watched else 'without':>14}: {rate:.1f} tokens/s{told}")
        idle = {watched: idle_cost(server, watched) for watched in (False, True)}
    console.print(said("Tokens a second", rates))
    if costs[False][0]:
        console.print(said("The server's CPU time, ms a token", costs))
        console.print(
            f"With nobody to serve, CPU time of {idle[False]:.1f} ms a second without, {idle[True]:.1f} with a viewer"
        )
    return 0


if __name__ == "__main__":
    servers.script(main)
