"""Throughput of one model over several ranks on this machine, beside one process with the same cores.

    python benchmarks/parallel.py                       # the embedded weights in float32, two ranks over ring
    python benchmarks/parallel.py --ranks 2 --clients 1,8 --rounds 3

Ranks on one machine share its cores and its memory's bandwidth, so there is nothing to gain here: the ratio says what
splitting costs. Each rank gets its share of the cores, the single process all of them. Rounds alternate.
"""

import argparse
import os
import statistics

import servers
import weights

from mlx_parallm.bench.load_test import LoadSpec, run_load
from mlx_parallm.cli.bench_command import parse_span
from mlx_parallm.errors import UnavailableError
from tests.support.groups import RankGroup


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="mlx-lm folder (default: the embedded weights in float32)")
    add("--ranks", type=int, default=2)
    add("--clients", default="1,8", help="numbers of clients, with commas between them (default: 1,8)")
    add("--requests", type=int, default=3, help="per client (default: 3)")
    add("--prompt-words", type=parse_span, default=(32, 64), metavar="MIN-MAX")
    add("--output-tokens", type=parse_span, default=(48, 64), metavar="MIN-MAX")
    add("--rounds", type=int, default=3)
    return parser.parse_args()


def rate(server: servers.ServerProcess, clients: int, args: argparse.Namespace, salt: str) -> float:
    spec = LoadSpec(
        url=server.url,
        endpoint="completions",
        concurrency=clients,
        requests=args.requests * clients,
        prompt_words=args.prompt_words,
        output_tokens=args.output_tokens,
        ignore_eos=True,
        salt=salt,
    )
    summary = run_load(spec).summary()
    assert not sum(summary.errors.values()), summary.errors
    return summary.output_rate


def main() -> int:
    args = parse_args()
    model = args.model or str(weights.embedded_float32())
    share = max(1, (os.cpu_count() or 1) // args.ranks)
    group = RankGroup(model, args.ranks, threads=share, fork=False)
    try:
        with servers.running(servers.ours(model)) as alone:
            try:
                group.server.wait_ready(300)
            except UnavailableError:
                print(group.log())
                raise
            for clients in map(int, args.clients.split(",")):
                ratios = []
                for number in range(-1, args.rounds):  # the first is for warmth
                    one, split = (rate(one, clients, args, f"round {number}") for one in (alone, group.server))
                    if number >= 0:
                        ratios.append(split / one)
                        print(
                            f"{clients} clients, round {number}: one process {one:,.1f} tok/s, "
                            f"{args.ranks} ranks {split:,.1f} tok/s, ratio {split / one:.3f}",
                            flush=True,
                        )
                print(f"{clients} clients: {args.ranks} ranks / one process, median {statistics.median(ratios):.3f}")
    finally:
        group.stop()
    return 0


if __name__ == "__main__":
    servers.script(main)
