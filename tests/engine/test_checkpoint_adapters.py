"""Checkpoints as adapters: loaded when they are named, gone when nobody has named them for a while."""

import time
from collections.abc import Callable
from pathlib import Path

from mlx_parallm.arms import AutoSplit
from mlx_parallm.runtime.adapters import CheckpointAdapters, SplitFile
from mlx_parallm.types import AdapterRoute
from tests.engine.test_session import school


def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def test_a_checkpoint_leaves_when_it_is_not_used_and_comes_again(tmp_path: Path) -> None:
    with school() as one:
        session = one.session(folder=tmp_path)
        session.checkpoint("kept")
        registry = one.engine.adapters
        adapters = CheckpointAdapters(lambda: {"policy": session}, 1 << 30, idle=0.3)
        first = adapters.load(registry, "kept")
        assert first is not None
        assert adapters.load(registry, "policy/kept") is first  # the same, while it is there
        assert len(one.driver.ask([5, 6, 7], adapter="policy/kept").tokens) > 0
        eventually(lambda: "policy/kept" not in registry)
        again = adapters.load(registry, "kept")
        assert again is not None
        assert again.digest == first.digest
        registry.serve([AdapterRoute("policy/kept", None, 1.0)])
        time.sleep(1.0)
        assert "policy/kept" in registry  # the model's own name serves it
        registry.serve([])
        eventually(lambda: "policy/kept" not in registry)
        assert adapters.load(registry, "nobody") is None
        one.driver.settle()


def test_a_split_between_checkpoints_survives_a_restart(tmp_path: Path) -> None:
    routes = [AdapterRoute("policy/kept", None, 0.5), AdapterRoute(None, None, 0.5)]
    with school() as one:
        session = one.session(folder=tmp_path)
        session.checkpoint("kept")
        adapters = CheckpointAdapters(lambda: {"policy": session}, 1 << 30)
        registry = one.engine.adapters
        SplitFile(tmp_path, "model").follow(registry)
        adapters.load(registry, "kept")
        registry.serve(routes, AutoSplit(min_rewards=7))
        one.driver.settle()
    with school() as one:
        session = one.session(folder=tmp_path)
        adapters = CheckpointAdapters(lambda: {"policy": session}, 1 << 30)
        registry = one.engine.adapters
        SplitFile(tmp_path, "model").restore(registry, lambda name: adapters.load(registry, name))
        assert [(route.name, route.share) for route in registry.routes] == [("policy/kept", 0.5), (None, 0.5)]
        assert registry.auto is not None
        assert registry.auto.min_rewards == 7
        one.driver.settle()


def test_a_split_that_a_start_can_not_serve_is_kept_for_the_next(tmp_path: Path) -> None:
    with school() as one:
        session, registry, file = one.session(folder=tmp_path), one.engine.adapters, SplitFile(tmp_path, "model")
        session.checkpoint("kept")
        CheckpointAdapters(lambda: {"policy": session}, 1 << 30).load(registry, "kept")
        file.follow(registry)
        registry.serve([AdapterRoute("policy/kept", None, 0.5), AdapterRoute(None, None, 0.5)], AutoSplit())
        one.driver.settle()
    [kept] = tmp_path.glob("split-*.json")
    with school() as one:
        file, registry = SplitFile(tmp_path, "model"), one.engine.adapters
        file.restore(registry, lambda name: None)
        file.follow(registry)
        file.write(registry)  # as after a reward
        assert kept.exists()
        registry.serve([])
        assert not kept.exists()


def test_a_name_means_the_checkpoint_of_an_adapter_that_may_be_used(tmp_path: Path) -> None:
    with school() as one:
        session = one.session(folder=tmp_path)
        session.checkpoint("kept")
        adapters = CheckpointAdapters(lambda: {"policy": session, "other": session}, 1 << 30)
        version = adapters.load(one.engine.adapters, "kept", lambda name: name == "policy")
        assert version is not None
        assert version.name == "policy/kept"
        assert adapters.load(one.engine.adapters, "policy/kept", lambda name: name == "other") is None
        one.driver.settle()
