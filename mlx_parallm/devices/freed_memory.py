"""Freed memory that MLX keeps for what comes next, and how it goes back to the system."""

import threading

import mlx.core as mx

from mlx_parallm import heap


def give_memory_back() -> None:
    """Hands freed memory to the system: what MLX keeps for later, and what glibc's allocator keeps of that."""
    mx.clear_cache()
    heap.trim()


class AllocatorCache:
    """Freed memory that MLX keeps for what comes next: the whole process's, so there is one of these.

    MLX takes a freed buffer back while it keeps less than its limit, and lets hardly anything that it keeps go for it.
    At the limit it is full of sizes that nobody asks for, and every step asks the system for its memory anew and frees
    it again. So the limit is kept out of reach: near it, what has lain there longest goes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[object, int] = {}
        self._limit = 0
        self._before = 0  # MLX's limit before anybody asked

    def allow(self, owner: object, size: int) -> None:
        """So much may be kept; of several that ask, the one that needs most decides."""
        with self._lock:
            first = not self._asked
            self._asked[owner] = size
            self._limit = max(self._asked.values())
            before = mx.set_cache_limit(self._limit)
            self._before = before if first else self._before

    def release(self, owner: object) -> None:
        """This one needs nothing any more; behind the last, the limit is what it was before the first."""
        with self._lock:
            if self._asked.pop(owner, None) is not None:
                self._limit = max(self._asked.values(), default=self._before)
                mx.set_cache_limit(self._limit)
        give_memory_back()

    def trim(self) -> None:
        """Lets what has lain longest go near the limit. To be called often: it costs nothing where nothing is to do."""
        if mx.get_cache_memory() <= self._limit // 4 * 3:
            return
        with self._lock:
            mx.set_cache_limit(self._limit // 2)
            mx.array(0)  # some allocators look at the limit when they are asked for memory
            mx.set_cache_limit(self._limit)


process_allocator_cache = AllocatorCache()
