"""What a long prompt does to those who are reading: inter-token times of running streams with and without it.

    python benchmarks/long_prompt.py [--url URL | --model FOLDER] [--prefill-step-size 512]

Streams run, then one long prompt arrives. No token may come later than one prefill chunk and one decode step after
the token before. The chunk's time is that of the prompt's last chunk, the dearest, measured alone: the time to the
first token of the whole prompt, less that of the prompt without its last chunk.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import servers
from rich.console import Console
from rich.table import Table

from mlx_parallm.bench.load_test import Percentiles
from mlx_parallm.common_words import WORDS
from mlx_parallm.errors import UnavailableError
from mlx_parallm.http_client import Endpoint, send

UNDER_WAY = 8  # tokens after which a stream counts as running


@dataclass(slots=True)
class Stream:
    """When each piece of one streamed answer arrived."""

    times: list[float] = field(default_factory=list)
    in_flight: asyncio.Event = field(default_factory=asyncio.Event)  # some tokens have come
    failed: str | None = None

    def __call__(self, event: bytes) -> None:
        now = time.perf_counter()
        if event == b"[DONE]":
            return
        chunk = orjson.loads(event)
        if "error" in chunk:
            self.failed = str(chunk["error"])
        elif any(choice.get("text") for choice in chunk["choices"]):
            self.times.append(now)
            if len(self.times) == UNDER_WAY:
                self.in_flight.set()

    def gaps(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Those that overlap the time from `begin` to `end`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later > begin and earlier <= end]


@dataclass(frozen=True, slots=True)
class Setup:
    endpoint: Endpoint
    model: str
    rows: int
    stream_tokens: int
    prompt_tokens: int
    chunk_tokens: int
    repeats: int  # of the chunk's measurement


async def tokens(setup: Setup, count: int, seed: int) -> list[int]:
    """A prompt of exactly so many tokens, that no other prompt begins with."""
    words = random.Random(seed).choices(WORDS, k=count)
    body = orjson.dumps({"model": setup.model, "prompt": " ".join(words)})
    answer = await send(setup.endpoint, "/tokenize", body)
    if answer.status != 200:
        raise UnavailableError(f"/tokenize answered {answer.status}: {answer.body.decode(errors='replace')[:300]}")
    ids: list[int] = orjson.loads(answer.body)["tokens"]
    return ids[:count]


async def stream(setup: Setup, prompt: list[int], max_tokens: int, into: Stream) -> Stream:
    body = {"model": setup.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    answer = await send(setup.endpoint, "/v1/completions", orjson.dumps(body | {"ignore_eos": True}), on_event=into)
    if answer.status != 200 or into.failed:
        raise UnavailableError(f"a stream failed: {into.failed or answer.body.decode(errors='replace')[:300]}")
    return into


async def first_token_alone(setup: Setup, length: int, seed: int) -> float:
    prompt, watch = await tokens(setup, length, seed), Stream()
    begin = time.perf_counter()
    await stream(setup, prompt, 1, watch)
    return watch.times[0] - begin


async def chunk_seconds(setup: Setup) -> float:
    """The last chunk's time, or the mean chunk's should noise make that one longer."""
    rest = setup.prompt_tokens - setup.chunk_tokens
    wholes = [await first_token_alone(setup, setup.prompt_tokens, 10 + number) for number in range(setup.repeats)]
    whole = statistics.median(wholes)
    if rest <= 0:
        return whole
    rests = [await first_token_alone(setup, rest, 20 + number) for number in range(setup.repeats)]
    return max(whole - statistics.median(rests), whole * setup.chunk_tokens / setup.prompt_tokens)


async def read_along(setup: Setup, seed: int, *, long_prompt: bool) -> tuple[list[Stream], float, float]:
    """The streams, and when the long prompt was sent and gave its first token. Each `seed` is new to the server."""
    prompts = [await tokens(setup, 16, seed=seed + 1 + number) for number in range(setup.rows)]
    long = await tokens(setup, setup.prompt_tokens, seed=seed)
    readers = [Stream() for _ in prompts]
    work = [
        asyncio.create_task(stream(setup, prompt, setup.stream_tokens, reader))
        for prompt, reader in zip(prompts, readers, strict=True)
    ]
    sent = first = 0.0
    if long_prompt:
        await asyncio.gather(*(reader.in_flight.wait() for reader in readers))
        sent = time.perf_counter()
        first = (await stream(setup, long, 4, Stream())).times[0]
    await asyncio.gather(*work)
    return readers, sent, first


def steady_gaps(readers: list[Stream]) -> list[float]:
    """From when all are under way: before that, the streams' own prompts are computed between their tokens."""
    begin = max(reader.times[UNDER_WAY - 1] for reader in readers)
    return [gap for reader in readers for gap in reader.gaps(begin)]


async def measure(setup: Setup) -> dict[str, Any]:
    await read_along(setup, 1000, long_prompt=True)  # warms up
    chunk = await chunk_seconds(setup)
    quiet, _, _ = await read_along(setup, 2000, long_prompt=False)
    busy, sent, first = await read_along(setup, 3000, long_prompt=True)
    if min(reader.times[-1] for reader in busy) < first:
        raise UnavailableError("the streams ended before the long prompt was computed: raise --stream-tokens")
    return {
        "chunk_seconds": chunk,
        "long_ttft": first - sent,
        "without": Percentiles.of(steady_gaps(quiet)),
        "with": Percentiles.of(steady_gaps(busy)),
        "meanwhile": Percentiles.of([gap for reader in busy for gap in reader.gaps(sent, first)]),
    }


def show(setup: Setup, found: dict[str, Any]) -> bool:
    table = Table(title=f"inter-token times of {setup.rows} streams", title_justify="left")
    for column in ("", "p50", "p95", "p99", "max", "gaps"):
        table.add_column(column, justify="right" if column else "left")
    names = {
        "without": "without",
        "with": f"with a prompt of {setup.prompt_tokens} tokens",
        "meanwhile": "while it was computed",
    }
    for key, label in names.items():
        times: Percentiles = found[key]
        cells = [f"{1000 * value:.1f} ms" for value in (times.p50, times.p95, times.p99, times.max)]
        table.add_row(label, *cells, str(times.count))
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    console.print(table)
    chunk, step, worst = found["chunk_seconds"], found["without"].p99, found["with"].max
    console.print(f"the long prompt's first token came after {found['long_ttft']:.2f} s")
    console.print(
        f"one chunk of {setup.chunk_tokens} tokens {1000 * chunk:.0f} ms, one decode step {1000 * step:.0f} ms (p99)"
    )
    holds = bool(worst <= chunk + step)
    console.print(f"longest gap {1000 * worst:.0f} ms: {'within' if holds else 'MORE THAN'} one chunk and one step")
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", help="a running server of ours (default: start one)")
    add("--model", help="for the server that is started (default: the embedded model)")
    add("--prefill-step-size", type=int, default=2048, help="of the server (default: %(default)s)")
    add("--rows", type=int, default=8, help="streams (default: %(default)s)")
    add("--stream-tokens", type=int, default=192, help="length of each stream (default: %(default)s)")
    add("--prompt-tokens", type=int, default=6000, help="length of the long prompt (default: %(default)s)")
    add("--repeats", type=int, default=3, help="of the chunk's measurement (default: %(default)s)")
    add("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with servers.server_at(args.url, args.model, ["--prefill-step-size", str(args.prefill_step_size)]) as (
        url,
        model,
        _,
    ):
        sizes = (args.rows, args.stream_tokens, args.prompt_tokens, args.prefill_step_size, args.repeats)
        setup = Setup(Endpoint.parse(url), model, *sizes)
        found = asyncio.run(measure(setup))
    holds = show(setup, found)
    if args.json:
        args.json.write_bytes(orjson.dumps(found | {"holds": holds}, option=orjson.OPT_INDENT_2))
    return 0 if holds else 1


if __name__ == "__main__":
    servers.script(main)
