"""Reads and writes adapters in the formats of mlx-lm and PEFT. NumPy only: on any thread, and never a pickle.

mlx-lm: adapter_config.json (fine_tune_type, lora_parameters) and adapters.safetensors or .npz, with lora_a (K, r),
lora_b (r, N) and for DoRA m. PEFT: adapter_config.json (peft_type, r, lora_alpha, …) and adapter_model.safetensors,
with lora_A.weight (r, K), lora_B.weight (N, r) and lora_magnitude_vector. Embeddings are the other way round in both.
"""

import functools
import io
import json
import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import re2

from mlx_parallm.lora.adapter import Adapter, AdapterError, Array, Part
from mlx_parallm.tensors import TensorError, parse_safetensors

CONFIG = "adapter_config.json"
WEIGHTS = ("adapters.safetensors", "adapter_model.safetensors", "adapters.npz")
MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERN_BYTES = 1 << 20  # of a compiled pattern
PEFT_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<path>.+)\."
    r"(?P<leaf>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.[^.]+)??(?:\.weight)?"
)
MLX_KEY = re.compile(r"(?P<path>.+)\.(?P<leaf>lora_a|lora_b|m)")
UNSUPPORTED = (  # what makes PEFT compute something else than W + b · a
    "alora_invocation_tokens",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)

Tensors = dict[str, Array]
Leaves = dict[str, dict[str, Array]]


def read_folder(folder: Path, max_bytes: int) -> tuple[Adapter, dict[str, Any]]:
    """An adapter's folder, as mlx-lm's and PEFT's trainers leave it, and its config."""
    config, data = _contents(folder, max_bytes)
    return parse(config, data, max_bytes), config


def _contents(folder: Path, max_bytes: int) -> tuple[dict[str, Any], bytes]:
    config_file = folder / CONFIG
    weights_file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if not config_file.is_file() or weights_file is None:
        raise AdapterError(f"{folder} holds no {CONFIG} with {' or '.join(WEIGHTS)} beside it", param="lora_path")
    return parse_config(_bytes_of(config_file, MAX_CONFIG_BYTES)), _bytes_of(weights_file, max_bytes)


def read_adapter(path: str, max_bytes: int) -> tuple[Adapter, dict[str, Any], str]:
    """The adapter in a folder that somebody has named, its config, and the folder; AdapterError where it can't be."""
    config, data, folder = read_contents(path, max_bytes)
    return parse(config, data, max_bytes), config, folder


def read_contents(path: str, max_bytes: int) -> tuple[dict[str, Any], bytes, str]:
    """The config, the file of the weights and the folder that somebody has named; AdapterError where it can't be."""
    try:
        folder = Path(path).expanduser()
        return *_contents(folder, max_bytes), str(folder)
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a name too long, a folder that is closed to us
        raise AdapterError(f"{path[:200]!r} can't be read: {error}", param="path") from error


def parse_config(data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"the adapter's config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError("the adapter's config is not a JSON object")
    return config


def parse(config: Mapping[str, Any], data: bytes, max_bytes: int) -> Adapter:
    """An adapter from the contents of its two files."""
    tensors = parse_tensors(data, max_bytes)
    return from_peft(config, tensors) if "peft_type" in config else from_mlx_lm(config, tensors)


def usual_config(data: bytes, max_bytes: int) -> dict[str, Any]:
    """Returns the config of weights that come without one: the format that their names tell, and a scale of 1."""
    tensors = parse_tensors(data, max_bytes)
    ranks = {array.shape[0] for name, array in tensors.items() if "lora_A" in name and array.ndim == 2}
    if not any("lora_A" in name or "lora_embedding_A" in name for name in tensors):
        return {"fine_tune_type": "lora", "lora_parameters": {"scale": 1.0}}
    if len(ranks) != 1:
        raise AdapterError("weights of several ranks need a config that says their scale", param="config")
    return {"peft_type": "LORA", "lora_alpha": ranks.copy().pop(), "r": ranks.pop()}


def parse_tensors(data: bytes, max_bytes: int) -> Tensors:
    if len(data) > max_bytes:
        raise AdapterError(f"the adapter has {len(data):,} bytes, and at most {max_bytes:,} are taken")
    try:
        tensors = _npz(data, max_bytes) if data[:4] == b"PK\x03\x04" else parse_safetensors(data)
    except TensorError as error:
        raise AdapterError(f"the adapter's weights can't be read: {error}") from error
    for name, array in tensors.items():
        if array.dtype.kind != "f":
            raise AdapterError(f"{name} is {array.dtype}, and weights must be floating point numbers")
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def from_mlx_lm(config: Mapping[str, Any], tensors: Tensors) -> Adapter:
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise AdapterError(f"the adapter's fine_tune_type is {kind!r}, and only lora and dora can be served")
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if scale is None or not _is_number(scale):
        raise AdapterError("the adapter's config has no number lora_parameters.scale")
    parts = {}
    for path, leaves in _leaves(tensors, MLX_KEY).items():
        if not {"lora_a", "lora_b"} <= leaves.keys():
            raise AdapterError(f"{path} has not both lora_a and lora_b")
        a = leaves["lora_a"]
        b = leaves["lora_b"]
        if a.ndim != 2 or b.ndim != 2:
            raise AdapterError(f"{path}: lora_a and lora_b must be matrices")
        if a.shape[1] != b.shape[0]:
            raise AdapterError(f"{path}: lora_a has rank {a.shape[1]} and lora_b {b.shape[0]}")
        if _is_embedding(path):
            parts[path] = Part(_plain(b), _plain(scale * a), leaves.get("m"))
        else:
            parts[path] = Part(_plain(a.T), _plain(scale * b.T), leaves.get("m"))
    return Adapter(parts)


def from_peft(config: Mapping[str, Any], tensors: Tensors) -> Adapter:
    if config["peft_type"] != "LORA":
        raise AdapterError(f"the adapter's peft_type is {config['peft_type']!r}, and only LORA can be served")
    for name in UNSUPPORTED:
        if config.get(name):
            raise AdapterError(f"adapters with {name} can't be served")
    parts = {}
    for path, leaves in _leaves(tensors, PEFT_KEY).items():
        embedding = "lora_embedding_A" in leaves
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
        if not set(names) <= leaves.keys():
            raise AdapterError(f"{path} has not both {names[0]} and {names[1]}")
        a = leaves[names[0]]
        b = leaves[names[1]]
        m = leaves.get("lora_magnitude_vector")
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise AdapterError(f"{path}: {names[0]} and {names[1]} are no pair of matrices of one rank")
        if embedding and m is not None:
            raise AdapterError(f"{path}: PEFT's DoRA of an embedding can't be served")
        _check_rank(config, path, a.shape[0])
        scale = _peft_scale(config, path, a.shape[0])
        parts[path] = Part(_plain(b.T), _plain(scale * a.T)) if embedding else Part(_plain(a), _plain(scale * b), m)
    return Adapter(parts)


def _check_rank(config: Mapping[str, Any], path: str, rank: int) -> None:
    """PEFT divides by the config's rank: tensors of another one would be scaled wrongly."""
    stated = _of_pattern(config, "rank_pattern", path, config.get("r"))
    if stated is not None and stated != rank:
        raise AdapterError(f"the adapter's config says r = {stated!r}, and {path} has rank {rank}", param="config")


def _of_pattern(config: Mapping[str, Any], name: str, path: str, default: Any) -> Any:
    """Returns what the first of a config's patterns that fits a layer says, as PEFT decides it; else the default."""
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"the adapter's {name} is not a JSON object", param="config")
    for pattern, value in patterns.items():
        if path == pattern or path.endswith(f".{pattern}") or _matches(pattern, path, name):
            return value
    return default


def _peft_scale(config: Mapping[str, Any], path: str, rank: int) -> float:
    alpha = _of_pattern(config, "alpha_pattern", path, config.get("lora_alpha", 8))
    if not _is_number(alpha):
        raise AdapterError("the adapter's lora_alpha is not a number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    """Compiles a pattern by RE2, whose time is linear in the text: whoever uploads an adapter writes the pattern."""
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_PATTERN_BYTES
    return re2.compile(rf"(.*\.)?({pattern})", options)


def _matches(pattern: str, path: str, name: str) -> bool:
    try:
        return _compiled(pattern).fullmatch(path) is not None
    except UnicodeEncodeError:
        raise AdapterError(f"a pattern in the adapter's {name} is no text", param="config") from None
    except re2.error as error:
        reason = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else error
        raise AdapterError(
            f"{pattern[:100]!r} in the adapter's {name} can't be used: {reason}", param="config"
        ) from None


def _leaves(tensors: Tensors, key: re.Pattern[str]) -> Leaves:
    found: Leaves = {}
    for name, array in tensors.items():
        match = key.fullmatch(name)
        if match is None:
            raise AdapterError(f"{name} is not a weight of an adapter")
        found.setdefault(match["path"], {})[match["leaf"]] = array
    return found


def _is_embedding(path: str) -> bool:
    """mlx-lm's files don't say; its models call them so."""
    return path.rsplit(".", 1)[-1] in ("embed_tokens", "wte", "embeddings", "word_embeddings", "tok_embeddings")


def _npz(data: bytes, max_bytes: int) -> Tensors:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(item.file_size for item in archive.infolist()) > max_bytes:
                raise AdapterError(f"the adapter unpacks to more than {max_bytes:,} bytes")
            for item in archive.infolist():
                with archive.open(item) as file:
                    _check_npy_size(file, item.file_size)
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            tensors = {name: arrays[name] for name in arrays.files}
    except AdapterError:
        raise
    except Exception as error:  # NumPy evaluates headers as Python, and archives are packed in many ways
        reason = str(error) or type(error).__name__
        raise AdapterError(f"the adapter's weights are not a sound npz file: {reason[:300]}") from error
    for name, array in tensors.items():
        if not isinstance(array, np.ndarray):  # NumPy hands out other files of the archive as they are
            raise AdapterError(f"the adapter's npz file holds {name!r}, which is no array")
    return tensors


def _check_npy_size(file: IO[bytes], size: int) -> None:
    """NumPy takes the memory that a header asks for before it reads a number. What is no array is found later."""
    if file.read(6) != b"\x93NUMPY":
        return
    major, _ = file.read(2)
    read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if math.prod(shape) * dtype.itemsize > size:
        raise AdapterError(f"the adapter's npz file has an array of shape {shape} in {size:,} bytes")


def _bytes_of(file: Path, max_bytes: int) -> bytes:
    try:
        size = file.stat().st_size
        if size > max_bytes:
            raise AdapterError(f"{file} has {size:,} bytes, and at most {max_bytes:,} are taken")
        return file.read_bytes()
    except OSError as error:
        raise AdapterError(f"{file} can't be read: {error}", param="lora_path") from error


def _plain(array: Array) -> Array:
    return np.ascontiguousarray(array, np.float32)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
