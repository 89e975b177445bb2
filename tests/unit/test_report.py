"""Reports: the log and the plot of both kinds of run, and what each board is told."""

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.training import report
from mlx_parallm.training.report import LOG, PLOT, Progress, chosen_boards, plot, read_log
from mlx_parallm.training.rl.task_loop import StepReport
from mlx_parallm.training.supervised.finetune import RunReport

NEWS = [
    RunReport(0, 0.0, held_out={"loss": 2.0}),
    RunReport(1, 0.5, 0.1, {"loss": 1.5, "tokens": 9.0}),
    RunReport(2, 1.0, 0.1, {"loss": 1.25}, {"loss": 1.0}),
]


@pytest.mark.long
def test_a_run_s_log_and_plot(tmp_path: Path) -> None:
    with Progress(tmp_path, 2, "sft", report_to=["none"]) as progress:
        for news in NEWS:
            progress.on_step(news)
    assert [entry.get("loss") for entry in read_log(tmp_path / LOG)] == [None, 1.5, 1.25]
    assert read_log(tmp_path / LOG)[2]["held_out_loss"] == 1.0
    assert (tmp_path / PLOT).stat().st_size > 1000


def test_parts_of_a_reward_are_told_one_by_one() -> None:
    news = StepReport(3, 0.7, 1, 1.0, 10, 1.0, held_out=0.5, components={"number": 0.6, "regex": 1.0})
    news.held_out_components = {"number": 0.5}
    flat = news.flat()
    assert (flat["reward/number"], flat["reward/regex"], flat["held_out/number"]) == (0.6, 1.0, 0.5)
    assert "held out [bold green]0.500[/]" in news.parts()


def test_a_board_that_is_not_there_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_installed", lambda name: name == "tensorboard")
    assert chosen_boards([]) == ["tensorboard"]
    assert chosen_boards(["tensorboard,tensorboard"]) == ["tensorboard"]
    assert chosen_boards(["none"]) == []
    for name, package in (("wandb", "wandb"), ("mlflow", "mlflow")):
        with pytest.raises(ConfigError, match=f"pip install {package}$"):
            chosen_boards([f"tensorboard,{name}"])
    with pytest.raises(ConfigError, match="there is tensorboard, wandb, mlflow"):
        chosen_boards(["neptune"])
    monkeypatch.setattr(report, "_installed", lambda name: False)
    assert chosen_boards([]) == []


def test_the_calls_that_boards_are_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With modules that only write down what they are called with: whether the real ones take it, they can't say."""
    calls: list[Any] = []

    class Run:
        info = types.SimpleNamespace(run_id="r1")

        def log(self, numbers: dict[str, float], step: int) -> None:
            calls.append(("wandb", numbers, step))

        def finish(self) -> None:
            calls.append("wandb finish")

    def wandb_init(**options: Any) -> Run:
        calls.append(("init", options["project"], options["name"], options["config"]))
        return Run()

    def log_metrics(numbers: dict[str, float], step: int, run_id: str) -> None:
        calls.append(("mlflow", numbers, step, run_id))

    modules = {
        "wandb": {"init": wandb_init},
        "mlflow": {
            "start_run": lambda run_name: Run(),
            "log_params": lambda settings: calls.append(("params", settings)),
            "log_metrics": log_metrics,
            "end_run": lambda: calls.append("mlflow end"),
        },
    }
    for name, functions in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(report, "_installed", lambda name: True)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    with Progress(tmp_path, 2, "sft", report_to=["wandb,mlflow"], settings={"lora_rank": 4}) as progress:
        progress.on_step(NEWS[2])
    numbers = {"step": 2.0, "epoch": 1.0, "seconds": 0.1, "loss": 1.25, "held_out_loss": 1.0}
    assert calls == [
        ("init", "mlx-parallm", "sft", {"lora_rank": 4}),
        ("params", {"lora_rank": "4"}),
        ("wandb", numbers, 2),
        ("mlflow", numbers, 2, "r1"),
        "wandb finish",
        "mlflow end",
    ]


def test_the_lines_are_json(tmp_path: Path) -> None:
    with Progress(tmp_path, 2, "sft", report_to=["none"]) as progress:
        progress.on_step(NEWS[1])
    assert json.loads((tmp_path / LOG).read_text()) == NEWS[1].flat()


@pytest.mark.long
def test_a_plot_says_what_it_draws(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("svg")
    with Progress(tmp_path, 2, "sft", report_to=["none"]) as progress:
        for news in NEWS:
            progress.on_step(news)
    words = texts(tmp_path / LOG)
    assert matplotlib.get_backend().lower() == "agg", "one that opens no window, whatever was chosen before"
    assert {"loss", "held-out loss", "step", "mine"} <= words
    rewards = tmp_path / "rewards.jsonl"
    rewards.write_text('{"step": 0, "held_out": 0.25}\n{"step": 1, "reward": 0.5, "held_out": 0.5}\n')
    words = texts(rewards)
    assert {"mean reward of sampled completions", "held-out score, greedy", "1.0"} <= words


def texts(log: Path) -> set[str]:
    drawn = plot([log], log.with_suffix(".svg"), ["mine"])
    assert drawn is not None
    return set(re.findall(r"<!-- (.*?) -->", drawn.read_text()))
