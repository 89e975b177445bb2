"""Small kernels for the CPU, in C, built once with the machine's compiler into the user's cache folder.

MLX on Linux hands matrix products to a BLAS and computes the rest one element at a time: in a prompt's pass over
a small model that rest takes a third of the time. Without a compiler, or with PARALLM_NATIVE=none, MLX's own
operations are used, with the same results. `classes` says which layers use the kernels.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

from mlx_parallm.paths import user_cache

log = logging.getLogger(__name__)

FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffinite-math-only",
    "-fno-signed-zeros",
    "-pthread",
)
POINTER = ctypes.c_void_p
SIZE = ctypes.c_int64
NUMBER = ctypes.c_float
MAX_HELPERS = 7
FUNCTIONS = {
    "hire": (ctypes.c_int,),
    "attend": (POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, NUMBER),
    "attend_slots": (*[POINTER] * 10, NUMBER),
    "softmax": (POINTER, POINTER, POINTER, POINTER, NUMBER),
    "swiglu": (POINTER, POINTER, POINTER, SIZE),
    "rope": (POINTER, POINTER, POINTER, POINTER, POINTER, POINTER),
    "rms_norm": (POINTER, POINTER, POINTER, SIZE, SIZE, NUMBER),
    "add_low_rank": (POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, SIZE),
    "most_rows": (),
    "products": (POINTER, SIZE, SIZE, POINTER, SIZE),
    "attend_packed": (POINTER, POINTER, POINTER, POINTER, NUMBER),
    "rope_packed": (POINTER, POINTER, POINTER, POINTER),
    "activate": (POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, SIZE),
    "add_norm": (*[POINTER] * 7, SIZE, SIZE, NUMBER),
    "draw": (POINTER, POINTER, POINTER, POINTER, POINTER, SIZE, SIZE),
}


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The library; None where it can't be built."""
    if os.environ.get("PARALLM_NATIVE") == "none":
        return None
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        log.info("there is no C compiler: the CPU is used without our own kernels, somewhat slower")
        return None
    try:
        library = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        log.warning("the CPU kernels can't be built, so MLX's own are used: %s", getattr(error, "stderr", error))
        return None
    for name, types in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = ctypes.c_int
    library.hire(min(_threads() - 1, MAX_HELPERS))
    return library


def _threads() -> int:
    """Returns how many threads share a call: one for each core, or as many as OMP_NUM_THREADS leaves the BLAS, too."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(allowed)) if allowed.isdecimal() and int(allowed) else cores


def _built(compiler: str) -> Path:
    source = files(__package__).joinpath("kernels.c").read_bytes()
    folder = user_cache() / "native"
    library = folder / f"kernels-{_fingerprint(source)}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch, library.name)
        command = [compiler, *FLAGS, "-shared", "-fPIC", "-x", "c", "-", "-o", str(built), "-lm"]
        subprocess.run(command, input=source, check=True, capture_output=True)
        built.replace(library)  # at once: another process may be starting too
    return library


def _fingerprint(source: bytes) -> str:
    """Returns a fingerprint of the source and of the processor, since a home folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    return hashlib.sha256(source + repr((platform.machine(), FLAGS, flags)).encode()).hexdigest()[:16]
