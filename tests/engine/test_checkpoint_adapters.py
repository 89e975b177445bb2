"""Checkpoints as adapters: loaded when they are named, gone when nobody has named them for a while."""

import time
from collections.abc import Callable
from pathlib import Path

from mlx_parallm.runtime.checkpoint_adapters import CheckpointAdapters
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
