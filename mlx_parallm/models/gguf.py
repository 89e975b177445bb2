"""GGUF files: reads their header, and turns one, once, into a folder that mlx-lm loads. Called by `loader`.

The weights stay as they are, quantised ones included: MLX reads Q4_0, Q4_1 and Q8_0 blocks as its own
affine quantisation with groups of 32. What changes are names, the row order of q and k (llama.cpp
interleaves them for its rope), and the metadata, which becomes config.json and a tokenizer.
"""

import hashlib
import json
import math
import mmap
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.gguf_tokenizer import end_token_ids, save_tokenizer
from mlx_parallm.paths import user_cache
from mlx_parallm.progress import Tell

FORMAT = 1  # of the converted folder: raise it when conversion changes, and old folders are left behind
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SUPPORTED = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34)}  # elements and bytes of a block
BITS = {2: 4, 3: 4, 8: 8}
GROUP_SIZE = 32
TYPE_NAMES = dict(
    enumerate(
        "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S "
        "IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0".split()
    )
) | {39: "MXFP4"}

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


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
        elements, size = SUPPORTED[self.type]
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

    def get(self, key: str, default: Any = None) -> Any:
        """The architecture's own value of `key`; without a default it must be there."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"{self.path.name}: the GGUF metadata has no {self.architecture}.{key}")
        return value


class _Reader:
    """A cursor over the file's bytes; reading beyond the end is a clear error."""

    SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    STRING, ARRAY = 8, 9

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
            item, count = self.number("I"), self.number("Q")
            if item in self.SCALARS and count <= len(self.data):
                return list(self.numbers(self.SCALARS[item], count))
            return [self.value(item) for _ in range(count)]
        if kind not in self.SCALARS:
            raise ModelLoadError(f"{self.path.name}: GGUF metadata of unknown type {kind}")
        return self.number(self.SCALARS[kind])


def read_header(path: Path) -> Header:
    """The metadata and tensor list, after checking that all of it is something we can load."""
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
        _check_support(header)
        if header.data_start + max(info.offset + info.nbytes for info in tensors.values()) > len(data):
            raise ModelLoadError(f"{path.name} is truncated: tensors lie beyond the end of the file")
    return header


def _read_tensor(reader: _Reader) -> tuple[str, TensorInfo]:
    name = reader.string()
    shape = reader.numbers("Q", reader.number("I"))[::-1]
    return name, TensorInfo(reader.number("I"), shape, reader.number("Q"))


def _check_support(header: Header) -> None:
    name = header.path.name
    if header.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError(f"{name}: GGUF architecture {header.architecture!r} is not supported, only {known}")
    for tensor, info in header.tensors.items():
        if info.type not in SUPPORTED:
            known = ", ".join(TYPE_NAMES[number] for number in SUPPORTED)
            raise ModelLoadError(
                f"{name}: {tensor} has tensor type {info.type_name}, which is not supported, only {known}"
            )
    if header.get("expert_count", 0):
        raise ModelLoadError(f"{name}: mixtures of experts are not supported as GGUF")
    for tensor in ("token_embd.weight", "output_norm.weight"):
        if tensor not in header.tensors:
            raise ModelLoadError(f"{name}: the tensor {tensor} is missing")


def converted(path: Path, tell: Tell = lambda text: None) -> Path:
    """The mlx-lm folder made from a GGUF file, now or earlier."""
    folder = user_cache() / "gguf" / f"{path.stem}-{_fingerprint(path)}"
    if folder.exists():
        return folder
    header = read_header(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
            convert(header, Path(scratch, "model"), tell)
            Path(scratch, "model").rename(folder)
    except (OSError, RuntimeError) as error:  # the second is MLX's, of a full disk
        if not folder.exists():  # else another process was faster, and its folder is as good
            raise ModelLoadError(f"{path.name} can't be converted into {folder.parent}: {error}") from error
    return folder


def _fingerprint(path: Path) -> str:
    """Of name, size and samples all over the content: quick on large files, and the same in every venv."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{FORMAT} {path.name} {size}".encode())
    with path.open("rb") as file:
        for index in range(64):
            file.seek(size * index // 64)
            digest.update(file.read(1 << 16))
    return digest.hexdigest()[:16]


def convert(header: Header, folder: Path, tell: Tell) -> None:
    """Writes config.json, tokenizer and weights of a checked file into the new `folder`."""
    config = model_config(header)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_tokenizer(header.metadata, header.path.name, folder)
    tell(f"converting {header.path.name} for MLX, once")
    weights: dict[str, mx.array] = mx.load(str(_writable(header.path, folder.parent)))  # type: ignore[assignment]
    weights = dict(_renamed(header, config, weights.items()))
    tell(f"writing {header.path.name} as it was converted")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def _writable(path: Path, scratch: Path) -> Path:
    """MLX opens GGUF files for writing, though it only reads them: one that we may not write to is copied first."""
    return path if os.access(path, os.W_OK) else Path(shutil.copyfile(path, scratch / path.name))


def _renamed(
    header: Header, config: dict[str, Any], weights: Iterable[tuple[str, mx.array]]
) -> Iterable[tuple[str, mx.array]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, array in weights:
        if name == "rope_freqs.weight":
            continue  # config.json has it as rope_scaling
        part = name.split(".")[-2]
        if header.architecture == "llama" and part in heads:
            array = restore_rows(array, heads[part])
        mx.eval(array)
        yield mlx_name(name, header.path.name), array


def mlx_name(name: str, file: str) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight, and so for scales, biases and bias."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name)
    if layer and layer[2] in LAYER_TENSORS:
        return f"model.layers.{layer[1]}.{LAYER_TENSORS[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    if stem not in TENSORS:
        raise ModelLoadError(f"{file}: the tensor {name} has no place in a supported architecture")
    return f"{TENSORS[stem]}.{kind}"


def restore_rows(array: mx.array, heads: int) -> mx.array:
    """Each head's rows from llama.cpp's order (a0 b0 a1 b1 …) back to (a0 a1 … b0 b1 …)."""
    rows = array.shape[0]
    return array.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)


def model_config(header: Header) -> dict[str, Any]:
    """config.json in the words of transformers, which mlx-lm reads."""
    get, tensors = header.get, header.tensors
    heads, hidden = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden // heads)
    if header.architecture == "qwen2" and head_dim * heads != hidden:
        raise ModelLoadError(f"{header.path.name}: qwen2 with a head size of {head_dim} is not supported")
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ModelLoadError(f"{header.path.name}: rope over a part of each head is not supported")
    config = {
        "architectures": [ARCHITECTURES[header.architecture]],
        "model_type": header.architecture,
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _short(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(header, head_dim),
        "max_position_embeddings": get("context_length"),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(header.metadata),
    }
    return config | _quantization(header)


def _short(number: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(f"{number:.7g}")


def _quantization(header: Header) -> dict[str, Any]:
    """mlx-lm's description: one default, and layers that differ from it by name."""
    bits = {
        mlx_name(name, header.path.name).removesuffix(".weight"): BITS[info.type]
        for name, info in header.tensors.items()
        if info.type in BITS
    }
    if not bits:
        return {}
    default = min(bits.values())
    odd = {name: {"group_size": GROUP_SIZE, "bits": value} for name, value in bits.items() if value != default}
    return {"quantization": {"group_size": GROUP_SIZE, "bits": default, **odd}}


def _rope_scaling(header: Header, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header, head_dim)
    kind = header.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(f"{header.path.name}: rope scaling {kind!r} is not supported, only linear and yarn")
    scaling = {"type": kind, "factor": _short(header.get("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = header.get("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(header: Header, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling, which llama.cpp stores as divisors. All published models share three of its four
    numbers; the fourth is the largest divisor, and the rest must then follow."""
    info = header.tensors["rope_freqs.weight"]
    stored = np.fromfile(header.path, np.float32, info.shape[0], offset=header.data_start + info.offset).tolist()
    low, high, original, factor = 1.0, 4.0, 8192, max(stored)
    base = header.get("rope.freq_base", 10000.0)
    for index, divisor in enumerate(stored):
        turns = original / (2 * math.pi * base ** (2 * index / head_dim))  # of this frequency over the old context
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(divisor, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-3):
            raise ModelLoadError(f"{header.path.name}: rope_freqs.weight is not Llama 3's rope scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
