"""`TrainConfig`: a run of `mlx_parallm_train`, beside all that a serving process is told."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_parallm.config.options import (
    check_at_least,
    check_positive,
    check_sampling_option,
    group,
    option,
    parse_bool,
    parse_list,
)
from mlx_parallm.config.reading import add_flags
from mlx_parallm.config.serve_config import ServeConfig, load_config
from mlx_parallm.errors import ConfigError

# Where they are other than a server's.
DEFAULTS: dict[str, Any] = {"enable_rl_training": True, "update_frequency": 0, "checkpoint_interval": 20}
# At the rate of a policy, nothing else would learn.
MODE_DEFAULTS: dict[str, dict[str, Any]] = {
    "rl": {},
    "rm": {"learning_rate": 2e-4},
    "sft": {"learning_rate": 2e-4, "lr_schedule": "linear", "train_batch_size": 16, "train_adapter": ("sft",)},
    "dpo": {"learning_rate": 5e-5, "lr_schedule": "linear", "train_batch_size": 16, "train_adapter": ("dpo",)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """The built-in loop of RL: sample, score, update."""

    steps: int = option(100, "rl: updates to make (default: 100)", parse=int)
    prompts_per_step: int = option(4, "rl: different problems for each update (default: 4)", parse=int)
    group_size: int = option(8, "rl: completions to each problem, whose rewards are compared (default: 8)", parse=int)
    temperature: float = option(1.0, "rl: sampling temperature of the completions (default: 1.0)", parse=float)
    top_p: float = option(
        1.0, "rl: sample each token among the likeliest whose probabilities sum up to this (default: 1.0)", parse=float
    )
    top_k: int = option(0, "rl: sample each token among so many likeliest; 0: among all (default: 0)", parse=int)
    dynamic_sampling: int = option(
        0,
        "rl: times in a step that problems whose completions all got the same reward are replaced by others; 0: they "
        "are skipped (default: 0)",
        parse=int,
    )
    answer_tokens: int | None = option(
        None, "rl: most tokens of a completion (default: the task's own limit)", parse=int
    )
    eval_every: int = option(
        0,
        "updates between evaluations on held-out problems or rows; 0: rl before the first and after the last update, "
        "sft and dpo after each epoch (default: 0)",
        parse=int,
    )
    eval_problems: int = option(
        32,
        "rl: problems that are kept for evaluation and never learnt from (default: 32)",
        parse=int,
    )
    level: int = option(
        1,
        "rl: the task's level of difficulty to begin with, 1 is the easiest (default: 1)",
        parse=int,
    )
    raise_level_at: float | None = option(
        None,
        "rl: mean reward over five updates from which the level of difficulty rises by one (default: never)",
        parse=float,
    )
    shuffle_rewards: bool = option(
        False,
        "rl: a placebo run: rewards are shuffled within each group, so nothing should be learnt (default: off)",
        parse=parse_bool,
    )
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, 1, "steps", "prompts_per_step", "eval_problems", "level")
        check_at_least(self, 2, "group_size")
        check_at_least(self, 0, "eval_every", "top_k", "dynamic_sampling")
        check_sampling_option(self, "top_p", "top_p")
        check_positive(self, "temperature")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What is learnt, from what, and for how long."""

    dataset: str | None = option(
        None,
        "JSON-lines file to learn from. sft: rows of messages, or of prompt and completion; dpo: of prompt, chosen and "
        "rejected; rl: of prompt and whatever --reward compares answers with, such as answer (default: none)",
    )
    eval_dataset: str | None = option(
        None,
        "sft, dpo: JSON-lines file to evaluate on, in place of --eval-share (default: none)",
    )
    eval_share: float = option(
        0.1,
        "share of the dataset's rows, sampled by --train-seed, that is held out and never learnt from (default: 0.1)",
        parse=float,
    )
    reward: tuple[str, ...] = option(
        (),
        "rl: a part of the reward as NAME[=ARGUMENT][@WEIGHT]; number (the completion's last number is the row's "
        "answer), exact, regex=PATTERN, length=WORDS, task (the task's own score), or NAME=module:function or "
        "NAME=file.py:function; repeatable, each is logged, and the reward is their weighted sum (default: task)",
        parse=parse_list,
    )
    init_adapter: str | None = option(
        None,
        "folder of an adapter to begin with, in mlx-lm's or PEFT's format, of the same rank and layers; rl: only where "
        "there is no checkpoint to go on from (default: none)",
    )
    epochs: int = option(1, "sft, dpo: times that the dataset is gone through (default: 1)", parse=int)
    max_length: int = option(
        2048,
        "sft, dpo: most tokens of an example; longer ones are cut at their end, and counted (default: 2048)",
        parse=int,
    )
    packing: bool = option(
        False,
        "sft: compute several examples in one row, none of which sees another's; updates stay the same, with less "
        "padding (default: off)",
        parse=parse_bool,
    )
    chat_template: bool = option(
        True,
        "sft, dpo: strings are a user's and an assistant's messages; --no-chat-template takes them as text, with an "
        "end-of-sequence token behind (default: on where the model has a template)",
        parse=parse_bool,
    )
    dpo_beta: float = option(
        0.1,
        "dpo: how strongly the policy is held to the one it began with (default: 0.1)",
        parse=float,
    )
    patience: int = option(
        0,
        "sft, dpo: evaluations in a row without a smaller held-out loss after which training ends, with the parameters "
        "of the smallest; 0: it runs to its end (default: 0)",
        parse=int,
    )
    report_to: tuple[str, ...] = option(
        (),
        "where numbers are sent, with commas: tensorboard, wandb, mlflow, or none (default: tensorboard where it is "
        "installed)",
        parse=parse_list,
    )
    task: str = option(
        "length",
        "rl: what is learnt: a built-in task (arithmetic, format, length, letters, calculator), reasoning_gym:NAME, "
        "gsm8k:FILE, verifiers:NAME or your own as file.py:Class (default: length)",
    )
    keep_serving: bool = option(False, "rl, rm: go on serving after the last update (default: off)", parse=parse_bool)
    peft_export: str | None = option(
        None,
        "rl, sft, dpo: folder to write the final adapter to in PEFT's format (default: none)",
    )
    pairs: str | None = option(
        None,
        "rm: JSON-lines file of prompts, each with a chosen and a rejected completion (default: none)",
    )
    pair_epochs: int = option(2, "rm: epochs over --pairs (default: 2)", parse=int)

    loop: LoopConfig = group(LoopConfig, "RL loop", "training")

    def __post_init__(self) -> None:
        check_at_least(self, 1, "epochs", "pair_epochs")
        check_at_least(self, 0, "patience")
        check_at_least(self, 2, "max_length")
        check_positive(self, "dpo_beta")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(ServeConfig):
    mode: str = option(
        "rl",
        "rl: a policy, from rewards; sft: an adapter, from examples; dpo: one from preferences; rm: a reward model",
        section="training",
        choices=("rl", "sft", "dpo", "rm"),
    )
    run: RunConfig = group(RunConfig, "training run", "training")

    @property
    def trains(self) -> bool:
        return self.mode != "rm"

    @property
    def serving_share(self) -> float:
        return self.training.inference_share

    @property
    def learns_apart(self) -> bool:
        """Whether servers elsewhere sample the rollouts."""
        return self.cluster.connect_to is not None

    def _check_cluster(self) -> None:
        if self.cluster.most > 1 or self.cluster.share_model:
            raise ConfigError("training runs in one process: leave --replicas, --max-replicas and --share-model out")


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, TrainConfig, DEFAULTS)


def load_train_config(flags: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> TrainConfig:
    """Loads the config of a training run, with the defaults of the mode that is asked for."""
    first = load_config(flags, environment, TrainConfig, DEFAULTS)
    mode = first.mode
    schedule = {"total_steps": first.run.loop.steps} if mode == "rl" else {}
    config = load_config(flags, environment, TrainConfig, {**DEFAULTS, **MODE_DEFAULTS[mode], **schedule})
    if mode == "rm" and config.run.pairs is None:
        raise ConfigError("--mode rm needs --pairs, a file of prompts with a better and a worse completion")
    if mode in ("sft", "dpo"):
        if config.run.dataset is None:
            raise ConfigError(f"--mode {mode} needs --dataset, a JSON-lines file")
        if config.run.keep_serving:
            raise ConfigError(f"--mode {mode} does not serve: give the folder that it writes to serve --lora-path")
    if config.learns_apart and (mode != "rl" or config.run.keep_serving):
        raise ConfigError("--connect-to is for --mode rl, and serves nothing here: leave --keep-serving out")
    if mode == "rl" and config.run.dataset is not None and not config.run.reward:
        raise ConfigError("--dataset needs at least one --reward, such as --reward number")
    return config
