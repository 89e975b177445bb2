"""How a run is going and how it went: lines in the terminal, `log.jsonl`, a PNG, and where its numbers are sent:
TensorBoard, Weights & Biases, MLflow.

The thread of the run calls it. Numbers that are kept are appended a line at a time, so a kill loses at most the last.
"""

import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console

from mlx_parallm.errors import ConfigError

log = logging.getLogger(__name__)

LOG = "log.jsonl"
PLOT = "report.png"
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}  # modules are called the same
NONE = "none"


class ProgressEntry(Protocol):
    """How a step went."""

    @property
    def step(self) -> int: ...

    def flat(self) -> dict[str, Any]:
        """Returns the values for a line of JSON."""

    def parts(self) -> list[str]:
        """Returns the parts of a line in the terminal."""


class Board(Protocol):
    """A service or program that shows numbers."""

    def log(self, numbers: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Progress:
    def __init__(
        self,
        folder: Path,
        steps: int,
        title: str,
        *,
        report_to: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`report_to`: names of boards; without any, TensorBoard where it is installed. `settings` are kept there."""
        self._folder = folder
        self._steps = steps
        self._title = title
        self._console = Console()
        folder.mkdir(parents=True, exist_ok=True)
        self._boards = [BOARDS[name](folder, title, dict(settings or {})) for name in chosen_boards(report_to)]
        self._begun = time.monotonic()
        self._file = (folder / LOG).open("a")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        for board in self._boards:
            board.close()
        if error is None:
            drawn = plot([self._folder / LOG], self._folder / PLOT, [self._title])
            self._console.print(f"[dim]{self._folder / LOG}{f' and {drawn}' if drawn else ''}")

    def on_step(self, entry: ProgressEntry) -> None:
        flat = entry.flat()
        self._file.write(json.dumps(flat) + "\n")
        self._file.flush()
        numbers = {
            name: float(value)
            for name, value in flat.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for board in self._boards:
            board.log(numbers, entry.step)
        self._console.print("  ".join([f"step {entry.step}/{self._steps}", *entry.parts()]), highlight=False)


# Where numbers are sent.


def chosen_boards(report_to: Sequence[str]) -> list[str]:
    """The boards that were asked for: each must be known, and installed."""
    names = [name.strip() for entry in report_to for name in entry.split(",") if name.strip()]
    if not names:
        return ["tensorboard"] if _installed("tensorboard") else []
    if names == [NONE]:
        return []
    for name in names:
        if name not in PACKAGES:
            raise ConfigError(f"--report-to {name}: there is {', '.join(PACKAGES)} and, alone, {NONE}")
        if not _installed(name):
            raise ConfigError(f"--report-to {name}: it is not installed: pip install {PACKAGES[name]}")
    return list(dict.fromkeys(names))


def _installed(name: str) -> bool:
    return importlib.util.find_spec(PACKAGES[name]) is not None


class TensorBoard:
    def __init__(self, folder: Path, title: str, settings: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """WANDB_MODE, WANDB_PROJECT and the like are the user's."""

    def __init__(self, folder: Path, title: str, settings: Mapping[str, Any]) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "mlx-parallm")
        self._run: Any = wandb.init(project=project, name=title, dir=str(folder), config=dict(settings))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are the user's."""

    def __init__(self, folder: Path, title: str, settings: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        self._run: str = mlflow.start_run(run_name=title).info.run_id
        mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step, run_id=self._run)

    def close(self) -> None:
        self._mlflow.end_run()


BOARDS: dict[str, Callable[[Path, str, Mapping[str, Any]], Board]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


# Afterwards.


def read_log(path: Path) -> list[dict[str, Any]]:
    """Its lines; of a step that was done twice, before and after a kill, the later."""
    entries: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        entries[entry["step"]] = entry
    return [entries[step] for step in sorted(entries)]


def plot(logs: list[Path], target: Path, titles: list[str]) -> Path | None:
    """Rewards and held-out scores over the steps, or losses; None where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    scored = False
    for path, title in zip(logs, titles, strict=True):
        entries = read_log(path)
        scored = scored or any("reward" in entry for entry in entries)
        learnt, held_out = ("reward", "held_out") if scored else ("loss", "held_out_loss")
        drawn = [(entry["step"], entry[learnt]) for entry in entries if entry["step"] and learnt in entry]
        held = [(entry["step"], entry[held_out]) for entry in entries if entry.get(held_out) is not None]
        for axis, points in ((left, drawn), (right, held)):
            if points:
                axis.plot(*zip(*points, strict=True), marker=".", label=title)
    left.set(title="mean reward of sampled completions" if scored else "loss", xlabel="step")
    right.set(title="held-out score, greedy" if scored else "held-out loss", xlabel="step")
    if scored:
        right.set(ylim=(0, 1))
    if right.lines:
        right.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
    return target
