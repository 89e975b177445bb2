"""How well the router of `--replicas` does with a hundred replicas: a trace of a million requests, replayed.

The router is the real one (mlx_parallm/cluster/replicas/affinity.py); replicas are simulated: each has a prefix cache
of so many characters, the longest unused going first, and takes as long for a request as the rates below say. Random
choice and taking turns are replayed beside it. Hit rate: characters of prompts found in the chosen replica's cache.

    python benchmarks/cluster_simulation.py --requests 1000000 --replicas 100
"""

import argparse
import heapq
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlx_parallm.cluster.replicas.affinity import CAPACITY, AffinityRouter, PromptPrefix
from mlx_parallm.cluster.replicas.prompt_hashes import prompt_digest

STEP = 512  # characters between two hashes, as prompts.py has it
PREFILL_RATE, DECODE_RATE = 8000.0, 120.0  # characters a second: 2000 tokens of a prompt, 30 of an answer
THINK_SECONDS = 30.0
SYSTEM_PROMPTS, SYSTEM_LENGTH = 200, 3000
CACHE_CHARACTERS = 400_000  # a replica's prefix cache: 100,000 tokens
LOAD = 11.0  # requests in flight on each replica, on average


@dataclass(slots=True)
class Request:
    at: float
    prefix: PromptPrefix
    answer: int  # characters


@dataclass(slots=True)
class SimulatedReplica:
    """A prefix cache by the same hashes, with the characters that each stands for."""

    cached: OrderedDict[int, int] = field(default_factory=OrderedDict)
    characters: int = 0
    seconds: float = 0.0  # of work

    def serve(self, request: Request) -> tuple[int, float]:
        """Characters found, and seconds that it takes."""
        hashes, lengths, cached = request.prefix.hashes, request.prefix.lengths, self.cached
        found = 0
        for place in range(len(hashes) - 1, -1, -1):  # ends go before beginnings: the last that is here is the longest
            hash_ = hashes[place]
            if hash_ in cached:
                found = found or lengths[place]
                cached.move_to_end(hash_)
            else:
                cached[hash_] = size = lengths[place] - (lengths[place - 1] if place else 0)
                self.characters += size
        while self.characters > CACHE_CHARACTERS:
            self.characters -= cached.popitem(last=False)[1]
        seconds = (lengths[-1] - found) / PREFILL_RATE + request.answer / DECODE_RATE
        self.seconds += seconds
        return found, seconds


def trace(count: int, replicas: int, seed: int) -> list[Request]:
    """Conversations that come at random, with system prompts of which some are far commoner than others."""
    draw = random.Random(seed)
    systems = [_grown([], [], round(draw.lognormvariate(0, 0.5) * SYSTEM_LENGTH), draw) for _ in range(SYSTEM_PROMPTS)]
    weights = [1 / (rank + 1) for rank in range(SYSTEM_PROMPTS)]
    mean_seconds = 800 / DECODE_RATE + 0.2
    rate = replicas * LOAD / mean_seconds / 6  # conversations a second, of six turns
    requests: list[Request] = []
    start = 0.0
    while len(requests) < count * 1.05:
        start += draw.expovariate(rate)
        at = start
        hashes, lengths = draw.choices(systems, weights)[0]
        hashes, lengths = list(hashes), list(lengths)
        for _ in range(1 + int(draw.expovariate(1 / 5.5))):
            hashes, lengths = _grown(hashes, lengths, round(draw.lognormvariate(5.5, 1.0)), draw)  # a question
            answer = max(20, round(draw.lognormvariate(6.4, 0.7)))
            requests.append(Request(at, PromptPrefix(tuple(hashes), tuple(lengths)), answer))
            hashes, lengths = _grown(hashes, lengths, answer, draw)
            at += answer / DECODE_RATE + draw.expovariate(1 / THINK_SECONDS)
    requests.sort(key=lambda request: request.at)
    return requests[:count]


def _grown(
    hashes: Sequence[int], lengths: Sequence[int], size: int, draw: random.Random
) -> tuple[list[int], list[int]]:
    """With a message of so many characters more."""
    place = lengths[-1] if lengths else 0
    ends = [*range(place + STEP, place + size, STEP), place + size]
    return [*hashes, *(draw.getrandbits(64) for _ in ends)], [*lengths, *ends]


@dataclass(slots=True)
class Outcome:
    hit_rate: float
    work_imbalance: float  # the busiest replica's work beside the mean
    load_imbalance: float  # of requests in flight, the 99th percentile over time of the same
    microseconds: float  # of the router's CPU time, for each request
    hashes: int  # that the router knows at the end


def replay(requests: Sequence[Request], count: int, choose: str, seed: int) -> Outcome:
    draw, turn = random.Random(seed), 0
    replicas = [SimulatedReplica() for _ in range(count)]
    router = AffinityRouter()
    names = [str(number) for number in range(count)]
    for name in names:
        router.add(name)
    running: list[tuple[float, str]] = []
    found = total = 0
    spent, loads = 0.0, []
    for number, request in enumerate(requests):
        while running and running[0][0] <= request.at:
            router.end(heapq.heappop(running)[1])
        if choose == "prefix":
            begun = time.thread_time()
            name = router.choose(request.prefix)
            assert name is not None
            router.note(name, request.prefix)
            spent += time.thread_time() - begun
        elif choose == "random":
            name = draw.choice(names)
        else:
            turn += 1
            name = names[turn % count]
        router.begin(name)
        hit, seconds = replicas[int(name)].serve(request)
        found, total = found + hit, total + request.prefix.lengths[-1]
        heapq.heappush(running, (request.at + seconds, name))
        if number % 1000 == 0 and number > len(requests) // 10:
            every = [router.load(name) for name in names]
            loads.append(max(every) / max(statistics.mean(every), 0.01))
    work = [replica.seconds for replica in replicas]
    return Outcome(
        found / total,
        max(work) / statistics.mean(work),
        sorted(loads)[int(len(loads) * 0.99)] if loads else 0.0,
        1e6 * spent / len(requests),
        router.hashes,
    )


def hashing_cost() -> float:
    """Microseconds to read and hash a body of a conversation of 6 turns, 8,000 characters."""
    messages = ",".join(f'{{"role":"user","content":"{"word " * 145}{number}"}}' for number in range(11))
    body = f'{{"model":"default","messages":[{messages}]}}'.encode()
    return _timed(lambda: prompt_digest(body))


def router_memory(replicas: int) -> int:
    """Megabytes of a router whose replicas all hold as many different hashes as are kept."""
    draw, before = random.Random(0), resident_memory()
    router = AffinityRouter()
    for number in range(replicas):
        router.add(str(number))
        router.hold(str(number), [draw.getrandbits(64) for _ in range(CAPACITY)])
    return (resident_memory() - before) // 1_000_000


def resident_memory() -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmRSS:"))
    return 1024 * int(line.split()[1])


def _timed(call: Callable[[], object], repeats: int = 2000) -> float:
    begun = time.thread_time()
    for _ in range(repeats):
        call()
    return 1e6 * (time.thread_time() - begun) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    requests = trace(args.requests, args.replicas, args.seed)
    mean_length = statistics.mean(request.prefix.lengths[-1] for request in requests)
    print(
        f"{len(requests)} requests over {requests[-1].at:.0f} s to {args.replicas} replicas; prompts of "
        f"{mean_length:.0f} characters; reading and hashing a body of 8,000: {hashing_cost():.0f} µs\n"
    )
    print(
        "| routing | hit rate | busiest replica's work / mean | p99 of most in flight / mean | router, µs a request |"
    )
    print("|---|---|---|---|---|")
    hashes = 0
    for choose in ("prefix", "random", "round-robin"):
        outcome = replay(requests, args.replicas, choose, args.seed)
        cost = f"{outcome.microseconds:.1f}" if choose == "prefix" else "–"
        print(
            f"| {choose} | {outcome.hit_rate:.3f} | {outcome.work_imbalance:.2f} | {outcome.load_imbalance:.2f} | "
            f"{cost} |",
            flush=True,
        )
        if choose == "prefix":
            hashes = outcome.hashes
    print(f"\nat the end the router knows {hashes} different hashes; a full one: {router_memory(args.replicas)} MB")


if __name__ == "__main__":
    main()
