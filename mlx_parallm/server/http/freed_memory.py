"""What long bodies leave behind is handed back to the system; `middleware.BodyLimit` tells of bodies.

A body of megabytes is read on a thread, and glibc keeps up to 64 MB of each thread's freed memory.
"""

import asyncio

from mlx_parallm import heap

BYTES = 4 << 20  # of bodies between two trims
SECONDS = 2.0  # from such a body's end until then: what came of it is freed first


class FreedMemory:
    def __init__(self) -> None:
        self._bytes = 0
        self._scheduled = False

    def note(self, body_bytes: int) -> None:
        """A request with such a body has ended. To be called on the event loop."""
        self._bytes += body_bytes
        if self._bytes >= BYTES and not self._scheduled:
            self._scheduled = True
            loop = asyncio.get_running_loop()
            loop.call_later(SECONDS, loop.run_in_executor, None, self._trim)

    def _trim(self) -> None:
        self._bytes = 0
        self._scheduled = False
        heap.trim()
