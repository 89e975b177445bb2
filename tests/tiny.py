"""Two-layer random models of each kind, with a small real tokenizer, made in milliseconds and without files.

Weights are drawn large enough that attention and state matter, so greedy output varies with the whole
context, and two tokens are never equally likely.
"""

import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import _get_classes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_parallm.models.language import LanguageModel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = (
    "t h|th e|i n|a n|an d|e r|o n|r e|o u|Ġ the|Ġ and|in g|e s|i s|a t|o r|Ġ a|Ġ t|Ġ s|Ġ w|l l|e n|i t|o f|Ġ of".split(
        "|"
    )
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SHARED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma3": {  # layer 0 sees the last 12 tokens, layer 1 all
        "model_type": "gemma3_text",
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "hybrid": {  # a Mamba 2 layer, then an attention layer
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"],
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        **MAMBA2,
    },
    "qwen3_next": {  # a gated delta-net layer, then an attention layer, each with experts
        "model_type": "qwen3_next",
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
    },
    "jamba": {  # a Mamba layer, then an attention layer without positions: nothing reads its cache's offset
        "model_type": "jamba",
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
    "mamba": {
        "model_type": "mamba",
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
}


def tiny(kind: str = "llama", seed: int = 0, dtype: mx.Dtype = mx.float32, **changes: Any) -> LanguageModel:
    tokenizer = tiny_tokenizer()
    config = SHARED | KINDS[kind] | {"vocab_size": len(tokenizer)} | changes
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)  # what the model draws for itself and `_randomise` keeps
    module = model_class(args_class.from_dict(config))
    _randomise(module, seed, dtype)
    module.eval()
    return LanguageModel(
        name=f"tiny-{kind}",
        module=module,
        tokenizer=tokenizer,
        config=config,
        context_length=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(module.parameters())),
        precision=str(dtype).removeprefix("mlx.core."),
        source=f"tiny-{kind}",
    )


def tiny_tokenizer() -> TokenizerWrapper:
    """Byte-level BPE: three special tokens, every byte, and a handful of merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, *dict.fromkeys(merge.replace(" ", "") for merge in MERGES)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    return TokenizerWrapper(wrapped, BPEStreamingDetokenizer)


def save_tiny(model: LanguageModel, folder: Any) -> None:
    """Writes a tiny model as a folder that mlx-lm and the loader read."""
    model.tokenizer._tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(model.config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.module.parameters())))


def _randomise(module: nn.Module, seed: int, dtype: mx.Dtype) -> None:
    keys = iter(mx.random.split(mx.random.key(seed), 200))

    def draw(path: str, array: mx.array) -> mx.array:
        noise = mx.random.normal(array.shape, key=next(keys))
        if "embed" in path or "wte" in path:
            return noise
        if array.ndim == 1 or "A_log" in path:  # norms, biases, decays: near what the model starts with
            return array + 0.1 * noise
        # A state-space recurrence amplifies rounding: with larger weights no two batch sizes would agree.
        gain = 3.0 if "lm_head" in path else 0.7 if "mixer" in path else 1.5
        fan_in = array.size // array.shape[0] if array.ndim == 2 else array[0].size // array.shape[1]
        return gain * noise / max(fan_in, 1) ** 0.5

    module.update(tree_map_with_path(lambda path, array: draw(path, array).astype(dtype), module.parameters()))
    mx.eval(module.parameters())
