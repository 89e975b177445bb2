"""How long requests wait for their first token beside rollouts without an end, and what the rollouts lose.

    python benchmarks/rollouts_beside_requests.py                                   # the embedded model
    python benchmarks/rollouts_beside_requests.py --model FOLDER --seconds 60       # a GPU

One server with `--enable-rl-training`. In turn, as many rounds as asked for: the clients alone, the rollouts alone, and
both together. Said: time to the first token at the clients (p50, p95), tokens a second of both, and the ratios, each
the median of the rounds. The rollouts fill every row that the clients leave, and more of them wait.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from dataclasses import dataclass, field

import httpx
import servers
from rich.console import Console
from rich.table import Table

from mlx_parallm.common_words import WORDS


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder, GGUF or hub id (default: the embedded model)")
    add("--clients", type=int, default=8)
    add("--rollouts", type=int, default=4, help="calls of /v1/rl/rollout at once, 16 answers each (default: 4)")
    add("--seconds", type=float, default=40.0, help="of each part (default: %(default)s)")
    add("--rounds", type=int, default=3)
    add("--prompt-words", type=int, default=48)
    add("--output-tokens", type=int, default=24, help="of a client's answer")
    add("--rollout-tokens", type=int, default=64, help="of a rollout's answer")
    add("--inference-share", type=float, default=0.7)
    add("--max-batch-size", type=int, default=32)
    return parser.parse_args()


@dataclass
class Part:
    """What one part of the run gave."""

    first_tokens: list[float] = field(default_factory=list)  # seconds until each client's first token
    tokens: int = 0  # of clients
    rollout_tokens: int = 0
    seconds: float = 0.0

    def percentile(self, share: float) -> float:
        found = sorted(self.first_tokens)
        return found[min(len(found) - 1, int(share * len(found)))]


async def ask(client: httpx.AsyncClient, part: Part, args: argparse.Namespace, choose: random.Random) -> None:
    """One client: a streamed answer to a prompt of its own, again and again."""
    while True:
        prompt = " ".join(choose.choices(WORDS, k=args.prompt_words))
        body = {"prompt": prompt, "max_tokens": args.output_tokens, "ignore_eos": True, "stream": True}
        begun, seen = time.perf_counter(), 0
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    if not seen:
                        part.first_tokens.append(time.perf_counter() - begun)
                    seen += 1
        part.tokens += args.output_tokens


async def roll_out(client: httpx.AsyncClient, args: argparse.Namespace, choose: random.Random) -> None:
    while True:
        prompts = [" ".join(choose.choices(WORDS, k=24)) for _ in range(4)]
        body = {"prompts": prompts, "n": 4, "max_tokens": args.rollout_tokens, "temperature": 1.0}
        (await client.post("/v1/rl/rollout", json=body)).raise_for_status()


async def generated(client: httpx.AsyncClient) -> float:
    """Tokens that the server has made so far, for whomever."""
    for line in (await client.get("/metrics")).text.splitlines():
        if line.startswith("mlx_parallm_generated_tokens_total{"):
            return float(line.split()[-1])
    raise RuntimeError("the server does not count its tokens")


async def run_part(client: httpx.AsyncClient, args: argparse.Namespace, clients: bool, rollouts: bool) -> Part:
    part, choose = Part(), random.Random(len(WORDS))
    work = [ask(client, part, args, choose) for _ in range(args.clients if clients else 0)]
    work += [roll_out(client, args, choose) for _ in range(args.rollouts if rollouts else 0)]
    tasks = [asyncio.ensure_future(one) for one in work]
    await asyncio.sleep(min(5.0, args.seconds / 4))  # rows fill
    part.first_tokens.clear()
    part.tokens, before, begun = 0, await generated(client), time.perf_counter()
    await asyncio.sleep(args.seconds)
    part.seconds, made = time.perf_counter() - begun, await generated(client) - before
    part.rollout_tokens = round(made) - part.tokens if rollouts else 0
    failed = [task for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in failed:
        task.result()
    await asyncio.sleep(1.0)  # what its client has left ends
    return part


async def drive(url: str, args: argparse.Namespace) -> dict[str, list[Part]]:
    parts: dict[str, list[Part]] = {"clients alone": [], "rollouts alone": [], "both": []}
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await run_part(client, argparse.Namespace(**{**vars(args), "seconds": 8.0}), True, True)  # warm
        for _ in range(args.rounds):
            parts["clients alone"].append(await run_part(client, args, True, False))
            parts["rollouts alone"].append(await run_part(client, args, False, True))
            parts["both"].append(await run_part(client, args, True, True))
    return parts


def main() -> int:
    args = parse_args()
    flags = ["--enable-rl-training", "--update-frequency", "0", "--inference-share", str(args.inference_share)]
    flags += ["--max-batch-size", str(args.max_batch_size), "--no-resume"]
    with servers.running(servers.ours(args.model, flags)) as server:
        parts = asyncio.run(drive(server.url, args))
    table = Table("", "first token p50 ms", "p95", "clients tok/s", "rollouts tok/s", title="Medians of the rounds")
    for name, rounds in parts.items():
        waits = [[1000 * one.percentile(share) for one in rounds if one.first_tokens] for share in (0.5, 0.95)]
        shown = [f"{statistics.median(some):,.0f}" if some else "" for some in waits]
        rates = [statistics.median(getattr(one, what) / one.seconds for one in rounds) for what in RATES]
        table.add_row(name, *shown, *(f"{rate:,.1f}" if rate else "" for rate in rates))
    console = Console(width=max(120, Console().width))
    console.print(table)
    pairs = list(zip(parts["clients alone"], parts["rollouts alone"], parts["both"], strict=True))
    waits = [both.percentile(0.95) / alone.percentile(0.95) for alone, _, both in pairs]
    kept = [both.rollout_tokens / both.seconds / (rolled.rollout_tokens / rolled.seconds) for _, rolled, both in pairs]
    console.print(
        f"time to first token p95 beside rollouts {statistics.median(waits):.2f}× of alone (rounds "
        f"{', '.join(f'{one:.2f}' for one in waits)}); rollouts make {statistics.median(kept):.2f} of what they make "
        f"alone ({', '.join(f'{one:.2f}' for one in kept)})"
    )
    return 0


RATES = ("tokens", "rollout_tokens")

if __name__ == "__main__":
    servers.script(main)
