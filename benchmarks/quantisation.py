"""What fewer bits in the weights change: tokens a second, memory, and the perplexity of a text.

    python benchmarks/quantisation.py                             # the embedded model
    python benchmarks/quantisation.py --model FOLDER --clients 32 # another, in bf16 or float32

mlx-lm converts the model to each precision, once, into the user's cache. Then, in turn and as many rounds as asked for,
a server of each answers the clients' requests. Said: tokens a second (the median of the rounds, and as a ratio to the
first precision in the same round), the most bytes that MLX held, and the perplexity that the server's own
log-probabilities give `benchmarks/perplexity.txt`. The server computes as it does by default: on a CPU in float32,
whatever is stored, since anything else is many times slower there. `--keep` has it compute with what is stored.
"""

import argparse
import asyncio
import hashlib
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import servers
from rich.console import Console
from rich.table import Table
from train_while_serving import Load, Part, ask
from weights import embedded_float32

from mlx_parallm.errors import ParallmError
from mlx_parallm.paths import user_cache

PRECISIONS = {  # how mlx-lm converts the model, and what the server's --dtype keeps of it
    "float32": (["--dtype", "float32"], "float32"),
    "bfloat16": (["--dtype", "bfloat16"], "bfloat16"),
    "8 bits": (["--dtype", "bfloat16", "--quantize", "--q-bits", "8"], "quantized"),
    "4 bits": (["--dtype", "bfloat16", "--quantize", "--q-bits", "4"], "quantized"),
}
TEXT = Path(__file__).with_name("perplexity.txt")
MIB = 1 << 20


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, help="an mlx-lm folder in bf16 or float32 (default: the embedded model in float32)")
    add("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    add("--clients", type=int, default=8)
    add("--seconds", type=float, default=20.0, help="of each server in each round (default: %(default)s)")
    add("--rounds", type=int, default=3)
    add("--keep", action="store_true", help="compute with what is stored, on a CPU too")
    add("--output-tokens", type=int, nargs=2, default=[32, 64], metavar=("MIN", "MAX"))
    return parser.parse_args()


@dataclass
class Measured:
    """One precision: a rate for each round."""

    rates: list[float] = field(default_factory=list)  # tokens a second
    weights: int = 0  # bytes that MLX holds before the first request
    peak: int = 0
    perplexity: float = math.nan


def converted(model: Path, precision: str) -> Path:
    """The model in this precision, made once."""
    known = hashlib.sha256(f"{model.resolve()} {(model / 'model.safetensors').stat()}".encode()).hexdigest()[:12]
    folder = user_cache() / "benchmarks" / f"{model.name}-{known}-{precision.replace(' ', '-')}"
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "mlx_lm", "convert", "--hf-path", str(model), "--mlx-path", str(folder)]
        subprocess.run([*command, *PRECISIONS[precision][0]], check=True, stdout=subprocess.DEVNULL)
    return folder


async def perplexity(client: httpx.AsyncClient) -> float:
    """Of the text, from the log-probabilities of its tokens after the first."""
    body = {"prompt": TEXT.read_text(), "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    known = answer.json()["choices"][0]["logprobs"]["token_logprobs"][1:-1]  # without the token that was generated
    return math.exp(-statistics.fmean(known))


async def drive(url: str, args: argparse.Namespace, into: Measured) -> None:
    load = Load([Part("warm-up"), Part("measured")])
    limits = httpx.Limits(max_connections=args.clients + 4)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        into.weights = (await client.get("/debug/metrics")).json()["active_memory"]
        tasks = [asyncio.create_task(ask(client, load, args, number)) for number in range(args.clients)]
        await asyncio.sleep(args.seconds / 4)
        load.now = 1
        await asyncio.sleep(args.seconds)
        load.now, load.over = 0, True
        await asyncio.gather(*tasks)
        into.peak = max(into.peak, (await client.get("/debug/metrics")).json()["peak_memory"])
        into.rates.append(load.parts[1].tokens / args.seconds)
        if math.isnan(into.perplexity):
            into.perplexity = await perplexity(client)
    if load.failed:
        raise ParallmError(f"{len(load.failed)} requests failed: {load.failed[0]}")


def main() -> int:
    args = parse_args()
    model = args.model or embedded_float32()
    console = Console(width=max(120, Console().width))
    folders = {precision: converted(model, precision) for precision in args.precisions}
    found = {precision: Measured() for precision in folders}
    for _ in range(args.rounds):
        for precision, folder in folders.items():
            dtype = PRECISIONS[precision][1] if args.keep else "auto"
            with servers.running(servers.ours(str(folder), ["--dtype", dtype])) as server:
                asyncio.run(drive(server.url, args, found[precision]))
            console.print(f"{precision}: {found[precision].rates[-1]:,.1f} tok/s", style="dim")
    columns = ("tok/s", "ratio", "rounds", "weights MiB", "MLX at most", "perplexity")
    table = Table("", *columns, title=f"{args.clients} clients, medians of {args.rounds} rounds")
    first = next(iter(found.values()))
    for precision, one in found.items():
        ratios = [mine / theirs for mine, theirs in zip(one.rates, first.rates, strict=True)]
        sizes = [f"{number / MIB:,.0f}" for number in (one.weights, one.peak)]
        shown = [f"{statistics.median(one.rates):,.1f}", f"{statistics.median(ratios):.2f}"]
        table.add_row(precision, *shown, " ".join(f"{ratio:.2f}" for ratio in ratios), *sizes, f"{one.perplexity:.2f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    servers.script(main)
