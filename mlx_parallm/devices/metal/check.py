"""Tries each Metal kernel against MLX's operations before it is used: one that differs, or is slower, is left out.

What is tried has the model's own sizes. A Mac that nobody has seen may be better off with MLX's operations.
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence

import mlx.core as mx

log = logging.getLogger(__name__)

Compute = Callable[[], Sequence[mx.array]]
BOUNDS = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 8e-2}  # by which rounding may make them differ
ALTERNATIONS = 5
AT_ONCE = 16  # computed in one go: one alone would be lost in what it takes to start


def is_worth_using(name: str, kernel: Compute, operations: Compute) -> bool:
    """Returns whether a kernel gives what MLX's operations give, and in no more time."""
    try:
        if not _agree(kernel(), operations()):
            log.warning("the Metal kernel for %s gives wrong results here, and is left out", name)
            return False
        own, theirs = _seconds(kernel, operations)
    except (RuntimeError, ValueError) as error:
        log.warning("the Metal kernel for %s can't be used here: %s", name, str(error)[:300])
        return False
    microseconds = f"{own * 1e6:.0f} µs beside {theirs * 1e6:.0f} of MLX's operations"
    if own > theirs:
        log.info("the Metal kernel for %s is slower here, and is left out: %s", name, microseconds)
        return False
    log.info("the Metal kernel for %s is used: %s", name, microseconds)
    return True


def _agree(found: Sequence[mx.array], expected: Sequence[mx.array]) -> bool:
    return len(found) == len(expected) and all(
        one.dtype == other.dtype and mx.allclose(one, other, rtol=BOUNDS[one.dtype], atol=BOUNDS[one.dtype]).item()
        for one, other in zip(found, expected, strict=True)
    )


def _seconds(kernel: Compute, operations: Compute) -> tuple[float, float]:
    """Returns the median time of each, alternating."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ALTERNATIONS):
        for compute, seconds in zip((kernel, operations), times, strict=True):
            arrays = [array for _ in range(AT_ONCE) for array in compute()]
            begun = time.perf_counter()
            mx.eval(arrays)
            seconds.append((time.perf_counter() - begun) / AT_ONCE)
    return statistics.median(times[0]), statistics.median(times[1])
