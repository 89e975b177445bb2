"""Threads share the C library's heaps, where it is glibc."""

import os
import platform
import subprocess
import sys

import pytest

HEAPS_OF_EIGHT_THREADS = """
import ctypes, re, threading
from mlx_parallm import heap
heap.share_heaps()
kept, ready, done = [], threading.Barrier(9), threading.Event()
def work():
    kept.extend(bytes(2000) for _ in range(100))
    ready.wait()
    done.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
ready.wait()
libc, opened = ctypes.CDLL(None), ctypes.c_void_p()
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fopen.restype = ctypes.c_void_p
libc.fopen.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
libc.fclose.argtypes = [ctypes.c_void_p]
import sys
file = libc.fopen(sys.argv[1].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
print(open(sys.argv[1]).read().count("<heap "))
done.set()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heaps")
@pytest.mark.parametrize(("said", "expected"), [(None, range(1, 3)), ("6", range(3, 7))])
def test_threads_share_heaps_unless_the_environment_says_how_many(
    said: str | None, expected: range, tmp_path: object
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    if said is not None:
        environment["MALLOC_ARENA_MAX"] = said
    command = [sys.executable, "-c", HEAPS_OF_EIGHT_THREADS, f"{tmp_path}/heaps.xml"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(ended.stdout) in expected
