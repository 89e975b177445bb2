"""One step of RL, rollouts and update, beside mlx-lm-lora's GRPO on the same model, prompts, groups and lengths.

    python -m venv PEER && PEER/bin/pip install mlx-lm-lora           # once; on Linux also "mlx[cpu]"
    python benchmarks/rl_step.py --peer PEER/bin/python               # the embedded model, beside its peer
    python benchmarks/rl_step.py --model FOLDER --prompts 8 --answer-tokens 128      # a GPU, our rates alone

LoRA of rank 8 on all linear layers, no KL term, one optimiser step on what was drawn. The two take turns, `--repeats`
times; each turn's first step, which warms up, does not count. Medians.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from functools import partial
from typing import Any

import servers
from rich.console import Console
from rich.table import Table
from weights import embedded_float32

from mlx_parallm.config import ServeConfig
from mlx_parallm.config.training import LoRAConfig, RLConfig
from mlx_parallm.devices.device import device_name
from mlx_parallm.engine.delivery import deliver
from mlx_parallm.engine.start import start_engine
from mlx_parallm.models.loader import load
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.training.rl.rollouts import Rollouts
from mlx_parallm.training.rl.session import Session
from mlx_parallm.training.rl.trajectories import Trajectory
from mlx_parallm.training.storage.ledger import Ledger

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KEYS = [f"{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}" for name in ALL]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder, GGUF or hub id (default: the embedded model)")
    add("--peer", help="python of an environment with mlx-lm-lora (default: our rates alone)")
    add("--prompts", type=int, default=4)
    add("--prompt-tokens", type=int, default=24)
    add("--group-size", type=int, default=8)
    add("--answer-tokens", type=int, default=16)
    add("--rank", type=int, default=8)
    add("--steps", type=int, default=3, help="in a turn")
    add("--repeats", type=int, default=2)
    add("--microstep-seconds", type=float, default=0.5)
    return parser.parse_args()


Turn = dict[str, list[Any]]  # "steps": seconds of each; "rollouts": (seconds, tokens) of each


class Ours:
    def __init__(self, args: argparse.Namespace) -> None:
        rows = min(64, args.prompts * args.group_size)
        config = ServeConfig.of(
            ssd=False, max_batch_size=rows, num_blocks=128
        )  # prompts are random: nothing to find again
        self.engine = start_engine(partial(load, args.model, name="model"), config, deliver)
        ledger = Ledger()
        self.engine.recorder = ledger
        self._rollouts = Rollouts(self.engine, ledger, rows)
        self._args = args
        self._session = Session(
            self.engine,
            "policy",
            LoRAConfig(args.rank, 2.0 * args.rank, ALL),
            RLConfig(learning_rate=1e-5, microstep_seconds=args.microstep_seconds),
        )
        self._session.start()
        self._random = random.Random(0)
        self.metrics: list[dict[str, float]] = []

    def turn(self) -> Turn:
        found: Turn = {"steps": [], "rollouts": []}
        for number in range(self._args.steps + 1):
            step, rollout = self._step()
            if number:
                found["steps"].append(step)
                found["rollouts"].append(rollout)
        return found

    def _step(self) -> tuple[float, tuple[float, int]]:
        args, begun = self._args, time.perf_counter()
        vocabulary = range(100, self.engine.model.vocab_size)
        prompts = [self._random.choices(vocabulary, k=args.prompt_tokens) for _ in range(args.prompts)]
        sampling = SamplingParams(n=args.group_size, max_tokens=args.answer_tokens, temperature=1.0)
        groups = self._rollouts.sample(prompts, sampling, adapter="policy")
        drawn = time.perf_counter() - begun
        trajectories = [
            Trajectory.recorded(record, self._random.random(), str(number))
            for number, group in enumerate(groups)
            for record in group
        ]
        report = self._session.update(trajectories)
        assert report.published, report.outcome.reason
        self.metrics.append(report.outcome.metrics | {"update_seconds": report.outcome.seconds})
        return time.perf_counter() - begun, (drawn, sum(len(one.completion_ids) for one in trajectories))


def peer_turn(args: argparse.Namespace, folder: str) -> Turn:
    settings = {
        "rank": args.rank,
        "keys": KEYS,
        "prompts": args.prompts,
        "prompt_tokens": args.prompt_tokens,
        "group_size": args.group_size,
        "answer_tokens": args.answer_tokens,
        "steps": args.steps,
    }
    with tempfile.TemporaryDirectory() as scratch:
        settings["scratch"] = f"{scratch}/adapters.safetensors"
        command = [args.peer, "benchmarks/peer_grpo.py", folder, json.dumps(settings)]
        env = os.environ | servers.blas_environment()
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"the peer has failed:\n{done.stderr[-3000:]}")
    found: Turn = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> int:
    args = parse_args()
    console = Console()
    ours = Ours(args)
    folder = str(args.model or embedded_float32()) if args.peer else ""
    turns: dict[str, list[Turn]] = {"mlx_parallm": [], "mlx-lm-lora": []}
    for _ in range(args.repeats):
        turns["mlx_parallm"].append(ours.turn())
        if args.peer:
            turns["mlx-lm-lora"].append(peer_turn(args, folder))
    title = (
        f"{args.prompts} prompts × {args.group_size} × {args.answer_tokens} tokens, rank {args.rank}, {device_name()}"
    )
    table = Table("", "s a step", "steps/min", "rollout s", "rollout tok/s", title=title)
    rates: dict[str, tuple[float, float]] = {}
    for name, some in turns.items():
        if not some:
            continue
        step = statistics.median(step for turn in some for step in turn["steps"])
        seconds = statistics.median(one[0] for turn in some for one in turn["rollouts"])
        rate = statistics.median(one[1] / one[0] for turn in some for one in turn["rollouts"])
        rates[name] = 60 / step, rate
        table.add_row(name, f"{step:.2f}", f"{60 / step:.2f}", f"{seconds:.2f}", f"{rate:,.1f}")
    console.print(table)
    if args.peer:
        ratios = [left / right for left, right in zip(*rates.values(), strict=True)]
        console.print(f"steps/min {ratios[0]:.2f}×, rollout tokens/s {ratios[1]:.2f}×")
    tokens = statistics.median(one["tokens"] for one in ours.metrics)
    update = statistics.median(one["update_seconds"] for one in ours.metrics[1:])
    console.print(
        f"update: {update:.2f} s for {tokens:.0f} tokens of answers, {tokens / update:,.0f} tok/s; largest |Δ logprob| "
        f"between rollout and update {max(one['max_logprob_gap'] for one in ours.metrics):.1e}; "
        f"peak memory {ours.engine.metrics.peak_memory / 1e6:,.0f} MB"
    )
    ours.engine.stop()
    return 0


if __name__ == "__main__":
    servers.script(main)
