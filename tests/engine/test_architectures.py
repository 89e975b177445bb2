"""Full-attention architectures of mlx-lm run in slots, exactly: the probe that every model passes at load says so."""

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.engine.compute.batching import batch_cache
from mlx_parallm.models.forward import Forward
from mlx_parallm.models.language import LanguageModel
from tests.tiny import tiny, tiny_tokenizer

# Spellings of one small model: each architecture picks out what it knows.
CONFIG: dict[str, Any] = {
    "hidden_size": 64, "dim": 64, "n_embd": 64, "d_model": 64,
    "num_hidden_layers": 2, "n_layers": 2, "n_layer": 2, "num_layers": 2,
    "num_attention_heads": 4, "n_heads": 4, "n_head": 4, "num_heads": 4,
    "num_key_value_heads": 2, "n_kv_heads": 2, "multi_query_group_num": 2,
    "head_dim": 16, "intermediate_size": 128, "ffn_hidden_size": 128, "n_inner": 128, "mlp_hidden_size": 128,
    "vocab_size": 300, "padded_vocab_size": 300, "n_positions": 512, "n_ctx": 512, "seq_length": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layernorm_eps": 1e-5,
    "norm_eps": 1e-5, "norm_epsilon": 1e-5, "layer_norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5,
    "rope_theta": 10000.0, "rotary_pct": 1.0, "partial_rotary_factor": 0.5, "rotary_dim": 8, "rotary_emb_base": 10000,
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "qkv_bias": False, "use_qk_norm": True,
    "tie_word_embeddings": False, "hidden_act": "silu", "activation_function": "gelu", "use_parallel_residual": True,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
    "logit_scale": 1.0, "attention_multiplier": 0.25, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "logits_scaling": 1.0, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 16, "rope_scaling": None, "bias": False, "no_bias": True, "kv_channels": 16,
    "scale_depth": 1.0, "scale_emb": 1.0, "dim_model_base": 64, "sliding_window": 512, "use_sliding_window": False,
}  # fmt: skip
IN_SLOTS = (
    "llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "phi3", "starcoder2",
    "granite", "glm4", "cohere", "olmo2", "smollm3", "helium", "internlm3", "seed_oss", "ernie4_5", "olmoe", "phi",
    "minicpm", "nemotron", "exaone", "internlm2", "hunyuan_v1_dense", "granitemoe", "mimo", "glm", "gptj", "gpt_neox",
    "qwen", "deepseek", "gpt2", "telechat3", "nanochat", "youtu_llm", "talkie",
)  # fmt: skip
TUNING = DeviceProfile(steps_in_flight=0, compiled=False, view_step=32, max_padding=0.0, round_prompts=False)


def build(name: str, **changes: Any) -> LanguageModel | None:
    """The architecture with random weights, or None where the generic configuration does not suit it."""
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
        model = module.Model(module.ModelArgs.from_dict({**CONFIG, **changes, "model_type": name}))
        mx.random.seed(0)
        model.update(tree_map(lambda a: a + 0.02 * mx.random.normal(a.shape).astype(a.dtype), model.parameters()))
        width = model(mx.array([[1, 2, 3]])).shape[-1]
        mx.eval(model.parameters())
    except Exception:
        return None
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return LanguageModel(
        name=name,
        source=name,
        precision="float32",
        context_length=512,
        vocab_size=width,
        module=model,
        tokenizer=tiny_tokenizer(),
        config={},
        eos_token_ids=frozenset({2}),
        weight_bytes=weights,
    )


def chosen(model: LanguageModel) -> str:
    cache = batch_cache(model, Forward(model.module), 4, 1 << 40, TUNING)
    return type(cache).__name__


@pytest.mark.parametrize("name", IN_SLOTS)
def test_full_attention_runs_in_slots(name: str) -> None:
    model = build(name)
    assert model is not None, f"the generic configuration no longer builds {name}"
    assert chosen(model) == "SlotCache"


def test_what_takes_no_offsets_per_row_runs_one_by_one() -> None:
    model = build("gpt_bigcode")
    assert model is not None
    assert chosen(model) == "SerialCache"


@pytest.mark.parametrize(
    ("kind", "way"), [("llama", "SlotCache"), ("hybrid", "MergedCache"), ("gemma3", "MergedCache")]
)
def test_layers_of_several_kinds_run_in_mlx_lms_batches(kind: str, way: str) -> None:
    assert chosen(tiny(kind)) == way


class Watched(nn.Embedding):
    """An output head that is the embedding too, and writes down how many positions it is asked for."""

    def as_linear(self, hidden: mx.array) -> mx.array:
        self.__dict__.setdefault("widths", []).append(hidden.shape[1])
        return super().as_linear(hidden)


@pytest.mark.parametrize(
    ("name", "backbone", "embedding"), [("llama", "model", "embed_tokens"), ("exaone", "transformer", "wte")]
)
def test_the_output_head_runs_only_where_a_token_is_sampled(name: str, backbone: str, embedding: str) -> None:
    """By whatever name the architecture calls its backbone: over all of a long prompt the logits take gigabytes."""
    model = build(name, tie_word_embeddings=True)
    assert model is not None
    module = model.module
    watched = Watched(300, 64)
    watched.weight = module[backbone][embedding].weight
    module[backbone][embedding] = watched
    tokens, index = mx.array([[5, 9, 7, 3], [8, 2, 6, 0]]), mx.array([3, 2])
    found = Forward(module).at(tokens, make_prompt_cache(module), index)
    assert watched.widths == [1]
    assert mx.allclose(found, module(tokens)[mx.arange(2), index], atol=1e-5)
