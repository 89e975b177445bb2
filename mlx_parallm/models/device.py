"""What MLX runs on here, and how much memory there is for keys and values. Read by the engine at start."""

import ctypes
import os
import sys
from typing import Literal

import mlx.core as mx

DeviceKind = Literal["cpu", "metal", "cuda"]


def device_kind() -> DeviceKind:
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def device_name() -> str:
    info = mx.device_info()
    return f"{info.get('device_name', info.get('architecture', 'unknown'))} ({device_kind()})"


def memory_at_hand() -> int:
    """Bytes that may be taken beside what is in use: for keys and values once the weights are loaded, for updates."""
    info = mx.device_info()
    kind = device_kind()
    if kind == "metal":
        limit = int(info["max_recommended_working_set_size"])
        return max(limit * 8 // 10 - mx.get_active_memory(), limit // 20)
    if kind == "cuda":
        total = int(info.get("total_memory", info.get("memory_size", 16 << 30)))
        return max(total * 8 // 10 - mx.get_active_memory(), total // 20)
    return _available_memory() // 2


def give_memory_back() -> None:
    """Hands freed memory to the system: what MLX keeps for later, and what glibc's allocator keeps of that."""
    mx.clear_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _available_memory() -> int:
    if sys.platform == "linux":
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
