"""`mlx_parallm_train`, or `parallm train`: the built-in loop on a server of its own, which serves meanwhile.

It takes every option of `serve`, and those of the loop. Ends when the steps are done, unless it is to go on serving;
what it did is in `log.jsonl` and `report.png` beside the checkpoints.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_parallm import config
from mlx_parallm.config import ServeConfig, _option, _parse_bool
from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from mlx_parallm.training.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(ServeConfig):
    mode: str = _option("rl", "rl: a policy; rm: a reward model", section="training", choices=("rl", "rm"))
    enable_rl_training: bool = _option(True, "always", section="rl_training", parse=_parse_bool, key="enabled")
    update_frequency: int = _option(
        0, "trajectories of requests that make an update of their own; 0: none", section="rl_training", parse=int
    )
    checkpoint_interval: int = _option(
        20, "updates from one to the next", section="checkpointing", parse=int, key="interval"
    )
    task: str = _option("length", "a built-in task, reasoning_gym:NAME, gsm8k:FILE or module:Task", section="training")
    steps: int = _option(100, "updates to make", section="training", parse=int)
    prompts_per_step: int = _option(4, "problems in each", section="training", parse=int)
    group_size: int = _option(8, "answers to each", section="training", parse=int)
    temperature: float = _option(1.0, "at which they are drawn", section="training", parse=float)
    answer_tokens: int | None = _option(None, "most tokens of one (default: the task's)", section="training", parse=int)
    eval_every: int = _option(
        0, "steps between looks at held-out problems; 0: first and last", section="training", parse=int
    )
    eval_problems: int = _option(32, "held-out problems", section="training", parse=int)
    level: int = _option(1, "of difficulty, to begin with", section="training", parse=int)
    raise_level_at: float | None = _option(
        None, "success rate from which problems get harder (default: never)", section="training", parse=float
    )
    shuffle_rewards: bool = _option(
        False, "a placebo: rewards go to other answers of their group", section="training", parse=_parse_bool
    )
    learning_rate: float = _option(1e-5, "of AdamW; rm: 2e-4 if not given", section="rl_training", parse=float)
    keep_serving: bool = _option(False, "serve on when the steps are done", section="training", parse=_parse_bool)
    peft_export: str | None = _option(None, "folder for the final adapter in PEFT's format", section="training")
    pairs: str | None = _option(None, "rm: JSON lines of prompt, chosen and rejected", section="training")
    pair_epochs: int = _option(2, "rm: times that they are gone through", section="training", parse=int)

    @property
    def trains(self) -> bool:
        return self.mode == "rl"

    @property
    def serving_share(self) -> float:
        return self.inference_share


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(TrainConfig):
    """With --mode rm: at the rate of a policy, a reward model would learn next to nothing."""

    learning_rate: float = _option(2e-4, "of AdamW", section="rl_training", parse=float)


def add_flags(parser: argparse.ArgumentParser) -> None:
    config.add_flags(parser, TrainConfig)


def settings_of(flags: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> TrainConfig:
    settings = config.load_config(flags, environment, TrainConfig)
    if settings.mode != "rm":
        return settings
    if settings.pairs is None:
        raise ConfigError("--mode rm needs --pairs, a file of prompts with a better and a worse answer")
    return config.load_config(flags, environment, RewardConfig)


def run(args: argparse.Namespace) -> int:
    settings = settings_of({name: value for name, value in vars(args).items() if name != "run"})
    from mlx_parallm.server.run import serve

    def companion(training: "Training") -> int | None:
        if settings.mode == "rm":
            _reward_model(training, settings)
        else:
            _policy(training, settings)
        return None if settings.keep_serving else 0

    return serve(settings, companion)


def _policy(training: "Training", settings: TrainConfig) -> None:
    from mlx_parallm.training.checkpoints import peft_files
    from mlx_parallm.training.loop import Asker, Loop, LoopConfig
    from mlx_parallm.training.report import Progress
    from mlx_parallm.training.tasks import find_task

    session = training.session()
    assert session.checkpoints is not None
    asker = Asker(training.engine, training.rollouts, training.rewards, find_task(settings.task))
    loop_config = LoopConfig(
        steps=settings.steps,
        prompts_per_step=settings.prompts_per_step,
        group_size=settings.group_size,
        temperature=settings.temperature,
        answer_tokens=settings.answer_tokens,
        eval_every=settings.eval_every,
        eval_problems=settings.eval_problems,
        level=settings.level,
        raise_level_at=settings.raise_level_at,
        shuffle_rewards=settings.shuffle_rewards,
        seed=settings.train_seed,
    )
    with Progress(session.checkpoints.folder, loop_config.steps, settings.task) as progress:
        loop = Loop(session, asker, loop_config, progress.on_step)
        training.on_close = loop.stop
        loop.run()
        session.checkpoint()
    if settings.peft_export is not None:
        folder = Path(settings.peft_export).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        adapter = session.engine.work(session.adapter_steps()).result()
        for name, data in peft_files(adapter, session.lora.rank, session.engine.model.source).items():
            (folder / name).write_bytes(data)


def _reward_model(training: "Training", settings: TrainConfig) -> None:
    """Trains one on pairs, looks at pairs that were held out, writes it, and serves it."""
    from functools import partial

    from rich.console import Console

    from mlx_parallm.engine.prompts import Prompts
    from mlx_parallm.training.reward_model import NAME, RewardModel, RewardTrainer, read_pairs
    from mlx_parallm.training.session import once
    from mlx_parallm.training.training import lora_config

    console, engine = Console(), training.engine
    assert settings.pairs is not None
    pairs = read_pairs(settings.pairs, Prompts(engine.model.tokenizer))
    held_out = len(pairs) // 10
    made = partial(RewardModel, engine.model, lora_config(settings), settings.train_seed)
    found = training.add_reward_model(NAME, once(made))
    teacher = RewardTrainer(
        found,
        learning_rate=settings.learning_rate,
        epochs=settings.pair_epochs,
        batch_size=settings.train_batch_size,
        max_grad_norm=settings.max_grad_norm,
        weight_decay=settings.weight_decay,
        seed=settings.train_seed,
    )
    console.print(f"{len(pairs) - held_out} pairs to learn from, {held_out} held out")
    metrics = engine.work(teacher.train(pairs[held_out:])).result()
    console.print("  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    if held_out:
        some = pairs[:held_out]
        texts = [pair.chosen for pair in some] + [pair.rejected for pair in some]
        scores = engine.work(found.score_steps(texts)).result()
        right = sum(left > right for left, right in zip(scores[:held_out], scores[held_out:], strict=True))
        console.print(f"held out: {right} of {held_out} ranked right")
    packed = engine.work(once(found.pack)).result()
    path = packed.save(Path(settings.checkpoint_dir).expanduser() / NAME)
    console.print(f"written to {path}: serve it with --reward-model {path}")
