"""Embeddings beside sentence-transformers on torch, and what they cost the streams of a chat model beside them.

    python benchmarks/embeddings.py --peer-python VENV/bin/python [--model FOLDER] [--parts process,http,chat]
    python benchmarks/embeddings.py --peer-python python --peer-device cuda --model FOLDER --chat-model FOLDER

process: texts per second in batches of 32, tokenising included. http: the same texts from 32 clients, one each, beside
the peer in process. Rounds of ours and the peer's alternate; medians are compared, and each round's ratio. chat: times
between tokens of 8 streams, without and while texts are embedded. Without --peer-python only our numbers are shown.
With --peer-device cuda the peer is transformers' model on torch, in the precision of the folder's weights, as ours is.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import servers
from rich.console import Console
from rich.table import Table

from mlx_parallm.bench.load_test import Percentiles
from mlx_parallm.config.model_config import ModelConfig
from mlx_parallm.errors import UnavailableError
from mlx_parallm.http_client import Endpoint, send
from mlx_parallm.models.kinds import embedding
from tests.support.texts import sample_texts

THREADS = 2
EMBED_BATCH = 4  # texts of a request beside streams: what is in flight at their end is not counted
PEER = """
import json, sys, time
import torch
from sentence_transformers import SentenceTransformer
torch.set_num_threads(int(sys.argv[2]))
model = SentenceTransformer(sys.argv[1], device="cpu")
for line in sys.stdin:
    task = json.loads(line)
    begun = time.perf_counter()
    model.encode(task["texts"], batch_size=task["batch"], show_progress_bar=False)
    print(json.dumps(time.perf_counter() - begun), flush=True)
"""


CUDA_PEER = """
import json, sys, time
import torch
from transformers import AutoModel, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModel.from_pretrained(sys.argv[1], dtype="auto").to("cuda").eval()
limit = model.config.max_position_embeddings

@torch.inference_mode()
def encode(texts, batch):
    texts, vectors = sorted(texts, key=len), []
    for first in range(0, len(texts), batch):
        some = texts[first : first + batch]
        inputs = tokenizer(some, padding=True, truncation=True, max_length=limit, return_tensors="pt").to("cuda")
        mask = inputs["attention_mask"].unsqueeze(-1)
        states = model(**inputs).last_hidden_state
        mean = (states * mask).sum(1) / mask.sum(1)
        vectors.append(torch.nn.functional.normalize(mean.float(), dim=1).cpu().numpy())
    return vectors

for line in sys.stdin:
    task = json.loads(line)
    begun = time.perf_counter()
    encode(task["texts"], task["batch"])
    print(json.dumps(time.perf_counter() - begun), flush=True)
"""


class Peer:
    """torch, in a process and an environment of its own."""

    def __init__(self, python: str, folder: str, device: str) -> None:
        command = [python, "-W", "ignore", "-c", CUDA_PEER if device == "cuda" else PEER, folder, str(THREADS)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def seconds(self, texts: Sequence[str], batch: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"texts": texts, "batch": batch}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise UnavailableError("the peer has ended: are torch and its library installed for --peer-python?")
        return float(answer)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class InProcess:
    def __init__(self, folder: str) -> None:
        self._model = embedding.load(Path(folder))
        self._limit = self._model.info.context_length or 1

    def seconds(self, texts: Sequence[str], batch: int) -> float:
        begun = time.perf_counter()
        tokens = [encoding.ids for encoding in self._model.tokenizer.encode_batch(list(texts))]
        tokens = sorted((ids[: self._limit] for ids in tokens), key=len)  # the peer does too
        for first in range(0, len(tokens), batch):
            self._model.predict(tokens[first : first + batch])
        return time.perf_counter() - begun

    def count(self, texts: Sequence[str]) -> int:
        return sum(min(self._limit, len(one.ids)) for one in self._model.tokenizer.encode_batch(list(texts)))


async def embed(endpoint: Endpoint, texts: Sequence[str]) -> int:
    body = {"input": texts, "model": "embedder", "encoding_format": "base64", "truncate_prompt_tokens": -1}
    answer = await send(endpoint, "/v1/embeddings", orjson.dumps(body))
    if answer.status != 200:
        raise UnavailableError(f"/v1/embeddings answered {answer.status}: {answer.body.decode(errors='replace')[:300]}")
    return int(orjson.loads(answer.body)["usage"]["prompt_tokens"])


async def from_clients(endpoint: Endpoint, texts: Sequence[str], clients: int) -> None:
    """Each client sends a text, waits for its vector, and sends the next that nobody has sent."""
    left = iter(texts)

    async def client() -> None:
        for text in left:
            await embed(endpoint, [text])

    await asyncio.gather(*(client() for _ in range(clients)))


def http_seconds(endpoint: Endpoint, texts: Sequence[str], clients: int) -> float:
    begun = time.perf_counter()
    asyncio.run(from_clients(endpoint, texts, clients))
    return time.perf_counter() - begun


@dataclass(slots=True)
class Stream:
    """When each token of one streamed answer arrived."""

    times: list[float] = field(default_factory=list)

    def __call__(self, event: bytes) -> None:
        now = time.perf_counter()
        if event != b"[DONE]" and any(choice.get("text") for choice in orjson.loads(event).get("choices", ())):
            self.times.append(now)


async def read_streams(endpoint: Endpoint, rows: int, tokens: int, seed: int) -> list[float]:
    """Times between tokens while all of the streams run."""
    streams = [Stream() for _ in range(rows)]

    async def read(number: int) -> None:
        body = {"model": "chat", "prompt": f"Story {seed} {number}:", "max_tokens": tokens, "ignore_eos": True}
        body |= {"temperature": 0, "stream": True}
        await send(endpoint, "/v1/completions", orjson.dumps(body), on_event=streams[number])

    await asyncio.gather(*map(read, range(rows)))
    begin, end = max(one.times[8] for one in streams), min(one.times[-1] for one in streams)
    pairs = [pair for one in streams for pair in zip(one.times, one.times[1:], strict=False)]
    return [later - earlier for earlier, later in pairs if begin <= earlier and later <= end]


async def while_embedding(endpoint: Endpoint, args: argparse.Namespace, seed: int) -> tuple[list[float], int]:
    """Times between tokens while clients embed without a pause, and how many tokens these have got embedded."""
    texts, embedded, running = sample_texts(1024, seed=seed), 0, True

    async def client(number: int) -> None:
        nonlocal embedded
        while running:
            first = number * EMBED_BATCH % len(texts)
            tokens = await embed(endpoint, texts[first : first + EMBED_BATCH])
            embedded += tokens  # after the await: others have added theirs meanwhile
            number += args.embedding_clients

    clients = [asyncio.create_task(client(number)) for number in range(args.embedding_clients)]
    gaps = await read_streams(endpoint, args.rows, args.stream_tokens, seed)
    counted, running = embedded, False
    await asyncio.gather(*clients)
    return gaps, counted


async def chat_beside(endpoint: Endpoint, args: argparse.Namespace) -> dict[str, Any]:
    """Streams without and with embeddings in turn: what else the machine does then harms both alike."""
    await read_streams(endpoint, args.rows, 16, 0)  # warms up
    await embed(endpoint, sample_texts(64))
    quiet: list[float] = []
    busy: list[float] = []
    embedded, seed, seconds = 0, 1, 0.0
    while embedded < args.embed_tokens:
        quiet += await read_streams(endpoint, args.rows, args.stream_tokens, seed)
        begun = time.perf_counter()
        gaps, tokens = await while_embedding(endpoint, args, seed + 1)
        busy, embedded, seed, seconds = busy + gaps, embedded + tokens, seed + 2, seconds + time.perf_counter() - begun
    return {
        "without": Percentiles.of(quiet),
        "with": Percentiles.of(busy),
        "embedded_tokens": embedded,
        "seconds": seconds,
        "ratio_p99": Percentiles.of(busy).p99 / Percentiles.of(quiet).p99,
    }


def alternate(ours: Callable[[], float], peer: Callable[[], float] | None, texts: int, rounds: int) -> dict[str, Any]:
    """Texts per second of both; which begins changes from round to round."""
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    runs = {"ours": ours} | ({"peer": peer} if peer is not None else {})
    for run in runs.values():
        run()  # warms up
    for number in range(rounds):
        for name in sorted(runs, reverse=bool(number % 2)):
            times[name].append(runs[name]())
    found: dict[str, Any] = {name: texts / statistics.median(taken) for name, taken in times.items() if taken}
    if peer is not None:
        ratios = [peer / ours for ours, peer in zip(times["ours"], times["peer"], strict=True)]
        found |= {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    return found


def show(found: dict[str, Any]) -> bool:
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    table = Table(title="texts per second", title_justify="left")
    for column in ("", "ours", "torch", "ratio of rounds: median (lowest to highest)"):
        table.add_column(column, justify="right" if column else "left")
    holds = True
    for part, label in {"process": "in process, batches of 32", "http": "over HTTP, 32 clients"}.items():
        if part not in found:
            continue
        one, cells = found[part], ["-", "-"]
        if "ratio" in one:
            cells = [f"{one['peer']:.1f}", f"{one['ratio']:.2f} ({one['lowest']:.2f} to {one['highest']:.2f})"]
            holds = holds and one["ratio"] >= 1
        table.add_row(label, f"{one['ours']:.1f}", *cells)
    if table.rows:
        console.print(table)
        console.print(f"{found['texts']} texts of {found['tokens'] / found['texts']:.0f} tokens in the mean")
    if "chat" in found:
        chat = found["chat"]
        for key in ("without", "with"):
            times: Percentiles = chat[key]
            cells = ", ".join(f"{name} {1000 * getattr(times, name):.0f} ms" for name in ("p50", "p95", "p99", "max"))
            console.print(f"between tokens {key} embeddings: {cells} ({times.count} gaps)")
        speed = chat["embedded_tokens"] / chat["seconds"]
        console.print(f"{chat['embedded_tokens']} tokens were embedded meanwhile, {speed:.0f} a second")
        console.print(f"p99 with to without: {chat['ratio_p99']:.2f} (at most 2 is wanted)")
        holds = holds and chat["ratio_p99"] <= 2
    return holds


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    texts = sample_texts(args.texts, longest=args.longest)
    model = InProcess(folder)
    found: dict[str, Any] = {"texts": len(texts), "tokens": model.count(texts)}
    peer = Peer(args.peer_python, folder, args.peer_device) if args.peer_python else None
    by_peer = None if peer is None else lambda: peer.seconds(texts, args.batch)
    try:
        if "process" in args.parts:
            found["process"] = alternate(lambda: model.seconds(texts, args.batch), by_peer, len(texts), args.rounds)
        if {"http", "chat"} & set(args.parts):
            chat = f"chat={args.chat_model}" if args.chat_model else "chat=SmolLM2-135M-Instruct"
            with servers.running(servers.ours(chat, ["--model-path", f"embedder={folder}"])) as server:
                endpoint = Endpoint.parse(server.url)
                if "http" in args.parts:
                    over_http = lambda: http_seconds(endpoint, texts, args.clients)  # noqa: E731
                    found["http"] = alternate(over_http, by_peer, len(texts), args.rounds)
                if "chat" in args.parts:
                    found["chat"] = asyncio.run(chat_beside(endpoint, args))
    finally:
        if peer is not None:
            peer.stop()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="all-MiniLM-L6-v2", help="embedding model: a folder, or one in a wheel (%(default)s)")
    add("--chat-model", help="that streams beside it (default: the embedded model)")
    add("--peer-python", help="interpreter of an environment with torch and sentence-transformers")
    add("--peer-device", choices=("cpu", "cuda"), default="cpu", help="of the peer (default: %(default)s)")
    add("--parts", type=lambda text: text.split(","), default=["process", "http", "chat"], help="what to measure")
    add("--texts", type=int, default=128, help="of a round (default: %(default)s)")
    add("--longest", type=int, default=200, help="words of a text (default: %(default)s)")
    add("--batch", type=int, default=32)
    add("--clients", type=int, default=32)
    add("--rounds", type=int, default=7, help="of ours and the peer each (default: %(default)s)")
    add("--rows", type=int, default=8, help="streams (default: %(default)s)")
    add(
        "--stream-tokens",
        type=int,
        default=128,
        help="of each (default: %(default)s)",
    )
    add("--embedding-clients", type=int, default=8, help="beside the streams (default: %(default)s)")
    add("--embed-tokens", type=int, default=20_000, help="at least, beside the streams (default: %(default)s)")
    add("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    folder = next(iter(ModelConfig(model_path=(f"model={args.model}",)).named_models().values()))
    found = measure(args, str(folder))
    holds = show(found)
    if args.json:
        args.json.write_bytes(orjson.dumps(found | {"holds": holds}, option=orjson.OPT_INDENT_2))
    return 0 if holds else 1


if __name__ == "__main__":
    servers.script(main)
