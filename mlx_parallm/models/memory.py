"""How much memory the process may hold, and how it is divided. One budget for all models, made once they are loaded.

The limit is what the machine leaves us: on a Mac four fifths of the GPU's working set, on CUDA of the card's memory, on
the CPU half of what is available, within the limits of the container (cgroups v2 and v1). Of what the weights leave,
parts go to training, to adapters on the device and to freed memory that MLX keeps; the rest is shared by the models,
two thirds for running rows and one third for cached blocks. The engine and `server_process` call this.
"""

from collections.abc import Sequence

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import Device, this_device
from mlx_parallm.devices.machine_memory import largest_memory, usable_memory
from mlx_parallm.errors import MemoryLimitError, ModelLoadError
from mlx_parallm.metrics import MemoryPlan

LORA_RANK = 16  # of the adapters that room is kept for


def memory_limit(config: ServeConfig) -> int:
    """Bytes that the process may hold: what the flag says, or what the machine leaves us."""
    return config.cache.memory_limit or usable_memory(this_device())


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
    device = this_device()
    limit = limit or memory_limit(config)
    held = sum(weights) + predictors
    at_hand = limit - held
    if at_hand <= 0:
        raise MemoryLimitError(
            f"the weights take {size_text(held)} and the process may hold {size_text(limit)}: "
            f"--memory-limit {size_flag(held * 5 // 4)} would leave some for requests"
        )
    kept = at_hand // device.kept_share
    if config.cache.kv_cache_memory:  # rows that may hold little leave little behind
        kept = min(kept, config.cache.kv_cache_memory // device.kept_of_rows)
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
    _check_flags(plans, config, device)
    return plans


def _check_flags(plans: Sequence[MemoryPlan], config: ServeConfig, device: Device) -> None:
    """What flags ask for must be there: a budget that the machine can't hold ends in an out-of-memory kill."""
    if not config.cache.kv_cache_memory or config.cache.memory_limit:
        return
    asked = sum(plan.weights + plan.rows for plan in plans)
    most = largest_memory(device)
    if asked > most:
        room = max(0, most - sum(plan.weights for plan in plans))
        raise ModelLoadError(
            f"--kv-cache-memory {size_flag(config.cache.kv_cache_memory)} is more than there is: "
            f"at most {size_flag(room)} is left beside the weights"
        )


def size_text(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def size_flag(count: int) -> str:
    """Formats a size as a flag takes it, rounded up."""
    return f"{-(-count // (1 << 20))}MiB"
