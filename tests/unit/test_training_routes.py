"""Training's routes: what is quick never waits for what takes long."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from mlx_parallm.config import ServeConfig
from mlx_parallm.server.api.training import TrainingRoutes
from mlx_parallm.server.api.training.bodies import CheckpointBody, FeedbackBody, UpdateBody
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


def test_feedback_does_not_wait_for_updates() -> None:
    training = SlowTraining()
    context = SimpleNamespace(
        runtime=SimpleNamespace(training=training), models=None, tokenizers=None, config=ServeConfig()
    )

    async def scenario() -> None:
        routes = TrainingRoutes(context)  # type: ignore[arg-type]
        slow = [asyncio.ensure_future(routes.update(UpdateBody.model_validate({}))) for _ in range(40)]
        slow += [asyncio.ensure_future(routes.checkpoint(CheckpointBody.model_validate({}))) for _ in range(40)]
        await asyncio.sleep(0)
        body = FeedbackBody.model_validate({"request_id": "r", "reward": 1.0})
        try:
            answer = await asyncio.wait_for(routes.feedback(body), 10)
            assert answer.status_code == 200
            assert not any(one.done() for one in slow)
        finally:
            training.go_on.set()
            await asyncio.gather(*slow)

    asyncio.run(scenario())
