"""The profile that an engine starts with: from `--profile`, from an earlier start, or measured now."""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.profile import CHUNK, DeviceProfile
from mlx_parallm.devices.tuning import Tuning, TuningFiles, identity_of, read_profile
from mlx_parallm.engine.compute.exactness import Exactness
from mlx_parallm.engine.compute.tuner import Tuner
from mlx_parallm.errors import ConfigError
from mlx_parallm.kv.batch import BatchCache
from mlx_parallm.kv.slots import SlotCache
from mlx_parallm.models.forward import Forward
from mlx_parallm.models.language import LanguageModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tuned:
    profile: DeviceProfile
    source: str = "the device's own"  # for people

    def as_json(self) -> dict[str, Any]:
        return {**Tuning.of(self.profile).as_json(), "source": self.source}


NOT_EXACT = (
    "--exact always: {name} in {precision} gives a request other numbers beside other requests, whatever is tried on "
    "this device. Give --exact auto, or --dtype float32, which is exact and takes twice the memory of 16 bits"
)


# Chooses the profile for a model that runs in slots; what the device has is where it begins.
Tune = Callable[[LanguageModel, Forward, BatchCache, DeviceProfile], Tuned]


def tuned_by(config: ServeConfig, files: TuningFiles | None = None) -> Tune:
    """Reads `--profile` at once, so that a file that is wrong ends a start before a model is loaded."""
    path = config.batch.profile
    pinned = None if path is None else read_profile(path)

    def tune(model: LanguageModel, forward: Forward, batch: BatchCache, profile: DeviceProfile) -> Tuned:
        cache = cast(SlotCache, batch)
        if pinned is not None:
            found, source = pinned, f"--profile {path}"
        else:
            found, source = _kept_or_measured(model, forward, cache, profile, config, files or TuningFiles())
        exact_rows = found.exact_rows if can_be_exact(model, config) else ()
        tuned = found.applied_to(profile).exactly(exact_rows, chunk_of(config))
        cache.adopt_method(
            replace(cache.method, slot_steps=tuned.slot_steps, view_step=tuned.view_step, pass_rows=tuned.exact_rows)
        )
        log.info("tuning of %s, %s: %s", model.name, source, found.as_json())
        return Tuned(tuned, source)

    return tune


def _kept_or_measured(
    model: LanguageModel,
    forward: Forward,
    cache: SlotCache,
    profile: DeviceProfile,
    config: ServeConfig,
    files: TuningFiles,
) -> tuple[Tuning, str]:
    shape = json.dumps(model.config, sort_keys=True, default=str)
    identity = identity_of(
        {
            "model": hashlib.sha256(shape.encode()).hexdigest(),
            "precision": model.precision,
            "weights": model.weight_bytes,
            "rows": cache.free,
            "piece": config.batch.prefill_step_size,
            "profile": str(profile),
            "exact": "off" if excluded(config) else config.batch.exact,
        }
    )
    kept = files.find(identity)
    if kept is not None:
        return kept, "measured at an earlier start"
    tuner = Tuner(forward, cache, profile, config.batch.prefill_step_size)
    found = tuner.run()
    measured = dict(tuner.measured)
    if can_be_exact(model, config):
        exactness = Exactness(forward, cache, model.vocab_size)
        found = replace(found, exact_rows=exactness.rows(always=config.batch.exact == "always"))
        measured["exact_cost"] = round(exactness.cost, 3)
    files.keep(identity, found, measured)
    return found, "measured at this start"


def chunk_of(config: ServeConfig) -> int:
    """Returns how many tokens a piece of a prompt has where equal texts are computed in equal shapes: whole blocks."""
    block = config.cache.block_size
    return max(block, min(CHUNK, config.batch.prefill_step_size) // block * block)


def excluded(config: ServeConfig) -> str:
    """Returns the flag with which passes can't be exact in 16 bits; an empty string where there is none."""
    if config.cache.kv_bits is not None:  # what is read back is not what was computed
        return "--kv-bits"
    return "--speculation copy" if config.batch.speculation == "copy" else ""  # verified in passes of other shapes


def can_be_exact(model: LanguageModel, config: ServeConfig) -> bool:
    """Returns whether to look for a way in which rows don't change each other's numbers. float32 needs none."""
    return config.batch.exact != "off" and model.precision != "float32" and not excluded(config)


def check_exact(model: LanguageModel, config: ServeConfig, profile: DeviceProfile) -> None:
    """What `--exact always` asks for, or no start."""
    if config.batch.exact != "always" or model.precision == "float32" or profile.exact_rows:
        return
    if flag := excluded(config):
        raise ConfigError(
            f"--exact always and {flag} exclude each other for a model in {model.precision}: leave one of them out, "
            "or give --dtype float32"
        )
    raise ConfigError(NOT_EXACT.format(name=model.name, precision=model.precision))
