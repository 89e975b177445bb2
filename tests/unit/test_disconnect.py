"""Waiting for an answer ends with the answer, with its time, or with the client."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mlx_parallm.server.http.disconnect import unless_left, when_left
from mlx_parallm.server.http.http_errors import ClientLeft

Receive = Callable[[], Awaitable[dict[str, Any]]]


def client(stays: float) -> Receive:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(stays)
        return {"type": "http.disconnect"}

    return receive


async def test_an_answer_in_time_is_returned() -> None:
    assert await unless_left(client(60), asyncio.sleep(0, "answer"), 60) == "answer"


@pytest.mark.parametrize(("stays", "seconds", "error"), [(0, None, ClientLeft), (60, 0.01, TimeoutError)])
async def test_what_nobody_waits_for_is_cancelled(stays: float, seconds: float | None, error: type[Exception]) -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("work")

    with pytest.raises(error):
        await unless_left(client(stays), work(), seconds)
    assert ended == ["work"], "before its waiter is told"


@pytest.mark.parametrize(("stays", "told"), [(0, ["left"]), (60, [])])
async def test_a_client_that_leaves_is_told_of(stays: float, told: list[str]) -> None:
    found: list[str] = []
    with when_left(client(stays), lambda: found.append("left")):
        await asyncio.sleep(0.02)
    assert found == told
