"""What training costs those who are served meanwhile: the same clients without it, with, and without again.

    python benchmarks/train_while_serving.py                                         # the embedded model, all it can
    python benchmarks/train_while_serving.py --model FOLDER --clients 32 --updates-per-minute 11 --rounds 3      # a GPU

Clients stream without a pause from a server with `--enable-rl-training`: alone; then in turns with updates, one after
another or so many a minute, and alone again. Updates learn from rollouts of their own, which are measured without
updates too, or from the clients' answers (`--learn-from requests`). Said: tokens a second, gaps between tokens, the
longest piece of an update, the share of the engine's time, publishes, and memory beside its plan, where rollouts count
as served. Exit code 1 where a request failed, or named versions that can't be.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import servers
from rich.console import Console
from rich.table import Table

from mlx_parallm.common_words import WORDS


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder, GGUF or hub id (default: the embedded model)")
    add("--clients", type=int, default=16)
    add("--seconds", type=float, default=60.0, help="of each part (default: %(default)s)")
    add("--training-seconds", type=float, help="of a part with updates (default: the same)")
    add("--rounds", type=int, default=1, help="with updates, and alone again (default: %(default)s)")
    add("--updates-per-minute", type=float, default=0.0, help="0: one after another")
    add("--ahead", action="store_true", help="draw the next rollouts while the last are learnt from")
    add("--learn-from", choices=["rollouts", "requests"], default="rollouts")
    add("--prompts", type=int, default=4, help="of an update")
    add("--group-size", type=int, default=8)
    add("--answer-tokens", type=int, default=16)
    add("--output-tokens", type=int, nargs=2, default=[16, 64], metavar=("MIN", "MAX"), help="of the clients' requests")
    add("--serve-flags", default="", help="more flags of the server, in one string")
    return parser.parse_args()


@dataclass
class Part:
    """What the clients saw in one part of the run."""

    name: str
    seconds: float = 0.0
    tokens: int = 0
    rates: list[float] = field(default_factory=list)  # tokens a second, each time
    gaps: list[float] = field(default_factory=list)
    steps: dict[str, float] = field(default_factory=dict)  # of the engine, and the host's seconds for them
    answers: int = 0
    versions: set[int] = field(default_factory=set)


@dataclass
class Load:
    parts: list[Part]
    now: int = 0
    trainings: int = 0
    over: bool = False
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    current: int = 1  # the version that is surely served
    newest: int = 1  # the one that may be
    course: list[tuple[int, float]] = field(default_factory=list)  # which part, tokens a second, every few seconds
    answered: "asyncio.Queue[str]" = field(default_factory=asyncio.Queue)  # ids of requests


async def ask(client: httpx.AsyncClient, load: Load, args: argparse.Namespace, number: int) -> None:
    choose = random.Random(number)
    while not load.over:
        body = {
            "model": "default",
            "prompt": " ".join(choose.choices(WORDS, k=choose.randint(16, 64))),
            "max_tokens": choose.randint(*args.output_tokens),
            "temperature": 0.8,
            "ignore_eos": True,
            "stream": True,
            "step_id": number,
            "return_token_ids": True,
        }
        oldest = load.current
        try:
            await stream(client, body, load, oldest)
        except (httpx.HTTPError, ValueError) as error:
            load.failed.append(f"{type(error).__name__}: {error}")


async def stream(client: httpx.AsyncClient, body: dict[str, Any], load: Load, oldest: int) -> None:
    last, count, spans, name = None, 0, None, ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError((await response.aread()).decode()[:200])
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise ValueError(chunk["error"]["message"])
            now, part, name = time.perf_counter(), load.parts[load.now], chunk["id"]
            for choice in chunk["choices"]:
                tokens = len(choice.get("token_ids") or ())
                if tokens:
                    count += tokens
                    part.tokens += tokens
                    if last is not None:
                        part.gaps.append(now - last)
                    last = now
                spans = choice.get("policy_spans", spans)
    part.answers += 1
    load.answered.put_nowait(name)
    ends = [span[1] for span in spans or [[0, 0, 0]]]
    part.versions |= {span[2] for span in spans or []}
    if count != body["max_tokens"] or ends[-1] != count or not all(oldest <= s[2] <= load.newest for s in spans or []):
        load.wrong.append(f"{count} of {body['max_tokens']} tokens, spans {spans}, versions {oldest} to {load.newest}")


Groups = list[list[tuple[str, int]]]  # requests, and which of their answers


async def draw(client: httpx.AsyncClient, args: argparse.Namespace, choose: random.Random) -> tuple[Groups, int]:
    """Rollouts, and how many tokens they have."""
    prompts = [" ".join(choose.choices(WORDS, k=24)) for _ in range(args.prompts)]
    body = {"prompts": prompts, "n": args.group_size, "max_tokens": args.answer_tokens}
    found = await client.post("/v1/rl/rollout", json=body)
    found.raise_for_status()
    groups = [group["samples"] for group in found.json()["groups"]]
    names = [[(sample["request_id"], sample["index"]) for sample in group] for group in groups]
    return names, sum(len(sample["completion_ids"]) for group in groups for sample in group)


async def recent(load: Load, args: argparse.Namespace) -> tuple[Groups, int]:
    """What clients were answered last, each answer used once."""
    wanted = args.prompts * args.group_size
    names: list[tuple[str, int]] = []
    while len(names) < wanted or not load.answered.empty():
        names.append((await load.answered.get(), 0))
    return [names[-wanted:][first : first + args.group_size] for first in range(0, wanted, args.group_size)], 0


async def train(
    client: httpx.AsyncClient, load: Load, args: argparse.Namespace, until: float, learn: bool = True
) -> list[dict[str, Any]]:
    """Updates from fresh answers, until then; or the rollouts alone."""
    load.trainings += 1
    choose = random.Random(load.trainings)  # other prompts each time: none is found in a cache
    made: list[dict[str, Any]] = []
    begun = time.perf_counter()

    def next_groups() -> "asyncio.Future[tuple[Groups, int]]":
        return asyncio.ensure_future(
            draw(client, args, choose) if args.learn_from == "rollouts" else recent(load, args)
        )

    coming = next_groups() if args.ahead and learn else None
    while time.perf_counter() < until:
        if args.updates_per_minute:
            due = begun + 60 / args.updates_per_minute * len(made)
            await asyncio.sleep(max(0.0, min(due, until) - time.perf_counter()))
            if due >= until:
                break
        groups, rolled_out = await (coming or next_groups())
        coming = next_groups() if args.ahead and learn else None
        trajectories = [
            {"group_id": str(number), "request_id": name, "index": index, "reward": choose.random()}
            for number, group in enumerate(groups)
            for name, index in group
        ]
        if not learn:
            made.append({})
            continue
        load.newest = load.current + 1  # from here on an answer may name it
        answer = await client.post("/v1/training/update", json={"trajectories": trajectories})
        answer.raise_for_status()
        report = answer.json()
        load.current = load.newest = report["policy_version"]
        made.append(report | {"rolled_out": rolled_out})
    if coming is not None:
        await coming
    return made


@contextlib.asynccontextmanager
async def during(client: httpx.AsyncClient, load: Load, number: int) -> AsyncIterator[float]:
    """What happens now is one part's; gives when it began."""
    now, before = load.parts[number], await steps(client)
    load.now, begun, tokens = number, time.perf_counter(), now.tokens
    yield begun
    taken = time.perf_counter() - begun
    now.seconds += taken
    now.rates.append((now.tokens - tokens) / taken)
    load.now = 0
    for name, value in (await steps(client)).items():
        now.steps[name] = value if name == "spare" else now.steps.get(name, 0.0) + value - before[name]


async def watch(load: Load, seconds: float = 5.0) -> None:
    number, before, begun = 0, 0, time.perf_counter()
    while True:
        await asyncio.sleep(0.1)
        tokens, taken = load.parts[number].tokens - before, time.perf_counter() - begun
        if taken >= seconds and load.now == number:
            load.course.append((number, tokens / taken))
        elif load.now == number:
            continue
        number, before, begun = load.now, load.parts[load.now].tokens, time.perf_counter()


async def steps(client: httpx.AsyncClient) -> dict[str, float]:
    found = (await client.get("/debug/metrics")).json()
    numbers = {f"{kind} {name}": value for kind in ("decode", "prefill") for name, value in found[kind].items()}
    return numbers | {"written": found["ssd"]["written_bytes"], "spare": found["spare_memory"]}


async def drive(
    url: str, args: argparse.Namespace
) -> tuple[Load, list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    names = "warm-up", "serving alone", "and rollouts", "and training", "alone again"
    load = Load([Part(name) for name in names])
    limits = httpx.Limits(max_connections=args.clients + 4)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        load.current = load.newest = (await client.get("/v1/training/status")).json()["policy_version"]
        clients = [asyncio.create_task(ask(client, load, args, number)) for number in range(args.clients)]
        watcher = asyncio.create_task(watch(load))
        await asyncio.sleep(min(10.0, args.seconds))
        async with during(client, load, 1):
            await asyncio.sleep(args.seconds)
        if args.learn_from == "rollouts":
            async with during(client, load, 2) as begun:
                await train(client, load, args, begun + args.seconds, learn=False)
        alone = (await client.get("/debug/metrics")).json()
        await train(client, load, args, time.perf_counter() + 8)  # kernels, and the pace of micro-batches
        before = after = (await client.get("/debug/metrics")).json()
        made: list[dict[str, Any]] = []
        for _ in range(args.rounds):
            async with during(client, load, 3) as begun:
                made += await train(client, load, args, begun + (args.training_seconds or args.seconds))
            after = (await client.get("/debug/metrics")).json()
            async with during(client, load, 4):
                await asyncio.sleep(args.seconds)
        load.over = True
        await asyncio.gather(*clients)
        watcher.cancel()
        internals = (await client.get("/debug/training")).json()
    background = {
        name: after["background"][name] - before["background"][name]
        for name in ("serving_seconds", "contended_seconds", "steps")
    } | {"longest_stall": after["background"]["longest_stall"]}
    memory = {
        "serving": alone["serving_peak_memory"],
        "meanwhile": after["serving_peak_memory"],
        "with training": after["peak_memory"],
        "trainer": internals["trainer_bytes"],
        "activations": internals["activation_bytes"],
        "adapters": after["adapter_seconds"],
    }
    return load, made, background, memory


TITLE = "decode, prefill: steps a second, ms of the host's to start one and to wait for it; spare: GB that MLX keeps"


def per_step(part: Part, kind: str) -> str:
    count = max(1.0, part.steps[f"{kind} count"])
    start, wait = (1000 * part.steps[f"{kind} {name}_seconds"] / count for name in ("start", "wait"))
    return f"{count / part.seconds:.1f}: {start:.1f} {wait:.1f}"


def main() -> int:
    args = parse_args()
    console = Console(width=max(120, Console().width))
    flags = ["--enable-rl-training", "--update-frequency", "0", "--max-loras", "16", "--learning-rate", "1e-5"]
    with servers.running(servers.ours(args.model, [*flags, *args.serve_flags.split()])) as server:
        load, made, background, memory = asyncio.run(drive(server.url, args))
    table = Table(
        "", "tok/s", "answers", "gap p50 ms", "p99", "max", "versions", "decode", "prefill", "spare", title=TITLE
    )
    for part in (part for part in load.parts[1:] if part.seconds):
        gaps = sorted(part.gaps)
        shown = [1000 * gaps[min(len(gaps) - 1, int(share * len(gaps)))] for share in (0.5, 0.99, 1.0)]
        row = [f"{part.tokens / part.seconds:,.1f}", str(part.answers), *(f"{gap:,.0f}" for gap in shown)]
        row += [str(len(part.versions)), per_step(part, "decode"), per_step(part, "prefill")]
        table.add_row(part.name, *row, f"{part.steps['spare'] / 1e9:.2f}")
    console.print(table)
    alone, rollouts, training, again = (part.tokens / max(1e-9, part.seconds) for part in load.parts[1:])
    published = [report for report in made if report["published"]]
    seconds = load.parts[3].seconds
    beside = f"{rollouts / statistics.mean((alone, again)):.3f}× with its rollouts only" if rollouts else "no rollouts"
    share = background["serving_seconds"] / max(1e-9, background["serving_seconds"] + background["contended_seconds"])
    around = zip(load.parts[3].rates, [alone, *load.parts[4].rates], load.parts[4].rates, strict=False)
    ratios = [rate / statistics.mean((before, after)) for rate, before, after in around]
    console.print(
        f"throughput with training {training / statistics.mean((alone, again)):.3f}× of alone "
        f"({beside}); by rounds, beside before and after: "
        f"{', '.join(f'{ratio:.3f}' for ratio in ratios)}, median {statistics.median(ratios):.3f}; "
        f"{60 * len(published) / seconds:.1f} updates a minute ({len(made) - len(published)} refused), "
        f"{statistics.mean(report['metrics']['tokens'] for report in made):.0f} tokens each; "
        f"updates took {100 * background['contended_seconds'] / seconds:.1f}% of the time, their rollouts made "
        f"{sum(report['rolled_out'] for report in made) / seconds:,.0f} tok/s; "
        f"{load.parts[3].steps['written'] / seconds / 1e6:.1f} MB/s went to the SSD; "
        f"serving had {100 * share:.1f}% of the time while both had work; longest stall "
        f"{background['longest_stall']:.3f} s"
    )
    course = [
        f"{load.parts[number].name} {' '.join(f'{rate:,.0f}' for _, rate in some)}"
        for number, some in itertools.groupby(load.course, key=lambda one: one[0])
    ]
    console.print(f"tok/s every five seconds: {'; '.join(course)}", style="dim")
    adapters = memory["adapters"]
    console.print(
        f"publishing, engine thread: p50 {1000 * adapters['p50']:.2f}, p99 {1000 * adapters['p99']:.2f}, "
        f"max {1000 * adapters['max']:.2f} ms"
    )
    serving, meanwhile, peak, trainer, activations = (
        memory[name] / 1e6 for name in ("serving", "meanwhile", "with training", "trainer", "activations")
    )
    console.print(
        f"memory: serving, rollouts too, peaked at {serving:,.1f} MB, LoRA and optimiser ({trainer:,.1f}) included; a "
        f"piece takes {activations:,.1f} at most: {serving + activations:,.1f} in sum; with training it peaked at "
        f"{peak:,.1f}, between pieces since the start at {meanwhile:,.1f}"
    )
    for line in [*load.failed[:5], *load.wrong[:5]]:
        console.print(f"[red]{line}")
    console.print(f"{len(load.failed)} requests failed, {len(load.wrong)} answers with wrong lengths or versions")
    return int(bool(load.failed or load.wrong))


if __name__ == "__main__":
    servers.script(main)
