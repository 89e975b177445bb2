"""A run of SFT or DPO: epochs over examples, evaluation on held-out ones, an early end, and the resulting adapter.

Every step goes to the engine in micro-batches, so that clients who are served meanwhile wait for one at most. The
order of examples depends on the seed alone. Any thread but the engine's.
"""

import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ConfigError
from mlx_parallm.training.learner import LearnerState
from mlx_parallm.training.storage.checkpoints import STATE, Checkpoints, adapter_files
from mlx_parallm.training.supervised.trainers import Item, Supervised


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochConfig:
    epochs: int = 1
    batch_size: int = 16
    eval_every: int = 0  # steps; 0: after each epoch
    patience: int = 0  # evaluations in a row without a smaller held-out loss that end the run; 0: it runs to its end
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("eval_every", "patience"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, and is {getattr(self, name)}")

    def steps(self, count: int) -> int:
        """Returns the number of steps of a run over so many examples."""
        return self.epochs * -(-count // self.batch_size)


@dataclass(slots=True)
class RunReport:
    """How a step went; step 0 is before the first."""

    step: int
    epoch: float
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    held_out: Mapping[str, float] = field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        """Returns the values for a line of JSON."""
        held_out = {f"held_out_{name}": value for name, value in self.held_out.items()}
        return {"step": self.step, "epoch": self.epoch, "seconds": self.seconds, **self.metrics, **held_out}

    def parts(self) -> list[str]:
        """Returns the parts of a line in the terminal."""
        parts = [f"epoch {self.epoch:.2f}"]
        shown = ("loss", "accuracy", "margin", "grad_norm")
        parts += [f"{name.replace('_', ' ')} {self.metrics[name]:.4f}" for name in shown if name in self.metrics]
        if self.seconds:
            parts.append(f"{self.seconds:.1f} s")
        for name in shown:
            if name in self.held_out:
                parts.append(f"held out {name} [bold green]{self.held_out[name]:.4f}[/]")
        return parts


@dataclass(frozen=True, slots=True)
class BestLoss:
    """The smallest held-out loss, and the parameters that gave it."""

    loss: float
    state: LearnerState


class FineTuning(Generic[Item]):
    def __init__(
        self,
        engine: Engine,
        trainer: Supervised[Item],
        items: Sequence[Item],
        held_out: Sequence[Item],
        config: EpochConfig,
        on_step: Callable[[RunReport], None] = lambda report: None,
    ) -> None:
        if config.patience and not held_out:
            raise ConfigError("patience needs held-out examples: give --eval-share or --eval-dataset")
        self._engine = engine
        self._trainer: Supervised[Item] = trainer
        self._items: Sequence[Item] = items
        self._held_out: Sequence[Item] = held_out
        self._config = config
        self._on_step = on_step
        self._stopping = threading.Event()
        self._best: BestLoss | None = None
        self._worse = 0  # evaluations since the best one

    def stop(self) -> None:
        """Stops after the step that runs; what was learnt until then stands."""
        self._stopping.set()

    def run(self) -> list[RunReport]:
        """Runs all epochs. With a patience, the parameters are those of the smallest held-out loss in the end."""
        reports = [RunReport(step=0, epoch=0.0, held_out=self._evaluate())]
        self._on_step(reports[0])
        batches = self._batches()
        each = len(batches) // self._config.epochs
        for step, batch in enumerate(batches, 1):
            if self._stopping.is_set():
                break
            begun = time.perf_counter()
            metrics = self._engine.work(self._trainer.step(batch, self._engine.is_serving)).result()
            report = RunReport(step=step, epoch=step / each, seconds=time.perf_counter() - begun, metrics=metrics)
            if step % (self._config.eval_every or each) == 0 or step == len(batches):
                report.held_out = self._evaluate()
            reports.append(report)
            self._on_step(report)
        best = self._best
        if best is not None and self._worse:
            self._engine.run(lambda: self._trainer.learner.go_back(best.state))
        return reports

    def _batches(self) -> list[list[Item]]:
        """Returns the batches of all epochs."""
        size = self._config.batch_size
        batches = []
        for epoch in range(self._config.epochs):
            order = list(range(len(self._items)))
            random.Random(f"{self._config.seed} {epoch}").shuffle(order)
            batches += [
                [self._items[one] for one in order[begin : begin + size]] for begin in range(0, len(order), size)
            ]
        return batches

    def _evaluate(self) -> dict[str, float]:
        if not self._held_out:
            return {}
        metrics: dict[str, float] = self._engine.work(
            self._trainer.evaluate(self._held_out, self._engine.is_serving)
        ).result()
        if self._config.patience:
            self._judge(metrics["loss"])
        return metrics

    def _judge(self, loss: float) -> None:
        if self._best is None or loss < self._best.loss:
            self._best = BestLoss(loss, self._engine.run(self._trainer.learner.snapshot))
            self._worse = 0
            return
        self._worse += 1
        if self._worse >= self._config.patience:
            self.stop()


def save_adapter(folder: Path, engine: Engine, trainer: Supervised[Any], kind: str, metrics: Mapping[str, Any]) -> Path:
    """Writes it as mlx-lm does, whole or not at all, in the place of an earlier result of such a run."""
    check_free(folder)
    adapter = engine.run(trainer.adapter)
    files = adapter_files(adapter, trainer.lora.scale, trainer.lora.rank, engine.model.source)
    state = {"kind": kind, "updates": trainer.learner.updates, "model": engine.model.source, "metrics": dict(metrics)}
    # Its neighbours are none of our business.
    return Checkpoints(folder.parent, sys.maxsize).save(folder.name, files, {}, state)


def check_free(folder: Path) -> None:
    """Whether a run may write there: nothing is replaced that it has not written."""
    if not folder.exists():
        return
    if (folder / STATE).is_file() and not any(path.is_dir() for path in folder.iterdir()):
        return
    raise ConfigError(f"{folder} holds something else: give another --train-adapter name or --checkpoint-dir")
