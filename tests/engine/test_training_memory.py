"""Memory for training where attention's backward pass keeps its scores: it grows with the square of a text."""

from dataclasses import replace

import numpy as np
import pytest

from mlx_parallm.config.training import LoRAConfig, RLConfig
from mlx_parallm.devices.device import DEVICES
from mlx_parallm.errors import ConfigError, ContextLengthError
from mlx_parallm.steps import run_through
from mlx_parallm.training import trainable_model
from mlx_parallm.training.rl.trainer import Trainer
from mlx_parallm.training.rl.trajectories import Trajectory
from mlx_parallm.training.supervised.datasets import Example
from mlx_parallm.training.supervised.trainers import SFT, SupervisedConfig
from mlx_parallm.training.trainable_model import TrainableModel
from tests.tiny import tiny

LORA = LoRAConfig(rank=4, alpha=8)


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_for_attention_grows_with_the_square_of_a_text_and_is_foreseen(checkpointing: bool) -> None:
    taken = {}
    for length in (512, 1024):
        trainer = Trainer(tiny(), LORA, RLConfig(gradient_checkpointing=checkpointing, microbatch_tokens=4 * length))
        ids = np.random.default_rng(0).integers(3, 200, (2, length)).tolist()
        run_through(trainer.update([Trajectory([5, 6], one, float(number), "g") for number, one in enumerate(ids)]))
        foreseen = 2 * trainer.tree.score_bytes * length**2
        assert 0.6 * foreseen < trainer.activation_bytes < 1.6 * foreseen
        taken[length] = trainer.activation_bytes
    assert taken[1024] > 3 * taken[512]


def test_a_text_too_long_for_the_memory_is_refused_with_the_length_that_fits() -> None:
    trainer = Trainer(tiny(), LORA, RLConfig(), memory=32 << 20)
    longest = trainer.budget.longest_text()
    assert longest is not None
    assert 300 < longest < 1000
    short = Trajectory([5], [6] * (longest - 1), 1.0, "g")
    assert trainer.checked_length(short) is short
    long = Trajectory([5], [6] * longest, 1.0, "g")
    with pytest.raises(ContextLengthError, match=f"a text of {longest + 1} tokens .* memory for {longest} tokens"):
        trainer.checked_length(long)
    assert trainer._fitting([short, long]) == [short], "what came before that was known is left out"
    assert longest <= trainer.budget.room(longest) < 2 * longest, "one at a time"
    assert trainer.budget.room(longest // 4) >= 4 * longest - 8


def test_blocks_are_computed_again_on_a_mac_unless_there_is_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainable_model, "this_device", lambda: DEVICES["cpu"])
    few, many = (TrainableModel(tiny(), LORA, checkpointing=asked).score_bytes for asked in (True, False))
    assert few < many
    assert TrainableModel(tiny(), LORA, checkpointing=None).score_bytes == many
    monkeypatch.setattr(trainable_model, "this_device", lambda: DEVICES["metal"])
    assert TrainableModel(tiny(), LORA, checkpointing=None).score_bytes == few
    assert TrainableModel(tiny(), replace(LORA, dropout=0.1), checkpointing=None).score_bytes == many
    monkeypatch.setattr(trainable_model, "this_device", lambda: DEVICES["cuda"])
    assert TrainableModel(tiny(), LORA, checkpointing=None).score_bytes == 0, "its backward pass keeps no scores"


def test_texts_too_long_for_the_memory_are_refused_before_the_first_step() -> None:
    config = SupervisedConfig(learning_rate=1e-3)
    trainer = SFT(tiny(), LORA, config, memory=32 << 20)
    longest = trainer.budget.longest_text()
    assert longest is not None
    trainer.check_lengths([Example([5] * longest, [1.0] * longest)])
    with pytest.raises(ConfigError, match=f"give --max-length {longest}"):
        trainer.check_lengths([Example([5] * (longest + 1), [1.0] * (longest + 1))])
