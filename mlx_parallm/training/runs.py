"""The runs of `mlx_parallm_train`: a policy from rewards, an adapter from examples or preferences, a reward model from
pairs. Each reads its data, trains, tells how it goes and writes its result. Any thread but the engine's.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal

from rich.console import Console

from mlx_parallm.engine.engine import Engine
from mlx_parallm.lora.files import read_folder
from mlx_parallm.lora.weights import Adapter
from mlx_parallm.text.prompts import Prompts
from mlx_parallm.training.checkpoints import peft_files
from mlx_parallm.training.components import parse_components
from mlx_parallm.training.datasets import Dataset, DatasetReader, split
from mlx_parallm.training.engine_work import once, run_on_engine
from mlx_parallm.training.environments import make_task_sampler
from mlx_parallm.training.finetune import FineTuning, RunConfig, check_free, save_adapter
from mlx_parallm.training.loop import Loop, LoopConfig
from mlx_parallm.training.manager import TrainingManager
from mlx_parallm.training.model import LoRAConfig
from mlx_parallm.training.pairs import Pair, read_pairs
from mlx_parallm.training.report import LOG, Progress
from mlx_parallm.training.reward_model import NAME, RewardModel
from mlx_parallm.training.reward_trainer import RewardTrainer
from mlx_parallm.training.supervised import DPO, SFT, Item, Supervised, SupervisedConfig
from mlx_parallm.training.tasks import Rows, find_task


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """A folder of an adapter to begin with."""

    folder: Path
    max_bytes: int  # of its files

    def read(self) -> Adapter:
        adapter, _ = read_folder(self.folder, self.max_bytes)
        return adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """Where a run's numbers go, and the settings that are told with them."""

    boards: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def progress(self, folder: Path, steps: int, title: str) -> Progress:
        return Progress(folder, steps, title, report_to=self.boards, settings=self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """The built-in loop, on a task or on the rows of a dataset."""

    task: str
    dataset: str | None
    eval_share: float  # of the dataset's rows, held out
    rewards: Sequence[str]  # components, as `components` reads them
    loop: LoopConfig
    start: AdapterSource | None  # only where there is no checkpoint to go on from
    reporting: Reporting
    peft_export: Path | None


def train_policy(manager: TrainingManager, run: PolicyRun) -> None:
    session = manager.session()
    assert session.checkpoints is not None
    task = find_task(run.task) if run.dataset is None else Rows(run.dataset, run.eval_share, run.loop.seed)
    components = parse_components(run.rewards, task)
    sampler = make_task_sampler(manager.engine, manager.rollouts, manager.rewards, task, components)
    if run.start is not None and not session.trainer.updates and not session.extra:
        session.begin_with(run.start.read())
    title = run.dataset or run.task
    with run.reporting.progress(session.checkpoints.folder, run.loop.steps, title) as progress:
        loop = Loop(session, sampler, run.loop, progress.on_step)
        manager.on_close = loop.stop
        loop.run()
        session.checkpoint()
    adapter = manager.engine.work(session.adapter_steps()).result()
    export_peft(run.peft_export, adapter, session.lora.rank, manager.engine.model.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuneRun:
    """SFT or DPO, and the folder of the adapter that it writes."""

    kind: Literal["sft", "dpo"]
    folder: Path
    dataset: str
    eval_dataset: str | None
    eval_share: float  # of the dataset's rows, where there is no other to evaluate on
    max_length: int  # tokens of an example
    chat_template: bool
    epochs: RunConfig
    lora: LoRAConfig
    trainer: SupervisedConfig  # its optimiser's total_steps are those of the run
    start: AdapterSource | None
    reporting: Reporting
    peft_export: Path | None


@dataclass(frozen=True, slots=True)
class SplitData(Generic[Item]):
    """Examples or preferences of a run."""

    learnt: Sequence[Item]
    held_out: Sequence[Item]
    dataset: Dataset[Item]  # with the counts of what was cut


def fine_tune(engine: Engine, run: FineTuneRun, on_start: Callable[[Callable[[], None]], None]) -> None:
    """`on_start` is handed what ends the run in order."""
    console, name = Console(), run.folder.name
    check_free(run.folder)
    length = min(run.max_length, engine.model.context_length)
    data = _read_data(engine, run, length)
    console.print(
        f"{len(data.learnt)} examples to learn from, {len(data.held_out)} held out; "
        f"{data.dataset.cut} were longer than {length} tokens and cut, {data.dataset.left_out} of them left out"
    )
    steps = run.epochs.steps(len(data.learnt))
    trainer = _make_trainer(engine, run, steps)
    if run.trainer.packing and not trainer.packs:
        console.print(f"{engine.model.name} can't be packed: each example is computed in a row of its own")
    log_folder = run.folder.with_name(f"{name}-log")
    (log_folder / LOG).unlink(missing_ok=True)  # of an earlier run
    with run.reporting.progress(log_folder, steps, name) as progress:
        tuning = FineTuning(engine, trainer, data.learnt, data.held_out, run.epochs, progress.on_step)
        on_start(tuning.stop)
        reports = tuning.run()
    path = save_adapter(run.folder, engine, trainer, run.kind, reports[-1].flat())
    export_peft(run.peft_export, run_on_engine(engine, trainer.adapter), trainer.lora.rank, engine.model.source)
    console.print(f"written to {path}: serve it with --lora-path {path}, train on with --init-adapter {path}")


def _read_data(engine: Engine, run: FineTuneRun, length: int) -> SplitData[Any]:
    tokenizer = engine.model.tokenizer
    chat = run.chat_template and tokenizer.has_chat_template
    reader = DatasetReader(Prompts(tokenizer), int(tokenizer.eos_token_id), length, chat)
    read: Callable[[str], Dataset[Any]] = reader.examples if run.kind == "sft" else reader.preferences
    dataset = read(run.dataset)
    if run.eval_dataset is not None:
        return SplitData(dataset.items, read(run.eval_dataset).items, dataset)
    learnt, held_out = split(dataset.items, run.eval_share, run.epochs.seed)
    return SplitData(learnt, held_out, dataset)


def _make_trainer(engine: Engine, run: FineTuneRun, steps: int) -> Supervised[Any]:
    """On the engine, from the adapter to go on from where there is one."""
    config = replace(run.trainer, optimizer=replace(run.trainer.optimizer, total_steps=steps))
    kind: type[Supervised[Any]] = SFT if run.kind == "sft" else DPO
    start = None if run.start is None else run.start.read()

    def make() -> Supervised[Any]:
        trainer = kind(engine.model, run.lora, config, engine.memory.training or None)
        if start is not None:
            trainer.start_from(start)
        return trainer

    return run_on_engine(engine, make)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRun:
    """A reward model from pairs, of which a tenth is held out."""

    pairs: str
    folder: Path  # of checkpoints
    lora: LoRAConfig
    learning_rate: float
    epochs: int
    batch_size: int
    max_grad_norm: float
    weight_decay: float
    seed: int


def train_reward_model(manager: TrainingManager, run: RewardRun) -> None:
    """Trains one, evaluates it on the pairs held out, writes it, and serves it."""
    console, engine = Console(), manager.engine
    pairs = read_pairs(run.pairs, Prompts(engine.model.tokenizer))
    count = len(pairs) // 10
    held_out, learnt = pairs[:count], pairs[count:]
    make = partial(RewardModel, engine.model, run.lora, run.seed)
    reward_model = manager.add_reward_model(NAME, once(make))
    trainer = RewardTrainer(
        reward_model,
        learning_rate=run.learning_rate,
        epochs=run.epochs,
        batch_size=run.batch_size,
        max_grad_norm=run.max_grad_norm,
        weight_decay=run.weight_decay,
        seed=run.seed,
    )
    console.print(f"{len(learnt)} pairs to learn from, {len(held_out)} held out")
    metrics = engine.work(trainer.train(learnt)).result()
    console.print("  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    if held_out:
        right = _ranked_right(engine, reward_model, held_out)
        console.print(f"held out: {right} of {len(held_out)} ranked right")
    path = run_on_engine(engine, reward_model.pack).save(run.folder / NAME)
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


def export_peft(folder: Path | None, adapter: Adapter, rank: int, source: str) -> None:
    """Writes an adapter in PEFT's format, where that is asked for."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in peft_files(adapter, rank, source).items():
        (folder / name).write_bytes(data)
