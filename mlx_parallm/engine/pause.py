"""When the engine stands still: because there is nothing to do (`IdleState`), or because somebody asked (`Pause`).

The loop enters both between two steps; callers on other threads wait for them.
"""

import threading

from mlx_parallm.engine.accounts import Accounts
from mlx_parallm.engine.compute.runner import Runner
from mlx_parallm.engine.delivery import Delivery
from mlx_parallm.engine.pipeline import StepPipeline
from mlx_parallm.engine.scheduler import Scheduler
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.types import PauseMode


class IdleState:
    """Nothing runs and nothing waits."""

    def __init__(self, runner: Runner, accounts: Accounts) -> None:
        self._runner = runner
        self._accounts = accounts
        self._reached = threading.Event()

    @property
    def reached(self) -> bool:
        return self._reached.is_set()

    def wait(self, timeout: float) -> bool:
        return self._reached.wait(timeout)

    def enter(self) -> None:
        """Memory goes back, and whoever waits for that is told."""
        self._runner.release_memory()
        self._accounts.gauge()
        self._reached.set()

    def leave(self) -> None:
        self._reached.clear()

    def end(self) -> None:
        """The thread ends: nobody waits any longer."""
        self._reached.set()


class Pause:
    def __init__(
        self,
        thread: EngineThread,
        scheduler: Scheduler,
        pipeline: StepPipeline,
        delivery: Delivery,
        idle: IdleState,
    ) -> None:
        self.active = False
        self._thread = thread
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._delivery = delivery
        self._idle = idle
        self._decided = threading.Event()  # the pause has begun, or will not

    # From any thread but the engine's.

    def request(self, mode: PauseMode, timeout: float) -> bool:
        """Asks for a pause, and returns whether it came to one in this time."""
        self._decided.clear()
        self._thread.run_between_steps(lambda: self._begin(mode))
        if self._decided.wait(timeout):
            return self.active
        self.resume()
        return False

    def resume(self) -> None:
        self._thread.run_between_steps(self.end)

    # The engine thread from here on.

    def _begin(self, mode: PauseMode) -> None:
        if mode == "abort":
            self._delivery.abort_all()
        if mode == "wait" and not self.active:
            self._scheduler.admitting = False  # the turn in which nothing runs any more is the pause
            return
        self.enter()

    def enter(self) -> None:
        self.active = True
        self._pipeline.finish_all()
        if self._scheduler.idle:
            self._idle.enter()
        self._decided.set()

    def end(self) -> None:
        self.active = False
        self._scheduler.admitting = True
        self._decided.set()

    def release_waiting(self) -> None:
        """The thread ends: nobody waits any longer."""
        self._decided.set()
