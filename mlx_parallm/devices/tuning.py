"""The constants of a device's profile that are measured at a start, and the files that keep what was found.

`engine.compute.tuner` measures them. What it finds is kept per machine, model and MLX version, so that later starts
work in the same way; `--profile` names a file to take instead.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from mlx_parallm.devices.device import device_name
from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.errors import ConfigError
from mlx_parallm.paths import user_cache

log = logging.getLogger(__name__)

FORM = 2  # of what is kept: another one is measured anew
MOST_STEPS_IN_FLIGHT = 4
MOST_STEPS = 64  # of `slot_steps`
MOST_ROWS = 4096
MOST_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Tuning:
    """The same fields as `DeviceProfile` has."""

    steps_in_flight: int
    slot_steps: tuple[int, ...]
    view_step: int
    prefill_step: int | None = None
    exact_rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least, most in (
            ("steps_in_flight", 0, MOST_STEPS_IN_FLIGHT),
            ("view_step", 8, MOST_TOKENS),
            ("prefill_step", 16, MOST_TOKENS),
        ):
            value = getattr(self, name)
            if name == "prefill_step" and value is None:
                continue
            if not _is_whole(value) or not least <= value <= most:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number from {least} to {most}")
        rows = self.exact_rows
        if rows and (len(rows) > MOST_STEPS or not _rise(rows) or rows[0] < 1 or rows[-1] > MOST_ROWS):
            raise ConfigError(f"exact_rows must be at most {MOST_STEPS} rising whole numbers from 1 to {MOST_ROWS}")
        steps = self.slot_steps
        if not steps or len(steps) > MOST_STEPS or not _rise(steps) or steps[0] != 1 or steps[-1] > MOST_ROWS:
            raise ConfigError(
                f"slot_steps must be at most {MOST_STEPS} rising whole numbers from 1 to {MOST_ROWS}, beginning with 1"
            )

    @classmethod
    def of(cls, profile: DeviceProfile) -> Self:
        return cls(
            profile.steps_in_flight, profile.slot_steps, profile.view_step, profile.prefill_step, profile.exact_rows
        )

    @classmethod
    def parse(cls, document: Any) -> Self:
        """Reads what `as_json` gives; other fields of `/server_info` may be beside it."""
        if not isinstance(document, dict):
            raise ConfigError("it must be a JSON object, such as `tuning` in /server_info")
        missing = [name for name in ("steps_in_flight", "slot_steps", "view_step") if name not in document]
        if missing:
            raise ConfigError(f"{missing[0]} is missing")
        rows = document.get("exact_rows", [])
        for name, value in (("slot_steps", document["slot_steps"]), ("exact_rows", rows)):
            if not isinstance(value, list):
                raise ConfigError(f"{name} must be a list")
        return cls(
            document["steps_in_flight"],
            tuple(document["slot_steps"]),
            document["view_step"],
            document.get("prefill_step"),
            tuple(rows),
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "slot_steps": list(self.slot_steps), "exact_rows": list(self.exact_rows)}

    def applied_to(self, profile: DeviceProfile) -> DeviceProfile:
        return replace(
            profile,
            steps_in_flight=self.steps_in_flight,
            slot_steps=self.slot_steps,
            view_step=self.view_step,
            prefill_step=self.prefill_step,
        )


def read_profile(path: str) -> Tuning:
    """Reads the file that `--profile` names."""
    try:
        return Tuning.parse(json.loads(Path(path).expanduser().read_text()))
    except OSError as error:
        raise ConfigError(f"--profile: {path} can't be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--profile: {path} is not JSON: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"--profile: {path} is no tuning profile: {error}") from None


def identity_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns whatever decides what is fast: `model` describes the model and how it is served."""
    return {
        "form": FORM,
        "device": device_name(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "mlx": version("mlx"),
        **model,
    }


class TuningFiles:
    """What earlier starts have found: a file for each machine, model and MLX version."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or user_cache() / "profiles"

    def find(self, identity: Mapping[str, Any]) -> Tuning | None:
        """Returns what is kept; None where there is nothing, or nothing that can be used."""
        path = self._path(identity)
        try:
            return Tuning.parse(json.loads(path.read_text())["tuning"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            log.warning("%s can't be used, and what it says is measured anew: %s", path, error)
            return None

    def keep(self, identity: Mapping[str, Any], tuning: Tuning, measured: Mapping[str, Any]) -> None:
        """Writes the file whole or not at all; a disk that takes nothing costs the next start its measurement."""
        path = self._path(identity)
        document = {"tuning": tuning.as_json(), "measured": measured, "identity": dict(identity)}
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial.write_text(json.dumps(document, indent=1))
            partial.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            log.warning("%s can't be written: the next start measures again: %s", path, error)

    def _path(self, identity: Mapping[str, Any]) -> Path:
        key = json.dumps(identity, sort_keys=True, default=str)
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _rise(numbers: tuple[object, ...]) -> bool:
    whole = [number for number in numbers if isinstance(number, int) and _is_whole(number)]
    return len(whole) == len(numbers) and whole == sorted(set(whole))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
