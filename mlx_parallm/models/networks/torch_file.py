"""Reads the tensors of a file that torch.save has written, without torch and without running what is in it.

Such a file is a zip archive: a pickle, whose tensors refer to files of raw numbers beside it. The pickle is read with
an unpickler that knows dicts, tensors and nothing else.
"""

import collections
import io
import math
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.tensors import Array

STORAGES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "BFloat16Storage": "<u2",  # the upper half of a float32
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "|i1",
    "ByteStorage": "|u1",
    "BoolStorage": "|b1",
}


@dataclass(frozen=True, slots=True)
class StorageType:
    name: str


def read_torch(path: Path) -> Any:
    """Returns what was saved, with arrays in place of tensors; ModelLoadError."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive)
    except zipfile.BadZipFile as error:
        raise ModelLoadError(
            f"{path} is no file of torch.save (1.6 or newer): {error}; save it as safetensors"
        ) from error
    except (pickle.UnpicklingError, ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError) as error:
        raise ModelLoadError(
            f"{path} can't be read as a state_dict: {error}; save model.state_dict(), not the model"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"{path} can't be read: {error.strerror or error}") from error


def _read(archive: zipfile.ZipFile) -> Any:
    names = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
    if len(names) != 1:
        raise zipfile.BadZipFile("it has no data.pkl")
    folder = names[0].rpartition("/")[0]
    prefix = f"{folder}/" if folder else ""
    if f"{prefix}byteorder" in archive.namelist() and archive.read(f"{prefix}byteorder").strip() != b"little":
        raise ValueError("its numbers are big-endian")
    return TensorUnpickler(archive, prefix, archive.read(names[0])).load()


class TensorUnpickler(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, prefix: str, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._archive = archive
        self._prefix = prefix
        self._storages: dict[str, Array] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "collections" and name == "OrderedDict":
            return collections.OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            return rebuild_tensor if name == "_rebuild_tensor_v2" else rebuild_parameter
        if module == "torch" and name in STORAGES:
            return StorageType(name)
        if module == "torch" and name == "Size":
            return tuple
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, and only tensors are read")

    def persistent_load(self, pid: Any) -> Array:
        kind = pid[0]
        storage = pid[1]
        key = pid[2]
        if kind != "storage" or not isinstance(storage, StorageType) or not isinstance(key, str):
            raise pickle.UnpicklingError(f"it refers to {pid!r:.60}")
        if key not in self._storages:
            entry = self._archive.getinfo(f"{self._prefix}data/{key}")
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its numbers are compressed")
            array = np.frombuffer(self._archive.read(entry), STORAGES[storage.name])
            if storage.name == "BFloat16Storage":
                array = (array.astype(np.uint32) << 16).view(np.float32)
            self._storages[key] = array
        return self._storages[key]


def rebuild_tensor(storage: Array, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Array:
    if offset < 0 or len(size) != len(stride) or min((*size, *stride), default=0) < 0:
        raise ValueError("a tensor has a negative size or stride")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if math.prod(size) and last >= len(storage):
        raise ValueError("a tensor reaches beyond its numbers")
    if not math.prod(size):
        return np.zeros(size, storage.dtype)
    strides = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, strides).copy()


def rebuild_parameter(data: Array, *_: Any) -> Array:
    return data


def state_dict(saved: Any, key: str | None = None) -> dict[str, Array]:
    """The tensors by name: of what was saved, of its part `key`, or of the only part that has any."""
    if not isinstance(saved, Mapping):
        raise ModelLoadError(f"the file holds a {type(saved).__name__}, not a state_dict")
    if key is not None:
        if not isinstance(part := saved.get(key), Mapping):
            raise ModelLoadError(f"the file has no dict {key!r}; it has {', '.join(map(str, saved))[:300]}")
        return _tensors(part)
    if found := _tensors(saved):
        return found
    parts = {
        str(name): tensors for name, part in saved.items() if isinstance(part, Mapping) and (tensors := _tensors(part))
    }
    if not parts:
        raise ModelLoadError("the file has no dict of tensors in it")
    if len(parts) > 1:
        raise ModelLoadError(
            f"the file has several dicts of tensors: {', '.join(parts)}; say with --key which is meant"
        )
    return next(iter(parts.values()))


def _tensors(part: Mapping[Any, Any]) -> dict[str, Array]:
    return {str(name): value for name, value in part.items() if isinstance(value, np.ndarray)}
