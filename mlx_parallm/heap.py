"""The C library's heaps: how many there are, and freed memory that goes back to the system. No MLX."""

import ctypes
import os
import sys
from typing import Any

M_ARENA_MAX = -8  # of glibc's malloc.h
HEAPS = 2  # as many as threads of ours allocate much at once: the engine's, and one of training or of long bodies


def share_heaps() -> None:
    """Has threads share a few heaps from now on, unless MALLOC_ARENA_MAX says how many.

    glibc makes one for each of up to eight threads a core, and each keeps pages for what lies scattered in it: after
    some thousand requests 40 MB and more, which grew for hours.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        _call("mallopt", M_ARENA_MAX, HEAPS)


def trim() -> None:
    """Trims all heaps: some milliseconds for each 100 MB. Allocators other than glibc's do it themselves."""
    _call("malloc_trim", 0)


def _call(name: str, *args: Any) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*args)
