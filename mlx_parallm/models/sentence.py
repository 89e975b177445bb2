"""Folders of sentence-transformers: which modules stand behind the transformer, its prompts and limits.

`kinds.embedding` loads them. A folder without modules.json is a transformer alone, with mean pooling behind it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.encoders import Settings, Weights
from mlx_parallm.models.encoders.encoder_layers import Array, DenseWeights

POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
MODES = tuple(POOLING_FLAGS.values())
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda x: x,
    "Tanh": mx.tanh,
    "ReLU": nn.relu,
    "GELU": nn.gelu,
    "SiLU": nn.silu,
    "Sigmoid": mx.sigmoid,
}
IGNORED = ("Dropout",)


@dataclass(frozen=True, slots=True)
class DenseModule:
    weights: DenseWeights
    activation: str

    def __call__(self, x: mx.array) -> mx.array:
        return ACTIVATIONS[self.activation](self.weights(x))


@dataclass(frozen=True, slots=True)
class SentenceFolder:
    """What a folder says, besides the transformer that is in `transformer`."""

    transformer: Path
    modes: tuple[str, ...] = ("mean",)  # of pooling, one after the other
    dense: Sequence[DenseModule] = ()
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False
    trained_dimensions: tuple[int, ...] = ()


def modules_of(folder: Path) -> list[dict[str, Any]] | None:
    """modules.json; None where there is none."""
    try:
        modules = json.loads((folder / "modules.json").read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(modules, list) and all(isinstance(module, dict) for module in modules)
    return modules if whole else None


def module_kind(module: Mapping[str, Any]) -> str:
    """`sentence_transformers.models.Pooling` and whatever later versions call it are a Pooling."""
    return str(module.get("type", "")).rsplit(".", 1)[-1]


def read_sentence_folder(folder: Path) -> SentenceFolder:
    modules = modules_of(folder)
    if modules is None:
        return SentenceFolder(folder, **_limits(folder), **_dimensions(folder, folder))
    if not modules or module_kind(modules[0]) != "Transformer":
        raise ModelLoadError(f"{folder}/modules.json: the first module must be a Transformer")
    transformer = _path(folder, modules[0])
    modes: tuple[str, ...] = ()
    dense: list[DenseModule] = []
    normalize = False
    for module in modules[1:]:
        kind = module_kind(module)
        path = _path(folder, module)
        if kind == "Pooling" and not modes:
            modes = _modes(path)
        elif kind == "Dense" and modes and not normalize:
            dense.append(_dense(path))
        elif kind == "Normalize" and modes:
            normalize = True
        elif kind not in IGNORED:
            raise ModelLoadError(f"{folder}/modules.json: a {kind or 'nameless'} module is not supported there")
    if not modes:
        raise ModelLoadError(f"{folder}/modules.json: there is no Pooling module")
    return SentenceFolder(
        transformer=transformer,
        modes=modes,
        dense=dense,
        normalize=normalize,
        **_prompts(folder),
        **_limits(transformer),
        **_dimensions(folder, transformer),
    )


def _path(folder: Path, module: Mapping[str, Any]) -> Path:
    path = (folder / str(module.get("path", ""))).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ModelLoadError(f"{folder}/modules.json: the path {module.get('path')!r} leads out of the folder")
    return path


def _modes(path: Path) -> tuple[str, ...]:
    settings = Settings.of(path)
    stated = settings.get("pooling_mode")
    if stated is None:
        modes = tuple(mode for flag, mode in POOLING_FLAGS.items() if settings.get(flag))
    else:
        modes = (stated,) if isinstance(stated, str) else tuple(stated)
    if not set(modes) <= set(MODES):
        raise settings.wrong("pooling_mode", stated, ", ".join(MODES))
    if settings.values.get("include_prompt") is False:
        raise settings.wrong("include_prompt", False, "true")
    return modes or ("mean",)


def _dense(path: Path) -> DenseModule:
    settings = Settings.of(path)
    activation = str(settings.get("activation_function", default="torch.nn.modules.activation.Tanh"))
    name = activation.rsplit(".", 1)[-1]
    if name not in ACTIVATIONS:
        raise settings.wrong("activation_function", activation, " or ".join(ACTIVATIONS))
    settings.one_of("use_residual", (False,), False)
    settings.one_of("module_input_name", ("sentence_embedding",), "sentence_embedding")
    weights = Weights.of(path)
    bias = bool(settings.get("bias", default=True))
    sizes = settings.size("out_features"), settings.size("in_features")
    dense = weights.dense("linear", *sizes, bias)
    mx.eval([part for part in (dense.weight, dense.bias) if part is not None])
    return DenseModule(dense, name)


def _prompts(folder: Path) -> dict[str, Any]:
    if not (folder / "config_sentence_transformers.json").is_file():
        return {}
    settings = Settings.of(folder, "config_sentence_transformers.json")
    prompts = settings.get("prompts", default={})
    default = settings.get("default_prompt_name")
    texts = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    if not texts or (default is not None and default not in prompts):
        raise ModelLoadError(f"{folder}/config_sentence_transformers.json: prompts or default_prompt_name is wrong")
    return {"prompts": prompts, "default_prompt": default}


def _limits(transformer: Path) -> dict[str, Any]:
    """Reads the limits from sentence_bert_config.json, or from the tokenizer's config where that says nothing."""
    limit = None
    lower = False
    if (transformer / "sentence_bert_config.json").is_file():
        settings = Settings.of(transformer, "sentence_bert_config.json")
        lower = bool(settings.get("do_lower_case", default=False))
        limit = settings.size("max_seq_length") if settings.get("max_seq_length") is not None else None
    if limit is None and (transformer / "tokenizer_config.json").is_file():
        stated = Settings.of(transformer, "tokenizer_config.json").get("model_max_length")
        limit = stated if isinstance(stated, int) and 0 < stated < 1 << 30 else None  # larger: not set
    return {"max_tokens": limit, "lower_case": lower}


def _dimensions(folder: Path, transformer: Path) -> dict[str, Any]:
    """Sizes that vectors may be cut to, where the folder says it: `matryoshka_dimensions`, of either config."""
    for file in (folder / "config_sentence_transformers.json", transformer / "config.json"):
        stated = Settings.of(file.parent, file.name).get("matryoshka_dimensions") if file.is_file() else None
        if stated is None:
            continue
        if not isinstance(stated, list) or not all(isinstance(size, int) and size > 0 for size in stated):
            raise ModelLoadError(f"{file}: matryoshka_dimensions is {stated!r}, and must be a list of sizes")
        return {"trained_dimensions": tuple(sorted(set(stated)))}
    return {}


def pool(hidden: mx.array, lengths: Sequence[int], modes: Sequence[str]) -> mx.array:
    """Hidden states (B, T, D) of texts that are padded on the right -> (B, modes * D)."""
    hidden = hidden.astype(mx.float32)
    size = np.array(lengths, np.int32)[:, None]
    longest = hidden.shape[1]
    seen = np.arange(longest) < size  # (B, T)
    # All but the maximum are weighted sums over the tokens, and so one product.
    weighted = [mode for mode in modes if mode != "max"]
    sums = None
    if weighted:
        weights = np.stack([_weights(mode, seen, size) for mode in weighted], axis=1).astype(np.float32)
        sums = mx.array(weights) @ hidden  # (B, modes, D)
    parts = []
    for mode in modes:
        if mode == "max":
            parts.append(mx.max(mx.where(mx.array(seen)[..., None], hidden, -mx.inf), axis=1))
        else:
            assert sums is not None
            parts.append(sums[:, weighted.index(mode)])
    return mx.concatenate(parts, axis=-1)


def _weights(mode: str, seen: Array, size: Array) -> Array:
    """(B, T)"""
    places = np.arange(seen.shape[1])
    if mode == "cls":
        return np.broadcast_to(places == 0, seen.shape)
    if mode == "lasttoken":
        return places == size - 1
    if mode == "weightedmean":
        return seen * (places + 1) / (size * (size + 1) / 2)
    return seen / (size if mode == "mean" else np.sqrt(size))


def normalized(x: mx.array) -> mx.array:
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
