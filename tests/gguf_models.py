"""Tiny random models of each architecture: the GGUF file that llama.cpp would write, and the same weights for mlx-lm.

What is said here of names, transforms and metadata is said apart from `mlx_parallm.models.gguf`, which is tested by it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.gguf_writer import GgufFile

HIDDEN, INNER, HEADS, KV_HEADS = 64, 128, 4, 2
EXPERTS, EXPERTS_USED, EXPERT_INNER = 4, 2, 32
ORIGINAL_CONTEXT = 128  # of models whose context of 512 was extended


@dataclass
class Tiny:
    """A file under construction. `put` writes a tensor under one name and keeps its value under the other."""

    architecture: str  # of the file
    kind: str  # tensor type of matrices
    layers: int = 2
    head_dim: int = 16
    interleaved: bool = False
    norm_offset: float = 0.0  # that norm weights are stored with
    seed: int = 0
    file: GgufFile = field(default_factory=GgufFile)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def meta(self, **values: Any) -> None:
        """Metadata of the architecture; `__` stands for a dot."""
        self.file.metadata |= {f"{self.architecture}.{key.replace('__', '.')}": value for key, value in values.items()}

    def matrix(self, name: str, mlx_name: str, *shape: int, kind: str | None = None, heads: int = 0) -> None:
        values = self._random.normal(size=shape) / shape[-1] ** 0.5
        if heads and self.interleaved:
            values = interleave(values, heads)
        stored = self.file.add(f"{name}.weight", values, kind or self.kind)
        self.weights[f"{mlx_name}.weight"] = restore(stored, heads) if heads and self.interleaved else stored

    def vector(self, name: str, mlx_name: str, size: int, offset: float = 0.0) -> None:
        stored = self.file.add(name, self._random.normal(size=size) / 10 + offset, "F32")
        self.weights[mlx_name] = stored - (self.norm_offset if "norm" in name else 0.0)

    def norm(self, name: str, mlx_name: str, size: int = HIDDEN) -> None:
        self.vector(f"{name}.weight", f"{mlx_name}.weight", size, offset=1.0)


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: a head's halves (a…, b…) become a0 b0 a1 b1 …"""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def restore(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def attention(tiny: Tiny, old: str, new: str, bias: bool = False, norms: bool = False) -> None:
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        rows = heads * tiny.head_dim
        permuted = 0 if part == "v" else heads
        tiny.matrix(f"{old}attn_{part}", f"{new}self_attn.{part}_proj", rows, HIDDEN, heads=permuted)
        if bias:
            tiny.vector(f"{old}attn_{part}.bias", f"{new}self_attn.{part}_proj.bias", rows)
        if norms and part != "v":
            tiny.norm(f"{old}attn_{part}_norm", f"{new}self_attn.{part}_norm", tiny.head_dim)
    tiny.matrix(f"{old}attn_output", f"{new}self_attn.o_proj", HIDDEN, HEADS * tiny.head_dim)


def mlp(tiny: Tiny, old: str, new: str) -> None:
    tiny.matrix(f"{old}ffn_gate", f"{new}mlp.gate_proj", INNER, HIDDEN)
    tiny.matrix(f"{old}ffn_up", f"{new}mlp.up_proj", INNER, HIDDEN)
    tiny.matrix(f"{old}ffn_down", f"{new}mlp.down_proj", HIDDEN, INNER)


def experts(tiny: Tiny, old: str, block: str, inner: int) -> None:
    tiny.matrix(f"{old}ffn_gate_inp", f"{block}.gate", EXPERTS, HIDDEN, kind="F32")
    tiny.matrix(f"{old}ffn_gate_exps", f"{block}.switch_mlp.gate_proj", EXPERTS, inner, HIDDEN)
    tiny.matrix(f"{old}ffn_up_exps", f"{block}.switch_mlp.up_proj", EXPERTS, inner, HIDDEN)
    tiny.matrix(f"{old}ffn_down_exps", f"{block}.switch_mlp.down_proj", EXPERTS, HIDDEN, inner)


def plain_layer(tiny: Tiny, old: str, new: str, **options: bool) -> None:
    tiny.norm(f"{old}attn_norm", f"{new}input_layernorm")
    tiny.norm(f"{old}ffn_norm", f"{new}post_attention_layernorm")
    attention(tiny, old, new, **options)


def llama_layer(tiny: Tiny, old: str, new: str, **options: bool) -> None:
    plain_layer(tiny, old, new, **options)
    mlp(tiny, old, new)


def qwen2_layer(tiny: Tiny, old: str, new: str) -> None:
    llama_layer(tiny, old, new, bias=True)


def qwen3_layer(tiny: Tiny, old: str, new: str) -> None:
    llama_layer(tiny, old, new, norms=True)


def qwen3moe_layer(tiny: Tiny, old: str, new: str) -> None:
    plain_layer(tiny, old, new, norms=True)
    experts(tiny, old, f"{new}mlp", EXPERT_INNER)


def mixtral_layer(tiny: Tiny, old: str, new: str) -> None:
    plain_layer(tiny, old, new)
    experts(tiny, old, f"{new}block_sparse_moe", INNER)


def gemma3_layer(tiny: Tiny, old: str, new: str) -> None:
    tiny.norm(f"{old}attn_norm", f"{new}input_layernorm")
    tiny.norm(f"{old}post_attention_norm", f"{new}post_attention_layernorm")
    tiny.norm(f"{old}ffn_norm", f"{new}pre_feedforward_layernorm")
    tiny.norm(f"{old}post_ffw_norm", f"{new}post_feedforward_layernorm")
    attention(tiny, old, new, norms=True)
    mlp(tiny, old, new)


def phi3_layer(tiny: Tiny, old: str, new: str) -> None:
    tiny.norm(f"{old}attn_norm", f"{new}input_layernorm")
    tiny.norm(f"{old}ffn_norm", f"{new}post_attention_layernorm")
    tiny.matrix(f"{old}attn_qkv", f"{new}self_attn.qkv_proj", (HEADS + 2 * KV_HEADS) * tiny.head_dim, HIDDEN)
    tiny.matrix(f"{old}attn_output", f"{new}self_attn.o_proj", HIDDEN, HEADS * tiny.head_dim)
    tiny.matrix(f"{old}ffn_up", f"{new}mlp.gate_up_proj", 2 * INNER, HIDDEN)
    tiny.matrix(f"{old}ffn_down", f"{new}mlp.down_proj", HIDDEN, INNER)


def gemma3_extras(tiny: Tiny) -> None:
    tiny.meta(attention__sliding_window=4, rope__scaling__type="linear", rope__scaling__factor=8.0)
    tiny.config |= {"sliding_window": 4, "sliding_window_pattern": 6, "query_pre_attn_scalar": tiny.head_dim}
    tiny.config |= {"rope_local_base_freq": 10000.0, "rope_scaling": {"type": "linear", "factor": 8.0}}


def phi3_extras(tiny: Tiny) -> None:
    """The long-context variant, with rope over three quarters of each head, as Phi-4-mini has it."""
    rotated = tiny.head_dim * 3 // 4
    short, long = np.linspace(1, 2, rotated // 2), np.linspace(1, 30, rotated // 2)
    factor = math.sqrt(1 + math.log(512 / ORIGINAL_CONTEXT) / math.log(ORIGINAL_CONTEXT))
    tiny.meta(rope__dimension_count=rotated, attention__sliding_window=100)
    tiny.meta(rope__scaling__original_context_length=ORIGINAL_CONTEXT, rope__scaling__attn_factor=factor)
    tiny.file.add("rope_factors_long.weight", long, "F32")
    tiny.file.add("rope_factors_short.weight", short, "F32")
    scaling = {"type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist()}
    tiny.config |= {"partial_rotary_factor": 0.75, "original_max_position_embeddings": ORIGINAL_CONTEXT}
    tiny.config["rope_scaling"] = scaling
    del tiny.config["head_dim"]


def qwen3moe_extras(tiny: Tiny) -> None:
    tiny.meta(expert_count=EXPERTS, expert_used_count=EXPERTS_USED, expert_feed_forward_length=EXPERT_INNER)
    tiny.config |= {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS_USED, "norm_topk_prob": True}
    tiny.config |= {"moe_intermediate_size": EXPERT_INNER, "decoder_sparse_step": 1, "mlp_only_layers": []}


def mixtral_extras(tiny: Tiny) -> None:
    tiny.meta(expert_count=EXPERTS, expert_used_count=EXPERTS_USED)
    tiny.config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS_USED}


def ministral3_extras(tiny: Tiny) -> None:
    tiny.meta(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__yarn_log_multiplier=1.0)
    tiny.meta(rope__scaling__yarn_beta_fast=16.0, rope__scaling__yarn_beta_slow=2.0)
    tiny.meta(rope__scaling__original_context_length=4, attention__temperature_scale=0.5)
    tiny.config["rope_parameters"] = {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 50000.0, "beta_fast": 16.0, "beta_slow": 2.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5,
    }  # fmt: skip


@dataclass(frozen=True)
class Kind:
    model_type: str  # of mlx-lm
    layer: Callable[[Tiny, str, str], None]
    extras: Callable[[Tiny], None] = lambda tiny: None
    architecture: str = ""  # of the file, where that is not the kind's own name
    layers: int = 2
    head_dim: int = 16
    interleaved: bool = False
    norm_offset: float = 0.0
    tied: bool = False


KINDS = {
    "llama": Kind("llama", llama_layer, interleaved=True),
    "qwen2": Kind("qwen2", qwen2_layer),
    "qwen3": Kind("qwen3", qwen3_layer, head_dim=32),
    "mistral": Kind("mistral", llama_layer, architecture="llama", interleaved=True),
    "mistral3": Kind("mistral", llama_layer, head_dim=32, interleaved=True),
    "ministral3": Kind("ministral3", llama_layer, ministral3_extras, "mistral3", interleaved=True),
    "mixtral": Kind("mixtral", mixtral_layer, mixtral_extras, "llama", interleaved=True),
    "qwen3moe": Kind("qwen3_moe", qwen3moe_layer, qwen3moe_extras, head_dim=32),
    "gemma3": Kind("gemma3_text", gemma3_layer, gemma3_extras, layers=6, head_dim=32, norm_offset=1.0, tied=True),
    "phi3": Kind("phi3", phi3_layer, phi3_extras),
}


def model_file(
    name: str, kind: str = "F32", *, embedding: str | None = None, tied: bool | None = None, seed: int = 0
) -> tuple[GgufFile, dict[str, np.ndarray], dict[str, Any]]:
    """A random model as a file, the weights that it stands for under their mlx-lm names, and its config."""
    entry = KINDS[name]
    tied = entry.tied if tied is None else tied
    tiny = Tiny(
        entry.architecture or name, kind, entry.layers, entry.head_dim, entry.interleaved, entry.norm_offset, seed
    )
    tiny.file.metadata = {"general.architecture": tiny.architecture} | byte_level_metadata()
    vocabulary = len(tiny.file.metadata["tokenizer.ggml.tokens"])
    tiny.meta(context_length=512, embedding_length=HIDDEN, block_count=entry.layers, feed_forward_length=INNER)
    tiny.meta(attention__head_count=HEADS, attention__head_count_kv=KV_HEADS, attention__layer_norm_rms_epsilon=1e-5)
    tiny.meta(rope__freq_base=50000.0)
    if name != "phi3":  # llama.cpp's converter writes none there
        tiny.meta(attention__key_length=entry.head_dim)
    tiny.config = {
        "model_type": entry.model_type,
        "hidden_size": HIDDEN,
        "num_hidden_layers": entry.layers,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": entry.head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": 512,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }
    tiny.matrix("token_embd", "model.embed_tokens", vocabulary, HIDDEN, kind=embedding or kind)
    tiny.norm("output_norm", "model.norm")
    if not tied:
        tiny.matrix("output", "lm_head", vocabulary, HIDDEN)
    for layer in range(entry.layers):
        entry.layer(tiny, f"blk.{layer}.", f"model.layers.{layer}.")
    entry.extras(tiny)
    return tiny.file, tiny.weights, tiny.config


def byte_level_metadata() -> dict[str, Any]:
    """`tests.tiny`'s tokenizer as GGUF has it."""
    from tests.tiny import CHAT_TEMPLATE, MERGES, tiny_tokenizer

    vocabulary = tiny_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    return {
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
