"""Tensors outside MLX: dtypes by name, and safetensors to and from NumPy. For the server, the runtime and networks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in "float32 float16 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
}
# By safetensors' names.
STORED = dict(zip("F32 F16 F64 I8 I16 I32 I64 U8 U16 U32 U64 BOOL".split(), DTYPES, strict=True))
SAFETENSORS_TYPES = ("application/x-safetensors", "application/vnd.safetensors", "application/octet-stream")


class TensorError(ValueError):
    """Bytes that are not the tensors that they should be; says which, for the caller's own error."""


def parse_safetensors(data: bytes) -> dict[str, Array]:
    """All tensors of a safetensors file; bfloat16 becomes float32. TensorError."""
    try:
        entries: list[tuple[str, dict[str, Any]]] = deserialize(data)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError, OverflowError) as error:
        raise TensorError(f"not a sound safetensors file: {error}") from error
    try:
        return {name: _array(name, entry) for name, entry in entries}
    except (ValueError, OverflowError) as error:
        if isinstance(error, TensorError):
            raise
        raise TensorError(f"not a sound safetensors file: {error}") from error  # a shape of too many or too large axes


def dump_safetensors(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return save(arrays, dict(metadata) if metadata else None)


def _array(name: str, entry: Mapping[str, Any]) -> Array:
    shape = tuple(entry["shape"])
    dtype = entry["dtype"]
    data = entry["data"]
    if dtype == "BF16":
        bits = np.frombuffer(data, np.dtype("<u2")).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape)
    if dtype not in STORED:
        raise TensorError(f"tensor {name!r} has dtype {dtype}, which can't be read; save it as F32")
    array: Array = np.frombuffer(data, DTYPES[STORED[dtype]]).reshape(shape)
    if dtype == "BOOL" and array.size and array.view(np.uint8).max() > 1:
        raise TensorError(f"tensor {name!r} is of booleans and holds other bytes than 0 and 1")
    return array
