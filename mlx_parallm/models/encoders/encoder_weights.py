"""A model folder's config and tensors, read without trust: what is missing or has another shape is named."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.devices.device import this_device
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.encoders.encoder_layers import DenseWeights, NormWeights

LEGACY = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}  # in files made from TensorFlow's


class Settings:
    """config.json of a folder, whose values have the type and the range that the caller expects."""

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        self.folder = folder
        self.values = values

    @classmethod
    def of(cls, folder: Path, name: str = "config.json") -> "Settings":
        try:
            values = json.loads((folder / name).read_text())
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{folder / name} can't be read: {error}") from error
        if not isinstance(values, dict):
            raise ModelLoadError(f"{folder / name} holds no JSON object")
        return cls(folder, values)

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these that is there; configs of different origin call the same thing differently."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def size(self, *names: str, default: int | None = None) -> int:
        value = self.get(*names, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(names[0], value, "a positive integer")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        value = self.get(*names, default=default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self.wrong(names[0], value, "a positive number")
        return float(value)

    def one_of(self, name: str, allowed: Sequence[Any], default: Any) -> Any:
        value = self.get(name, default=default)
        if value not in allowed:
            raise self.wrong(name, value, " or ".join(map(repr, allowed)))
        return value

    def wrong(self, name: str, value: Any, wanted: str) -> ModelLoadError:
        return ModelLoadError(f"{self.folder}/config.json: {name} is {value!r}, and only {wanted} is supported")


class Weights:
    """The tensors of a folder's safetensors files, by name, with a prefix such as `bert.` or without it."""

    def __init__(self, folder: Path, tensors: dict[str, mx.array], quantization: Mapping[str, Any] | None) -> None:
        self.folder = folder
        self.prefixes: tuple[str, ...] = ("",)
        self._tensors = tensors
        self._quantization = quantization or {}
        self._dtype = mx.float32 if this_device().float32 else None  # what is fast there; else as the file has it

    @classmethod
    def of(cls, folder: Path) -> "Weights":
        tensors: dict[str, mx.array] = {}
        for file in _files(folder):
            try:
                loaded = mx.load(str(file))
            except (RuntimeError, ValueError, OSError) as error:
                raise ModelLoadError(f"{file} can't be read: {error}") from error
            assert isinstance(loaded, dict)
            tensors |= loaded
        config = Settings.of(folder) if (folder / "config.json").is_file() else None
        return cls(folder, tensors, config.get("quantization", "quantization_config") if config else None)

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def take(self, name: str, *shape: int) -> mx.array:
        """A tensor of this shape; -1 stands for any size."""
        found = self._find(name)
        if found is None:
            raise ModelLoadError(f"{self.folder}: the tensor {name} is missing")
        array = self._dequantized(found)
        sizes = tuple(array.shape)
        if len(sizes) != len(shape) or any(want not in (-1, size) for want, size in zip(shape, sizes, strict=True)):
            raise ModelLoadError(f"{self.folder}: the tensor {name} has the shape {sizes}, and {shape} is needed")
        if not mx.issubdtype(array.dtype, mx.floating):
            raise ModelLoadError(f"{self.folder}: the tensor {name} is of {array.dtype}, which is no float")
        return array if self._dtype is None else array.astype(self._dtype)

    def dense(self, name: str, out: int, inner: int, bias: bool | None = True) -> DenseWeights:
        """A linear layer; `bias` None: where the file has one."""
        has_bias = f"{name}.bias" in self if bias is None else bias
        return DenseWeights(
            self.take(f"{name}.weight", out, inner), self.take(f"{name}.bias", out) if has_bias else None
        )

    def fused(self, names: Sequence[str], out: int, inner: int, bias: bool | None = True) -> DenseWeights:
        """Layers of one input as one, one after the other."""
        layers = [self.dense(name, out, inner, bias) for name in names]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        weight = mx.concatenate([layer.weight for layer in layers])
        return DenseWeights(weight, mx.concatenate(biases) if biases else None)

    def norm(self, name: str, size: int, eps: float, bias: bool | None = True) -> NormWeights:
        has_bias = f"{name}.bias" in self if bias is None else bias
        return NormWeights(
            self.take(f"{name}.weight", size), self.take(f"{name}.bias", size) if has_bias else None, eps
        )

    def _find(self, name: str) -> str | None:
        ending = next((old for new, old in LEGACY.items() if name.endswith(new)), None)
        names = [name] if ending is None else [name, name.rsplit("LayerNorm.", 1)[0] + ending]
        candidates = (prefix + one for one in names for prefix in self.prefixes)
        return next((one for one in candidates if one in self._tensors), None)

    def _dequantized(self, name: str) -> mx.array:
        array = self._tensors[name]
        layer = name.removesuffix(".weight")
        scales = self._tensors.get(f"{layer}.scales")
        if scales is None or layer == name:
            return array
        size = self._quantization.get("group_size", 64)
        bits = self._quantization.get("bits", 4)
        mode = self._quantization.get("mode", "affine")
        try:
            return mx.dequantize(array, scales, self._tensors.get(f"{layer}.biases"), size, bits, mode)
        except (ValueError, RuntimeError, TypeError) as error:
            raise ModelLoadError(f"{self.folder}: the tensor {name} can't be dequantised: {error}") from error


def _files(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        others = [file.name for pattern in ("*.bin", "*.pt", "*.onnx", "*.h5") for file in folder.glob(pattern)]
        found = f": it has {', '.join(sorted(others)[:3])}, and only safetensors are read" if others else ""
        raise ModelLoadError(f"{folder} has no model.safetensors{found}")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} can't be read: {error}") from error
    files = [folder / str(name) for name in names]
    missing = next((file for file in files if not file.is_file() or file.parent != folder), None)
    if missing is not None:
        raise ModelLoadError(f"{folder}: {missing.name} is missing, which {index.name} names")
    return files
