"""A working set many times the prefix cache, for minutes: does memory stay flat, do the books balance, is all right?

    python benchmarks/working_set.py [--url URL | --model FOLDER] [--seconds 600 --clients 16]

Clients ask about documents of which the cache holds a tenth, so that blocks are evicted and come back from the SSD all
the time. Each document's answer must be the one that it had the first time. Exit code 1 if memory moves by more
than 5% after the warm-up, if an answer differs, or if the books do not balance at the end.
"""

import argparse
import random
import statistics
import threading
import time
from dataclasses import dataclass, field

import httpx
import servers

from mlx_parallm.common_words import WORDS

BLOCK = 16
TIE = 1e-4  # of log-probability: which of two such tokens is the likelier depends on rounding


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder, GGUF or hub id (default: the embedded model)")
    add("--seconds", type=float, default=600)
    add("--warm-up", type=float, default=180, help="seconds before memory is watched (default: %(default)s)")
    add("--clients", type=int, default=16)
    add("--documents", type=int, default=200)
    add("--words", type=int, default=150, help="of each document (default: %(default)s)")
    add("--tokens", type=int, default=8, help="of each answer (default: %(default)s)")
    add("--factor", type=int, default=10, help="the working set in caches (default: %(default)s)")
    return parser.parse_args()


@dataclass(slots=True)
class Soak:
    url: str
    args: argparse.Namespace
    end: float
    answers: dict[int, str] = field(default_factory=dict)
    other: dict[int, str] = field(default_factory=dict)  # answers that were not the first's
    asked: int = 0
    cached: int = 0
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self, seed: int) -> None:
        draw = random.Random(seed)
        with httpx.Client(base_url=self.url, timeout=300) as http:
            while time.monotonic() < self.end and not self.failures:
                number = draw.randrange(self.args.documents)
                body = {"prompt": document(number, self.args.words), "max_tokens": self.args.tokens, "temperature": 0}
                try:
                    answer = http.post("/v1/completions", json=body).raise_for_status().json()
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    return
                self.take(number, answer)

    def take(self, number: int, answer: dict) -> None:  # type: ignore[type-arg]
        text = answer["choices"][0]["text"]
        with self.lock:
            self.asked += 1
            self.cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            if self.answers.setdefault(number, text) != text:
                self.other[number] = text

    def ties(self) -> int:
        """How many of the other answers part from the first where two tokens were equally likely, to rounding."""
        count = 0
        for number, text in self.other.items():
            body = {"prompt": document(number, self.args.words), "max_tokens": self.args.tokens, "temperature": 0}
            answer = httpx.post(f"{self.url}/v1/completions", json={**body, "logprobs": 2}, timeout=300).json()
            scored = answer["choices"][0]["logprobs"]
            shared = common(self.answers[number], text)
            first = max(
                i for i, offset in enumerate(scored["text_offset"]) if offset - scored["text_offset"][0] <= shared
            )
            likeliest = sorted(scored["top_logprobs"][first].values(), reverse=True)
            print(f"document {number}: {self.answers[number]!r}, then {text!r}; the two likeliest there: {likeliest}")
            count += likeliest[0] - likeliest[1] < TIE
        return count


def common(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def document(number: int, count: int) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=count))


def main() -> int:
    args = parse_args()
    blocks = round(args.documents * (args.words * 1.35 + args.tokens) / BLOCK / args.factor)
    with servers.running(servers.ours(args.model, ["--num-blocks", str(blocks)])) as server:
        begin = time.monotonic()
        soak = Soak(server.url, args, begin + args.seconds)
        threads = [threading.Thread(target=soak.client, args=(seed,)) for seed in range(args.clients)]
        for thread in threads:
            thread.start()
        sizes = []
        while any(thread.is_alive() for thread in threads):
            time.sleep(5)
            if time.monotonic() - begin > args.warm_up and time.monotonic() < soak.end:
                sizes.append(server.memory())
                if len(sizes) % 12 == 1:
                    print(
                        f"{time.monotonic() - begin:5.0f} s: {sizes[-1] / 1e6:,.0f} MB, {soak.asked} asked", flush=True
                    )
        metrics = httpx.get(f"{server.url}/debug/metrics").json()
        ties = soak.ties()
        balanced = httpx.post(f"{server.url}/flush_cache", timeout=60).json()["success"]
    middle = statistics.median(sizes)
    low, high = min(sizes) / middle - 1, max(sizes) / middle - 1
    print(
        f"{soak.asked} requests of {args.clients} clients, {soak.cached} with something cached, "
        f"{len(soak.other) - ties} wrong ({ties} ties), "
        f"failures {soak.failures or 'none'}; pool of {blocks} blocks, {metrics['prefix']['evictions']} evictions, "
        f"{metrics['ssd']['reads']} blocks read from SSD, {metrics['ssd']['writes']} written, "
        f"{metrics['ssd']['dropped']} dropped, {metrics['ssd']['damaged']} damaged; "
        f"memory {middle / 1e6:,.0f} MB {low:+.1%} {high:+.1%}; the books {'balance' if balanced else 'DO NOT BALANCE'}"
    )
    flat = low >= -0.05 and high <= 0.05
    return 0 if flat and balanced and len(soak.other) == ties and not soak.failures else 1


if __name__ == "__main__":
    servers.script(main)
