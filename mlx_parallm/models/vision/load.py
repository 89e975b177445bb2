"""Loads a model that reads images from a folder, through mlx-vlm. Engine thread only."""

import contextlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.vision.encoder import ImageEncoder
from mlx_parallm.models.vision.families import FAMILIES
from mlx_parallm.models.vision.processor import ImageProcessor
from mlx_parallm.models.vision.vision_language import ImageTextModel

INSTALL = "pip install 'mlx-parallm[vision]'"


@dataclass(frozen=True, slots=True)
class LoadedVision:
    whole: nn.Module  # mlx-vlm's model: all weights
    module: ImageTextModel
    tokenizer: TokenizerWrapper
    encoder: ImageEncoder
    processor: ImageProcessor


def has_image_encoder(config: dict[str, Any]) -> bool:
    """Returns whether config.json has an image encoder. A model that brings code of its own is left to mlx-lm, which
    asks whether that is trusted."""
    return isinstance(config.get("vision_config"), dict) and "model_file" not in config


def why_text_only(config: dict[str, Any]) -> str | None:
    """Returns why such a model can't read images here; None: it can."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        return f"models of type {kind} are not served with images; those of type {', '.join(FAMILIES)} are"
    if importlib.util.find_spec("mlx_vlm") is None:
        return f"images need mlx-vlm: {INSTALL}"
    return None


def load_vision(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> LoadedVision:
    from mlx_vlm.utils import load_model, load_processor

    kind = str(config["model_type"])
    try:
        whole = load_model(folder, lazy=True)
        processor = load_processor(folder, add_detokenizer=False, trust_remote_code=trust_remote_code)
        family = FAMILIES[kind](processor, config)
    except Exception as error:  # three libraries read the folder, each with errors of its own
        raise ModelLoadError(f"{folder} can't be loaded as a model of type {kind}: {error}") from error
    tokenizer = load_tokenizer(folder, _tokenizer_settings(folder, trust_remote_code), config.get("eos_token_id"))
    return LoadedVision(
        whole=whole,
        module=ImageTextModel(whole.language_model, family.three_axes),
        tokenizer=tokenizer,
        encoder=ImageEncoder(whole, family.image_token),
        processor=ImageProcessor(family),
    )


def _tokenizer_settings(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Older folders have the chat template in a file of the processor's alone."""
    settings: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    with contextlib.suppress(OSError, ValueError, KeyError):
        settings["chat_template"] = json.loads((folder / "chat_template.json").read_text())["chat_template"]
    return settings
