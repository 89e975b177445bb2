"""The runs of `mlx_parallm_train`: a policy from rewards, an adapter from examples or preferences, a reward model from
pairs. Each reads its data, trains, tells how it goes and writes its result. Any thread but the engine's.
"""

import functools
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic

from rich.console import Console

from mlx_parallm.config.options import options_of
from mlx_parallm.config.train_config import TrainConfig
from mlx_parallm.config.training import OptimizerConfig
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ConfigError, UnavailableError
from mlx_parallm.lora.adapter import Adapter
from mlx_parallm.lora.adapter_files import read_folder
from mlx_parallm.text.prompts import Prompts
from mlx_parallm.training.manager import TrainingManager
from mlx_parallm.training.report import LOG, Progress
from mlx_parallm.training.rl.remote_policy import RemotePolicy
from mlx_parallm.training.rl.session import Session
from mlx_parallm.training.rl.task_loop import Loop
from mlx_parallm.training.storage.checkpoints import peft_files
from mlx_parallm.training.supervised.datasets import Dataset, DatasetReader, split
from mlx_parallm.training.supervised.finetune import EpochConfig, FineTuning, check_free, save_adapter
from mlx_parallm.training.supervised.pairs import Pair, read_pairs
from mlx_parallm.training.supervised.reward_model import NAME, RewardModel
from mlx_parallm.training.supervised.reward_trainer import RewardTrainer
from mlx_parallm.training.supervised.trainers import DPO, SFT, Item, Supervised, SupervisedConfig
from mlx_parallm.training.tasks.built_in import Rows
from mlx_parallm.training.tasks.components import parse_components
from mlx_parallm.training.tasks.environments import make_task_sampler
from mlx_parallm.training.tasks.find_task import find_task


def train_policy(manager: TrainingManager, config: TrainConfig) -> None:
    """The built-in loop, on a task or on the rows of a dataset."""
    session = manager.session()
    run = config.run
    assert session.checkpoints is not None
    loop_config = replace(run.loop, seed=config.training.rl.seed)
    task = find_task(run.task) if run.dataset is None else Rows(run.dataset, run.eval_share, loop_config.seed)
    components = parse_components(run.reward, task)
    if run.init_adapter is not None and not session.trainer.updates and not session.extra:
        session.begin_with(_read_adapter(run.init_adapter, config))
    with ExitStack() as stack:
        remote = None
        if config.cluster.connect_to is not None:
            remote = stack.enter_context(closing(_connect(session, config, config.cluster.connect_to)))
        sampler = make_task_sampler(manager.engine, remote or manager.rollouts, manager.rewards, task, components)
        title = run.dataset or run.task
        progress = stack.enter_context(_progress(config, session.checkpoints.folder, loop_config.steps, title))
        loop = Loop(session, sampler, loop_config, progress.on_step)
        manager.on_close = loop.stop
        if remote is None:
            loop.run()
        else:
            _run_apart(loop, remote)
        session.checkpoint()
    adapter = session.adapter()
    _export_peft(config, adapter, session.lora.rank, manager.engine.model.source)


def _run_apart(loop: Loop, remote: RemotePolicy) -> None:
    """Runs the loop in a process that serves nothing. A signal ends it after the step, or at once where it waits for
    the server."""

    def stop() -> None:
        loop.stop()
        remote.stop()

    stop_at_signals(stop)
    try:
        loop.run()
    except UnavailableError:
        if not remote.stopped:
            raise


def _connect(session: Session, config: TrainConfig, address: str) -> RemotePolicy:
    """The server that samples rollouts, once it serves what is to be trained."""
    key = config.http.admin_key or config.http.api_key
    remote = RemotePolicy(address, api_key=key, max_staleness=config.training.max_staleness)
    number = session.publish_to(remote, remote.newest(session.name))
    Console().print(f"{remote.url} serves {session.name}@{number}, and samples the rollouts")
    return remote


def _read_adapter(folder: str, config: TrainConfig) -> Adapter:
    adapter, _ = read_folder(Path(folder).expanduser(), config.adapters.max_lora_bytes)
    return adapter


def _progress(config: TrainConfig, folder: Path, steps: int, title: str) -> Progress:
    """Makes the progress of a run, with the options that others may see: no keys, no addresses."""
    public = {
        option.name: functools.reduce(getattr, option.path, config)
        for option in options_of(TrainConfig)
        if option.section in ("model", "training", "rl_training")
    }
    return Progress(folder, steps, title, report_to=config.run.report_to, settings=public)


@dataclass(frozen=True, slots=True)
class SplitData(Generic[Item]):
    """Examples or preferences of a run."""

    learnt: Sequence[Item]
    held_out: Sequence[Item]
    dataset: Dataset[Item]  # with the counts of what was cut


def fine_tune(manager: TrainingManager, config: TrainConfig) -> None:
    """SFT or DPO; the first SIGTERM or SIGINT ends it in order, and what was learnt until then is kept."""
    console = Console()
    engine = manager.engine
    run = config.run
    folder = Path(config.checkpoints.checkpoint_dir).expanduser() / config.training.adapters[0]
    check_free(folder)
    _check_writable(config)
    length = min(run.max_length, engine.model.context_length)
    data = _read_data(engine, config, length)
    console.print(
        f"{len(data.learnt)} examples to learn from, {len(data.held_out)} held out; "
        f"{data.dataset.cut} were longer than {length} tokens and cut, {data.dataset.left_out} of them left out"
    )
    epochs = EpochConfig(
        epochs=run.epochs,
        batch_size=config.training.rl.batch_size,
        eval_every=run.loop.eval_every,
        patience=run.patience,
        seed=config.training.rl.seed,
    )
    steps = epochs.steps(len(data.learnt))
    trainer = _make_trainer(engine, config, steps)
    trainer.check_lengths([*data.learnt, *data.held_out])
    if run.packing and not trainer.packs:
        console.print(f"{engine.model.name} can't be packed: each example is computed in a row of its own")
    log_folder = folder.with_name(f"{folder.name}-log")
    (log_folder / LOG).unlink(missing_ok=True)  # of an earlier run
    with _progress(config, log_folder, steps, folder.name) as progress:
        tuning = FineTuning(engine, trainer, data.learnt, data.held_out, epochs, progress.on_step)
        stop_at_signals(tuning.stop)
        reports = tuning.run()
    path = save_adapter(folder, engine, trainer, config.mode, reports[-1].flat())
    _export_peft(config, engine.run(trainer.adapter), trainer.lora.rank, engine.model.source)
    console.print(f"written to {path}: serve it with --lora-path {path}, train on with --init-adapter {path}")


def _read_data(engine: Engine, config: TrainConfig, length: int) -> SplitData[Any]:
    run = config.run
    tokenizer = engine.model.tokenizer
    assert run.dataset is not None
    chat = run.chat_template and tokenizer.has_chat_template
    reader = DatasetReader(Prompts(tokenizer), int(tokenizer.eos_token_id), length, chat)
    read: Callable[[str], Dataset[Any]] = reader.examples if config.mode == "sft" else reader.preferences
    dataset = read(run.dataset)
    if run.eval_dataset is not None:
        return SplitData(dataset.items, read(run.eval_dataset).items, dataset)
    learnt, held_out = split(dataset.items, run.eval_share, config.training.rl.seed)
    return SplitData(learnt, held_out, dataset)


def _make_trainer(engine: Engine, config: TrainConfig, steps: int) -> Supervised[Any]:
    """Makes the trainer on the engine, from the adapter to go on from where there is one."""
    run = config.run
    lora = config.training.lora
    settings = SupervisedConfig.of(config.training.rl, total_steps=steps, packing=run.packing, beta=run.dpo_beta)
    kind: type[Supervised[Any]] = SFT if config.mode == "sft" else DPO
    start = None if run.init_adapter is None else _read_adapter(run.init_adapter, config)

    def make() -> Supervised[Any]:
        trainer = kind(engine.model, lora, settings, engine.memory.training or None)
        if start is not None:
            trainer.start_from(start)
        return trainer

    return engine.run(make)


def train_reward_model(manager: TrainingManager, config: TrainConfig) -> None:
    """A reward model from pairs, of which a tenth is held out: trained, evaluated, written, and served."""
    console = Console()
    engine = manager.engine
    training = config.training
    assert config.run.pairs is not None
    pairs = read_pairs(config.run.pairs, Prompts(engine.model.tokenizer))
    count = len(pairs) // 10
    held_out = pairs[:count]
    learnt = pairs[count:]
    make = partial(RewardModel, engine.model, training.lora, training.rl.seed)
    reward_model = manager.add_reward_model(NAME, make)
    trainer = RewardTrainer(
        reward_model,
        OptimizerConfig(
            learning_rate=training.rl.learning_rate,
            weight_decay=training.rl.weight_decay,
            max_grad_norm=training.rl.max_grad_norm,
        ),
        epochs=config.run.pair_epochs,
        batch_size=training.rl.batch_size,
        seed=training.rl.seed,
    )
    console.print(f"{len(learnt)} pairs to learn from, {len(held_out)} held out")
    metrics = engine.work(trainer.train(learnt)).result()
    console.print("  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    if held_out:
        right = _ranked_right(engine, reward_model, held_out)
        console.print(f"held out: {right} of {len(held_out)} ranked right")
    folder = Path(config.checkpoints.checkpoint_dir).expanduser()
    path = engine.run(reward_model.pack).save(folder / NAME)
    console.print(f"written to {path}: serve it with --reward-model {path}")


def _ranked_right(engine: Engine, reward_model: RewardModel, pairs: Sequence[Pair]) -> int:
    texts = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    scores = engine.work(reward_model.score_steps(texts)).result()
    return sum(chosen > rejected for chosen, rejected in zip(scores[: len(pairs)], scores[len(pairs) :], strict=True))


def stop_at_signals(stop: Callable[[], None]) -> None:
    """The first SIGTERM or SIGINT ends a run in order, a second the process there and then. Main thread."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def end(number: int, frame: Any) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        stop()

    for number in before:
        signal.signal(number, end)


def _check_writable(config: TrainConfig) -> None:
    """Makes the output folders before training begins; ConfigError where that fails."""
    for flag, path in (
        ("--checkpoint-dir", config.checkpoints.checkpoint_dir),
        ("--peft-export", config.run.peft_export),
    ):
        folder = Path(path or ".").expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{flag} {folder} can't be written: {error.strerror or error}") from None
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"{flag} {folder} can't be written")


def _export_peft(config: TrainConfig, adapter: Adapter, rank: int, source: str) -> None:
    """Writes an adapter in PEFT's format, where that is asked for."""
    if config.run.peft_export is None:
        return
    folder = Path(config.run.peft_export).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in peft_files(adapter, rank, source).items():
        (folder / name).write_bytes(data)
