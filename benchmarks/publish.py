"""New versions of an adapter under load: what a publish costs the engine, and whether every answer names its weights.

    python benchmarks/publish.py                                        # the embedded model
    python benchmarks/publish.py --model FOLDER --interval 0.25         # a GPU

Clients sample from the adapter without a pause. After a while without, `--publishes` new versions come at even
intervals, and then none again. Said: the engine thread's time for each (published, copied to the device, put beside the
others in use), the tokens' pace with and without, and requests that failed. Afterwards every answer is computed again
by mlx-lm's layers with the weights of the version that it names; exit code 1 where its log-probabilities differ.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import mlx_parallm  # noqa: F401  (a fast BLAS, before MLX)

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import servers
from mlx_lm.tuner.utils import linear_to_lora_layers
from rich.console import Console
from rich.table import Table

from mlx_parallm.client import InferenceClient, Sample
from mlx_parallm.common_words import WORDS
from mlx_parallm.devices.device import this_device
from mlx_parallm.engine.compute.sampling import log_sum_exp
from mlx_parallm.errors import ParallmError
from mlx_parallm.lora.layout import Layout
from mlx_parallm.models.loader import load
from mlx_parallm.training.trainable_model import shared_tree

NAME = "policy"
TEMPERATURE = 0.8
SCALE = 1.0
TARGETS = ("q_proj", "v_proj")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder, GGUF or hub id (default: the embedded model)")
    add("--clients", type=int, default=16)
    add("--publishes", type=int, default=200)
    add("--interval", type=float, default=1.0, help="seconds from one to the next (default: %(default)s)")
    add("--rank", type=int, default=16)
    add("--tokens", type=int, nargs=2, default=[8, 24], metavar=("MIN", "MAX"), help="of an answer")
    add("--quiet-seconds", type=float, default=30.0, help="without publishes, before and after (default: %(default)s)")
    add("--recompute", type=int, default=400, help="most answers to compute again (default: %(default)s)")
    add("--bound", type=float, help="on |Δ log-probability| (default: 1e-4 in float32, else 0.25)")
    return parser.parse_args()


class Versions:
    """The weights of each version, made anew from its number."""

    def __init__(self, module: nn.Module, rank: int) -> None:
        self._targets = {p: t for p, t in Layout(module).targets.items() if p.rsplit(".", 1)[-1] in TARGETS}
        self._rank = rank
        keys = {path.split(".", 3)[-1] for path in self._targets}  # within a block
        linear_to_lora_layers(module, len(module.layers), {"rank": rank, "scale": SCALE, "dropout": 0.0, "keys": keys})
        self._module = module
        self._dtype = module.layers[0].self_attn.q_proj.linear.weight.dtype

    def weights(self, number: int) -> dict[str, "np.ndarray[Any, Any]"]:
        draw = np.random.default_rng(number).standard_normal
        found = {}
        for path, target in self._targets.items():
            found[f"{path}.lora_a"] = draw((target.size, self._rank), np.float32) * target.size**-0.5
            found[f"{path}.lora_b"] = draw((self._rank, target.out_features), np.float32) * 0.02
        return found

    def use(self, number: int) -> None:
        """Makes the module the model with that version; as the server does, in the model's own precision."""
        weights = self.weights(number)
        self._module.load_weights([(k, mx.array(v).astype(self._dtype)) for k, v in weights.items()], strict=False)
        mx.eval(self._module.parameters())


@dataclass
class Load:
    """What the clients have seen."""

    samples: list[Sample] = field(default_factory=list)
    paces: dict[bool, list[float]] = field(default_factory=lambda: defaultdict(list))  # seconds a token, by publishing
    failed: list[str] = field(default_factory=list)
    publishing: bool = False
    over: bool = False
    warm: asyncio.Event = field(default_factory=asyncio.Event)  # as many answers as clients have come


async def ask(client: InferenceClient, load: Load, args: argparse.Namespace, number: int) -> None:
    choose = random.Random(number)
    while not load.over:
        prompt = " ".join(choose.choices(WORDS, k=choose.randint(16, 64)))
        begun, publishing = time.perf_counter(), load.publishing
        try:
            sample = await client.generate(
                prompt,
                adapter=NAME,
                max_tokens=choose.randint(*args.tokens),
                temperature=TEMPERATURE,
                logprobs_mode="raw",
                seed=choose.getrandbits(31),
            )
        except ParallmError as error:
            load.failed.append(error.message)
            continue
        load.samples.append(sample)
        if len(load.samples) >= args.clients:
            load.warm.set()
        if publishing == load.publishing:
            load.paces[publishing].append((time.perf_counter() - begun) / len(sample.completion_ids))


async def drive(
    url: str, versions: Versions, args: argparse.Namespace, console: Console
) -> tuple[Load, dict[str, Any]]:
    load = Load()
    async with InferenceClient(url) as client:
        await client.upload_adapter(NAME, versions.weights(1), {"lora_parameters": {"scale": SCALE, "rank": args.rank}})
        tasks = [asyncio.create_task(ask(client, load, args, number)) for number in range(args.clients)]
        await load.warm.wait()
        load.paces.clear()
        await asyncio.sleep(args.quiet_seconds)
        before = await debug(client)
        load.publishing = True
        late, answered = 0.0, []
        begun = time.perf_counter()
        for number in range(args.publishes):
            weights = await asyncio.to_thread(versions.weights, number + 2)
            wait = begun + number * args.interval - time.perf_counter()
            late = max(late, -wait)
            await asyncio.sleep(max(0.0, wait))
            sent = time.perf_counter()
            assert await client.update_adapter_weights(NAME, weights) == number + 2
            answered.append(time.perf_counter() - sent)
        console.print(
            f"{args.publishes} publishes in {time.perf_counter() - begun:.0f} s; answered after "
            f"{1000 * statistics.median(answered):.0f} ms (median), {1000 * max(answered):.0f} ms at most"
        )
        after = await debug(client)
        load.publishing = False
        await asyncio.sleep(args.quiet_seconds)
        load.over = True
        await asyncio.gather(*tasks)
    costs = after["adapter_seconds"]
    costs["per_publish"] = (
        costs["count"] * costs["mean"] - before["adapter_seconds"]["count"] * before["adapter_seconds"]["mean"]
    ) / args.publishes
    return load, costs


async def debug(client: InferenceClient) -> dict[str, Any]:
    return await client._get("/debug/metrics")


def recompute(module: nn.Module, versions: Versions, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """|Δ log-probability| of each token with the version that it names, and with the one before that."""
    right: list[float] = []
    wrong: list[float] = []
    by_version: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_version[sample.policy_version].append(sample)
    for number, some in sorted(by_version.items()):
        for used, differences in ((number, right), (number - 1, wrong)):
            if used < 1 or (used != number and len(wrong) > 500):
                continue
            versions.use(used)
            for sample in some:
                assert sample.logprobs is not None
                tokens = mx.array([sample.prompt_ids + sample.completion_ids])
                logits = module(tokens)[0, len(sample.prompt_ids) - 1 : -1].astype(mx.float32)
                scores = logits - log_sum_exp(logits)[..., None]
                chosen = mx.take_along_axis(scores, mx.array(sample.completion_ids)[:, None], axis=-1)[:, 0]
                differences += mx.abs(chosen - mx.array(sample.logprobs)).tolist()
    return right, wrong


def main() -> int:
    args = parse_args()
    console = Console()
    model = load(args.model, name="model")
    module = shared_tree(model)  # of mlx-lm's own classes
    versions = Versions(module, args.rank)
    with servers.running(servers.ours(args.model, ["--max-loras", "16"])) as server:
        seen, costs = asyncio.run(drive(server.url, versions, args, console))
    table = Table("engine thread, per event", "ms")
    for name in ("p50", "p99", "max", "mean", "per_publish"):
        table.add_row(name, f"{1000 * costs[name]:.2f}")
    console.print(table)
    quiet, busy = (statistics.median(seen.paces[publishing]) for publishing in (False, True))
    console.print(
        f"{len(seen.samples)} answers of {len({sample.policy_version for sample in seen.samples})} versions, "
        f"{len(seen.failed)} failed; a token every {1000 * quiet:.1f} ms without publishes, {1000 * busy:.1f} ms with: "
        f"{busy / quiet:.3f}×"
    )
    some = list(itertools.islice(random.Random(0).sample(seen.samples, len(seen.samples)), args.recompute))
    right, wrong = recompute(module, versions, some)
    exact = model.precision == "float32"
    bound = args.bound or (1e-4 if exact else 0.25)
    console.print(
        f"{len(some)} answers computed again ({this_device().kind}): |Δ logprob| mean {statistics.mean(right):.2e}, "
        f"largest {max(right):.2e} (bound {bound:g}); with the version before theirs mean {statistics.mean(wrong):.2e}"
    )
    return int(bool(seen.failed) or max(right) > bound)


if __name__ == "__main__":
    servers.script(main)
