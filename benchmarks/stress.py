"""Many clients, a third of them leaving early, a tenth talking nonsense: does every honest request end right?

    python benchmarks/stress.py [--url URL | --model FOLDER] [--requests 1000 --clients 64]

Checked: each well-formed request ends with the finish reason and length it must; a sample of them, greedy and seeded,
gives the very text that it gave alone; each malformed one gets a 4xx with an error body; afterwards the queue is
empty, and free slots, bytes of keys and values and the memory that MLX holds are what they were. Exit code 1 if not.
"""

import argparse
import asyncio
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import servers
from rich.console import Console
from rich.table import Table

from mlx_parallm.common_words import WORDS
from mlx_parallm.errors import UnavailableError
from mlx_parallm.http_client import Endpoint, HttpResponse, WireError, send

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MALFORMED: list[tuple[str, Any]] = [
    (CHAT, b"{"),
    (CHAT, b""),
    (CHAT, b"[1, 2]"),
    (CHAT, {"messages": "hello"}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "stop": 5}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "temperature": -1}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "model": "no-such-model"}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "tools": "hammer"}),
    (TEXT, {}),
    (TEXT, {"prompt": 7}),
    (TEXT, {"prompt": [[-1]]}),
    (TEXT, {"prompt": [10**9]}),
    (TEXT, {"prompt": "hi", "max_tokens": -1}),
    (TEXT, {"prompt": "hi", "n": 0}),
    (TEXT, {"prompt": "hi", "top_p": 2}),
    (TEXT, {"prompt": "hi", "logit_bias": {"x": 1}}),
    (TEXT, {"prompt": "hi", "stream": "yes please"}),
    (TEXT, {"prompt": [1] * 1_000_000}),
]


@dataclass(slots=True)
class Ask:
    """One request of the plan, and what must become of it."""

    kind: str  # plain, aborted or malformed
    path: str
    body: Any  # a dict, or bytes as they are
    abort_after: float = 0.0


@dataclass(slots=True)
class Ending:
    """How a request ended: its status, and text and finish reason of each choice."""

    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    tokens: int | None = None
    error: Any = None
    aborted: bool = False
    seconds: float = 0.0

    def event(self, event: bytes) -> None:
        if event != b"[DONE]":
            self.read(orjson.loads(event))

    def read(self, body: Any) -> None:
        self.error = body.get("error") or self.error
        if body.get("usage"):
            self.tokens = body["usage"]["completion_tokens"]
        for choice in body.get("choices") or ():
            index = choice["index"]
            part = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            self.texts[index] = self.texts.get(index, "") + part
            if choice.get("finish_reason"):
                self.reasons[index] = choice["finish_reason"]


def plan(count: int, seed: int, aborted: float, malformed: float, words: int, tokens: int) -> list[Ask]:
    rng = random.Random(seed)
    kinds = ["malformed"] * round(count * malformed) + ["aborted"] * round(count * aborted)
    kinds += ["plain"] * (count - len(kinds))
    rng.shuffle(kinds)
    return [_malformed(rng) if kind == "malformed" else _wellformed(rng, kind, words, tokens) for kind in kinds]


def _malformed(rng: random.Random) -> Ask:
    path, body = rng.choice(MALFORMED)
    return Ask("malformed", path, body)


def _wellformed(rng: random.Random, kind: str, words: int, tokens: int) -> Ask:
    """A request that is the same computation each time: greedy, or sampled with a seed."""
    prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, words)))
    body: dict[str, Any] = {"model": "default", "max_tokens": rng.randint(1, tokens), "temperature": 0}
    if rng.random() < 0.5:
        body |= {"temperature": rng.choice([0.5, 0.8, 1.0, 1.5]), "seed": rng.randrange(1 << 31)}
        body |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 50}])
    body |= rng.choice([{}, {}, {"ignore_eos": True}, {"n": 2}, {"stop": ["the", "\n"]}, {"repetition_penalty": 1.2}])
    body |= rng.choice([{}, {}, {"presence_penalty": 0.5}, {"logit_bias": {"5": -100}}, {"min_tokens": 1}])
    if rng.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if rng.random() < 0.5:
        return Ask(kind, CHAT, body | {"messages": [{"role": "user", "content": prompt}]}, rng.random())
    return Ask(kind, TEXT, body | {"prompt": prompt}, rng.random())


async def perform(endpoint: Endpoint, ask: Ask, patience: float | None = None) -> Ending:
    """Sends it; with `patience`, leaves after so many seconds."""
    ending, begin = Ending(), time.perf_counter()
    body = ask.body if isinstance(ask.body, bytes) else orjson.dumps(ask.body)
    try:
        async with asyncio.timeout(patience):
            answer = await send(endpoint, ask.path, body, on_event=ending.event)
        _read(ending, answer)
    except TimeoutError:
        ending.aborted = True
    except WireError as error:
        ending.error = str(error)
    ending.seconds = time.perf_counter() - begin
    return ending


def _read(ending: Ending, answer: HttpResponse) -> None:
    ending.status = answer.status
    if answer.body:
        ending.read(orjson.loads(answer.body))


def fault(ask: Ask, ending: Ending) -> str | None:
    """What is wrong with how it ended, if anything."""
    if ending.aborted:
        return None if ask.kind == "aborted" else "was aborted"
    if ask.kind == "malformed":
        right = 400 <= ending.status < 500 and isinstance(ending.error, dict) and ending.error.get("message")
        return None if right else f"{ask.body!r:.60} was answered {ending.status} {ending.error}"
    if ending.status != 200 or ending.error:
        return f"answered {ending.status} {ending.error}"
    choices = ask.body.get("n", 1)
    if sorted(ending.reasons) != list(range(choices)) or not set(ending.reasons.values()) <= {"stop", "length"}:
        return f"ended with {ending.reasons}"
    return _wrong_length(ask, ending, choices)


def _wrong_length(ask: Ask, ending: Ending, choices: int) -> str | None:
    if ending.tokens is None:
        return "came without usage"
    most = ask.body["max_tokens"] * choices
    exact = bool(ask.body.get("ignore_eos"))
    if ending.tokens > most or (exact and ending.tokens != most):
        return f"has {ending.tokens} tokens, of {most}"
    return None


async def run_all(endpoint: Endpoint, asks: Sequence[Ask], clients: int, typical: float) -> list[Ending]:
    """All of them, `clients` at a time. Those that leave do so at a random moment of a typical answer's time."""
    endings: dict[int, Ending] = {}
    work = iter(enumerate(asks))

    async def client() -> None:
        for number, ask in work:
            patience = ask.abort_after * typical if ask.kind == "aborted" else None
            endings[number] = await perform(endpoint, ask, patience)

    await asyncio.gather(*(client() for _ in range(clients)))
    return [endings[number] for number in range(len(asks))]


GAUGES = ("queue_depth", "running", "slots_free", "kv_bytes", "active_memory")


async def gauges(endpoint: Endpoint) -> dict[str, float]:
    answer = await send(endpoint, "/metrics")
    values = dict(re.findall(r"^mlx_parallm_(\w+)(?:\{[^}]*\})? ([-+\d.e]+)$", answer.body.decode(), re.M))
    missing = [name for name in GAUGES if name not in values]
    if missing:
        raise UnavailableError(f"/metrics of {endpoint.url} has no mlx_parallm_{missing[0]}")
    return {name: float(values[name]) for name in GAUGES}


async def settled(endpoint: Endpoint, patience: float = 30.0) -> dict[str, float]:
    """The gauges once nothing runs and nothing is cached; the engine's books must balance then."""
    deadline = time.monotonic() + patience
    while True:
        now = await gauges(endpoint)
        if not now["running"] and not now["queue_depth"]:
            answer = await send(endpoint, "/flush_cache", b"")
            if b'"success":true' not in answer.body:
                raise UnavailableError(f"the engine's books do not balance: {answer.body.decode()}")
            return await gauges(endpoint)
        if time.monotonic() > deadline:
            raise UnavailableError(f"still busy after {patience:g} s: {now}")
        await asyncio.sleep(0.05)


@dataclass(slots=True)
class Findings:
    asks: list[Ask]
    endings: list[Ending]
    before: dict[str, float]
    after: dict[str, float]
    compared: int
    faults: list[str]
    seconds: float
    memory: tuple[int, int] | None


async def stress(endpoint: Endpoint, args: argparse.Namespace, server: servers.ServerProcess | None) -> Findings:
    asks = plan(args.requests, args.seed, args.aborted, args.malformed, args.prompt_words, args.output_tokens)
    honest = [number for number, ask in enumerate(asks) if ask.kind == "plain"]
    sample = random.Random(args.seed).sample(honest, min(args.sample, len(honest)))
    alone = {number: await perform(endpoint, asks[number]) for number in sample}
    warm = plan(4 * args.clients, args.seed + 1, 0, 0, args.prompt_words, args.output_tokens)
    typical = sorted(ending.seconds for ending in await run_all(endpoint, warm, args.clients, 0))[2 * args.clients]
    before, memory = await settled(endpoint), server.memory() if server else 0
    begin = time.perf_counter()
    endings = await run_all(endpoint, asks, args.clients, typical)
    seconds = time.perf_counter() - begin
    after = await settled(endpoint)
    faults = [f"request {i} ({ask.kind}) {found}" for i, ask in enumerate(asks) if (found := fault(ask, endings[i]))]
    faults += [
        f"request {i} gave {endings[i].texts}, and alone {alone[i].texts}"
        for i in sample
        if endings[i].texts != alone[i].texts
    ]
    faults += leaks(before, after)
    sizes = (memory, server.memory()) if server else None
    if sizes and sizes[1] - sizes[0] > args.memory_growth << 20:
        faults.append(f"the process grew by {(sizes[1] - sizes[0]) >> 20} MiB")
    return Findings(asks, endings, before, after, len(sample), faults, seconds, sizes)


def leaks(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Slots and keys and values must be back to the byte; MLX may round its memory up a little."""
    found = [
        f"{name} was {before[name]:g} and is {after[name]:g}"
        for name in ("slots_free", "kv_bytes")
        if before[name] != after[name]
    ]
    if after["active_memory"] > before["active_memory"] + (1 << 20):
        found.append(f"MLX holds {after['active_memory'] - before['active_memory']:,.0f} bytes more")
    return found


def show(findings: Findings, clients: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    kinds = Counter(ask.kind for ask in findings.asks)
    left = sum(ending.aborted for ending in findings.endings)
    console.print(
        f"{len(findings.asks)} requests at {clients} clients in {findings.seconds:.1f} s: {kinds['plain']} plain, "
        f"{kinds['aborted']} to abort ({left} left in time), {kinds['malformed']} malformed; "
        f"{findings.compared} compared with themselves alone",
        soft_wrap=True,
    )
    table = Table()
    for column in ("when idle", "before", "after"):
        table.add_column(column, justify="left" if column == "when idle" else "right")
    for name in GAUGES:
        table.add_row(name, f"{findings.before[name]:,.0f}", f"{findings.after[name]:,.0f}")
    if findings.memory:
        table.add_row("process memory", *(f"{size:,}" for size in findings.memory))
    console.print(table)
    for text in findings.faults[:20]:
        console.print(f"FAULT: {text:.500}", style="red", markup=False)
    console.print(f"{len(findings.faults)} faults" if findings.faults else "every request ended right, nothing leaked")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", help="a running server of ours (default: start one)")
    add("--model", help="for the server that is started (default: the embedded model)")
    add("--requests", type=int, default=1000)
    add("--clients", type=int, default=64)
    add("--aborted", type=float, default=1 / 3, metavar="SHARE")
    add("--malformed", type=float, default=0.1, metavar="SHARE")
    add("--prompt-words", type=int, default=60, help="the longest prompt (default: %(default)s)")
    add("--output-tokens", type=int, default=24, help="the longest answer (default: %(default)s)")
    add("--sample", type=int, default=40, help="requests to compare with themselves alone (default: %(default)s)")
    add("--memory-growth", type=int, default=256, metavar="MIB", help="allowed to the process (default: %(default)s)")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    with servers.server_at(args.url, args.model) as (url, _, server):
        findings = asyncio.run(stress(Endpoint.parse(url), args, server))
    show(findings, args.clients)
    return 1 if findings.faults else 0


if __name__ == "__main__":
    servers.script(main)
