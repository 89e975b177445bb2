"""A run of SFT on a real engine: its order, its looks, its early end, and the folder it leaves."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.config.training import LoRAConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.lora.adapter_files import read_folder
from mlx_parallm.training.supervised.datasets import Example
from mlx_parallm.training.supervised.finetune import EpochConfig, FineTuning, RunReport, check_free, save_adapter
from mlx_parallm.training.supervised.trainers import SFT, SupervisedConfig
from tests.engine.harness import Driver, driver
from tests.engine.test_supervised import examples


def trainer(drive: Driver, rate: float) -> SFT:
    config = SupervisedConfig(learning_rate=rate, microbatch_tokens=64)
    engine = drive.engine
    return engine.run(lambda: SFT(engine.model, LoRAConfig(rank=4, alpha=8), config))


def tuned(
    drive: Driver, rate: float, held_out: list[Example], **options: Any
) -> tuple[FineTuning[Example], SFT, list[RunReport]]:
    made, told = trainer(drive, rate), list[RunReport]()
    tuning = FineTuning(drive.engine, made, examples(12), held_out, EpochConfig(batch_size=4, **options), told.append)
    assert tuning.run() == told
    return tuning, made, told


def test_epochs_looks_and_repetition() -> None:
    with driver("llama") as drive:
        runs = [tuned(drive, 1e-3, examples(3, seed=1), epochs=2, seed=3) for _ in range(2)]
        told = runs[0][2]
        assert [news.step for news in told] == list(range(7))
        assert [bool(news.held_out) for news in told] == [True, False, False, True, False, False, True]
        assert told[-1].epoch == 2
        states = [drive.engine.run(run[1].learner.state) for run in runs]
        assert all(np.array_equal(array, states[1][name]) for name, array in states[0].items())
        assert [news.metrics["loss"] for news in told[1:]] == [news.metrics["loss"] for news in runs[1][2][1:]]
        every = tuned(drive, 1e-3, examples(3, seed=1), eval_every=2)[2]
        assert [bool(news.held_out) for news in every] == [True, False, True, True]


def test_patience_ends_a_run_with_its_best_parameters(tmp_path: Path) -> None:
    """What is learnt makes other texts of random tokens no likelier, and soon less so."""
    held_out = examples(6, seed=1)
    with driver("llama") as drive:
        _, made, told = tuned(drive, 3e-2, held_out, epochs=30, patience=2)
        losses = [news.held_out["loss"] for news in told if news.held_out]
        assert len(told) < 1 + 90
        assert min(losses) == losses[-3]
        after = drive.engine.work(made.evaluate(held_out)).result()["loss"]
        assert after == pytest.approx(min(losses), rel=1e-4)
        path = save_adapter(tmp_path / "one", drive.engine, made, "sft", told[-1].flat())
        own = drive.engine.run(made.adapter)
        for name, part in read_folder(path, 1 << 20)[0].parts.items():
            np.testing.assert_allclose(part.b, own.parts[name].b, rtol=1e-6)
        save_adapter(tmp_path / "one", drive.engine, made, "sft", {})  # in the place of an earlier result


def test_without_patience_a_run_goes_to_its_end() -> None:
    with driver("llama") as drive:
        _, _, told = tuned(drive, 3e-2, examples(6, seed=1), epochs=8)
        losses = [news.held_out["loss"] for news in told if news.held_out]
        assert any(after > before for before, after in pairwise(losses))
        assert told[-1].step == 24
        assert tuned(drive, 1e-3, [])[2][-1].step == 3


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    check_free(tmp_path / "new")
    (tmp_path / "policy" / "step-00000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds something else"):
        check_free(tmp_path / "policy")


def test_wrong_settings() -> None:
    for wrong in ({"epochs": 0}, {"batch_size": 0}, {"patience": -1}, {"eval_every": -1}):
        with pytest.raises(ConfigError):
            EpochConfig(**wrong)
    with driver("llama") as drive, pytest.raises(ConfigError, match="held-out"):
        tuned(drive, 1e-3, [], patience=1)
