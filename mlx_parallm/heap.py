"""Freed memory that the C library's allocator keeps for later, handed back to the system. No MLX."""

import ctypes
import sys


def trim() -> None:
    """Trims all threads' heaps: some milliseconds for each 100 MB. Allocators other than glibc's do it themselves."""
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:
            malloc_trim(0)
