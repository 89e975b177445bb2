"""Turns a GGUF file, once, into a folder that mlx-lm loads. Called by `loader`.

The weights stay as they are, quantised ones included: MLX reads Q4_0, Q4_1 and Q8_0 blocks as its own
affine quantisation with groups of 32. What changes are names, for some architectures the order of q's and k's rows or
the offset of norms, and the metadata, which becomes config.json and a tokenizer.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.gguf import rope
from mlx_parallm.models.gguf.architectures import MODEL_TENSORS, Architecture, architecture_of
from mlx_parallm.models.gguf.header import BITS, SUPPORTED, TYPE_NAMES, Header, read_header
from mlx_parallm.models.gguf.tokenizer import end_token_ids, save_tokenizer
from mlx_parallm.paths import user_cache
from mlx_parallm.progress import Tell

FORMAT = 2  # of the converted folder: raise it when conversion changes, and old folders are left behind
GROUP_SIZE = 32
IMAGE_TENSORS = ("v.", "mm.")  # how names of an image encoder's tensors start


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
    """Fingerprints name, size and samples all over the content: quick on large files, and the same in every venv."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{FORMAT} {path.name} {size}".encode())
    with path.open("rb") as file:
        for index in range(64):
            file.seek(size * index // 64)
            digest.update(file.read(1 << 16))
    return digest.hexdigest()[:16]


def convert(header: Header, folder: Path, tell: Tell) -> None:
    """Writes config.json, tokenizer and weights into the new `folder`."""
    architecture = architecture_of(header)
    check(header, architecture)
    config = model_config(header, architecture)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_tokenizer(header.metadata, header.path.name, folder)
    tell(f"converting {header.path.name} for MLX, once")
    weights: dict[str, mx.array] = mx.load(str(_writable(header.path, folder.parent)))  # type: ignore[assignment]
    weights = dict(_renamed(header, architecture, weights.items()))
    tell(f"writing {header.path.name} as it was converted")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def _writable(path: Path, scratch: Path) -> Path:
    """MLX opens GGUF files for writing, though it only reads them: one that we may not write to is copied first."""
    return path if os.access(path, os.W_OK) else Path(shutil.copyfile(path, scratch / path.name))


def check(header: Header, architecture: Architecture) -> None:
    """Refuses what can't be loaded, by a text that says what to do instead."""
    parts = header.metadata.get("split.count", 1)
    if parts > 1:
        raise header.error(
            f"this is one of {parts} parts of a model, and such files are not supported: join them first by "
            "llama.cpp's `llama-gguf-split --merge FIRST_PART WHOLE_FILE`"
        )
    if not architecture.experts and header.get("expert_count", 0):
        raise header.error(f"mixtures of experts are not supported for the architecture {header.architecture}")
    for tensor, info in header.tensors.items():
        if tensor.startswith(IMAGE_TENSORS):
            raise header.error(
                f"{tensor} belongs to an image encoder, which is not supported within a GGUF file: use one that "
                "llama.cpp's converter wrote, for it keeps the encoder in a file of its own (mmproj)"
            )
        if info.type not in SUPPORTED:
            known = ", ".join(TYPE_NAMES[number] for number in SUPPORTED)
            raise header.error(
                f"{tensor} has tensor type {info.type_name}, which is not supported, only {known}: download the "
                "model's Q8_0 file, or make one of a single type by llama.cpp's `llama-quantize --pure`"
            )
    for tensor in ("token_embd.weight", "output_norm.weight"):
        if tensor not in header.tensors:
            raise header.error(f"the tensor {tensor} is missing")


def _renamed(
    header: Header, architecture: Architecture, weights: Iterable[tuple[str, mx.array]]
) -> Iterable[tuple[str, mx.array]]:
    query_heads = header.get("attention.head_count")
    heads = {"attn_q": query_heads, "attn_k": header.get("attention.head_count_kv", query_heads)}
    for name, array in weights:
        if name in _rope_tensors(architecture):
            continue  # config.json has it as rope_scaling
        part = name.split(".")[-2]
        if architecture.interleaved and part in heads:
            array = restore_rows(array, heads[part])
        if architecture.norms_plus_one and part.endswith("norm"):
            array = array - 1
        mx.eval(array)
        yield mlx_name(name, header, architecture), array


def _rope_tensors(architecture: Architecture) -> tuple[str, ...]:
    return tuple(name for kind in architecture.rope_scalings for name in rope.TENSORS.get(kind, ()))


def mlx_name(name: str, header: Header, architecture: Architecture) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight, and so for scales, biases and bias."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name)
    if layer and layer[2] in architecture.layer_tensors:
        return f"model.layers.{layer[1]}.{architecture.layer_tensors[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    if stem not in MODEL_TENSORS:
        raise header.error(
            f"the tensor {name} has no place in {architecture.model_class}: if the model is one, convert it again with "
            "a current llama.cpp and without options that fuse tensors"
        )
    return f"{MODEL_TENSORS[stem]}.{kind}"


def restore_rows(array: mx.array, heads: int) -> mx.array:
    """Each head's rows from llama.cpp's order (a0 b0 a1 b1 …) back to (a0 a1 … b0 b1 …)."""
    rows = array.shape[0]
    return array.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)


def model_config(header: Header, architecture: Architecture) -> dict[str, Any]:
    """config.json in the words of transformers, which mlx-lm reads."""
    get = header.get
    tensors = header.tensors
    head_dim = header.head_dim
    heads = get("attention.head_count")
    hidden = get("embedding_length")
    if not architecture.free_head_dim and head_dim * heads != hidden:
        raise header.error(
            f"{header.architecture} with {heads} heads of size {head_dim} is not supported: mlx-lm's class divides the "
            f"hidden size, {hidden}, by the number of heads"
        )
    if not architecture.partial_rope and get("rope.dimension_count", head_dim) != head_dim:
        raise header.error(f"rope over a part of each head is not supported for {header.architecture}")
    config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": header.number("rope.freq_base", 10000.0),
        "rope_scaling": rope.rope_scaling(header, architecture.rope_scalings),
        "max_position_embeddings": get("context_length"),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(header.metadata),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return config | architecture.settings(header) | _quantization(header, architecture)


def _quantization(header: Header, architecture: Architecture) -> dict[str, Any]:
    """mlx-lm's description: one default, and layers that differ from it by name."""
    bits = {
        mlx_name(name, header, architecture).removesuffix(".weight"): BITS[info.type]
        for name, info in header.tensors.items()
        if info.type in BITS
    }
    if not bits:
        return {}
    default = min(bits.values())
    odd = {name: {"group_size": GROUP_SIZE, "bits": value} for name, value in bits.items() if value != default}
    return {"quantization": {"group_size": GROUP_SIZE, "bits": default, **odd}}
