"""How many bytes a model's weights will take, read from the headers of its files, before any of it is loaded."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_parallm.devices.device import Device

WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
GGUF_BITS = 4.5  # of a weight: files are quantised, mostly to 4 bits with their scales
MAX_HEADER = 100 << 20  # of a file's header: what safetensors itself allows


def weight_bytes(source: str | Path, device: Device) -> int:
    """Bytes in the form that is fast on the device: on the CPU all is expanded to float32. 0: not known."""
    try:
        path = Path(source).expanduser()
        if path.suffix == ".gguf":
            size = path.stat().st_size if path.is_file() else 0
            return int(size * device.weight_bits(GGUF_BITS) / GGUF_BITS)
        files = list(path.glob("*.safetensors")) if path.is_dir() else []
    except (OSError, ValueError, RuntimeError):  # no path at all: loading will say so
        return 0
    quantization = _quantization(path)
    return sum(_file_bytes(file, quantization, device) for file in files)


def _file_bytes(file: Path, bits: int | None, device: Device) -> int:
    """Returns the bytes of the tensors that a file's header names; 0 where it can't be read: loading will say why."""
    try:
        return sum(_tensor_bytes(tensor, bits, device) for tensor in _tensors(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        return 0


def _tensor_bytes(tensor: dict[str, Any], bits: int | None, device: Device) -> int:
    if not all(isinstance(size, int) and size >= 0 for size in tensor["shape"]):
        raise ValueError("a shape is of numbers that are not negative")
    count: int = math.prod(tensor["shape"])
    width = WIDTHS.get(tensor["dtype"], 1)
    if bits and tensor["dtype"] == "U32":
        return count * width if device.keeps_quantised else int(count * 32 // bits * device.weight_bits(bits) // 8)
    return count * (4 if device.float32 and tensor["dtype"] in ("F16", "BF16", "F32") else width)


def _quantization(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_text())
        bits = config["quantization"]["bits"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return bits if isinstance(bits, int) and bits > 0 else None


def _tensors(file: Path) -> Iterator[dict[str, Any]]:
    """Yields what the header says of each tensor."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length)) if length <= MAX_HEADER else {}
    yield from (tensor for name, tensor in header.items() if name != "__metadata__")
