"""`mlx_parallm_train`, or `parallm train`: trains an adapter or a reward model, and leaves it in a folder. Here are its
options; `training.runs` does the work.

`--mode rl` is the built-in loop on a server of its own, which serves meanwhile; it takes every option of `serve`, and
ends when the steps are done, unless it is to go on serving. `--mode sft`, `dpo` and `rm` learn from a file and listen
on no port. What a run did is in `log.jsonl` and `report.png`.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_parallm import config
from mlx_parallm.config import ServeConfig, _option, _parse_bool, _parse_list
from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from mlx_parallm.training.manager import TrainingManager
    from mlx_parallm.training.runs import AdapterSource, Reporting
    from mlx_parallm.training.supervised import SupervisedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(ServeConfig):
    mode: str = _option(
        "rl",
        "rl: a policy, from rewards; sft: an adapter, from examples; dpo: one from preferences; rm: a reward model "
        "(default: rl)",
        section="training",
        choices=("rl", "sft", "dpo", "rm"),
    )
    enable_rl_training: bool = _option(True, "always", section="rl_training", parse=_parse_bool, key="enabled")
    update_frequency: int = _option(
        0, "trajectories of requests that make an update of their own; 0: none", section="rl_training", parse=int
    )
    checkpoint_interval: int = _option(
        20, "updates from one to the next", section="checkpointing", parse=int, key="interval"
    )
    dataset: str | None = _option(
        None,
        "JSON-lines file to learn from. sft: rows of messages, or of prompt and completion; dpo: of prompt, chosen and "
        "rejected; rl: of prompt and whatever --reward compares answers with, such as answer (default: none)",
        section="training",
    )
    eval_dataset: str | None = _option(
        None, "sft, dpo: JSON-lines file to evaluate on, in place of --eval-share (default: none)", section="training"
    )
    eval_share: float = _option(
        0.1,
        "share of the dataset's rows, drawn by --train-seed, that is held out and never learnt from (default: 0.1)",
        section="training",
        parse=float,
    )
    reward: tuple[str, ...] = _option(
        (),
        "rl: a part of the reward as NAME[=ARGUMENT][@WEIGHT]; number (the answer's last number is the row's answer), "
        "exact, regex=PATTERN, length=WORDS, task (the task's own score), or NAME=module:function or "
        "NAME=file.py:function; repeatable, each is logged, and the reward is their weighted sum (default: task)",
        section="training",
        parse=_parse_list,
    )
    init_adapter: str | None = _option(
        None,
        "folder of an adapter to begin with, in mlx-lm's or PEFT's format, of the same rank and layers; rl: only where "
        "there is no checkpoint to go on from (default: none)",
        section="training",
    )
    epochs: int = _option(
        1, "sft, dpo: times that the dataset is gone through (default: 1)", section="training", parse=int
    )
    max_length: int = _option(
        2048,
        "sft, dpo: most tokens of an example; longer ones are cut at their end, and counted (default: 2048)",
        section="training",
        parse=int,
    )
    packing: bool = _option(
        False,
        "sft: compute several examples in one row, none of which sees another's; updates stay the same, with less "
        "padding (default: off)",
        section="training",
        parse=_parse_bool,
    )
    chat_template: bool = _option(
        True,
        "sft, dpo: strings are a user's and an assistant's messages; --no-chat-template takes them as text, with an "
        "end-of-sequence token behind (default: on where the model has a template)",
        section="training",
        parse=_parse_bool,
    )
    dpo_beta: float = _option(
        0.1,
        "dpo: how strongly the policy is held to the one it began with (default: 0.1)",
        section="training",
        parse=float,
    )
    patience: int = _option(
        0,
        "sft, dpo: evaluations in a row without a smaller held-out loss after which training ends, with the parameters "
        "of the smallest; 0: it runs to its end (default: 0)",
        section="training",
        parse=int,
    )
    report_to: tuple[str, ...] = _option(
        (),
        "where numbers are sent, with commas: tensorboard, wandb, mlflow, or none (default: tensorboard where it is "
        "installed)",
        section="training",
        parse=_parse_list,
    )
    task: str = _option(
        "length",
        "rl: what is learnt: a built-in task (arithmetic, format, length, letters, calculator), reasoning_gym:NAME, "
        "gsm8k:FILE, verifiers:NAME or your own as file.py:Class (default: length)",
        section="training",
    )
    steps: int = _option(100, "rl: updates to make (default: 100)", section="training", parse=int)
    prompts_per_step: int = _option(
        4, "rl: different problems for each update (default: 4)", section="training", parse=int
    )
    group_size: int = _option(
        8, "rl: answers to each problem, whose rewards are compared (default: 8)", section="training", parse=int
    )
    temperature: float = _option(
        1.0, "rl: sampling temperature of the answers (default: 1.0)", section="training", parse=float
    )
    answer_tokens: int | None = _option(
        None, "rl: most tokens of an answer (default: the task's own limit)", section="training", parse=int
    )
    eval_every: int = _option(
        0,
        "updates between evaluations on held-out problems or rows; 0: rl before the first and after the last update, "
        "sft and dpo after each epoch (default: 0)",
        section="training",
        parse=int,
    )
    eval_problems: int = _option(
        32,
        "rl: problems that are kept for evaluation and never learnt from (default: 32)",
        section="training",
        parse=int,
    )
    level: int = _option(
        1,
        "rl: the task's level of difficulty to begin with, 1 is the easiest (default: 1)",
        section="training",
        parse=int,
    )
    raise_level_at: float | None = _option(
        None,
        "rl: mean reward over five updates from which the level of difficulty rises by one (default: never)",
        section="training",
        parse=float,
    )
    shuffle_rewards: bool = _option(
        False,
        "rl: a placebo run: rewards are shuffled within each group, so nothing should be learnt (default: off)",
        section="training",
        parse=_parse_bool,
    )
    learning_rate: float = _option(
        5e-4, "learning rate of AdamW (default: rl 5e-4; sft and rm 2e-4; dpo 5e-5)", section="rl_training", parse=float
    )
    keep_serving: bool = _option(
        False, "rl, rm: go on serving after the last update (default: off)", section="training", parse=_parse_bool
    )
    peft_export: str | None = _option(
        None, "rl, sft, dpo: folder to write the final adapter to in PEFT's format (default: none)", section="training"
    )
    pairs: str | None = _option(None, "rm: file of JSON lines with prompt, chosen and rejected", section="training")
    pair_epochs: int = _option(2, "rm: epochs over --pairs (default: 2)", section="training", parse=int)

    @property
    def trains(self) -> bool:
        return self.mode != "rm"

    @property
    def serving_share(self) -> float:
        return self.inference_share


# With other modes than rl: at the rate of a policy, nothing else would learn.


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(TrainConfig):
    learning_rate: float = _option(2e-4, "learning rate of AdamW (default: 2e-4)", section="rl_training", parse=float)


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig(TrainConfig):
    learning_rate: float = _option(2e-4, "learning rate of AdamW (default: 2e-4)", section="rl_training", parse=float)
    lr_schedule: str = _option(
        "linear", "how it changes", section="rl_training", choices=("constant", "linear", "cosine"), key="schedule"
    )
    train_batch_size: int = _option(16, "examples of an update", section="rl_training", parse=int, key="batch_size")
    train_adapter: tuple[str, ...] = _option(
        ("sft",), "what the adapter's folder is called", section="rl_training", parse=_parse_list
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOConfig(SFTConfig):
    learning_rate: float = _option(5e-5, "learning rate of AdamW (default: 5e-5)", section="rl_training", parse=float)
    train_batch_size: int = _option(16, "pairs of an update", section="rl_training", parse=int, key="batch_size")
    train_adapter: tuple[str, ...] = _option(
        ("dpo",), "what the adapter's folder is called", section="rl_training", parse=_parse_list
    )


Work = Callable[["TrainingManager", TrainConfig], None]  # a run on an engine that has started
KINDS: dict[str, type[TrainConfig]] = {"rm": RewardConfig, "sft": SFTConfig, "dpo": DPOConfig}


def add_flags(parser: argparse.ArgumentParser) -> None:
    config.add_flags(parser, TrainConfig)


def settings_of(flags: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> TrainConfig:
    mode = config.load_config(flags, environment, TrainConfig).mode
    settings = config.load_config(flags, environment, KINDS.get(mode, TrainConfig))
    if mode == "rm" and settings.pairs is None:
        raise ConfigError("--mode rm needs --pairs, a file of prompts with a better and a worse answer")
    if mode in ("sft", "dpo"):
        if settings.dataset is None:
            raise ConfigError(f"--mode {mode} needs --dataset, a JSON-lines file")
        if settings.keep_serving:
            raise ConfigError(f"--mode {mode} does not serve: give the folder that it writes to serve --lora-path")
        if settings.max_length < 2:
            raise ConfigError(f"max_length must be at least 2, not {settings.max_length}")
    if mode == "rl" and settings.dataset is not None and not settings.reward:
        raise ConfigError("--dataset needs at least one --reward, such as --reward number")
    return settings


def run(args: argparse.Namespace) -> int:
    settings = settings_of({name: value for name, value in vars(args).items() if name != "run"})
    from mlx_parallm.serve import serve
    from mlx_parallm.training.report import chosen_boards

    chosen_boards(settings.report_to)  # what is not installed is said before a model is loaded
    work: dict[str, Work] = {
        "rl": _train_policy,
        "rm": _train_reward_model,
        "sft": _fine_tune,
        "dpo": _fine_tune,
    }
    if settings.mode != "rl" and not settings.keep_serving:
        return _run_alone(settings, work[settings.mode])

    def companion(manager: "TrainingManager") -> int | None:
        work[settings.mode](manager, settings)
        return None if settings.keep_serving else 0

    return serve(settings, companion)


def _run_alone(settings: TrainConfig, work: "Work") -> int:
    """On an engine that nobody else uses: no port, no requests."""
    from mlx_parallm.runtime.startup import start
    from mlx_parallm.server import logs
    from mlx_parallm.server.banner import progress

    logs.set_up(settings.log_level, settings.log_json)
    runtime = start(settings, lambda events: None, learn=False, progress=progress)
    try:
        work(runtime.manager, settings)
    finally:
        runtime.close()
    return 0


# From options to runs.


def _train_policy(manager: "TrainingManager", settings: TrainConfig) -> None:
    from mlx_parallm.training.loop import LoopConfig
    from mlx_parallm.training.runs import PolicyRun, train_policy

    loop = LoopConfig(
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
    policy_run = PolicyRun(
        task=settings.task,
        dataset=settings.dataset,
        eval_share=settings.eval_share,
        rewards=settings.reward,
        loop=loop,
        start=_start_adapter(settings),
        reporting=_reporting(settings),
        peft_export=_peft_folder(settings),
    )
    train_policy(manager, policy_run)


def _fine_tune(manager: "TrainingManager", settings: TrainConfig) -> None:
    from mlx_parallm.training.finetune import RunConfig
    from mlx_parallm.training.manager import lora_config
    from mlx_parallm.training.runs import FineTuneRun, fine_tune, stop_at_signals

    assert settings.dataset is not None
    epochs = RunConfig(
        epochs=settings.epochs,
        batch_size=settings.train_batch_size,
        eval_every=settings.eval_every,
        patience=settings.patience,
        seed=settings.train_seed,
    )
    tuning = FineTuneRun(
        kind=settings.mode,  # type: ignore[arg-type]
        folder=Path(settings.checkpoint_dir).expanduser() / settings.train_adapter[0],
        dataset=settings.dataset,
        eval_dataset=settings.eval_dataset,
        eval_share=settings.eval_share,
        max_length=settings.max_length,
        chat_template=settings.chat_template,
        epochs=epochs,
        lora=lora_config(settings),
        trainer=_supervised_config(settings),
        start=_start_adapter(settings),
        reporting=_reporting(settings),
        peft_export=_peft_folder(settings),
    )
    fine_tune(manager.engine, tuning, stop_at_signals)


def _supervised_config(settings: TrainConfig) -> "SupervisedConfig":
    from mlx_parallm.training.learner import OptimizerConfig
    from mlx_parallm.training.supervised import SupervisedConfig

    optimizer = OptimizerConfig(
        learning_rate=settings.learning_rate,
        schedule=settings.lr_schedule,  # type: ignore[arg-type]
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )
    return SupervisedConfig(
        optimizer=optimizer,
        packing=settings.packing,
        beta=settings.dpo_beta,
        microstep_seconds=settings.microstep_seconds,
        microbatch_tokens=settings.microbatch_tokens,
        gradient_checkpointing=settings.gradient_checkpointing,
        seed=settings.train_seed,
    )


def _train_reward_model(manager: "TrainingManager", settings: TrainConfig) -> None:
    from mlx_parallm.training.manager import lora_config
    from mlx_parallm.training.runs import RewardRun, train_reward_model

    assert settings.pairs is not None
    reward_run = RewardRun(
        pairs=settings.pairs,
        folder=Path(settings.checkpoint_dir).expanduser(),
        lora=lora_config(settings),
        learning_rate=settings.learning_rate,
        epochs=settings.pair_epochs,
        batch_size=settings.train_batch_size,
        max_grad_norm=settings.max_grad_norm,
        weight_decay=settings.weight_decay,
        seed=settings.train_seed,
    )
    train_reward_model(manager, reward_run)


def _start_adapter(settings: TrainConfig) -> "AdapterSource | None":
    from mlx_parallm.training.runs import AdapterSource

    if settings.init_adapter is None:
        return None
    return AdapterSource(folder=Path(settings.init_adapter).expanduser(), max_bytes=settings.max_lora_bytes)


def _peft_folder(settings: TrainConfig) -> Path | None:
    return None if settings.peft_export is None else Path(settings.peft_export).expanduser()


def _reporting(settings: TrainConfig) -> "Reporting":
    """With the settings that others may see: no keys, no addresses."""
    from mlx_parallm.training.runs import Reporting

    sections = ("model", "training", "rl_training")
    public = {
        item.name: getattr(settings, item.name) for item in fields(settings) if item.metadata["section"] in sections
    }
    return Reporting(boards=settings.report_to, settings=public)
