"""Weights that both servers can load: the embedded model in float32, or a Llama of random numbers.

    python benchmarks/weights.py embedded OUT
    python benchmarks/weights.py random OUT --size 3b [--tokenizer FOLDER]

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
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def embedded_float32() -> Path:
    """The embedded model as a float32 folder, made once, by another process so that this one stays small."""
    folder = user_cache() / "benchmarks" / "embedded-float32"
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, __file__, "embedded", str(folder)], check=True)
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
    parser.add_argument("kind", choices=("embedded", "random"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json (default: the embedded model's)")
    args = parser.parse_args()
    if args.kind == "embedded":
        write_embedded(args.out)
    else:
        write_random(args.out, args.size, args.tokenizer)


if __name__ == "__main__":
    main()
