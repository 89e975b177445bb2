"""Freed memory: what is in use stays at hand, what is not goes back."""

import time
from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.freed_memory import AllocatorCache

MB = 1 << 20


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    before = mx.set_cache_limit(1 << 30)
    mx.clear_cache()
    yield
    mx.clear_cache()
    mx.set_cache_limit(before)


def use(*sizes: int) -> int:
    """Takes memory, frees it, and says how much of it had to be asked of the system."""
    kept, active = mx.get_cache_memory(), mx.get_active_memory()
    arrays = [mx.zeros((size * MB // 4,)) for size in sizes]
    mx.eval(arrays)
    asked = sum(sizes) * MB - (kept - mx.get_cache_memory())
    del arrays
    mx.synchronize()
    deadline = time.monotonic() + 5
    while mx.get_active_memory() > active and time.monotonic() < deadline:  # a GPU's is freed by another thread
        time.sleep(0.001)
    return asked


STEP = [5] * 6


@pytest.mark.skipif(this_device().kind != "cpu", reason="other allocators drop other buffers")
def current_limit() -> int:
    limit = mx.set_cache_limit(0)
    mx.set_cache_limit(limit)
    return limit


def test_at_its_limit_mlx_asks_for_every_steps_memory_anew() -> None:
    """Why there is an `AllocatorCache`. Where this fails, MLX has changed, and it may go."""
    mx.set_cache_limit(40 * MB)
    use(10, 11, 12)
    for _ in range(3):
        assert use(*STEP) >= 25 * MB


def test_what_is_in_use_stays_and_what_is_not_goes() -> None:
    spare = AllocatorCache()
    spare.allow("a", 80 * MB)
    use(10, 11, 12)
    use(*STEP)
    spare.trim()
    assert mx.get_cache_memory() <= 40 * MB
    for _ in range(3):
        assert use(*STEP) < MB
        spare.trim()
    assert mx.set_cache_limit(0) == 80 * MB, "the limit is as it was"


def test_nothing_goes_while_there_is_room() -> None:
    spare = AllocatorCache()
    spare.allow("a", 80 * MB)
    use(10, 11, 12)
    kept = mx.get_cache_memory()
    spare.trim()
    assert mx.get_cache_memory() == kept


def test_who_needs_most_decides() -> None:
    spare = AllocatorCache()
    spare.allow("a", 80 * MB)
    spare.allow("b", 20 * MB)
    assert current_limit() == 80 * MB
    spare.release("a")
    assert current_limit() == 20 * MB


def test_behind_the_last_the_limit_is_what_it_was_and_nothing_is_kept() -> None:
    before = current_limit()
    spare = AllocatorCache()
    spare.allow("a", 80 * MB)
    use(10, 11, 12)
    assert mx.get_cache_memory() > 0
    spare.release("a")
    assert current_limit() == before
    assert mx.get_cache_memory() == 0
