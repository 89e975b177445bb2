"""Writes small GGUF files as llama.cpp would: for tests of the reader, from its format's description."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14}


def encode(values: np.ndarray, kind: str) -> tuple[bytes, np.ndarray]:
    """The stored bytes, and the float32 values that they stand for."""
    if kind in ("F32", "F16"):
        stored = values.astype(np.float32 if kind == "F32" else np.float16)
        return stored.tobytes(), stored.astype(np.float32)
    blocks = values.reshape(-1, 32).astype(np.float32)
    data, decoded = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}[kind](blocks)
    return data, decoded.reshape(values.shape)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    return (codes[:, :16] | (codes[:, 16:] << 4)).astype(np.uint8)


def _q4_0(blocks: np.ndarray) -> tuple[bytes, np.ndarray]:
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 7).astype(np.float16)
    codes = np.clip(np.round(blocks / scale.astype(np.float32)) + 8, 0, 15).astype(np.uint8)
    data = np.concatenate([scale.view(np.uint8), _nibbles(codes)], axis=1)
    return data.tobytes(), (codes.astype(np.float32) - 8) * scale.astype(np.float32)


def _q4_1(blocks: np.ndarray) -> tuple[bytes, np.ndarray]:
    low = blocks.min(axis=1, keepdims=True).astype(np.float16)
    scale = ((blocks.max(axis=1, keepdims=True) - low.astype(np.float32)) / 15).astype(np.float16)
    codes = np.clip(np.round((blocks - low.astype(np.float32)) / scale.astype(np.float32)), 0, 15).astype(np.uint8)
    data = np.concatenate([scale.view(np.uint8), low.view(np.uint8), _nibbles(codes)], axis=1)
    return data.tobytes(), codes.astype(np.float32) * scale.astype(np.float32) + low.astype(np.float32)


def _q8_0(blocks: np.ndarray) -> tuple[bytes, np.ndarray]:
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    codes = np.clip(np.round(blocks / scale.astype(np.float32)), -127, 127).astype(np.int8)
    data = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1)
    return data.tobytes(), codes.astype(np.float32) * scale.astype(np.float32)


@dataclass
class GgufFile:
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)  # type, shape, data

    def add(self, name: str, values: np.ndarray, kind: str) -> np.ndarray:
        data, decoded = encode(values, kind)
        self.tensors[name] = (kind, values.shape, data)
        return decoded

    def write(self, path: Path) -> Path:
        header = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))
        header += b"".join(_string(key) + _value(value) for key, value in self.metadata.items())
        body = b""
        for name, (kind, shape, data) in self.tensors.items():
            header += _string(name) + struct.pack(
                f"<I{len(shape)}QIQ", len(shape), *shape[::-1], TYPES[kind], len(body)
            )
            body += _padded(data)
        path.write_bytes(_padded(header) + body)
        return path


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 32)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    items = [_value(item) for item in value]
    return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)
