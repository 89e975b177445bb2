"""Training's routes: what is quick never waits for what takes long."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import QueueFullError
from mlx_parallm.server.api.training import MAX_WAITING, TrainingRoutes
from mlx_parallm.server.api.training.bodies import CheckpointBody, FeedbackBody, UpdateBody
from mlx_parallm.server.auth.caller import Caller, current_caller
from mlx_parallm.server.auth.keys import Key
from mlx_parallm.server.http.http_errors import ClientLeft
from mlx_parallm.types import FeedbackReport, UpdateReport


class SlowTraining:
    """Updates and checkpoints take until they are let go; feedback takes no time."""

    adapters = ("policy",)

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def update(self, *args: Any, **options: Any) -> UpdateReport:
        assert self.go_on.wait(30)
        return UpdateReport(2, True, 4, 0, None, None, True, {})

    def checkpoint(self, *args: Any) -> tuple[str, str]:
        assert self.go_on.wait(30)
        return "mine", "folder/mine"

    def feedback(self, *args: Any, **options: Any) -> FeedbackReport:
        return FeedbackReport("policy", 1, 0)

    def is_pending(self, request_id: str, *args: Any) -> bool:
        return request_id == "running" and not self.go_on.is_set()


def routes_over(training: SlowTraining) -> TrainingRoutes:
    context: Any = SimpleNamespace(
        runtime=SimpleNamespace(training=training), models=None, tokenizers=None, config=ServeConfig()
    )
    return TrainingRoutes(context)


def stays() -> Request:
    """A request whose client waits for its answer."""

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    return Request({"type": "http"}, receive)


def leaves() -> Request:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.1)
        return {"type": "http.disconnect"}

    return Request({"type": "http"}, receive)


def reward(request_id: str) -> FeedbackBody:
    return FeedbackBody.model_validate({"request_id": request_id, "reward": 1.0})


def test_feedback_does_not_wait_for_feedback_on_answers_being_given() -> None:
    training = SlowTraining()

    async def scenario() -> None:
        routes = routes_over(training)
        waiting = [asyncio.ensure_future(routes.feedback(reward("running"), stays())) for _ in range(MAX_WAITING)]
        await asyncio.wait(waiting, timeout=1.0)
        assert routes._waiting[""] == MAX_WAITING
        assert (await asyncio.wait_for(routes.feedback(reward("given"), stays()), 5)).status_code == 200
        with pytest.raises(QueueFullError):
            await routes.feedback(reward("running"), stays())
        other = current_caller.set(Caller(Key.of("other", "user", "sk-other")))
        try:
            waiting.append(asyncio.ensure_future(routes.feedback(reward("running"), stays())))
        finally:
            current_caller.reset(other)
        await asyncio.wait(waiting[-1:], timeout=0.2)
        assert not any(one.done() for one in waiting)
        training.go_on.set()
        assert {(await one).status_code for one in waiting} == {200}
        assert (await routes.feedback(reward("running"), stays())).status_code == 200
        assert routes._waiting.total() == 0

    asyncio.run(scenario())


def test_feedback_that_waits_ends_with_its_client() -> None:
    training = SlowTraining()

    async def scenario() -> None:
        routes = routes_over(training)
        with pytest.raises(ClientLeft):
            await asyncio.wait_for(routes.feedback(reward("running"), leaves()), 5)
        assert routes._waiting.total() == 0

    asyncio.run(scenario())


def test_feedback_does_not_wait_for_updates() -> None:
    training = SlowTraining()

    async def scenario() -> None:
        routes = routes_over(training)
        slow = [asyncio.ensure_future(routes.update(UpdateBody.model_validate({}))) for _ in range(40)]
        slow += [asyncio.ensure_future(routes.checkpoint(CheckpointBody.model_validate({}))) for _ in range(40)]
        await asyncio.sleep(0)
        try:
            answer = await asyncio.wait_for(routes.feedback(reward("given"), stays()), 10)
            assert answer.status_code == 200
            assert not any(one.done() for one in slow)
        finally:
            training.go_on.set()
            await asyncio.gather(*slow)

    asyncio.run(scenario())
