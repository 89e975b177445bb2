"""How a run is going and how it went: lines in the terminal, `log.jsonl`, TensorBoard where it is installed, a PNG.

The loop's thread calls it. Numbers that are kept are appended a line at a time, so a kill loses at most the last.
"""

import json
import logging
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from mlx_parallm.training.loop import StepNews

log = logging.getLogger(__name__)

LOG = "log.jsonl"
PLOT = "report.png"


class Progress:
    def __init__(self, folder: Path, steps: int, title: str) -> None:
        self._folder = folder
        self._steps = steps
        self._title = title
        self._console = Console()
        self._board = _tensorboard(folder)
        self._begun = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / LOG).open("a")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
        if error is None:
            drawn = plot([self._folder / LOG], self._folder / PLOT, [self._title])
            self._console.print(f"[dim]{self._folder / LOG}{f' and {drawn}' if drawn else ''}")

    def on_step(self, news: StepNews) -> None:
        flat = news.flat()
        self._file.write(json.dumps(flat) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in flat.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._board.add_scalar(name, value, news.step)
        self._console.print(self._line(news), highlight=False)

    def _line(self, news: StepNews) -> str:
        parts = [f"step {news.step}/{self._steps}"]
        if news.report is not None:
            metrics = news.report.outcome.metrics
            rate = news.rollout_tokens / max(news.rollout_seconds, 1e-6)
            parts += [
                f"reward [bold]{news.reward:.3f}[/]",
                *([f"KL {metrics['kl']:.3f}"] if "kl" in metrics else []),
                f"entropy {metrics.get('entropy', 0.0):.2f}",
                f"{rate:.0f} tok/s",
                f"{news.rollout_seconds:.1f} + {news.update_seconds:.1f} s",
                f"v{news.report.version}",
            ]
            if news.report.rolled_back:
                parts.append(f"[red]rolled back: {news.report.rolled_back}[/]")
            elif news.report.outcome.reason:
                parts.append(f"[yellow]refused: {news.report.outcome.reason}[/]")
        if news.held_out is not None:
            parts.append(f"held out [bold green]{news.held_out:.3f}[/]")
        return "  ".join(parts)


def _tensorboard(folder: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))


def read_log(path: Path) -> list[dict[str, Any]]:
    """Its lines; of a step that was done twice, before and after a kill, the later."""
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        found[entry["step"]] = entry
    return [found[step] for step in sorted(found)]


def plot(logs: list[Path], target: Path, titles: list[str]) -> Path | None:
    """Rewards and held-out scores over the steps; None where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for path, title in zip(logs, titles, strict=True):
        entries = read_log(path)
        drawn = [(entry["step"], entry["reward"]) for entry in entries if entry["step"]]
        held = [(entry["step"], entry["held_out"]) for entry in entries if entry["held_out"] is not None]
        for axis, points in ((left, drawn), (right, held)):
            if points:
                axis.plot(*zip(*points, strict=True), marker=".", label=title)
    left.set(title="mean reward of drawn answers", xlabel="step")
    right.set(title="held-out score, greedy", xlabel="step", ylim=(0, 1))
    right.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
    return target
