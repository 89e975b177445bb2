"""Replicas beside one process: what the way through the front costs, how many prompts are found, what kills do.

    python benchmarks/replicas.py overhead --repeats 5        # one replica beside one process, in turn
    python benchmarks/replicas.py hits                        # conversations over two replicas, and at random over two
    python benchmarks/replicas.py kills --count 10            # a replica is killed under load, again and again
    python benchmarks/replicas.py kills --count 60 --every 60 # for an hour, once a minute at random moments
    python benchmarks/replicas.py updates --count 50          # new weights under load; log-probabilities recomputed

Without --model the last three use a tiny random model; `overhead` uses the embedded one. Needs the extra `cluster`.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from mlx_parallm.bench.load_test import BenchSummary, LoadSpec, run_load
from mlx_parallm.common_words import WORDS
from tests.support.replicas import processes_below, replica_pids, resident, wait_ready
from tests.support.servers import ServerProcess, ours, running

MIB = 1 << 20
TWO = ["--replicas", "2"]
ONE = ["--share-model", "--replicas", "1"]
SHARED = ["--no-ssd", "--memory-limit", "4GiB"]  # of two servers at once


def tiny_model(folder: Path) -> str:
    from tests.tiny import save_tiny, tiny

    (folder / "tiny").mkdir()
    save_tiny(tiny("llama"), folder / "tiny")
    return str(folder / "tiny")


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


# What the way through the front costs.


def overhead(args: argparse.Namespace) -> None:
    found: dict[tuple[int, str], list[BenchSummary]] = {}
    costs: dict[tuple[int, str], list[float]] = {}  # CPU seconds of the process at the address, for each token
    with (
        running(ours(args.model, [*SHARED], fork=False)) as alone,
        running(ours(args.model, [*SHARED, *ONE], fork=False)) as replica,
    ):
        servers = {"one process": alone, "one replica": replica}
        for clients in args.clients:
            for server in servers.values():
                measured(server, clients, clients)  # warms up
            for number in range(args.repeats):
                for name, server in list(servers.items())[:: -1 if number % 2 else 1]:
                    before = cpu_seconds(server.process.pid)
                    summary = measured(server, clients, args.requests)
                    spent = cpu_seconds(server.process.pid) - before
                    found.setdefault((clients, name), []).append(summary)
                    costs.setdefault((clients, name), []).append(spent / summary.output_tokens)
                    speed = f"{summary.output_tokens / summary.seconds:.1f} tokens/s"
                    print(f"{clients} clients, {name}: {speed}, TTFT p50 {ms(summary.ttft.p50)}", flush=True)
    print("| clients | server | tokens/s | TTFT p50 | TTFT p99 | ITL p50 | CPU of the front, µs a token |")
    print("|---|---|---|---|---|---|---|")
    for (clients, name), runs in sorted(found.items()):
        rate = statistics.median(run.output_tokens / run.seconds for run in runs)
        ttft, tail, gap = (
            statistics.median(value(run) for run in runs)
            for value in (lambda run: run.ttft.p50, lambda run: run.ttft.p99, lambda run: run.itl.p50)
        )
        cost = f"{1e6 * statistics.median(costs[clients, name]):.0f}" if name == "one replica" else "–"
        print(f"| {clients} | {name} | {rate:.1f} | {ms(ttft)} | {ms(tail)} | {ms(gap)} | {cost} |")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(server: ServerProcess, clients: int, requests: int) -> BenchSummary:
    spec = LoadSpec(
        url=server.url,
        model="default",
        concurrency=clients,
        requests=requests,
        warmup=clients,
        stream_share=1.0,
        prompt_words=(16, 64),
        output_tokens=(32, 32),
        ignore_eos=True,
    )
    summary = run_load(spec).summary()
    assert not summary.errors, summary.errors
    return summary


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


# How many prompts are found.


def hits(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or tiny_model(Path(folder))
        flags = ["--no-ssd", "--max-queue-size", "1000"]
        found = {}
        with running(ours(model, flags, fork=False)) as one:
            found["one process"] = asyncio.run(talk([one.url], args))
        with running(ours(model, [*flags, *TWO], fork=False)) as two:
            found["two replicas"] = asyncio.run(talk([two.url], args))
        with running(ours(model, flags, fork=False)) as a, running(ours(model, flags, fork=False)) as b:
            found["two processes at random"] = asyncio.run(talk([a.url, b.url], args))
    base = found["one process"]
    print("| served by | prompt tokens found | beside one process |\n|---|---|---|")
    for name, share in found.items():
        print(f"| {name} | {share:.3f} | {share / base:.2f} |")


async def talk(urls: Sequence[str], args: argparse.Namespace) -> float:
    """Conversations of several turns, some at a time; the share of prompt tokens that were in a cache."""
    draw = random.Random(0)
    limit = asyncio.Semaphore(args.at_once)
    async with httpx.AsyncClient(timeout=300) as client:
        talks = [
            converse(client, urls, words(draw, 60), random.Random(n), limit, args.turns) for n in range(args.talks)
        ]
        counts = await asyncio.gather(*talks)
    return sum(cached for cached, _ in counts) / sum(total for _, total in counts)


async def converse(
    client: httpx.AsyncClient,
    urls: Sequence[str],
    system: str,
    draw: random.Random,
    limit: asyncio.Semaphore,
    turns: int,
) -> tuple[int, int]:
    messages = [{"role": "system", "content": system}]
    cached = total = 0
    for _ in range(turns):
        messages.append({"role": "user", "content": words(draw, 30)})
        async with limit:
            body = {"model": "default", "messages": messages, "max_tokens": 8, "ignore_eos": True}
            answer = await client.post(f"{draw.choice(urls)}/v1/chat/completions", json=body)
        answer.raise_for_status()
        found = answer.json()
        cached += found["usage"]["prompt_tokens_details"]["cached_tokens"]
        total += found["usage"]["prompt_tokens"]
        messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"] or "-"})
        await asyncio.sleep(draw.random() * 0.05)
    return cached, total


# What kills do.


def kills(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.model or tiny_model(folder)
        with running(ours(model, [*TWO, "--no-ssd", "--max-queue-size", "1000"], fork=False)) as server:
            post(server.url, 1, folder)
            back, outcomes, held = asyncio.run(kill_under_load(server, args, folder))
    print(f"{args.count} kills; a replica was back after {statistics.median(back):.1f} s (most {max(back):.1f} s)")
    for outcome, count in sorted(outcomes.items()):
        print(f"  {outcome}: {count}")
    if len(held) >= 8:
        later = held[len(held) // 2 :]
        for number, part in enumerate(("front", "replicas", "Ray's processes")):
            sizes = [sizes[number] / MIB for sizes in later]
            slope = statistics.linear_regression(range(len(sizes)), sizes).slope
            print(f"  memory of {part}, second half: {min(sizes):.0f} to {max(sizes):.0f} MiB, {slope:+.2f} a kill")


def memory(server: int) -> tuple[int, int, int]:
    """Bytes of the front, of the replicas, and of Ray's other processes."""
    replicas = set(replica_pids(server))
    return resident([server]), resident(replicas), resident(processes_below(server).keys() - replicas - {server})


async def kill_under_load(
    server: ServerProcess, args: argparse.Namespace, folder: Path
) -> tuple[list[float], Counter[str], list[tuple[int, int, int]]]:
    outcomes: Counter[str] = Counter()
    stop = asyncio.Event()
    async with httpx.AsyncClient(timeout=300) as client:
        load = [asyncio.ensure_future(send_until(client, server.url, n, stop, outcomes)) for n in range(args.at_once)]
        back, held = [], []
        begun = time.monotonic()
        for number in range(args.count):
            moment = (number + random.Random(number).random()) * args.every  # within the kill's own stretch of time
            await asyncio.sleep(max(1.0, begun + moment - time.monotonic()))
            held.append(memory(server.process.pid))
            victims = replica_pids(server.process.pid)
            assert len(victims) == 2, victims
            os.kill(random.Random(number).choice(victims), signal.SIGKILL)
            await asyncio.sleep(0.5)
            version = number + 2  # new weights while it is away
            await asyncio.to_thread(post, server.url, version, folder)
            back.append(await asyncio.to_thread(wait_ready, server.url, 2))
            assert versions(server.url) == {version}, versions(server.url)
            sizes = "/".join(str(size // MIB) for size in held[-1])
            print(
                f"kill {number + 1}: back after {back[-1]:.1f} s with version {version}; {sizes} MiB; {dict(outcomes)}",
                flush=True,
            )
        stop.set()
        await asyncio.gather(*load)
    return back, outcomes, held


async def send_until(
    client: httpx.AsyncClient, url: str, number: int, stop: asyncio.Event, outcomes: Counter[str]
) -> None:
    draw = random.Random(number)
    while not stop.is_set():
        stream = number % 2 == 0
        body = {"model": "default", "prompt": words(draw, 20), "max_tokens": 60, "stream": stream, "ignore_eos": True}
        kind = "streamed" if stream else "whole"
        try:
            answer = await client.post(f"{url}/v1/completions", json=body)
        except httpx.HTTPError as error:
            outcomes[f"{kind}: {type(error).__name__}"] += 1
            continue
        if answer.status_code != 200:
            outcomes[f"{kind}: status {answer.status_code}"] += 1
        elif not stream:
            assert answer.json()["usage"]["completion_tokens"] == 60
            outcomes["whole: answered"] += 1
        elif '"code":"replica_lost"' in answer.text and answer.text.endswith("data: [DONE]\n\n"):
            outcomes["streamed: error event after it had begun"] += 1
        else:
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in answer.text
            outcomes["streamed: answered"] += 1


# New weights under load.


def adapter(folder: Path, version: int) -> tuple[bytes, dict[str, Any]]:
    """Random weights of their own for each version, as the files that mlx-lm reads."""
    import numpy as np
    from safetensors.numpy import save

    path = folder / f"adapter-{version}"
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}
    config["lora_parameters"]["keys"] = ["self_attn.q_proj", "self_attn.v_proj"]  # type: ignore[index]
    draw = np.random.default_rng(version)
    sizes = {"q_proj": 64, "v_proj": 32}
    tensors = {}
    for layer in range(2):
        for name, size in sizes.items():
            key = f"model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_a"] = 0.3 * draw.standard_normal((64, 4)).astype(np.float32)
            tensors[f"{key}.lora_b"] = 0.3 * draw.standard_normal((4, size)).astype(np.float32)
    data = save(tensors)
    path.mkdir(exist_ok=True)
    (path / "adapters.safetensors").write_bytes(data)
    (path / "adapter_config.json").write_text(json.dumps(config))
    return data, config


def post(url: str, version: int, folder: Path) -> None:
    data, config = adapter(folder, version)
    params = {"name": "policy", "config": json.dumps(config)}
    headers = {"Content-Type": "application/octet-stream"}
    answer = httpx.post(f"{url}/update_adapter_weights", params=params, content=data, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["policy_version"] == version, answer.text


def versions(url: str) -> set[int]:
    """What each replica says that it serves."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return {int(float(found)) for found in re.findall(r"^mlx_parallm_replica_policy_version\{.*\} (\S+)$", text, re.M)}


def updates(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model(folder)
        with running(ours(model, [*TWO, "--no-ssd", "--max-queue-size", "1000"], fork=False)) as server:
            post(server.url, 1, folder)
            switched = httpx.post(f"{server.url}/model/switch-lora", json={"version": "policy"}, timeout=60)
            assert switched.status_code == 200, switched.text
            seconds, answers = asyncio.run(update_under_load(server, args.count, folder))
        worst, nearest_other = recomputed(model, folder, answers)
    counts = Counter(answer["policy_version"] for answer in answers)
    print(
        f"{args.count} updates under load, {len(answers)} answers of {len(counts)} versions; an update took "
        f"{ms(statistics.median(seconds))} (most {ms(max(seconds))}); log-probabilities recomputed with the version "
        f"that each answer names differ by {worst:.1e} at most, with the one before by {nearest_other:.1e} at least"
    )


async def update_under_load(server: ServerProcess, count: int, folder: Path) -> tuple[list[float], list[Any]]:
    stop, answers, seconds = asyncio.Event(), [], []

    async def ask(number: int) -> None:
        draw = random.Random(number)
        while not stop.is_set():
            body = {"prompt": words(draw, 12), "max_tokens": 12, "temperature": 1.0, "logprobs": True}
            answer = await client.post(f"{server.url}/generate", json=body)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())

    async with httpx.AsyncClient(timeout=300) as client:
        load = [asyncio.ensure_future(ask(number)) for number in range(6)]
        for version in range(2, count + 2):
            begun = time.perf_counter()
            await asyncio.to_thread(post, server.url, version, folder)
            seconds.append(time.perf_counter() - begun)
            agreed = await asyncio.to_thread(versions, server.url)
            assert agreed == {version}, (version, agreed)
            if version == count // 2:
                os.kill(replica_pids(server.process.pid)[0], signal.SIGKILL)
                print("a replica is killed", flush=True)
            await asyncio.sleep(0.1)
        returned = await asyncio.to_thread(wait_ready, server.url, 2)
        assert versions(server.url) == {count + 1}
        print(f"the killed replica was back {returned:.1f} s after the last update, with version {count + 1}")
        stop.set()
        await asyncio.gather(*load)
    return seconds, answers


def recomputed(model: str, folder: Path, answers: Sequence[Any]) -> tuple[float, float]:
    import mlx.core as mx
    import numpy as np
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load

    by_version: dict[int, list[Any]] = {}
    for answer in answers:
        by_version.setdefault(answer["policy_version"], []).append(answer)

    def difference(module: Any, answer: Any) -> float:
        ids = [*answer["prompt_ids"], *answer["completion_ids"]]
        logits = module(mx.array([ids[:-1]])).astype(mx.float32)
        scores = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]
        start = len(answer["prompt_ids"]) - 1
        own = [scores[start + place, token] for place, token in enumerate(answer["completion_ids"])]
        return float(np.max(np.abs(np.array(own) - np.array(answer["logprobs"]))))

    worst, nearest = 0.0, float("inf")
    for version, listed in sorted(by_version.items()):
        module = load_adapters(load(model)[0], str(folder / f"adapter-{version}"))
        worst = max(worst, *(difference(module, answer) for answer in listed))
        if version > 1:
            other = load_adapters(load(model)[0], str(folder / f"adapter-{version - 1}"))
            nearest = min(nearest, *(difference(other, answer) for answer in listed))
    return worst, nearest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("overhead", "hits", "kills", "updates"))
    parser.add_argument("--model")
    parser.add_argument("--clients", type=lambda text: [int(one) for one in text.split(",")], default=[1, 8])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--count", type=int, default=10, help="kills or updates")
    parser.add_argument("--every", type=float, default=0, help="seconds from kill to kill, about; default: at once")
    parser.add_argument("--talks", type=int, default=100)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=8, help="requests in flight")
    args = parser.parse_args()
    {"overhead": overhead, "hits": hits, "kills": kills, "updates": updates}[args.part](args)


if __name__ == "__main__":
    main()
