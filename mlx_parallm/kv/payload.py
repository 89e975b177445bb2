"""What a file of the SSD tier holds: arrays and a note, as a safetensors file with a checksum. No MLX.

The checksum is XXH3's 128 bits, which finds damage at the speed of memory; it is no protection against somebody who
can write to the user's private folder. Arrays of a file that was read are views of its bytes, never copies; a file to
be written is a header and views of the arrays, because the safetensors package copies megabytes while it holds the GIL,
for which the engine's thread would wait.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

VERSION = "2"
TYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64}  # what `integer_of` makes of all others
TYPE_NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}

Array = np.ndarray[Any, Any]


class Damaged(Exception):
    """A file is not what its name says."""


@dataclass(slots=True)
class Payload:
    """Arrays of unsigned integers, and what their owner wants to know of them."""

    arrays: list[Array]
    note: str = ""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def encode(payload: Payload, name: str) -> list[memoryview]:
    """The parts of a file, in order: its header, and the bytes of each array."""
    arrays = [np.ascontiguousarray(array) for array in payload.arrays]
    about = {"format": f"mlx-parallm-kv/{VERSION}", "name": name, "note": payload.note}
    header: dict[str, Any] = {"__metadata__": {**about, "checksum": _checksum(arrays, about)}}
    end = 0
    for number, array in enumerate(arrays):
        start = end
        end = end + array.nbytes
        entry = {"dtype": TYPE_NAMES[array.dtype], "shape": array.shape, "data_offsets": [start, end]}
        header[f"{number:04}"] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # arrays begin at a multiple of 8
    return [memoryview(len(text).to_bytes(8, "little") + text), *(_bytes_of(array) for array in arrays if array.size)]


def read_file(path: Path, name: str) -> Payload:
    """The payload of a file that is called `name`; raises OSError or Damaged."""
    with open(path, "rb", buffering=0) as file:
        data = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
        view = data.data
        got = 0
        while got < len(view) and (count := file.readinto(view[got:])):
            got += count
    return decode(data[:got], name)


def decode(data: Array, name: str) -> Payload:
    """Decodes a file's bytes: (size,) uint8."""
    try:
        length = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + length].tobytes())
        about = header.pop("__metadata__")
        checksum = about.pop("checksum")
        body = data[8 + length :]
        arrays = [_array(body, entry) for _, entry in sorted(header.items())]
        if sum(array.nbytes for array in arrays) != len(body):
            raise ValueError("there is more or less in the file than its arrays")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(f"it can't be read ({type(error).__name__})") from None
    if about.get("format") != f"mlx-parallm-kv/{VERSION}" or about.get("name") != name:
        raise Damaged(f"it holds {str(about.get('format'))[:40]}, {str(about.get('name'))[:40]}")
    if _checksum(arrays, about) != checksum:
        raise Damaged("its checksum is wrong")
    return Payload(arrays, str(about.get("note", "")))


def _array(body: Array, entry: dict[str, Any]) -> Array:
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(body):
        raise ValueError("an array lies outside of the file")
    return body[start:end].view(TYPES[entry["dtype"]]).reshape(entry["shape"])


def _checksum(arrays: list[Array], about: dict[str, str]) -> str:
    digest = xxhash.xxh3_128(json.dumps(about, sort_keys=True).encode())
    for array in arrays:
        digest.update(repr((array.shape, str(array.dtype))).encode())
        digest.update(_bytes_of(array))
    return digest.hexdigest()


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
