"""Updates a session by itself, on a thread: whenever enough trajectories are ready in its buffer."""

import logging
import threading
import time
from collections.abc import Callable

from mlx_parallm.errors import UnavailableError
from mlx_parallm.training.rl.buffer import Buffer

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.5  # between looks at whether it is to stop
FAILURE_SECONDS = 1.0  # before another attempt
STOP_SECONDS = 60.0  # for an update that runs to end


class BufferFollower:
    def __init__(self, name: str, buffer: Buffer, ready: int, update: Callable[[], object]) -> None:
        """`ready`: trajectories that make an update."""
        self._name = name
        self._buffer = buffer
        self._ready = ready
        self._update = update
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"train-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stops after the update that runs."""
        self._stopped.set()
        self._buffer.wake()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._stopped.is_set():
            if not self._buffer.wait(self._ready, WAIT_SECONDS) or self._stopped.is_set():
                continue
            try:
                self._update()
            except UnavailableError:
                return
            except Exception:  # the next may do better
                log.exception("an update of %s has failed", self._name)
                time.sleep(FAILURE_SECONDS)
