"""The embedded model learns a task from its own answers: three seeds, and two placebos that must not learn.

    make rl-demo            # a few words, as many as were asked for: ten minutes on two cores
    make rl-demo-long       # sums of two numbers
    make rl-demo ARGS="--connect-to 127.0.0.1:8000"   # the answers come from a server, or from the replicas behind it

Every run is an adapter of its own over one model in one engine. Before and after it the policy answers held-out
problems greedily. The placebos are a learning rate of 0, and rewards that go to other answers of their group. Writes
`log.jsonl` of each run and `report.png`; exit code 1 where the seeds did not learn, or a placebo did.
"""

import argparse
import statistics
import sys
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import mlx_parallm  # noqa: F401  (a fast BLAS, before MLX)

from rich.console import Console  # isort: skip
from rich.table import Table

from mlx_parallm.config import ServeConfig
from mlx_parallm.config.train_config import LoopConfig
from mlx_parallm.config.training import LoRAConfig, RLConfig
from mlx_parallm.engine.delivery import deliver
from mlx_parallm.engine.start import start_engine
from mlx_parallm.models.loader import load
from mlx_parallm.training.report import LOG, PLOT, Progress, plot
from mlx_parallm.training.rl.alarms import Alarms
from mlx_parallm.training.rl.remote_policy import RemotePolicy
from mlx_parallm.training.rl.rollouts import Rollouts
from mlx_parallm.training.rl.session import Session
from mlx_parallm.training.rl.task_loop import Loop
from mlx_parallm.training.storage.ledger import Ledger
from mlx_parallm.training.tasks.environments import make_task_sampler
from mlx_parallm.training.tasks.find_task import find_task
from mlx_parallm.training.tasks.scorers import Rewards

GAIN = 0.15  # of the held-out score: what counts as learnt
STILL_STEPS = 4  # at a learning rate of 0: each is the same update of nothing


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", default="length")
    add("--steps", type=int, default=14)
    add("--prompts", type=int, default=4)
    add("--group-size", type=int, default=6)
    add("--learning-rate", type=float, default=2e-3)
    add("--layers", type=int, default=8, help="the last so many blocks learn")
    add("--seeds", type=int, default=3)
    add("--held-out", type=int, default=24)
    add("--eval-every", type=int, default=0)
    add("--connect-to", metavar="HOST:PORT", help="a server of the same model that draws the answers (default: none)")
    add("--out", type=Path, default=Path("rl-demo"))
    return parser.parse_args()


class Demo:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._engine = start_engine(partial(load, None, name="model"), ServeConfig.of(ssd=False), deliver)
        ledger = Ledger()
        self._engine.recorder = ledger
        self._rollouts = Rollouts(self._engine, ledger, 32)

    def run(self, name: str, seed: int, learning_rate: float, shuffled: bool = False) -> tuple[float, float]:
        """Held-out scores before and after."""
        args = self._args
        steps = args.steps if learning_rate else min(STILL_STEPS, args.steps)
        lora = LoRAConfig(8, 16.0, ("q_proj", "k_proj", "v_proj", "o_proj"), layers=args.layers)
        config = RLConfig(learning_rate=learning_rate, seed=seed, microbatch_tokens=640)
        session = Session(self._engine, name, lora, config, alarms=Alarms(reward_drop=None))
        session.start(serve=False)
        settings = LoopConfig(
            steps=steps,
            prompts_per_step=args.prompts,
            group_size=args.group_size,
            eval_problems=args.held_out,
            eval_every=args.eval_every,
            shuffle_rewards=shuffled,
            seed=seed,
        )
        (args.out / name / LOG).unlink(missing_ok=True)
        with ExitStack() as stack:
            remote = None
            if args.connect_to:
                remote = stack.enter_context(closing(RemotePolicy(args.connect_to, max_staleness=0)))
                session.publish_to(remote, remote.newest(name))
            source = remote or self._rollouts
            sampler = make_task_sampler(self._engine, source, Rewards(), find_task(args.task))
            progress = stack.enter_context(Progress(args.out / name, steps, name))
            reports = Loop(session, sampler, settings, progress.on_step).run()
        self._engine.adapters.unload(name)
        held_out = [one.held_out for one in reports if one.held_out is not None]
        return held_out[0], held_out[-1]

    def stop(self) -> None:
        self._engine.stop()


def main() -> int:
    args = parse_args()
    console, begun = Console(), time.monotonic()
    runs = {f"seed-{seed}": (seed, args.learning_rate, False) for seed in range(args.seeds)}
    placebos = {"rate-0": (0, 0.0, False), "shuffled-rewards": (0, args.learning_rate, True)}
    demo = Demo(args)
    scores: dict[str, tuple[float, float]] = {}
    for name, settings in {**runs, **placebos}.items():
        console.rule(name)
        scores[name] = demo.run(name, *settings)
    demo.stop()
    table = Table("run", "before", "after", title=f"{args.task}: held-out score, greedy")
    for name, (before, after) in scores.items():
        table.add_row(name, f"{before:.3f}", f"{after:.3f}")
    console.print(table)
    names = list(scores)
    drawn = plot([args.out / name / LOG for name in names], args.out / PLOT, names)
    gains = {name: after - before for name, (before, after) in scores.items()}
    learnt = statistics.mean(gains[name] for name in runs)
    flat = max(abs(gains[name]) for name in placebos)
    console.print(
        f"the seeds gained {learnt:+.3f} on average, {min(gains[name] for name in runs):+.3f} at least; the placebos "
        f"moved by {flat:.3f} at most; {(time.monotonic() - begun) / 60:.1f} minutes; "
        f"{drawn or 'no plot without matplotlib'}"
    )
    return int(learnt < GAIN or flat >= learnt / 2)


if __name__ == "__main__":
    sys.exit(main())
