"""A thread for models that predict, where no model generates. Its `PredictionHost` is an engine otherwise."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import mlx.core as mx

from mlx_parallm.engine.background import Background
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.metrics import BackgroundMetrics
from mlx_parallm.steps import Steps

T = TypeVar("T")


class PredictThread:
    def __init__(self) -> None:
        self.metrics = BackgroundMetrics()
        self._background = Background(0.5, self.metrics)
        self._thread = EngineThread(self._main)
        self._thread.start()

    @property
    def slice_seconds(self) -> float:
        return self._background.slice_seconds

    def predict(self, steps: "Steps[T]") -> "Future[T]":
        future: Future[T] = Future()
        if self._thread.stopping:
            future.set_exception(self._thread.unavailable())
        else:
            self._thread.inbox.put(lambda: self._background.add(steps, future))
        return future

    def run(self, work: Callable[[], T]) -> T:
        """Has the thread do something short, and waits for it. Never on that thread itself."""

        def step() -> Steps[T]:
            yield from ()
            return work()

        return self.predict(step()).result()

    def stop(self) -> None:
        self._thread.stop()

    def _main(self) -> None:
        inbox = self._thread.inbox
        while not self._thread.stopping:
            if not self._background.waiting:
                inbox.get()()
            while not inbox.empty():
                inbox.get()()
            if self._background.due(serving=False) and not self._thread.stopping:
                self._background.step(serving=False)
        self._background.close()
        self._thread.empty_inbox()
        mx.synchronize()
