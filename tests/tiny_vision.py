"""Tiny random models that read images, as folders that mlx-vlm and the loader read: SmolVLM and Qwen-VL in style.

The folders have what real ones have: config, weights, tokenizer with the image marks, chat template, and the settings
of the image processor. Needs mlx-vlm.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from PIL import Image
from tokenizers import AddedToken

from tests.tiny import SPECIAL, _randomise, tiny_tokenizer

TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
SMOL_MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES]
QWEN_MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SMOL_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
PIXELS: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
}


def tiny_vision(kind: str, folder: Path, seed: int = 0) -> Path:
    """`kind`: smolvlm, qwen2_vl, qwen2_5_vl, qwen3_vl or qwen3_vl_moe."""
    folder.mkdir(parents=True, exist_ok=True)
    smol = kind == "smolvlm"
    size = _save_tokenizer(folder, SMOL_MARKS if smol else QWEN_MARKS, SMOL_TEMPLATE if smol else QWEN_TEMPLATE)
    first = size - len(SMOL_MARKS if smol else QWEN_MARKS)
    config = _smolvlm(folder, size, first) if smol else _qwen(folder, kind, size, first)
    (folder / "config.json").write_text(json.dumps(config))
    _save_weights(folder, config, seed)
    return folder


def _smolvlm(folder: Path, size: int, first: int) -> dict[str, Any]:
    tiles = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": True}
    settings = PIXELS | tiles | {"image_processor_type": "SmolVLMImageProcessor", "do_pad": True, "resample": 1}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    processor = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}  # (32 / 8)² patches, 2 × 2 of them in one
    (folder / "processor_config.json").write_text(json.dumps(processor))
    vision = {
        "model_type": "smolvlm_vision",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 8,
        "image_size": 32,
    }
    return {
        "model_type": "smolvlm",
        "text_config": TEXT | {"model_type": "llama", "vocab_size": size},
        "vision_config": vision,
        "image_token_id": first,
        "scale_factor": 2,
        "vocab_size": size,
        "eos_token_id": first + 3,
    }


def _qwen(folder: Path, kind: str, size: int, first: int) -> dict[str, Any]:
    grid = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    settings = PIXELS | grid | {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 64, "max_pixels": 4096}
    vision = {
        "model_type": kind,
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    config = {
        "model_type": kind,
        "vocab_size": size,
        "vision_start_token_id": first,
        "vision_end_token_id": first + 1,
        "image_token_id": first + 2,
        "video_token_id": first + 3,
        "eos_token_id": SPECIAL.index("<|im_end|>"),
    }
    text = TEXT | {"vocab_size": size, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    if kind.startswith("qwen3"):
        settings |= {
            "image_processor_type": "Qwen3VLImageProcessor",
            "size": {"shortest_edge": 64, "longest_edge": 4096},
        }
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        experts = MOE if "moe" in kind else {}
        config["text_config"] = text | {"model_type": f"{kind}_text", "head_dim": 16} | experts
    else:
        config |= text
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": 64}  # its output's
    name = "Qwen3VLProcessor" if kind.startswith("qwen3") else "Qwen2_5_VLProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name}))
    return config | {"vision_config": vision}


def _save_tokenizer(folder: Path, marks: list[str], template: str) -> int:
    tokenizer: Any = tiny_tokenizer()._tokenizer
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(mark, special=True, normalized=False) for mark in marks]}
    )
    tokenizer.chat_template = template
    if "<end_of_utterance>" in marks:
        tokenizer.eos_token = "<end_of_utterance>"
    tokenizer.save_pretrained(str(folder))
    return len(tokenizer)


def _save_weights(folder: Path, config: dict[str, Any], seed: int) -> None:
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    settings = json.loads(json.dumps(config))
    classes, _ = get_model_and_args(settings)
    model_config = classes.ModelConfig.from_dict(settings)
    model_config = update_module_configs(model_config, classes, settings, ["text", "vision"])
    mx.random.seed(seed)
    model = classes.Model(model_config)
    _randomise(model, seed, mx.float32)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Large spots of colour, so that tiles and patches differ."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
