"""Grammars that compile slowly wait for each other, few at a time, and no longer than their client does."""

import asyncio
import threading

import pytest

from mlx_parallm.errors import QueueFullError
from mlx_parallm.server.generation.tokenizers import MAX_SLOW_GRAMMARS, TokenizerPool


async def test_few_wait_and_those_that_left_are_not_compiled() -> None:
    pool, go, begun = TokenizerPool(), threading.Event(), list[int]()

    def compile_one(number: int) -> int:
        begun.append(number)
        assert go.wait(30)
        return number

    tasks = [
        asyncio.ensure_future(pool.compile_slowly(lambda number=number: compile_one(number)))  # type: ignore[misc]
        for number in range(MAX_SLOW_GRAMMARS + 1)
    ]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="waiting to be compiled"):
        await pool.compile_slowly(lambda: 0)
    for task in tasks[2:]:  # their clients leave
        task.cancel()
    await asyncio.gather(*tasks[2:], return_exceptions=True)
    later = asyncio.ensure_future(pool.compile_slowly(lambda: compile_one(99)))
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(*tasks[:2], later) == [0, 1, 99]
    assert begun == [0, 1, 99]
    pool.close()
