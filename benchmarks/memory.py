"""What a model takes in memory alone, with an adapter and in training, beside two processes that serve and train.

    python benchmarks/memory.py                          # the embedded model
    python benchmarks/memory.py --model FOLDER           # another

Four servers, one after another: clients and updates in one process; updates alone, which is what a trainer takes that
has a process of its own; clients alone; and clients with the LoRA that was trained in every request. Said, for each:
the most bytes that MLX held, and the process's largest resident set (which on a GPU leaves out what lies there). One
process is compared with the sum of two: the clients' alone and the trainer's.
"""

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import servers
from rich.console import Console
from rich.table import Table
from train_while_serving import Load, Part, ask, train

from mlx_parallm.errors import ParallmError

MIB = 1 << 20


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder, GGUF or hub id (default: the embedded model)")
    add("--clients", type=int, default=8)
    add("--seconds", type=float, default=40.0, help="of each server (default: %(default)s)")
    add("--rank", type=int, default=16, help="of the LoRA that is trained and served (default: %(default)s)")
    add("--prompts", type=int, default=4, help="of an update")
    add("--group-size", type=int, default=8)
    add("--answer-tokens", type=int, default=32)
    add("--output-tokens", type=int, nargs=2, default=[16, 64], metavar=("MIN", "MAX"), help="of the clients' requests")
    add("--serve-flags", default="", help="more flags of every server, in one string")
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Taken:
    """What one server took at most, in bytes."""

    weights: int  # what MLX held before the first request
    mlx: int
    resident: int
    answers: int
    updates: int


async def drive(server: servers.ServerProcess, args: argparse.Namespace, clients: int, training: bool) -> Taken:
    load, resident = Load([Part("all")]), [server.memory()]
    settings = argparse.Namespace(**vars(args), updates_per_minute=0.0, learn_from="rollouts", ahead=False)
    limits = httpx.Limits(max_connections=clients + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        weights = (await client.get("/debug/metrics")).json()["active_memory"]
        if training:
            load.current = load.newest = (await client.get("/v1/training/status")).json()["policy_version"]
        tasks = [asyncio.create_task(ask(client, load, args, number)) for number in range(clients)]
        watcher = asyncio.create_task(watch(server, resident))
        until = time.perf_counter() + args.seconds
        updates = len(await train(client, load, settings, until)) if training else 0
        await asyncio.sleep(max(0.0, until - time.perf_counter()))
        load.over = True
        await asyncio.gather(*tasks)
        found = (await client.get("/debug/metrics")).json()
        watcher.cancel()
    if load.failed:
        raise ParallmError(f"{len(load.failed)} requests failed: {load.failed[0]}")
    return Taken(weights, found["peak_memory"], max(resident), load.parts[0].answers, updates)


async def watch(server: servers.ServerProcess, resident: list[int]) -> None:
    while True:
        resident.append(server.memory())
        await asyncio.sleep(0.2)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Taken]:
    rank = ["--lora-rank", str(args.rank)]
    training = ["--enable-rl-training", "--update-frequency", "0", "--learning-rate", "1e-5", *rank]

    def run(flags: list[str], clients: int, trains: bool) -> Taken:
        command = servers.ours(args.model, [*flags, *args.serve_flags.split()])
        with servers.running(command) as server:
            taken = asyncio.run(drive(server, args, clients, trains))
        print(f"{clients} clients, {taken.updates} updates: MLX {taken.mlx / MIB:,.0f} MiB at most", flush=True)
        return taken

    found = {
        "serving and training": run([*training, "--checkpoint-dir", str(folder / "both")], args.clients, True),
        "training": run([*training, "--checkpoint-dir", str(folder / "alone")], 0, True),
        "serving": run([], args.clients, False),
    }
    adapter = next((folder / "both").rglob("adapter_config.json")).parent
    return found | {"serving with an adapter": run(["--adapter-path", str(adapter)], args.clients, False)}


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(args, Path(scratch))
    table = Table("", "before requests MiB", "MLX at most", "resident at most", "answers", "updates")
    for name, taken in found.items():
        sizes = [f"{number / MIB:,.0f}" for number in (taken.weights, taken.mlx, taken.resident)]
        table.add_row(name, *sizes, str(taken.answers or ""), str(taken.updates or ""))
    one, serving, training = (found[name] for name in ("serving and training", "serving", "training"))
    apart = [(serving.mlx + training.mlx), (serving.resident + training.resident)]
    table.add_row("two processes", "", *(f"{number / MIB:,.0f}" for number in apart), "", "")
    console = Console(width=max(120, Console().width))
    console.print(table)
    less = [1 - taken / sum_ for taken, sum_ in zip((one.mlx, one.resident), apart, strict=True)]
    console.print(
        f"one process takes {less[0]:.0%} less than two by what MLX holds, {less[1]:.0%} less resident memory"
    )
    return 0


if __name__ == "__main__":
    servers.script(main)
