"""What drafts save: the same requests to a server that drafts and to one that does not, in turns.

    python benchmarks/speculation.py                              # the embedded model
    python benchmarks/speculation.py --model FOLDER --rows 1,8,64 # a GPU

Tasks whose answers repeat what was read (a function to write out again, one to change, a record to turn into JSON), and
free chat, which repeats little. Said of each: tokens a second beside those without drafts, the share of drafted tokens
that were accepted, and how many answers differ, of which there should be none. Prompts are warm in both prefix caches,
so that decoding is what is measured.
"""

import argparse
import concurrent.futures
import json
import statistics
import sys
import time
from pathlib import Path

import mlx_parallm  # noqa: F401  (a fast BLAS, before MLX)

import servers  # isort: skip
import httpx
import weights
from rich.console import Console

NAMES = ["orders", "invoices", "readings", "tickets", "players", "routes", "songs", "parcels"]
FUNCTION = '''def total_of_{name}({name}, rate):
    """Adds up the amounts of all {name}."""
    total = 0
    for item in {name}:
        if item["amount"] > 0 and item["open"]:
            total = total + item["amount"] * rate
        else:
            total = total - item["discount"]
    print("the total of the {name} is", total)
    return total
'''
RECORD = "The {name} of {day} May: number {day}417, sender Ada Byron, city Leipzig, weight {day} kg, status delivered."
TALK = ["rivers", "bread", "winter", "music", "trains", "gardens", "the moon", "friendship"]


def prompts(task: str) -> list[str]:
    if task == "repeat":
        return [f"Write this function again, word for word:\n\n{FUNCTION.format(name=name)}" for name in NAMES]
    if task == "edit":
        return [f"Rename `total` to `sum_of_all` in this function:\n\n{FUNCTION.format(name=name)}" for name in NAMES]
    if task == "JSON":
        form = '{"number": "...", "sender": "...", "city": "...", "weight": "...", "status": "..."}'
        records = ["\n".join(RECORD.format(name=name, day=day) for day in range(1, 6)) for name in NAMES]
        return [f"Give each line as JSON like {form}, one a line:\n{text}" for text in records]
    return [f"Tell me a story about {topic}." for topic in TALK]


TASKS = ("repeat", "edit", "JSON", "chat")


class Client:
    def __init__(self, server: servers.ServerProcess, tokens: int) -> None:
        self._server = server
        self._tokens = tokens
        self._http = httpx.Client(timeout=600)

    def ask(self, prompt: str) -> tuple[str, int, int, int]:
        """Returns an answer, its tokens, and how many of those were drafted, and of how many drafts."""
        body = {
            "model": self._server.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._tokens,
            "temperature": 0,
        }
        answer = self._http.post(f"{self._server.url}/v1/chat/completions", json=body).raise_for_status().json()
        details = answer["usage"]["completion_tokens_details"]
        accepted = details.get("accepted_prediction_tokens", 0)
        drafted = accepted + details.get("rejected_prediction_tokens", 0)
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"], accepted, drafted

    def run(self, texts: list[str], rows: int) -> tuple[float, list[str], int, int]:
        """Returns tokens a second of requests, so many at a time, their answers, tokens accepted and drafted."""
        begun = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(rows) as pool:
            answers = list(pool.map(self.ask, texts))
        seconds = time.perf_counter() - begun
        told, tokens, accepted, drafted = zip(*answers, strict=True)
        return sum(tokens) / seconds, list(told), sum(accepted), sum(drafted)


def measure(clients: list[Client], texts: list[str], rows: int, turns: int) -> dict[str, float]:
    ratios = []
    accepted = drafted = differing = 0
    for client in clients:
        client.run(texts, rows)
    for turn in range(turns):
        order = clients if turn % 2 else clients[::-1]
        found = {client: client.run(texts, rows) for client in order}
        with_drafts, without = (found[client] for client in clients)
        ratios.append(with_drafts[0] / without[0])
        accepted += with_drafts[2]
        drafted += with_drafts[3]
        differing += sum(one != other for one, other in zip(with_drafts[1], without[1], strict=True))
    return {
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "accepted": accepted / drafted if drafted else 0.0,
        "drafted": drafted,
        "differing": differing,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder, GGUF file or hub id (default: the embedded weights in float32)")
    add("--rows", default="1,8", help="requests at a time (default: %(default)s)")
    add("--tokens", type=int, default=96, help="most of an answer (default: %(default)s)")
    add("--turns", type=int, default=5, help="of each server (default: %(default)s)")
    add("--tasks", default=",".join(TASKS), help="(default: %(default)s)")
    add("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    model = args.model or str(weights.embedded_float32())
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    rows = [int(one) for one in args.rows.split(",")]
    flags = ["--max-batch-size", str(max(rows)), "--no-ssd"]
    found = {}
    with (
        servers.running(servers.ours(model, [*flags, "--speculation", "copy"])) as drafting,
        servers.running(servers.ours(model, [*flags, "--speculation", "off"])) as plain,
    ):
        clients = [Client(server, args.tokens) for server in (drafting, plain)]
        for task in args.tasks.split(","):
            for count in rows:
                # Three for each row: others go on where some are done sooner, for drafts or for their length.
                texts = (prompts(task) * count)[: 3 * count]
                texts = [f"{text}\n\n({number})" if number >= len(NAMES) else text for number, text in enumerate(texts)]
                one = found[f"{task} {count}"] = measure(clients, texts, count, args.turns)
                console.print(
                    f"{task}, {count} at a time: {one['ratio']:.2f} times as fast ({one['least']:.2f} to "
                    f"{one['most']:.2f}); {one['accepted']:.0%} of {one['drafted']} drafted tokens accepted; "
                    f"{one['differing']} answers differ"
                )
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 1 if any(one["differing"] for one in found.values()) else 0


if __name__ == "__main__":
    servers.script(main)
