"""The other processes that hold parts of the same model, as the engine sees them. `rank_group` has them.

Only rank 0 has an engine. The others have the parts that compute, and do what rank 0 does with its own: every pass is
computed by all of them together. Rank 0 alone schedules and samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.nn as nn

from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.engine.compute.tuned import Tuned
from mlx_parallm.kv.batch import BatchCache
from mlx_parallm.kv.prefix import Prefix
from mlx_parallm.lora.layout import Layout
from mlx_parallm.lora.split import Split
from mlx_parallm.metrics import MemoryPlan
from mlx_parallm.models.forward import Forward
from mlx_parallm.models.language import LanguageModel


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """The parts that compute with a model, and hold what they have computed: every rank has its own."""

    forward: Forward
    cache: BatchCache
    prefix: Prefix | None
    tuned: Tuned  # the profile to work by


class Ranks(Protocol):
    """Engine thread only, but for `watch`."""

    @property
    def size(self) -> int: ...

    @property
    def adapter_split(self) -> Split:
        """The part of an adapter that is this rank's; known once the model is split."""
        ...

    def split(self, module: nn.Module) -> None:
        """Leaves a module this rank's part of it. The weights have not been read yet."""
        ...

    def profile(self, profile: DeviceProfile) -> DeviceProfile:
        """Returns the profile by which to work on this device in step with the others."""
        ...

    def agree(self, model: LanguageModel, plan: MemoryPlan) -> MemoryPlan:
        """A plan that all ranks have the memory for; raises where they do not serve the same model in the same way."""
        ...

    def lead(self, parts: DeviceParts, layout: Layout) -> DeviceParts:
        """The same parts: what is done with them from now on, the other ranks do with theirs."""
        ...

    def watch(self, on_lost: Callable[[Exception], None]) -> None:
        """Has it called, on another thread, when a rank is gone: a pass under way may never end."""
        ...

    def cause_of(self, error: Exception) -> Exception:
        """Returns what stands behind a fault: a rank that is gone, where one is; else the fault itself."""
        ...

    def close(self) -> None:
        """The others may end."""
        ...
