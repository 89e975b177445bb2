"""What a start tells people of a model, as label and value. The engine calls it; `server.banner` prints it."""

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import device_name
from mlx_parallm.kv.batch import BatchCache
from mlx_parallm.kv.prefix import Prefix
from mlx_parallm.metrics import MemoryPlan
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.memory import size_text


def describe(
    model: LanguageModel, cache: BatchCache, prefix: Prefix | None, plan: MemoryPlan, config: ServeConfig
) -> list[tuple[str, str]]:
    return [
        ("model", f"{model.name} ({model.precision}, {size_text(model.weight_bytes)} of weights)"),
        ("device", device_name()),
        ("context", f"{model.context_length} tokens"),
        ("batch", f"up to {config.batch.max_batch_size} answers at once, {cache.described}"),
        ("exactness", _exactness(model.precision)),
        ("memory", _memory(plan)),
        ("cache", _cache(prefix, config)),
    ]


def _exactness(precision: str) -> str:
    if precision == "float32":
        return "an answer is the same alone and in a batch, token for token"
    return f"in {precision}, rounding differs between batch sizes: an answer may differ from the one computed alone"


def _memory(plan: MemoryPlan) -> str:
    parts = {
        "weights": plan.weights,
        "running rows": plan.rows,
        "cached prompts": plan.blocks,
        "adapters": plan.adapters,
        "training": plan.training,
        "freed memory that MLX keeps": plan.kept,
    }
    told = ", ".join(f"{size_text(part)} {name}" for name, part in parts.items() if part)
    return f"at most {size_text(plan.limit)} in all: {told}"


def _cache(prefix: Prefix | None, config: ServeConfig) -> str:
    if prefix is None:
        return "prompts are not kept (--num-blocks 0)"
    disk, kept = prefix.disk, f"prompts are kept in memory ({size_text(prefix.max_bytes)})"
    if disk is None:
        return f"{kept}; not on SSD{' (--no-ssd)' if not config.cache.ssd else ''}"
    if disk.problem is not None:
        return f"{kept}; not on SSD: {disk.problem}"
    return f"{kept} and on SSD in {disk.folder} (at most {config.cache.ssd_max_bytes / 1e9:g} GB)"
