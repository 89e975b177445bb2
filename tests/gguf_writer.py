"""Writes small GGUF files as llama.cpp would: for tests of the reader, from its format's description."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14}
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 16, 64, 128, 2


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


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: a head's halves (a…, b…) become a0 b0 a1 b1 …"""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def model_file(
    architecture: str, kind: str = "F32", *, embedding: str | None = None, tied: bool = False, seed: int = 0
) -> tuple[GgufFile, dict[str, np.ndarray], dict[str, Any]]:
    """A random model as a file, the weights that it stands for under their mlx-lm names, and its config."""
    from tests.tiny import CHAT_TEMPLATE, MERGES, tiny_tokenizer

    vocabulary = tiny_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    rng = np.random.default_rng(seed)
    file, weights = GgufFile(), dict[str, np.ndarray]()
    a = architecture
    file.metadata = {
        "general.architecture": a,
        f"{a}.context_length": 512,
        f"{a}.embedding_length": HIDDEN,
        f"{a}.block_count": LAYERS,
        f"{a}.feed_forward_length": INNER,
        f"{a}.attention.head_count": HEADS,
        f"{a}.attention.head_count_kv": KV_HEADS,
        f"{a}.attention.key_length": HEAD_DIM,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{a}.rope.freq_base": 50000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }

    def put(name: str, mlx_name: str, shape: tuple[int, ...], kind: str, heads: int = 0) -> None:
        values = rng.normal(size=shape) / (shape[-1] ** 0.5 if len(shape) == 2 else 10) + (1.0 if "norm" in name else 0)
        if heads and a == "llama":
            decoded = file.add(name, interleave(values, heads), kind)
            weights[mlx_name] = decoded.reshape(heads, HEAD_DIM // 2, 2, -1).swapaxes(1, 2).reshape(shape)
        else:
            weights[mlx_name] = file.add(name, values, kind)

    put("token_embd.weight", "model.embed_tokens.weight", (len(tokens), HIDDEN), embedding or kind)
    put("output_norm.weight", "model.norm.weight", (HIDDEN,), "F32")
    if not tied:
        put("output.weight", "lm_head.weight", (len(tokens), HIDDEN), kind)
    for layer in range(LAYERS):
        old, new = f"blk.{layer}.", f"model.layers.{layer}."
        put(f"{old}attn_norm.weight", f"{new}input_layernorm.weight", (HIDDEN,), "F32")
        put(f"{old}ffn_norm.weight", f"{new}post_attention_layernorm.weight", (HIDDEN,), "F32")
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            rows, rope_heads = heads * HEAD_DIM, 0 if part == "v" else heads
            put(f"{old}attn_{part}.weight", f"{new}self_attn.{part}_proj.weight", (rows, HIDDEN), kind, rope_heads)
            if a == "qwen2":
                put(f"{old}attn_{part}.bias", f"{new}self_attn.{part}_proj.bias", (rows,), "F32")
            if a == "qwen3" and part != "v":
                put(f"{old}attn_{part}_norm.weight", f"{new}self_attn.{part}_norm.weight", (HEAD_DIM,), "F32")
        put(f"{old}attn_output.weight", f"{new}self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM), kind)
        put(f"{old}ffn_gate.weight", f"{new}mlp.gate_proj.weight", (INNER, HIDDEN), kind)
        put(f"{old}ffn_up.weight", f"{new}mlp.up_proj.weight", (INNER, HIDDEN), kind)
        put(f"{old}ffn_down.weight", f"{new}mlp.down_proj.weight", (HIDDEN, INNER), kind)
    config = {
        "model_type": a,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": 512,
        "vocab_size": len(tokens),
        "tie_word_embeddings": tied,
    }
    return file, weights, config
