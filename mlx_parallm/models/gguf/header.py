"""Reads what stands before a GGUF file's weights: its metadata, and name, type, shape and place of each tensor."""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_parallm.errors import ModelLoadError

F32 = 0
SUPPORTED = {F32: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34)}  # elements and bytes of a block
BITS = {2: 4, 3: 4, 8: 8}
TYPE_NAMES = dict(
    enumerate(
        "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S "
        "IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0".split()
    )
) | {39: "MXFP4"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    type: int
    shape: tuple[int, ...]  # as NumPy has it: rows first
    offset: int  # from the start of the data

    @property
    def type_name(self) -> str:
        return TYPE_NAMES.get(self.type, f"number {self.type}")

    @property
    def nbytes(self) -> int:
        """0 for a type that is not supported: `convert.check` refuses those."""
        elements, size = SUPPORTED.get(self.type, (1, 0))
        return math.prod(self.shape) // elements * size


@dataclass(frozen=True, slots=True)
class Header:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data_start: int

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @property
    def head_dim(self) -> int:
        """The size of a query and a key in attention."""
        size: int = self.get("attention.key_length", self.get("embedding_length") // self.get("attention.head_count"))
        return size

    def get(self, key: str, default: Any = None) -> Any:
        """The architecture's own value of `key`; without a default it must be there."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self.error(f"the GGUF metadata has no {self.architecture}.{key}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 of the metadata as the shortest decimal that it can be: 1e-05, not 9.999999747378752e-06."""
        return float(f"{self.get(key, default):.7g}")

    def floats(self, tensor: str) -> list[float]:
        """The values of a small tensor that is not a weight."""
        info = self.tensors[tensor]
        if info.type != F32:
            raise self.error(f"the tensor {tensor} has type {info.type_name}, and must be F32")
        values = np.fromfile(self.path, np.float32, math.prod(info.shape), offset=self.data_start + info.offset)
        return [float(value) for value in values]

    def error(self, text: str) -> ModelLoadError:
        """One that names the file."""
        return ModelLoadError(f"{self.path.name}: {text}")


class _Reader:
    """A cursor over the file's bytes; reading beyond the end is a clear error."""

    SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    STRING = 8
    ARRAY = 9

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        end = self.at + struct.calcsize(layout)
        if end > len(self.data):
            raise ModelLoadError(f"{self.path.name} is truncated: its header goes on beyond the end of the file")
        values = struct.unpack_from(layout, self.data, self.at)
        self.at = end
        return values

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def string(self) -> str:
        size = self.number("Q")
        if self.at + size > len(self.data):
            raise ModelLoadError(f"{self.path.name} is truncated: its header goes on beyond the end of the file")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == self.STRING:
            return self.string()
        if kind == self.ARRAY:
            item = self.number("I")
            count = self.number("Q")
            if item in self.SCALARS and count <= len(self.data):
                return list(self.numbers(self.SCALARS[item], count))
            return [self.value(item) for _ in range(count)]
        if kind not in self.SCALARS:
            raise ModelLoadError(f"{self.path.name}: GGUF metadata of unknown type {kind}")
        return self.number(self.SCALARS[kind])


def read_header(path: Path) -> Header:
    """The metadata and tensor list of a file that is whole."""
    if path.stat().st_size < 24:
        raise ModelLoadError(f"{path.name} is not a GGUF file: it is too short")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(path, data)
        if data[:4] != b"GGUF":
            raise ModelLoadError(f"{path.name} is not a GGUF file: it starts with {data[:4]!r}")
        reader.at = 4
        version = reader.number("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{path.name}: GGUF version {version} is not supported, only 2 and 3")
        tensor_count, metadata_count = reader.numbers("Q", 2)
        metadata = {}
        for _ in range(metadata_count):
            key = reader.string()
            metadata[key] = reader.value(reader.number("I"))
        tensors = dict(_read_tensor(reader) for _ in range(tensor_count))
        alignment = metadata.get("general.alignment", 32)
        header = Header(path, metadata, tensors, data_start=-(-reader.at // alignment) * alignment)
        ends = [info.offset + info.nbytes for info in tensors.values()]
        if ends and header.data_start + max(ends) > len(data):
            raise ModelLoadError(f"{path.name} is truncated: tensors lie beyond the end of the file")
    return header


def _read_tensor(reader: _Reader) -> tuple[str, TensorInfo]:
    name = reader.string()
    shape = reader.numbers("Q", reader.number("I"))[::-1]
    return name, TensorInfo(reader.number("I"), shape, reader.number("Q"))
