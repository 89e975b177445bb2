"""How much memory this process may hold: of the machine, of its control groups, of a Mac's working set."""

import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.devices.device import Device, this_device

UNLIMITED = 1 << 60  # cgroup v1 writes a huge number where there is no limit
SYSTEM_SHARE = 8  # a Mac keeps one part in so many for itself, and at least …
SYSTEM_BYTES = 2 << 30

log = logging.getLogger(__name__)


def usable_memory(device: Device) -> int:
    """Bytes that this process should hold at most, what it holds already included.

    On a GPU that is four fifths of its memory, whatever is free just now: other programs' memory is compressed or
    swapped when ours is used. On the CPU it is half of what is available.
    """
    if device.kind == "cpu":
        return mx.get_active_memory() + available_memory() // 2
    return largest_memory(device) * 8 // 10


def largest_memory(device: Device) -> int:
    """Bytes that it can hold, with nothing left for anybody else."""
    info = mx.device_info()
    if device.kind == "metal":
        return _working_set(info)
    if device.kind == "cuda":
        return int(info.get("total_memory", info.get("memory_size", 16 << 30)))
    return mx.get_active_memory() + available_memory()


def _working_set(info: Mapping[str, Any]) -> int:
    """Returns what macOS recommends; the CPU backend, on which tests stand in for Metal, has no recommendation."""
    return int(info.get("max_recommended_working_set_size", 0)) or available_memory() // 2


def room_at_hand() -> int:
    """Bytes that the next piece of work may take, where no limit is given. Cheap: it may be asked for each piece."""
    device = this_device()
    if device.kind == "cpu":
        return available_memory() // 2
    return max(0, usable_memory(device) - mx.get_active_memory())


def check_free_memory(needed: int) -> None:
    """Warns where fewer bytes are free than a model needs: it will load, and other programs will be swapped out."""
    if this_device().kind != "metal":
        return
    free = mac_available_memory()
    if free is not None and free < needed:
        log.warning(
            "%.1f GiB of memory are free and the model needs %.1f GiB: macOS will compress or swap out the memory of "
            "other programs, and the first requests will be slow; close programs, or choose a smaller model",
            free / (1 << 30),
            needed / (1 << 30),
        )


def wire_memory() -> int:
    """Keeps weights and caches from being paged out on a Mac, with room left for the system; returns how many bytes may
    be kept so, 0 elsewhere."""
    if this_device().kind != "metal":
        return 0
    info = mx.device_info()
    total = int(info.get("memory_size", 0)) or available_memory()
    wired = min(_working_set(info), total - max(SYSTEM_BYTES, total // SYSTEM_SHARE))
    mx.set_wired_limit(max(0, wired))
    return max(0, wired)


def available_memory() -> int:
    """Bytes that can be taken without swapping: of the machine, and of the container that we are in."""
    found = [_available_on_machine()]
    room = cgroup_room()
    return min(found + ([room] if room is not None else []))


def _available_on_machine() -> int:
    if sys.platform == "linux":
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    free = mac_available_memory()
    return free if free is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def mac_available_memory() -> int | None:
    """Returns the bytes that are free or can be had at once, as `vm_stat` counts pages; None where there is none."""
    if platform.system() != "Darwin":
        return None
    try:
        text = subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_vm_stat(text)


def parse_vm_stat(text: str) -> int | None:
    page = re.search(r"page size of (\d+) bytes", text)
    counts = {name.strip(): int(count) for name, count in re.findall(r"^(Pages [\w -]+):\s+(\d+)\.", text, re.M)}
    wanted = ("Pages free", "Pages inactive", "Pages speculative", "Pages purgeable")
    if page is None or not any(name in counts for name in wanted):
        return None
    return int(page[1]) * sum(counts.get(name, 0) for name in wanted)


def cgroup_room(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that the tightest of our control groups leaves; None where none has a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    rooms = [room for folder in _cgroup_folders(root, lines) if (room := _room_of(folder)) is not None]
    return min(rooms, default=None)


def _cgroup_folders(root: Path, lines: Sequence[str]) -> Iterator[Path]:
    """The folders of our groups and of all above them. In a container the path may be that of the host."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [root, root / "unified"]
        elif "memory" in controllers.split(","):
            bases = [root / "memory", root / controllers]
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for base in bases:
            for depth in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:depth])


def _room_of(folder: Path) -> int | None:
    for limit_file, used_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number_in(folder / limit_file)
        used = _number_in(folder / used_file)
        if limit is None or used is None or limit >= UNLIMITED:
            continue
        return max(0, limit - used + _stat(folder / "memory.stat", cache))
    return None


def _number_in(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _stat(file: Path, name: str) -> int:
    """File pages that the kernel gives up before it ends anybody."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
