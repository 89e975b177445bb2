"""The GGUF architectures that are supported, one entry each: mlx-lm's class, tensors' names, how values are stored.

`general.architecture` names the entry. Some files need another of mlx-lm's classes than their name says: `variants`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.models.gguf import rope
from mlx_parallm.models.gguf.header import Header

MODEL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}

Settings = Callable[[Header], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Architecture:
    model_type: str  # of config.json: mlx-lm's class
    model_class: str  # of config.json: transformers' class
    layer_tensors: Mapping[str, str]  # a layer's tensors: GGUF's name → mlx-lm's
    rope_scalings: tuple[str, ...] = ()  # those that mlx-lm's class knows
    interleaved: bool = False  # rows of q and k are stored in pairs, as llama.cpp's rope of this architecture wants
    norms_plus_one: bool = False  # norm weights are stored with the 1 that mlx-lm's class adds itself
    free_head_dim: bool = True  # else mlx-lm's class takes hidden size / heads
    partial_rope: bool = False  # rope may turn a part of each head
    experts: bool = False
    settings: Settings = lambda header: {}  # config.json beyond what all have
    variants: Mapping[str, "Architecture"] = field(default_factory=dict)  # metadata key, where not 0 → what it is then


def expert_tensors(block: str) -> dict[str, str]:
    """Maps the names of tensors where the MLP is a mixture: GGUF and mlx-lm stack experts into one tensor each."""
    stacked = {f"ffn_{part}_exps": f"{block}.switch_mlp.{part}_proj" for part in ("gate", "up", "down")}
    return stacked | {"ffn_gate_inp": f"{block}.gate"}


def qwen3_moe_settings(header: Header) -> dict[str, Any]:
    """llama.cpp's graph of qwen3moe has experts in every layer, and always scales the chosen weights to a sum of 1."""
    used = header.get("expert_used_count")
    return {
        "num_experts": header.get("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": header.get("expert_feed_forward_length", header.get("feed_forward_length") // used),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def mixtral_settings(header: Header) -> dict[str, Any]:
    return {"num_local_experts": header.get("expert_count"), "num_experts_per_tok": header.get("expert_used_count")}


def gemma3_settings(header: Header) -> dict[str, Any]:
    """GGUF has no query_pre_attn_scalar: it is the head size, but for the 27B model, the one with 62 layers."""
    get = header.get
    layers = header.get("block_count")
    if get("final_logit_softcapping", 0.0):
        raise header.error("gemma3 with final_logit_softcapping is not supported: mlx-lm's class has none")
    window = get("attention.sliding_window", 0)
    pattern = get("attention.sliding_window_pattern", 6) if window else 1  # every so many layers, one sees everything
    if not isinstance(pattern, int) or not 0 < pattern <= layers:
        raise header.error(f"attention.sliding_window_pattern {pattern} is not supported with {layers} layers")
    wide = layers == 62
    return {
        "sliding_window": window or get("context_length"),
        "sliding_window_pattern": pattern,
        "rope_local_base_freq": header.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": get("embedding_length") // get("attention.head_count") if wide else header.head_dim,
    }


def phi3_settings(header: Header) -> dict[str, Any]:
    """llama.cpp and mlx-lm don't use attention.sliding_window of Phi-3."""
    head_dim = header.head_dim
    rotated = header.get("rope.dimension_count", header.head_dim)
    factor = rotated / head_dim
    if int(head_dim * factor) < rotated:  # as mlx-lm computes it: the quotient was rounded down
        factor = math.nextafter(factor, 2)
    original = header.get("rope.scaling.original_context_length", header.get("context_length"))
    return {"partial_rotary_factor": factor, "original_max_position_embeddings": original}


def ministral3_settings(header: Header) -> dict[str, Any]:
    """Ministral 3 reads all of rope from one object, and scales queries by their position."""
    scaling = rope.rope_scaling(header, MINISTRAL3.rope_scalings)
    if scaling is None:
        raise header.error("attention.temperature_scale without rope scaling 'yarn' is not supported")
    beta = header.number("attention.temperature_scale")
    theta = header.number("rope.freq_base", 10000.0)
    return {"rope_parameters": scaling | {"rope_theta": theta, "llama_4_scaling_beta": beta}}


MIXTRAL = Architecture(
    model_type="mixtral",
    model_class="MixtralForCausalLM",
    layer_tensors=ATTENTION | expert_tensors("block_sparse_moe"),
    interleaved=True,
    free_head_dim=False,
    experts=True,
    settings=mixtral_settings,
)
MINISTRAL3 = Architecture(
    model_type="ministral3",
    model_class="Ministral3ForCausalLM",
    layer_tensors=ATTENTION | MLP,
    rope_scalings=(rope.YARN,),
    interleaved=True,
    settings=ministral3_settings,
)
ARCHITECTURES = {
    "llama": Architecture(  # and Mistral: llama.cpp's converter writes it under this name
        model_type="llama",
        model_class="LlamaForCausalLM",
        layer_tensors=ATTENTION | MLP,
        rope_scalings=(rope.LINEAR, rope.YARN, rope.LLAMA3),
        interleaved=True,
        variants={"expert_count": MIXTRAL},
    ),
    "mistral3": Architecture(  # Mistral Small 3.1 and later, and Ministral 3
        model_type="mistral",
        model_class="MistralForCausalLM",
        layer_tensors=ATTENTION | MLP,
        rope_scalings=(rope.LINEAR, rope.YARN),
        interleaved=True,
        variants={"attention.temperature_scale": MINISTRAL3},
    ),
    "qwen2": Architecture(
        model_type="qwen2",
        model_class="Qwen2ForCausalLM",
        layer_tensors=ATTENTION | MLP,
        rope_scalings=(rope.LINEAR, rope.YARN),
        free_head_dim=False,
    ),
    "qwen3": Architecture(
        model_type="qwen3",
        model_class="Qwen3ForCausalLM",
        layer_tensors=ATTENTION | HEAD_NORMS | MLP,
        rope_scalings=(rope.LINEAR, rope.YARN),
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        model_class="Qwen3MoeForCausalLM",
        layer_tensors=ATTENTION | HEAD_NORMS | expert_tensors("mlp"),
        experts=True,
        settings=qwen3_moe_settings,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        model_class="Gemma3ForCausalLM",
        layer_tensors=ATTENTION
        | HEAD_NORMS
        | MLP
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        rope_scalings=(rope.LINEAR,),
        norms_plus_one=True,
        settings=gemma3_settings,
    ),
    "phi3": Architecture(  # Phi-3, 3.5, 4 and 4-mini
        model_type="phi3",
        model_class="Phi3ForCausalLM",
        layer_tensors={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        rope_scalings=(rope.LONGROPE,),
        free_head_dim=False,
        partial_rope=True,
        settings=phi3_settings,
    ),
}


def architecture_of(header: Header) -> Architecture:
    if header.architecture == "clip":
        raise header.error("this is an image encoder (mmproj) without a text model: name the text model's GGUF file")
    if header.architecture not in ARCHITECTURES:
        raise header.error(
            f"GGUF architecture {header.architecture!r} is not supported, only {', '.join(ARCHITECTURES)}: serve the "
            "model's folder from the Hugging Face hub instead, if mlx-lm knows it"
        )
    entry = ARCHITECTURES[header.architecture]
    for key, variant in entry.variants.items():
        if header.get(key, 0):
            return variant
    return entry
