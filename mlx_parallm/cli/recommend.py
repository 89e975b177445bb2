"""`parallm recommend`: which open models fit this machine, how much memory they take, and how fast they will answer.

A token's time is that of reading the weights once, so the speed follows from the bandwidth that is measured here.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

GIB = 1 << 30
BITS = 4.5  # of a weight in 4 bits, with its scales
CONTEXT = 8192  # tokens of each response that memory is reckoned for
EFFICIENCY = 0.75  # of the bandwidth that decoding reaches


@dataclass(frozen=True, slots=True)
class OpenModel:
    """`active`: parameters that one token reads, in billions; `kv`: numbers that the cache keeps for a token."""

    name: str
    parameters: float
    active: float
    kv: int
    good_for: str


# Parameters and caches from the models' own configs: 2 × layers × KV heads × size of a head.
MODELS = (
    OpenModel("mlx-community/Qwen3-0.6B-4bit", 0.6, 0.6, 2 * 28 * 8 * 128, "drafts, tests"),
    OpenModel("mlx-community/Llama-3.2-1B-Instruct-4bit", 1.24, 1.24, 2 * 16 * 8 * 64, "short responses"),
    OpenModel("mlx-community/Qwen3-1.7B-4bit", 1.7, 1.7, 2 * 28 * 8 * 128, "RL on one machine"),
    OpenModel("mlx-community/Llama-3.2-3B-Instruct-4bit", 3.2, 3.2, 2 * 28 * 8 * 128, "chat"),
    OpenModel("mlx-community/Qwen3-4B-4bit", 4.0, 4.0, 2 * 36 * 8 * 128, "chat, tools"),
    OpenModel("mlx-community/Qwen3-8B-4bit", 8.2, 8.2, 2 * 36 * 8 * 128, "chat, tools, code"),
    OpenModel("mlx-community/Qwen3-14B-4bit", 14.8, 14.8, 2 * 40 * 8 * 128, "chat, tools, code"),
    OpenModel("mlx-community/gpt-oss-20b-MXFP4-Q4", 20.9, 3.6, 2 * 24 * 8 * 64, "agents, reasoning"),
    OpenModel("mlx-community/Qwen3-30B-A3B-4bit", 30.5, 3.3, 2 * 48 * 4 * 128, "agents, code, fast"),
    OpenModel("mlx-community/Qwen3-32B-4bit", 32.8, 32.8, 2 * 64 * 8 * 128, "the hardest questions"),
    OpenModel("mlx-community/Llama-3.3-70B-Instruct-4bit", 70.6, 70.6, 2 * 80 * 8 * 128, "large memory"),
    OpenModel("mlx-community/gpt-oss-120b-MXFP4-Q4", 116.8, 5.1, 2 * 36 * 8 * 64, "large memory, agents"),
)


@dataclass(frozen=True, slots=True)
class Prospect:
    """What to expect of a model on this machine. Bytes, and tokens per second of one response."""

    name: str
    weights: int
    row: int  # of one answer with a full CONTEXT
    answers: int  # of that length at once
    speed: float
    good_for: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory-limit", help="what a server may hold, such as 24GiB (default: as serve has it)")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    from mlx_parallm.config import ServeConfig
    from mlx_parallm.config.options import parse_bytes
    from mlx_parallm.devices.device import device_name, this_device
    from mlx_parallm.models.memory import memory_limit

    options = {} if args.memory_limit is None else {"memory_limit": parse_bytes(args.memory_limit)}
    limit = memory_limit(ServeConfig.of(**options))
    rate = bandwidth()
    width = this_device().weight_bits(BITS)
    found = prospects(limit, rate, width)
    if args.json:
        report = {"device": device_name(), "limit": limit, "bandwidth": rate, "models": [asdict(one) for one in found]}
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
        return 0
    _print(device_name(), limit, rate, found)
    return 0


def prospects(limit: int, rate: float, bits: float) -> list[Prospect]:
    """The models whose weights and one response fit, the largest first."""
    found = []
    for model in MODELS:
        weights = int(model.parameters * 1e9 * bits / 8)
        row = model.kv * (4 if bits == 32 else 2) * CONTEXT
        completions = int((0.9 * limit - weights) // row)
        if completions >= 1:
            speed = EFFICIENCY * rate / (model.active * 1e9 * bits / 8)
            found.append(Prospect(model.name, weights, row, completions, speed, model.good_for))
    return found[::-1]


def bandwidth() -> float:
    """Bytes per second at which the device reads a matrix that no cache holds: the median of several."""
    import mlx.core as mx

    rows = 8192
    columns = 8192
    matrix = mx.ones((rows, columns))
    vector = mx.ones((columns,))
    mx.eval(matrix, vector, matrix @ vector)
    times = []
    for _ in range(7):
        begun = time.perf_counter()
        mx.eval(matrix @ vector)
        times.append(time.perf_counter() - begun)
    return matrix.nbytes / statistics.median(times)


def _print(device: str, limit: int, rate: float, found: list[Prospect]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{device}: a server may hold {limit / GIB:.1f} GiB; weights are read at {rate / 1e9:.0f} GB/s")
    if not found:
        console.print("none of the listed models fits: the embedded one does (mlx_parallm_serve without --model-path)")
        return
    table = Table("model", "weights", f"responses of {CONTEXT} tokens at once", "tokens/s of one", "good for")
    for one in found:
        table.add_row(one.name, f"{one.weights / GIB:.1f} GiB", str(one.answers), f"{one.speed:.0f}", one.good_for)
    console.print(table)
    console.print(f"parallm pull {found[0].name}", style="dim", highlight=False)
