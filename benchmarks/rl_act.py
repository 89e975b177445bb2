"""`/v1/rl/act` for a 64-64 MLP: how long an action takes, and how many come per second beside the bare forward pass.

    python benchmarks/rl_act.py                     # 1 and 32 clients, 1 to 4096 observations per request
    python benchmarks/rl_act.py --clients 8 --rows 1,256 --seconds 5 --json out.json

Clients keep their connections and send the next request when the answer is there: one observation in JSON, more in
safetensors. `bare` is the same network in MLX in this process, on as many rows as all clients together send at once,
with nothing around it: no draw, no log-probability, no HTTP. Clients and server share the machine's cores.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  (a fast BLAS, before MLX)

import mlx.core as mx  # isort: skip
import numpy as np
import servers
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file, save

from mlx_parallm.errors import ParallmError
from tests.support.networks import mlp_policy
from tests.tiny import save_tiny, tiny

OBSERVED, ACTIONS, WIDTH = 8, 4, 64
WARM_UP = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class Result:
    clients: int
    rows: int
    requests: int
    p50_ms: float
    p99_ms: float
    actions_per_second: float
    bare_per_second: float

    @property
    def ratio(self) -> float:
        return self.actions_per_second / self.bare_per_second


def parse_args() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--clients", type=numbers, default=[1, 32], help="how many at once, several after each other (default: 1,32)")
    add("--rows", type=numbers, default=[1, 64, 1024, 4096], help="observations per request (default: 1,64,1024,4096)")
    add("--seconds", type=float, default=3.0, help="of each turn of a load (default: %(default)s)")
    add("--repeats", type=int, default=3, help="turns of each load and the bare pass (default: %(default)s)")
    add("--json", type=Path, help="write the results to this file")
    return parser.parse_args()


def request_bytes(rows: int) -> bytes:
    observations = np.random.default_rng(rows).standard_normal((rows, OBSERVED)).astype(np.float32)
    if rows == 1:
        body, kind, path = (
            json.dumps({"observations": observations.tolist()}).encode(),
            "application/json",
            "/v1/rl/act",
        )
    else:
        body, kind, path = save({"observations": observations}), "application/x-safetensors", "/v1/rl/act?seed=1"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def client(port: int, request: bytes, until: float, times: list[tuple[float, float]]) -> None:
    """Sends one request after the other; notes when each began and how long it took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (begun := time.perf_counter()) < until:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        answer = await reader.readexactly(int(length.partition(b":")[2]))
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise ParallmError(f"the server refused: {answer[:300]!r}")
        times.append((begun, time.perf_counter() - begun))
    writer.close()


async def measure(port: int, clients: int, rows: int, seconds: float) -> list[float]:
    request, times = request_bytes(rows), list[tuple[float, float]]()
    counted = time.perf_counter() + WARM_UP
    await asyncio.gather(*(client(port, request, counted + seconds, times) for _ in range(clients)))
    return [took for begun, took in times if begun >= counted]


def bare_forward(folder: Path) -> Callable[[mx.array], mx.array]:
    """The network in plain MLX, compiled."""
    weights = {name: mx.array(array) for name, array in load_file(folder / "model.safetensors").items()}

    def forward(x: mx.array) -> mx.array:
        x = mx.clip((x - weights["norm.mean"]) * mx.rsqrt(weights["norm.var"] + 1e-8), -10, 10)
        for name in ("one", "two"):
            x = mx.tanh(mx.addmm(weights[f"{name}.bias"], x, weights[f"{name}.weight"].T))
        heads = [mx.addmm(weights[f"{name}.bias"], x, weights[f"{name}.weight"].T) for name in ("head", "critic")]
        return mx.concatenate(heads, axis=-1)

    return mx.compile(forward)


def bare_rate(forward: Callable[[mx.array], mx.array], rows: int, seconds: float) -> float:
    """Rows per second."""
    x = mx.random.normal((rows, OBSERVED))
    mx.eval(x, forward(x))
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        mx.eval(forward(x))
        count += 1
    return count * rows / (time.perf_counter() - begun)


def compare(port: int, forward: Callable[[mx.array], mx.array], clients: int, rows: int, args: Any) -> Result:
    """Both in turns, and the medians of the turns."""
    times: list[float] = []
    rates, bare = [], []
    for _ in range(args.repeats):
        bare.append(bare_rate(forward, clients * rows, min(1.0, args.seconds)))
        turn = asyncio.run(measure(port, clients, rows, args.seconds))
        rates.append(len(turn) * rows / args.seconds)
        times += turn
    p50, p99 = (1000 * float(np.percentile(times, share)) for share in (50, 99))
    return Result(clients, rows, len(times), p50, p99, statistics.median(rates), statistics.median(bare))


def main() -> int:
    args = parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "tiny").mkdir()
        save_tiny(tiny("llama"), Path(scratch) / "tiny")
        folder = mlp_policy(Path(scratch) / "policy", observed=OBSERVED, actions=ACTIONS, width=WIDTH)
        forward = bare_forward(folder)
        flags = ["--model-path", f"policy={folder}"]
        with servers.running(servers.ours(f"tiny={scratch}/tiny", flags)) as server:
            port = int(server.url.rpartition(":")[2])
            for rows in args.rows:
                results += [compare(port, forward, clients, rows, args) for clients in args.clients]
    table = Table("clients", "rows", "requests/s", "p50 ms", "p99 ms", "actions/s", "bare rows/s", "ratio")
    for one in results:
        rates = f"{one.actions_per_second:,.0f}", f"{one.bare_per_second:,.0f}", f"{one.ratio:.3f}"
        sizes = str(one.clients), str(one.rows), f"{one.actions_per_second / one.rows:,.0f}"
        table.add_row(*sizes, f"{one.p50_ms:.2f}", f"{one.p99_ms:.2f}", *rates)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) | {"ratio": one.ratio} for one in results], indent=1))
    return 0


if __name__ == "__main__":
    servers.script(main)
