"""Parameters and their optimiser: steps are torch's, a step can be undone, and what was kept is read again."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.training import OptimizerConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.host import to_numpy
from mlx_parallm.training.learner import Learner, Parameters, Refused

TORCH = json.loads((Path(__file__).parents[1] / "golden" / "adamw.json").read_text())


def named(arrays: list[object]) -> Parameters:
    return {f"p{number}.lora_a": mx.array(array) for number, array in enumerate(arrays)}


def made(**settings: object) -> Learner:
    config = OptimizerConfig(**{"learning_rate": 1e-2, "max_grad_norm": 1e9, **settings})  # type: ignore[arg-type]
    return Learner(named(TORCH["parameters"]), config, lambda parameters: None)


def step(learner: Learner, number: int) -> float:
    learner.accumulate(named(TORCH["gradients"][number]))
    return learner.optim_step()


@pytest.mark.parametrize("name", list(TORCH["cases"]))
def test_five_steps_are_those_of_torch(name: str) -> None:
    """Numbers of torch.optim.AdamW, clip_grad_norm_ and LambdaLR (tests/golden/make_adamw.py)."""
    case = TORCH["cases"][name]
    learner = made(**case["settings"])
    for number, expected in enumerate(case["steps"]):
        assert step(learner, number) == pytest.approx(expected["norm"], rel=1e-6)
        assert learner.learning_rate == pytest.approx(expected["learning_rate"], rel=1e-6)
        for found, array in zip(learner.parameters.values(), expected["parameters"], strict=True):
            np.testing.assert_allclose(np.array(found), np.array(array, np.float32), rtol=1e-6, atol=1e-6)


def test_the_first_step_is_one_learning_rate() -> None:
    learner = made()
    before = {name: np.array(array) for name, array in learner.parameters.items()}
    step(learner, 0)
    moved = [np.abs(np.array(array) - before[name]) for name, array in learner.parameters.items()]
    assert np.concatenate([one.ravel() for one in moved]) == pytest.approx(1e-2, rel=1e-3)


def test_a_way_back_and_what_is_kept() -> None:
    learner = made(schedule="linear", total_steps=8)
    for number in range(3):
        step(learner, number)
    kept, before = learner.state(), learner.snapshot()
    step(learner, 3)
    after = learner.state()
    learner.go_back(before)
    assert all(np.array_equal(array, learner.state()[name]) for name, array in kept.items())
    other = made(schedule="linear", total_steps=8)
    other.go_back(other.snapshot_of({**kept, "reference_kl": np.zeros(1)}, 3))  # of an older version
    step(other, 3)
    assert all(np.array_equal(array, other.state()[name]) for name, array in after.items())
    assert other.updates == 3
    with pytest.raises(ConfigError, match="another rank"):
        made().snapshot_of({name: array.ravel()[:1] for name, array in kept.items()}, 3)
    with pytest.raises(ConfigError, match="optimiser"):
        made().snapshot_of({name: array for name, array in kept.items() if not name.endswith(".v")}, 3)


def test_a_gradient_that_is_no_number_changes_nothing() -> None:
    learner = made()
    before = learner.state()
    learner.accumulate(named([np.full((3, 4), np.nan), np.zeros((3, 4)), np.zeros(5)]))
    with pytest.raises(Refused, match="norm"):
        learner.optim_step()
    assert all(np.array_equal(array, learner.state()[name]) for name, array in before.items())


@pytest.mark.parametrize(
    "wrong", [{"schedule": "x"}, {"total_steps": 0}, {"learning_rate": float("nan")}, {"max_grad_norm": 0.0}]
)
def test_wrong_settings(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        made(**wrong)


def test_parameters_can_be_read_on_every_thread() -> None:
    """What MLX has not computed yet, another thread than that which asked for it can't compute."""
    learner = made()
    before = learner.snapshot()
    step(learner, 0)
    expected = [np.array(array) for array in learner.parameters.values()]
    for change in (
        lambda: learner.halve_step(before),
        lambda: learner.set_parameters({name: 2 * array for name, array in learner.parameters.items()}),
    ):
        change()
        with ThreadPoolExecutor(1) as other:
            found = other.submit(lambda: [to_numpy(array) for array in learner.parameters.values()]).result()
        assert not all(np.array_equal(one, array) for one, array in zip(found, expected, strict=True))
        expected = found
