"""What MLX runs on here, as one object: whoever must know what differs between the CPU, Metal and CUDA reads it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlx_parallm.devices.profile import DeviceKind, DeviceProfile


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device: choices that change speed and memory, never answers."""

    kind: DeviceKind
    profile: DeviceProfile  # how the engine works on it
    float32: bool = False  # it is slow with anything else, so that weights become float32 when they are loaded
    keeps_quantised: bool = False  # quantised weights are its fast form; else they are expanded
    native: bool = False  # C kernels of our own, where there is a compiler
    cuda: bool = False  # CUDA kernels of our own
    metal: bool = False  # Metal kernels of our own, where they are right and worth it
    builds_kernels: bool = False  # at their first use, so that a start uses them once
    builds_slowly: bool = False  # … each in seconds, and one at a time in a process
    fused_gradient: bool = False  # attention's backward pass keeps no scores, which grow with the square of a text
    recomputes: bool = False  # blocks are computed again in a backward pass, unless a run says otherwise
    plans_shapes: bool = False  # each new shape costs tens of milliseconds
    kept_share: int = 6  # one part in so many of the memory at hand is kept for what comes next,
    kept_of_rows: int = 4  # and no more than one part in so many of what rows may hold

    def weight_bits(self, stored: float) -> float:
        """Returns how many bits a weight takes in memory that is quantised to `stored` bits in its file."""
        if self.keeps_quantised:
            return stored
        return 32 if self.float32 else 16


DEVICES: Mapping[DeviceKind, Device] = {
    "cpu": Device("cpu", DeviceProfile.of("cpu"), float32=True, native=True, kept_share=12, kept_of_rows=8),
    "metal": Device(
        "metal", DeviceProfile.of("metal"), metal=True, keeps_quantised=True, builds_kernels=True, recomputes=True
    ),
    "cuda": Device(
        "cuda",
        DeviceProfile.of("cuda"),
        cuda=True,
        builds_kernels=True,
        builds_slowly=True,
        plans_shapes=True,
        fused_gradient=True,
    ),
}


# The environment variable with which tests have MLX's CPU backend worked on as another kind of device.
FORCED = "MLX_PARALLM_TEST_DEVICE"


def this_device() -> Device:
    """MLX's default device."""
    forced = os.environ.get(FORCED)
    if forced is not None:
        return DEVICES[cast(DeviceKind, forced)]
    if mx.default_device().type == mx.DeviceType.cpu:
        return DEVICES["cpu"]
    return DEVICES["metal" if mx.metal.is_available() else "cuda"]


def device_name() -> str:
    info = mx.device_info()
    return f"{info.get('device_name', info.get('architecture', 'unknown'))} ({this_device().kind})"
