"""Checkpoints of a trainer on disk: a folder each, complete or not there.

A folder holds the adapter in mlx-lm's format (any mlx-lm can load it), the trainer's arrays, and `state.json` with the
counters and a checksum of each file. It is written under another name, brought to the disk, and renamed; what a kill
leaves behind is ignored and swept away. Any thread; no MLX.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.lora.adapter import Adapter
from mlx_parallm.lora.adapter_files import CONFIG

log = logging.getLogger(__name__)

STATE = "state.json"
ADAPTER = "adapters.safetensors"
ARRAYS = "trainer.safetensors"
BUFFER = "buffer.jsonl"  # trajectories that wait
BEST = "best-performance"
LATEST = "latest"  # what a restart goes on from, written again and again
STEP = re.compile(r"step-(\d+)")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
PARTIAL = ".partial-"
OLD = ".old-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    state: dict[str, Any]
    arrays: dict[str, Any]

    @property
    def served_version(self) -> int | None:
        """The version that was served when it was written."""
        version = self.state.get("served_version", self.state.get("policy_version"))
        return None if version is None else int(version)

    def waiting(self) -> list[dict[str, Any]]:
        """Trajectories that were in the buffer."""
        path = self.path / BUFFER
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.is_file() else []


def adapter_files(adapter: Adapter, scale: float, rank: int, source: str) -> dict[str, bytes]:
    """An adapter as mlx-lm writes it."""
    tensors = {}
    for path, part in adapter.parts.items():
        tensors[f"{path}.lora_a"] = np.ascontiguousarray(part.a.T)
        tensors[f"{path}.lora_b"] = np.ascontiguousarray(part.b.T / scale)
        if part.m is not None:
            tensors[f"{path}.m"] = part.m
    blocks = {int(match[1]) for path in adapter.parts if (match := re.search(r"layers\.(\d+)\.", path))}
    keys = sorted({re.sub(r".*layers\.\d+\.", "", path) for path in adapter.parts})
    config = {
        "fine_tune_type": "dora" if adapter.dora else "lora",
        "model": source,
        "num_layers": len(blocks),
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys},
    }
    return {ADAPTER: save(tensors), CONFIG: json.dumps(config, indent=2).encode()}


def peft_files(adapter: Adapter, rank: int, source: str) -> dict[str, bytes]:
    """The same as PEFT writes it."""
    tensors = {}
    for path, part in adapter.parts.items():
        name = f"base_model.model.{path}"
        tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(part.a)
        tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(part.b)
        if part.m is not None:
            tensors[f"{name}.lora_magnitude_vector"] = part.m
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": rank,
        "lora_alpha": rank,  # the scale is in B already
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": adapter.dora,
        "inference_mode": True,
        "target_modules": sorted({path.rsplit(".", 1)[-1] for path in adapter.parts}),
    }
    return {"adapter_model.safetensors": save(tensors), CONFIG: json.dumps(config, indent=2).encode()}


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidRequestError(
            "a checkpoint's name has letters, digits, '.', '_' and '-', 100 at most", param="checkpoint_name"
        )


def check_new_name(name: str) -> None:
    """Checks a name that a client gives: names of what the server itself writes into the folder are refused."""
    check_name(name)
    if name in (LATEST, BEST) or STEP.fullmatch(name) or name.endswith(".jsonl"):
        raise InvalidRequestError(
            f"{name!r} is a name that the server uses itself, as {LATEST}, {BEST}, step-NUMBER and those that end with "
            ".jsonl: take another",
            param="checkpoint_name",
            code="invalid_value",
        )


class Checkpoints:
    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep
        self.saves = 0
        self.failures = 0

    def save(self, name: str, files: Mapping[str, bytes], arrays: Mapping[str, Any], state: Mapping[str, Any]) -> Path:
        """Writes a checkpoint, in the place of one that has this name."""
        check_name(name)
        contents = dict(files) | {ARRAYS: save(dict(arrays))}
        sums = {file: hashlib.blake2b(data, digest_size=16).hexdigest() for file, data in contents.items()}
        contents[STATE] = json.dumps({**state, "saved_at": time.time(), "files": sums}, indent=2).encode()
        partial = self.folder / f"{PARTIAL}{name}-{uuid.uuid4().hex[:8]}"
        try:
            partial.mkdir(parents=True)
            for file, data in contents.items():
                _write(partial / file, data)
            _sync(partial)
            self._put(partial, self.folder / name)
        except OSError:
            self.failures += 1
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self.saves += 1
        self._sweep()
        return self.folder / name

    def _put(self, partial: Path, target: Path) -> None:
        old = None
        if target.exists():
            old = self.folder / f"{OLD}{target.name}"
            shutil.rmtree(old, ignore_errors=True)
            os.rename(target, old)  # a kill from here on: `tidy` puts it back
        os.rename(partial, target)
        _sync(self.folder)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _sweep(self) -> None:
        """Keeps the numbered ones that were written last, and those with a name."""
        numbered = [name for _, name in self._by_time() if STEP.fullmatch(name)]
        for path in (self.folder / name for name in numbered[: max(0, len(numbered) - self._keep)]):
            gone = self.folder / f"{PARTIAL}gone-{uuid.uuid4().hex[:8]}"
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)

    def tidy(self) -> None:
        """Removes what writers that were killed have left. Before anybody writes."""
        for path in self.folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f"{OLD}*"):
            target = self.folder / path.name.removeprefix(OLD)
            if target.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.rename(path, target)

    def _by_time(self) -> list[tuple[float, str]]:
        """Returns when each was written, with its name; those that can't be read come first."""
        written = []
        for name in self.names():
            try:
                written.append((float(json.loads((self.folder / name / STATE).read_text())["saved_at"]), name))
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("checkpoint %s can't be read: %s", name, error)
                written.append((0.0, name))
        return sorted(written)

    def names(self) -> list[str]:
        """The oldest first."""
        if not self.folder.is_dir():
            return []
        paths = [path for path in self.folder.iterdir() if (path / STATE).is_file() and not path.name.startswith(".")]
        return [path.name for path in sorted(paths, key=lambda path: (path.stat().st_mtime, path.name))]

    def latest(self, check: Callable[[Mapping[str, Any]], object] = dict) -> Checkpoint | None:
        """The one that was written last and is whole; `check` raises where its state is of no use."""
        for _, name in reversed(self._by_time()):
            try:
                found = self.load(name)
                check(found.state)
                return found
            except InvalidRequestError as error:
                log.warning("%s", error.message)
            except (ValueError, TypeError) as error:
                log.warning("checkpoint %s can't be used: %s", name, error)
        return None

    def of_version(self, version: int | None) -> Checkpoint:
        """The one that was written when this version was served."""
        for name, written_of in reversed(self._versions()):
            if written_of == version:
                return self.load(name)
        raise InvalidRequestError(f"there is no version {version}, and no checkpoint of it", param="version")

    def last_version(self) -> int:
        """The newest number that any of them knows to have been given out."""
        return self._largest("last_version", "served_version", "policy_version")

    def last_journal(self) -> int:
        """The newest file of the journal that any of them names."""
        return self._largest("journal")

    def _largest(self, *fields: str) -> int:
        numbers = [0]
        for name in self.names():
            try:
                state = json.loads((self.folder / name / STATE).read_text())
                numbers += [int(state[field]) for field in fields if state.get(field) is not None]
            except (OSError, ValueError, AttributeError, TypeError):
                continue
        return max(numbers)

    def _versions(self) -> list[tuple[str, int]]:
        """Names with the versions they were written of, the oldest first."""
        versions = []
        for name in self.names():
            try:
                versions.append((name, int(json.loads((self.folder / name / STATE).read_text())["policy_version"])))
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return versions

    def load(self, name: str) -> Checkpoint:
        path = self.folder / name
        if not NAME.fullmatch(name) or not (path / STATE).is_file():
            raise InvalidRequestError(f"there is no checkpoint {name!r}", param="checkpoint_name")
        try:
            state = json.loads((path / STATE).read_text())
            for file, expected in state["files"].items():
                if hashlib.blake2b((path / file).read_bytes(), digest_size=16).hexdigest() != expected:
                    raise InvalidRequestError(f"checkpoint {name} is damaged: {file}")
            return Checkpoint(path, state, load_file(path / ARRAYS))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise InvalidRequestError(f"checkpoint {name} can't be read: {error}") from error


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        to_disk(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        to_disk(handle)
    finally:
        os.close(handle)


def to_disk(descriptor: int) -> None:
    """Writes a file through to the disk: on a Mac, fsync leaves data in the drive's own cache, and a checkpoint must
    outlast a loss of power."""
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        with contextlib.suppress(OSError):  # a network volume may not know it
            fcntl.fcntl(descriptor, full_sync)
            return
    os.fsync(descriptor)
