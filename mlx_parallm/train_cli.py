"""`mlx_parallm_train`, or `parallm train`: trains an adapter or a reward model, and leaves it in a folder.

`--mode rl` is the built-in loop on a server of its own, which serves meanwhile; it takes every option of `serve`, and
ends when the steps are done, unless it is to go on serving. `--mode sft`, `dpo` and `rm` learn from a file and listen
on no port. What a run did is in `log.jsonl` and `report.png`.
"""

import argparse
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_parallm import config
from mlx_parallm.config import ServeConfig, _option, _parse_bool, _parse_list
from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from mlx_parallm.engine.engine import Engine
    from mlx_parallm.lora.weights import Adapter
    from mlx_parallm.training.manager import TrainingManager
    from mlx_parallm.training.supervised import Supervised


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

    chosen_boards(settings.report_to)  # what is not there is said before a model is loaded
    work: dict[str, Callable[[TrainingManager, TrainConfig], None]] = {
        "rl": _policy,
        "rm": _reward_model,
        "sft": _fine_tune,
        "dpo": _fine_tune,
    }
    if settings.mode != "rl" and not settings.keep_serving:
        return _alone(settings, work[settings.mode])

    def companion(training: "TrainingManager") -> int | None:
        work[settings.mode](training, settings)
        return None if settings.keep_serving else 0

    return serve(settings, companion)


def _alone(settings: TrainConfig, work: "Callable[[TrainingManager, TrainConfig], None]") -> int:
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


def _stop_at_signals(stop: Callable[[], None]) -> None:
    """The first SIGTERM or SIGINT ends a run in order, a second the process there and then."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def end(number: int, frame: Any) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        stop()

    for number in before:
        signal.signal(number, end)


def _policy(training: "TrainingManager", settings: TrainConfig) -> None:
    from mlx_parallm.training.components import parse_components
    from mlx_parallm.training.environments import make_task_sampler
    from mlx_parallm.training.loop import Loop, LoopConfig
    from mlx_parallm.training.report import Progress
    from mlx_parallm.training.tasks import Rows, find_task

    session = training.session()
    assert session.checkpoints is not None
    task = (
        find_task(settings.task)
        if settings.dataset is None
        else Rows(settings.dataset, settings.eval_share, settings.train_seed)
    )
    components = parse_components(settings.reward, task)
    asker = make_task_sampler(training.engine, training.rollouts, training.rewards, task, components)
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
    if settings.init_adapter is not None and not session.trainer.updates and not session.extra:
        session.begin_with(_adapter(settings, settings.init_adapter))
    with Progress(
        session.checkpoints.folder,
        loop_config.steps,
        settings.dataset or settings.task,
        report_to=settings.report_to,
        settings=_told(settings),
    ) as progress:
        loop = Loop(session, asker, loop_config, progress.on_step)
        training.on_close = loop.stop
        loop.run()
        session.checkpoint()
    _export(settings, session.engine, session.engine.work(session.adapter_steps()).result(), session.lora.rank)


def _fine_tune(training: "TrainingManager", settings: TrainConfig) -> None:
    """SFT or DPO, and the folder of the adapter that came out."""
    from rich.console import Console

    from mlx_parallm.text.prompts import Prompts
    from mlx_parallm.training.datasets import DatasetReader, split
    from mlx_parallm.training.finetune import FineTuning, RunConfig, check_free, save_adapter
    from mlx_parallm.training.report import LOG, Progress

    assert settings.dataset is not None
    console, engine, tokenizer = Console(), training.engine, training.engine.model.tokenizer
    folder = Path(settings.checkpoint_dir).expanduser() / settings.train_adapter[0]
    check_free(folder)
    length = min(settings.max_length, engine.model.context_length)
    chat = settings.chat_template and tokenizer.has_chat_template
    reader = DatasetReader(Prompts(tokenizer), int(tokenizer.eos_token_id), length, chat)
    read: Callable[[str], Any] = reader.examples if settings.mode == "sft" else reader.preferences
    found = read(settings.dataset)
    other = None if settings.eval_dataset is None else read(settings.eval_dataset)
    items, held_out = (
        (found.items, other.items) if other else split(found.items, settings.eval_share, settings.train_seed)
    )
    run_config = RunConfig(
        epochs=settings.epochs,
        batch_size=settings.train_batch_size,
        eval_every=settings.eval_every,
        patience=settings.patience,
        seed=settings.train_seed,
    )
    console.print(
        f"{len(items)} examples to learn from, {len(held_out)} held out; {found.cut} were longer than {length} tokens "
        f"and cut, {found.left_out} of them left out"
    )
    trainer = _trainer(engine, settings, run_config.steps(len(items)))
    if settings.packing and not trainer.packs:
        console.print(f"{engine.model.name} can't be packed: examples are computed each in its own row")
    name, steps = settings.train_adapter[0], run_config.steps(len(items))
    told = folder.with_name(f"{name}-log")
    (told / LOG).unlink(missing_ok=True)  # of an earlier run
    with Progress(told, steps, name, report_to=settings.report_to, settings=_told(settings)) as progress:
        tuning = FineTuning(engine, trainer, items, held_out, run_config, progress.on_step)
        _stop_at_signals(tuning.stop)
        news = tuning.run()
    path = save_adapter(folder, engine, trainer, settings.mode, news[-1].flat())
    _export(settings, engine, _on_engine(engine, trainer.adapter), trainer.lora.rank)
    console.print(f"written to {path}: serve it with --lora-path {path}, train on with --init-adapter {path}")


def _trainer(engine: "Engine", settings: TrainConfig, steps: int) -> "Supervised[Any]":
    """Made on the engine, from the adapter to go on from where there is one."""
    from mlx_parallm.training.learner import OptimizerConfig
    from mlx_parallm.training.manager import lora_config
    from mlx_parallm.training.supervised import DPO, SFT, Supervised, SupervisedConfig

    optimizer = OptimizerConfig(
        learning_rate=settings.learning_rate,
        schedule=settings.lr_schedule,  # type: ignore[arg-type]
        warmup_steps=settings.warmup_steps,
        total_steps=steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )
    own = SupervisedConfig(
        optimizer=optimizer,
        packing=settings.packing,
        beta=settings.dpo_beta,
        microstep_seconds=settings.microstep_seconds,
        microbatch_tokens=settings.microbatch_tokens,
        gradient_checkpointing=settings.gradient_checkpointing,
        seed=settings.train_seed,
    )
    kind: type[Supervised[Any]] = SFT if settings.mode == "sft" else DPO
    first = None if settings.init_adapter is None else _adapter(settings, settings.init_adapter)

    def made() -> Supervised[Any]:
        found = kind(engine.model, lora_config(settings), own, engine.memory.training or None)
        if first is not None:
            found.start_from(first)
        return found

    trainer: Supervised[Any] = _on_engine(engine, made)
    return trainer


def _on_engine(engine: "Engine", work: Callable[[], Any]) -> Any:
    from mlx_parallm.training.engine_work import once

    return engine.work(once(work)).result()


def _adapter(settings: TrainConfig, folder: str) -> "Adapter":
    from mlx_parallm.lora.files import read_folder

    return read_folder(Path(folder).expanduser(), settings.max_lora_bytes)[0]


def _export(settings: TrainConfig, engine: "Engine", adapter: "Adapter", rank: int) -> None:
    from mlx_parallm.training.checkpoints import peft_files

    if settings.peft_export is None:
        return
    folder = Path(settings.peft_export).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in peft_files(adapter, rank, engine.model.source).items():
        (folder / name).write_bytes(data)


def _told(settings: TrainConfig) -> dict[str, Any]:
    """Of the settings, what is said about a run to others: no keys, no addresses."""
    sections = ("model", "training", "rl_training")
    return {
        item.name: getattr(settings, item.name) for item in fields(settings) if item.metadata["section"] in sections
    }


def _reward_model(training: "TrainingManager", settings: TrainConfig) -> None:
    """Trains one on pairs, looks at pairs that were held out, writes it, and serves it."""
    from functools import partial

    from rich.console import Console

    from mlx_parallm.text.prompts import Prompts
    from mlx_parallm.training.engine_work import once
    from mlx_parallm.training.manager import lora_config
    from mlx_parallm.training.pairs import read_pairs
    from mlx_parallm.training.reward_model import NAME, RewardModel
    from mlx_parallm.training.reward_trainer import RewardTrainer

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
