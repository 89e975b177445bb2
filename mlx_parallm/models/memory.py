"""How much memory the process may hold, and how it is divided. One budget for all models, made once they are loaded.

The limit is what the machine leaves us: on a Mac the GPU's working set and what is free, on CUDA the card's memory, on
the CPU half of what is available, within the limits of the container (cgroups v2 and v1). Of what the weights leave,
parts go to training, to adapters on the device and to freed memory that MLX keeps; the rest is shared by the models,
two thirds for running rows and one third for cached blocks. The engine and `server.run` call this.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import DeviceKind, device_kind
from mlx_parallm.errors import MemoryLimitError, ModelLoadError
from mlx_parallm.metrics import MemoryPlan

UNLIMITED = 1 << 60  # cgroup v1 writes a huge number where there is no limit
LORA_RANK = 16  # of the adapters that room is kept for
SYSTEM_SHARE = 8  # a Mac keeps one part in so many for itself, and at least …
SYSTEM_BYTES = 2 << 30


def memory_limit(config: ServeConfig) -> int:
    """Bytes that the process may hold: what the flag says, or what the machine leaves us."""
    return config.cache.memory_limit or usable_memory(device_kind())


def plan_memory(
    weights: Sequence[int],
    adapters: Sequence[int],
    config: ServeConfig,
    *,
    limit: int | None = None,
    predictors: int = 0,
) -> list[MemoryPlan]:
    """A plan for each model, given the bytes of its weights and of one adapter of it; the first is the one that trains.

    `limit`: of the whole process, where it is known already. `predictors`: what other models hold, and compute in.
    Raises where what is asked for can't work, with the number that would.
    """
    kind = device_kind()
    limit = limit or memory_limit(config)
    held = sum(weights) + predictors
    at_hand = limit - held
    if at_hand <= 0:
        raise MemoryLimitError(
            f"the weights take {size_text(held)} and the process may hold {size_text(limit)}: "
            f"--memory-limit {size_flag(held * 5 // 4)} would leave some for requests"
        )
    kept = at_hand // (12 if kind == "cpu" else 6)
    if config.cache.kv_cache_memory:  # rows that may hold little leave little behind
        kept = min(kept, config.cache.kv_cache_memory // (8 if kind == "cpu" else 4))
    training = at_hand // 4 if config.trains else 0
    resident = [min(config.adapters.max_loras * size, at_hand // 8 // len(weights)) for size in adapters]
    rest = max(0, at_hand - kept - training - sum(resident)) // len(weights)
    plans = []
    for number, (own, room) in enumerate(zip(weights, resident, strict=True)):
        rows = config.cache.kv_cache_memory // len(weights) if config.cache.kv_cache_memory else rest * 2 // 3
        blocks = 0 if config.cache.off else rows // 2
        plans.append(
            MemoryPlan(
                limit=limit,
                weights=own,
                rows=rows,
                blocks=blocks,
                adapters=room,
                training=training if number == 0 else 0,
                kept=kept,
            )
        )
    _check_flags(plans, config, kind)
    return plans


def _check_flags(plans: Sequence[MemoryPlan], config: ServeConfig, kind: DeviceKind) -> None:
    """What flags ask for must be there: a budget that the machine can't hold ends in an out-of-memory kill."""
    if not config.cache.kv_cache_memory or config.cache.memory_limit:
        return
    asked = sum(plan.weights + plan.rows for plan in plans)
    most = largest_memory(kind)
    if asked > most:
        room = max(0, most - sum(plan.weights for plan in plans))
        raise ModelLoadError(
            f"--kv-cache-memory {size_flag(config.cache.kv_cache_memory)} is more than there is: "
            f"at most {size_flag(room)} is left beside the weights"
        )


def usable_memory(kind: DeviceKind) -> int:
    """Bytes that this process should hold at most, what it holds already included."""
    info, held = mx.device_info(), mx.get_active_memory()
    if kind == "metal":
        working_set = int(info["max_recommended_working_set_size"])
        free = mac_available_memory()
        return min(working_set * 8 // 10, held + free * 9 // 10) if free is not None else working_set * 8 // 10
    if kind == "cuda":
        return int(info.get("total_memory", info.get("memory_size", 16 << 30))) * 8 // 10
    return held + available_memory() // 2


def largest_memory(kind: DeviceKind) -> int:
    """Bytes that it can hold, with nothing left for anybody else."""
    info, held = mx.device_info(), mx.get_active_memory()
    if kind == "metal":
        return int(info["max_recommended_working_set_size"])
    if kind == "cuda":
        return int(info.get("total_memory", info.get("memory_size", 16 << 30)))
    return held + available_memory()


def wire_memory() -> int:
    """On a Mac, keeps weights and caches from being paged out, with room left for the system; the bytes that may be."""
    if device_kind() != "metal":
        return 0
    info = mx.device_info()
    total = int(info["memory_size"])
    wired = min(int(info["max_recommended_working_set_size"]), total - max(SYSTEM_BYTES, total // SYSTEM_SHARE))
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
    """Of what `vm_stat` counts, the pages that are free or can be had at once; None where there is none."""
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
        limit, used = _number_in(folder / limit_file), _number_in(folder / used_file)
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


def size_text(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def size_flag(count: int) -> str:
    """As a flag takes it, rounded up."""
    return f"{-(-count // (1 << 20))}MiB"
