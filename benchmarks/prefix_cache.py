"""What the prefix cache saves, what it costs, and how it compares with `mlx_lm.server` on the same conversations.

    python benchmarks/prefix_cache.py                                    # all of it, on the embedded weights in float32
    python benchmarks/prefix_cache.py --only prefix,chats
    python benchmarks/prefix_cache.py --only overhead --model FOLDER --clients 64 --prompt-words 64-384 \\
        --output-tokens 64-192                                           # a GPU

prefix: the time to the first token of prompts with a long common beginning: cold, warm in RAM, and from SSD after
a restart. chats: how many prompt tokens are computed in a straight chat and in branching ones, beside the peer.
overhead: throughput with the cache and without, when nothing is shared. drift: what --kv-bits does to answers.
snapshots: the same as prefix for small random models with sliding windows and recurrent states. swapping: whether
rows that lose their place for lack of memory answer the same, and how much of them is computed again.
"""

import argparse
import functools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import servers
import weights
from rich.console import Console
from rich.table import Table

from mlx_parallm.bench.load_test import LoadSpec, run_load
from mlx_parallm.cli.bench_command import parse_span
from mlx_parallm.common_words import WORDS
from mlx_parallm.errors import ParallmError

PARTS = ("prefix", "snapshots", "chats", "swapping", "overhead", "drift")
SNAPSHOT_TOKENS = 500
Message = dict[str, str]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", default=",".join(PARTS), help="parts to run, with commas (default: %(default)s)")
    add("--model", help="mlx-lm folder (default: the embedded weights in float32)")
    add("--repeats", type=int, default=3)
    add("--prefix-tokens", type=int, default=1500)
    add("--turns", type=int, default=10, help="of the straight chat (default: %(default)s)")
    add("--clients", type=int, default=32, help="of the overhead's load (default: %(default)s)")
    add("--requests", type=int, help="of the overhead's load (default: 4 per client)")
    add("--prompt-words", type=parse_span, default=(32, 128), metavar="MIN-MAX")
    add("--output-tokens", type=parse_span, default=(16, 48), metavar="MIN-MAX")
    add("--skip-peer", action="store_true")
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def words(count: int, seed: object) -> str:
    return " ".join(random.Random(str(seed)).choices(WORDS, k=count))


class Client:
    def __init__(self, server: servers.ServerProcess) -> None:
        self.server = server
        self.http = httpx.Client(base_url=server.url, timeout=600)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.http.post(path, json={"model": self.server.model, "temperature": 0, **body})
        if response.status_code != 200:
            raise ParallmError(f"{path}: HTTP {response.status_code}: {response.text[:500]}")
        answer: dict[str, Any] = response.json()
        return answer

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
        return found

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds, and how many tokens were cached."""
        begin = time.perf_counter()
        answer = self.post("/v1/completions", prompt=prompt, max_tokens=1)
        return time.perf_counter() - begin, cached(answer)

    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/debug/metrics").json()
        return found

    def settle(self) -> None:
        """Until the SSD has all that it is to get."""
        before: dict[str, Any] = {}
        while before != (before := self.metrics()["ssd"]):
            time.sleep(0.5)


def cached(answer: dict[str, Any]) -> int:
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


# A long common beginning: cold, in RAM, on SSD.


def measure_prefix(model: str, tokens: int, repeats: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"cold": [], "warm in RAM": [], "from SSD after a restart": []}
    hits: dict[str, list[int]] = {name: [] for name in times}
    with tempfile.TemporaryDirectory() as folder:
        for names in (("cold", "warm in RAM"), ("from SSD after a restart",)):
            with servers.running(servers.ours(model, ["--ssd-cache-dir", folder])) as server:
                client = Client(server)
                client.first_token(client.tokens(words(200, "warm-up")))
                for repeat in range(repeats):
                    beginning = client.tokens(words(2 * tokens, repeat))[:tokens]
                    for name in names:
                        question = client.tokens(words(24, f"{name} {repeat}"))[:16]
                        seconds, found = client.first_token(beginning + question)
                        times[name].append(seconds)
                        hits[name].append(found)
                client.settle()
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        name: {"seconds": medians[name], "ratio": medians[name] / medians["cold"], "cached tokens": min(hits[name])}
        for name in times
    }


def show_prefix(console: Console, found: dict[str, Any], tokens: int, model: str = "") -> None:
    table = Table(title=f"time to the first token, {tokens} tokens in common{model}", title_justify="left")
    for column in ("", "seconds", "of cold", "cached tokens"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in found.items():
        table.add_row(name, f"{row['seconds']:.3f}", f"{row['ratio']:.3f}×", f"{row['cached tokens']:,}")
    console.print(table)


# Conversations: how much of them is computed.


@dataclass(slots=True)
class Work:
    prompt: int = 0  # tokens sent
    computed: int = 0

    @property
    def hit_share(self) -> float:
        return 1 - self.computed / self.prompt


def straight(turns: int) -> Iterator[list[str]]:
    """One chat that grows: what the user says at each turn."""
    yield [words(40, f"straight {turn}") for turn in range(turns)]


def branching(users: int = 12, rounds: int = 3) -> Iterator[list[str]]:
    """Many users of one agent, in turn: the same instructions, a document of each user's, ever new questions."""
    instructions = words(150, "instructions")
    documents = [words(120, f"document {user}") for user in range(users)]
    for turn in range(rounds):
        for user, document in enumerate(documents):
            yield [f"{instructions}\n{document}\n{words(12, f'question {user} {turn}')}"]


def converse(client: Client, chats: Iterator[list[str]]) -> tuple[Work, int]:
    """Plays chats turn by turn; what was computed, and the tokens of the last prompt."""
    work, last = Work(), 0
    for chat in chats:
        messages: list[Message] = []
        for said in chat:
            messages.append({"role": "user", "content": said})
            answer = client.post("/v1/chat/completions", messages=messages, max_tokens=24)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
            last = answer["usage"]["prompt_tokens"]
            work.prompt += last
            work.computed += last - cached(answer)
    return work, last


def measure_chats(model: str, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("mlx_parallm",) if args.skip_peer else ("mlx_parallm", "mlx_lm.server"):
        start = servers.ours if name == "mlx_parallm" else servers.mlx_lm
        with servers.running(start(model)) as server:
            client = Client(server)
            chat, distinct = converse(client, straight(args.turns))
            branches, _ = converse(client, branching())
        found[name] = {
            "straight chat": {"hit share": chat.hit_share, "computed / distinct": chat.computed / distinct},
            "branching chats": {"hit share": branches.hit_share, "computed": branches.computed},
        }
    return found


def show_chats(console: Console, found: dict[str, Any]) -> None:
    table = Table(title="conversations", title_justify="left")
    for column in ("", *found):
        table.add_column(column, justify="right" if column else "left")
    for chat in ("straight chat", "branching chats"):
        table.add_row(f"{chat}: prompt tokens cached", *(f"{row[chat]['hit share']:.1%}" for row in found.values()))
        extra = "computed / distinct" if chat == "straight chat" else "computed"
        values = [row[chat][extra] for row in found.values()]
        table.add_row(f"{chat}: {extra}", *(f"{v:.2f}×" if chat == "straight chat" else f"{v:,}" for v in values))
    console.print(table)


# Rows that lose their place.


def measure_swapping(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Clients that all want long answers, with memory for all of them, and for half."""
    found: dict[str, Any] = {}
    limit = ""
    for name in ("room for all", "room for half"):
        flags = ["--max-batch-size", str(args.clients), "--num-blocks", "4096", *limit.split()]
        with servers.running(servers.ours(model, flags)) as server:
            client = Client(server)
            client.post("/v1/completions", prompt=words(20, "warm-up"), max_tokens=4)
            before = client.metrics()
            with ThreadPoolExecutor(args.clients) as pool:
                texts = list(pool.map(functools.partial(long_answer, client), range(args.clients)))
            after = client.metrics()
        found[name] = {
            "texts": texts,
            "preemptions": after["preemptions"] - before["preemptions"],
            "prompt tokens computed": after["prompt_tokens"] - before["prompt_tokens"],
        }
        # Half of what these rows take: they grow past 256 tokens, so that each has a place of 512.
        per_token = after["prefix"]["bytes"] // max(1, after["prefix"]["blocks_cached"]) // 16
        limit = f"--kv-cache-memory {args.clients // 2 * 512 * per_token}"
    return found


def long_answer(client: Client, number: int) -> str:
    prompt = words(60 + 5 * number, f"swapping {number}")
    answer = client.post("/v1/completions", prompt=prompt, max_tokens=160, ignore_eos=True)
    return str(answer["choices"][0]["text"])


def show_swapping(console: Console, found: dict[str, Any]) -> None:
    everyone, half = found.values()
    same = sum(one == other for one, other in zip(everyone["texts"], half["texts"], strict=True))
    console.print(
        f"room for half of the rows: {same} of {len(half['texts'])} answers are the same; {half['preemptions']} times "
        f"a row lost its place; {half['prompt tokens computed']:,} prompt tokens computed, "
        f"{everyone['prompt tokens computed']:,} with room for all",
        soft_wrap=True,
    )


# What it costs when nothing is shared.


def measure_overhead(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both servers run side by side, one of them idle, so that neither is measured cold."""
    rates: dict[str, list[float]] = {"on": [], "off": []}
    flags = ["--max-batch-size", str(args.clients)]
    with (
        servers.running(servers.ours(model, flags)) as on,
        servers.running(servers.ours(model, [*flags, "--num-blocks", "0"])) as off,
    ):
        both = {"on": on, "off": off}
        for server in both.values():
            overhead_load(server, args, "warm-up", args.clients)
        for repeat in range(args.repeats):
            for name in ("on", "off") if repeat % 2 == 0 else ("off", "on"):
                requests = args.requests or 4 * args.clients
                rates[name].append(overhead_load(both[name], args, f"turn {repeat}", requests))
                print(f"cache {name:3}: {rates[name][-1]:,.1f} tok/s", flush=True)
    medians = {name: statistics.median(turns) for name, turns in rates.items()}
    return {**medians, "ratio": medians["on"] / medians["off"], "turns": rates}


def overhead_load(server: servers.ServerProcess, args: argparse.Namespace, salt: str, requests: int) -> float:
    spec = LoadSpec(
        url=server.url,
        model=server.model,
        endpoint="completions",  # a chat template would be shared
        concurrency=args.clients,
        requests=requests,
        prompt_words=args.prompt_words,
        output_tokens=args.output_tokens,
        stream_share=0.5,
        temperature=0.0,
        salt=salt,
    )
    return run_load(spec).summary().output_rate


def show_overhead(console: Console, found: dict[str, Any], args: argparse.Namespace) -> None:
    console.print(
        f"nothing shared, {args.clients} clients: {found['on']:,.1f} tok/s with the cache, "
        f"{found['off']:,.1f} without: {found['ratio']:.3f}×",
        soft_wrap=True,
    )


# What quantised blocks do to answers.


def measure_drift(model: str, args: argparse.Namespace) -> dict[str, Any]:
    prompts = [words(200, f"drift {number}") for number in range(6)]
    options = {"max_tokens": 24, "logprobs": 1, "ignore_eos": True}
    found: dict[str, Any] = {}
    exact: list[dict[str, Any]] = []
    for bits in ("none", "8", "4"):
        flags = ["--kv-bits", bits, "--kv-group-size", "32"] if bits != "none" else []
        with servers.running(servers.ours(model, flags)) as server:
            client = Client(server)
            for prompt in prompts:  # fills the cache; the second time the prompt comes from it
                client.post("/v1/completions", prompt=prompt, max_tokens=1)
            answers = [client.post("/v1/completions", prompt=prompt, **options) for prompt in prompts]
        assert all(cached(answer) > 100 for answer in answers)
        exact = exact or answers
        found[f"{bits} bits"] = _drift(exact, answers)
    return found


def _drift(exact: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Over the tokens until two answers part: how far their log-probabilities are from each other."""
    differences, same, total = [], 0, 0
    for one, other in zip(exact, answers, strict=True):
        pairs = [answer["choices"][0]["logprobs"] for answer in (one, other)]
        total += len(pairs[0]["tokens"])
        for a, b, x, y in zip(
            *(pair["tokens"] for pair in pairs), *(pair["token_logprobs"] for pair in pairs), strict=True
        ):
            if a != b:
                break
            same += 1
            differences.append(abs(x - y))
    mean = statistics.mean(differences) if differences else 0.0
    return {"same tokens": same / total, "mean": mean, "largest": max(differences, default=0.0)}


def show_drift(console: Console, found: dict[str, Any]) -> None:
    table = Table(title="greedy answers from quantised blocks", title_justify="left")
    for column in ("", "tokens until they part", "mean |Δlogprob|", "largest"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in found.items():
        table.add_row(name, f"{row['same tokens']:.0%}", f"{row['mean']:.5f}", f"{row['largest']:.5f}")
    console.print(table)


def main() -> int:
    args = parse_args()
    parts = args.only.split(",")
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    model = args.model or str(weights.embedded_float32())
    console = Console(width=None if sys.stdout.isatty() else 110)
    found: dict[str, Any] = {}
    if "prefix" in parts:
        found["prefix"] = measure_prefix(model, args.prefix_tokens, args.repeats)
        show_prefix(console, found["prefix"], args.prefix_tokens)
    for kind in weights.KINDS if "snapshots" in parts else ():
        found[kind] = measure_prefix(str(weights.small(kind)), SNAPSHOT_TOKENS, args.repeats)
        show_prefix(console, found[kind], SNAPSHOT_TOKENS, f", {kind}")
    if "chats" in parts:
        found["chats"] = measure_chats(model, args)
        show_chats(console, found["chats"])
    if "swapping" in parts:
        found["swapping"] = measure_swapping(model, args)
        show_swapping(console, found["swapping"])
    if "overhead" in parts:
        found["overhead"] = measure_overhead(model, args)
        show_overhead(console, found["overhead"], args)
    if "drift" in parts:
        found["drift"] = measure_drift(model, args)
        show_drift(console, found["drift"])
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    servers.script(main)
