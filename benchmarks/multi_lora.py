"""What a different LoRA in every row costs: decode steps with adapters beside the same steps without.

    python benchmarks/multi_lora.py                                     # the embedded model
    python benchmarks/multi_lora.py --model FOLDER --rows 64            # a GPU

Steps of the engine's own decode path over rows of one length, in turns: the bare model, the same with room for
adapters and none in use, one adapter for all rows, and `--adapters` of them spread over the rows; on q and v, then on
all linear layers. Each is given as a ratio of the bare model's tokens per second just before and after, the median of
all turns; the line `bare` says how far the machine itself wavers.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import mlx_parallm  # noqa: F401  (a fast BLAS, before MLX)

import mlx.core as mx  # isort: skip
import numpy as np
import servers
from rich.console import Console
from rich.table import Table

from mlx_parallm.devices.device import device_name, this_device
from mlx_parallm.engine.compute.batching import slot_cache
from mlx_parallm.engine.compute.patch import patch_layers, use_device_kernels
from mlx_parallm.lora.adapter import Adapter, Part
from mlx_parallm.lora.layout import Layout
from mlx_parallm.lora.registry import Registry, Version
from mlx_parallm.lora.row_adapters import RowAdapters, StackedLoRA
from mlx_parallm.models.forward import Forward
from mlx_parallm.models.loader import load

ATTENTION = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder, GGUF or hub id (default: the embedded model)")
    add("--rows", type=int, nargs="+", default=[32, 64])
    add("--adapters", type=int, default=8)
    add("--rank", type=int, default=16)
    add("--length", type=int, default=96, help="tokens that each row has already (default: %(default)s)")
    add("--steps", type=int, help="in a turn (default: 8 on the CPU, 32 elsewhere)")
    add("--turns", type=int, help="default: 7 on the CPU, 21 elsewhere")
    args = parser.parse_args()
    slow = this_device().kind == "cpu"
    args.steps, args.turns = args.steps or (8 if slow else 32), args.turns or (7 if slow else 21)
    return args


def random_adapter(layout: Layout, names: tuple[str, ...], rank: int, seed: int) -> Adapter:
    random = np.random.default_rng(seed)
    return Adapter(
        {
            path: Part(
                random.standard_normal((rank, target.size)).astype(np.float32) * 0.02,
                random.standard_normal((target.out_features, rank)).astype(np.float32) * 0.02,
            )
            for path, target in layout.targets.items()
            if path.rsplit(".", 1)[-1] in names
        }
    )


class Batch:
    """Rows in slots, decoded with these adapters or those."""

    def __init__(self, forward: Forward, layers: int, rows: int, length: int) -> None:
        tuning = this_device().profile
        self._forward = forward
        self._cache = slot_cache(layers, rows, 1 << 50, tuning)
        staged = self._cache.stage(1, length)
        mx.eval(forward.at(mx.ones((1, length), mx.int32), staged, mx.array([length - 1])))
        self._cache.expect(rows)
        self._cache.join(staged, [(0, length)] * rows)
        self._rows, self._length, self._max_in_flight = rows, length, tuning.steps_in_flight
        self._tokens = mx.zeros((rows,), mx.int32)

    def rate(self, row_adapters: RowAdapters | None, steps: int) -> float:
        """Tokens a second."""
        in_flight: list[mx.array] = []
        begin = time.perf_counter()
        for step in range(steps):
            logits = self._cache.decode(self._forward, self._tokens, [self._length + step] * self._rows, row_adapters)
            self._tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
            mx.async_eval(self._tokens)
            in_flight.append(self._tokens)
            if len(in_flight) > self._max_in_flight:
                mx.eval(in_flight.pop(0))
        mx.eval(self._tokens)
        return steps * self._rows / (time.perf_counter() - begin)


def measure(args: argparse.Namespace, rows: int) -> dict[str, tuple[float, float]]:
    """Tokens a second, and the ratio to the bare model's just before and after."""
    tuning = this_device().profile
    bare = load(args.model, name="model")
    use_device_kernels(bare.module, tuning)
    layers = len(bare.module.layers)
    plain = Batch(Forward(bare.module), layers, rows, args.length)
    plain.rate(None, args.steps)
    # A trace of the bare model stays what it is: both can share its weights, and where in memory those lie.
    adapted = bare if tuning.compiled else load(args.model, name="model")
    layout = patch_layers(adapted.module, tuning)
    forward = Forward(adapted.module, layout.active)
    batch = Batch(forward, layers, rows, args.length)
    ways: dict[str, Callable[[], float]] = {
        "bare": lambda: plain.rate(None, args.steps),
        "none in use": lambda: batch.rate(None, args.steps),
    }
    for label, names in (("q and v", ATTENTION), ("all linear layers", ALL)):
        registry = Registry(layout, args.adapters)
        versions = [
            registry.publish(f"{names[0]}-{number}", random_adapter(layout, names, args.rank, number), "")
            for number in range(args.adapters)
        ]
        one = row_adapters_of(registry, [versions[0]] * rows)
        many = row_adapters_of(registry, [versions[row % len(versions)] for row in range(rows)])
        ways[f"{label}: one for all"] = lambda adapters=one: batch.rate(adapters, args.steps)
        ways[f"{label}: {args.adapters}"] = lambda adapters=many: batch.rate(adapters, args.steps)
    for way in ways.values():
        way()  # kernels are built, memory is touched
    rates: dict[str, list[float]] = {name: [] for name in ways}
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.turns):
        before = ways["bare"]()
        for name in random.sample(list(ways), len(ways)):  # each between two of the bare model
            rate, after = ways[name](), ways["bare"]()
            rates[name].append(rate)
            ratios[name].append(2 * rate / (before + after))
            before = after
    return {name: (statistics.median(rates[name]), statistics.median(ratios[name])) for name in ways}


def row_adapters_of(registry: Registry, versions: list[Version]) -> RowAdapters:
    row_adapters = registry.row_adapters(versions)
    if isinstance(row_adapters, StackedLoRA):
        mx.eval(row_adapters.arrays())
    return row_adapters


def main() -> int:
    args = parse_args()
    console = Console()
    console.print(f"{device_name()}, {args.adapters} adapters of rank {args.rank}")
    for rows in args.rows:
        table = Table("adapters", "tok/s", "ratio", title=f"{rows} rows")
        for name, (rate, ratio) in measure(args, rows).items():
            table.add_row(name, f"{rate:,.1f}", f"{ratio:.3f}×")
        console.print(table)
    return 0


if __name__ == "__main__":
    servers.script(main)
