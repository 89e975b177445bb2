"""Memory: nothing grows with the steps of a batch that never empties, and a budget that can't work is told at start."""

import gc
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.kv import snapshots
from mlx_parallm.runtime.loading import _loaded_share
from tests.engine.harness import Bare, driver, driver_of, no_engine_runs
from tests.tiny import tiny


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("jamba", marks=pytest.mark.slow), "hybrid", "gemma3"])
def test_no_step_leaves_a_buffer_behind(kind: str) -> None:
    """An offset that no layer reads would otherwise be a longer and longer sum, one buffer a step."""
    with driver(kind) as drive:
        _, pending = drive.submit([5, 9, 12], max_tokens=700, ignore_eos=True, stream=True)
        pending.wait_for_tokens(10)
        cache = drive.engine._parts.compute.runner.cache
        pending.wait_for_tokens(300)

        def graph() -> int:
            """How many operations wait to be computed behind the caches' arrays."""
            waiting = [array for array in cache.pending() if array.ndim <= 1]
            gc.collect()  # what earlier tests left must not be freed in between
            mx.synchronize()
            before = mx.get_active_memory()
            mx.eval(waiting)
            return abs(mx.get_active_memory() - before)

        drive.engine.pause("keep", 30)
        left = drive.engine._thread.run_between_steps(graph)
        drive.engine.resume()
        assert left <= 64, f"{left} bytes of buffers were kept alive by what nobody reads"
        assert len(pending.wait()[0].tokens) == 700


def test_jamba_answers_as_it_does_alone() -> None:
    prompts = [[5, 9, 12, 7], [8, 8, 3], list(range(3, 60))]
    with driver("jamba") as drive:
        in_flight = [drive.submit(prompt, max_tokens=12, ignore_eos=True)[1] for prompt in prompts]
        found = [pending.wait()[0].tokens for pending in in_flight]
    bare = Bare(tiny("jamba"))
    assert found == [bare.greedy(prompt, 12, ignore_eos=True)[0] for prompt in prompts]


def test_snapshots_are_counted_in_arrays_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAX_ARRAYS", 30)
    with driver("hybrid") as drive:
        for number in range(8):
            drive.ask([number + 3] * 100, max_tokens=2)
        prefix = drive.engine._parts.compute.prefix
        assert isinstance(prefix, snapshots.SnapshotPrefix)
        held = list(prefix._snapshots.values())
        assert 0 < sum(one.arrays for one in held) <= 30
        assert held[0].arrays == len(snapshots.held_arrays(held[0].caches)) > 1
        assert prefix.metrics.evictions > 0
        drive.engine.check_integrity()


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_a_budget_that_holds_no_row_does_not_start(kind: str) -> None:
    with pytest.raises(ModelLoadError, match=r"--kv-cache-memory \d+MiB or more"), driver(kind, kv_cache_memory=1000):
        pass


def test_a_budget_that_the_machine_has_not_does_not_start() -> None:
    with pytest.raises(ModelLoadError, match=r"at most \d+MiB is left"), driver("llama", kv_cache_memory=1 << 50):
        pass
    with pytest.raises(ModelLoadError, match=r"--memory-limit \d+MiB"), driver("llama", memory_limit=10_000):
        pass
    assert no_engine_runs(), "it still holds the weights"


def test_the_budget_is_kept_and_told() -> None:
    with driver("llama", memory_limit=1 << 28, max_loras=2) as drive:
        plan = drive.engine.metrics.memory
        assert plan.limit == 1 << 28
        assert plan.weights == drive.engine.model.weight_bytes
        assert plan.weights + plan.rows + plan.blocks + plan.adapters + plan.training + plan.kept <= plan.limit
        assert "the same alone and in a batch" in dict(drive.engine.describe())["exactness"]
        told = dict(drive.engine.describe())["memory"]
        for part in ("256 MiB in all", "weights", "running rows", "cached prompts", "adapters", "MLX keeps"):
            assert part in told


def test_rounding_is_admitted_where_there_is_some() -> None:
    with driver_of(lambda: replace(tiny("llama", dtype=mx.bfloat16), precision="bfloat16")) as drive:
        assert "in bfloat16, rounding differs" in dict(drive.engine.describe())["exactness"]


def test_how_much_of_the_weights_has_come() -> None:
    size = 1 << 20
    share, nothing = _loaded_share(size), _loaded_share(0)
    assert nothing() is None
    assert share() == 0.0
    weights = [mx.zeros(size // 8, mx.float32)]  # half of them
    mx.eval(weights)
    assert share() == pytest.approx(0.5, abs=0.05)
    weights.append(mx.zeros(size, mx.float32))
    mx.eval(weights)
    assert share() == 1.0
