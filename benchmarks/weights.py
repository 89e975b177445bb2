"""Weights to measure on: the embedded model in float32, a Llama of random numbers, or a small model of another kind.

    python benchmarks/weights.py embedded OUT
    python benchmarks/weights.py random OUT --size 3b [--tokenizer FOLDER]
    python benchmarks/weights.py gemma3|hybrid|qwen3_next OUT

A GPU machine that can't download a model measures on random weights: speed does not depend on their values.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mlx_parallm.paths import user_cache

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
SIZES = {"135m": (576, 30, 1536, 9, 3, 64), "1b": (2048, 16, 8192, 32, 8, 64), "3b": (3072, 28, 8192, 24, 8, 128)}
SMALL: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 49152,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "attention_bias": False, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "gemma3": {  # three layers of four see the last 256 tokens
        "model_type": "gemma3_text", "sliding_window": 256, "sliding_window_pattern": 4, "query_pre_attn_scalar": 64,
    },
    "hybrid": {  # three Mamba 2 layers, then one of attention
        "model_type": "granitemoehybrid", "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
        "embedding_multiplier": 1.0, "attention_multiplier": 0.125, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_n_groups": 1,
        "mamba_proj_bias": False, "mamba_conv_bias": True,
    },
    "qwen3_next": {  # three gated delta-net layers, then one of attention
        "model_type": "qwen3_next", "full_attention_interval": 4, "linear_num_value_heads": 8,
        "linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 256,
        "moe_intermediate_size": 256, "mlp_only_layers": [], "partial_rotary_factor": 0.5, "norm_topk_prob": True,
    },
}  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def embedded_float32() -> Path:
    """The embedded model as a float32 folder, made once, by another process so that this one stays small."""
    folder = user_cache() / "benchmarks" / "embedded-float32"
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, __file__, "embedded", str(folder)], check=True)
    return folder


def small(kind: str) -> Path:
    """A small random model of another kind, made once."""
    folder = user_cache() / "benchmarks" / f"random-{kind}"
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, __file__, kind, str(folder)], check=True)
    return folder


def write_embedded(out: Path) -> None:
    from mlx_parallm.models.loader import load

    model = load(None, name="embedded", dtype="float32")
    config = {key: value for key, value in model.config.items() if not key.startswith("quantization")}
    _write(out, model.module, config | {"torch_dtype": "float32"})
    model.tokenizer.save_pretrained(str(out))


def write_random(out: Path, size: str, tokenizer: Path | None) -> None:
    import mlx.core as mx
    from mlx_lm.models import llama

    config = LLAMA | dict(zip(SHAPES, SIZES[size], strict=True))
    module = llama.Model(llama.ModelArgs.from_dict(config))
    module.set_dtype(mx.bfloat16)
    _write(out, module, config)
    _copy_tokenizer(out, tokenizer)


def write_small(out: Path, kind: str) -> None:
    from mlx_lm.utils import _get_classes

    config = SMALL | KINDS[kind]
    model_class, args_class = _get_classes(config)
    _write(out, model_class(args_class.from_dict(config)), config)
    _copy_tokenizer(out, None)


def _copy_tokenizer(out: Path, tokenizer: Path | None) -> None:
    source = tokenizer or embedded_float32()
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, out)


def _write(out: Path, module: Any, config: dict[str, Any]) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:  # the file appears when it is whole
        part = Path(scratch, "model.safetensors")
        mx.save_safetensors(str(part), dict(tree_flatten(module.parameters())), metadata={"format": "mlx"})
        part.replace(out / part.name)
    (out / "config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("embedded", "random", *KINDS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json (default: the embedded model's)")
    args = parser.parse_args()
    if args.kind == "embedded":
        write_embedded(args.out)
    elif args.kind in KINDS:
        write_small(args.out, args.kind)
    else:
        write_random(args.out, args.size, args.tokenizer)


if __name__ == "__main__":
    main()
