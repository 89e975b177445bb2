"""The server's configuration: one frozen dataclass, filled from flags, environment and a YAML file.

Each field of `ServeConfig` says all there is to know about its option (spellings, config-file section,
help), and the parser, the environment reader and the file reader below are made from that alone.
A flag beats PARALLM_<FLAG> in the environment, which beats the file; an unknown key is an error.
"""

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mlx_parallm.errors import ConfigError


def _option(
    default: Any,
    help: str,
    *,
    section: str = "server",
    aliases: Sequence[str | tuple[str, float]] = (),
    parse: Any = str,
    choices: Sequence[str] | None = None,
    key: str | None = None,
) -> Any:
    """A field with what the three readers need. `aliases` may give (flag, factor) to scale a number."""
    metadata = dict(help=help, section=section, aliases=tuple(aliases), parse=parse, choices=choices, key=key)
    return field(default=default, metadata=metadata)


def parse_bytes(text: str | int) -> int:
    """'512MB', '8GiB', '20 GB' or a number of bytes."""
    if isinstance(text, int):
        return text
    units = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "t": 1_000_000_000_000}
    units |= {f"{unit}i": 1 << (10 * power) for power, unit in enumerate("kmgt", start=1)}
    number = text.strip().lower().removesuffix("b").strip()
    digits = number.rstrip("kmgti").strip()
    unit = number[len(digits) :].strip()
    try:
        return int(float(digits) * units[unit])
    except (ValueError, KeyError):
        raise ConfigError(f"{text!r} is not a size: write bytes, or a number with MB, GB, MiB or GiB") from None


def _parse_bool(text: str | bool) -> bool:
    if isinstance(text, bool):
        return text
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ConfigError(f"{text!r} is not a boolean: write true or false")


def _parse_number(value: Any, kind: type) -> Any:
    problem = f"{value!r} is not a {'whole ' if kind is int else ''}number"
    if isinstance(value, bool):  # YAML's true is no 1
        raise ConfigError(problem)
    try:
        return kind(str(value))
    except ValueError:
        raise ConfigError(problem) from None


def _parse_list(value: str | Sequence[str]) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    # model
    model_path: tuple[str, ...] = _option(
        (), "hub id, local folder or .gguf file; repeatable as NAME=PATH (default: the embedded model)",
        section="model", aliases=("--model",), parse=_parse_list, key="base_model_path",
    )  # fmt: skip
    dtype: str = _option(
        "auto", "how weights are held: auto keeps what is fast on this device", section="model",
        choices=("auto", "float32", "float16", "bfloat16", "quantized"),
    )  # fmt: skip
    max_model_len: int | None = _option(None, "cut the model's context to this many tokens", section="model", parse=int)
    trust_remote_code: bool = _option(
        False, "run Python code that comes with the model", section="model", parse=_parse_bool
    )
    lora_path: tuple[str, ...] = _option(
        (), "LoRA or DoRA adapter to load at start, in mlx-lm's or PEFT's format; repeatable as NAME=PATH",
        section="model", aliases=("--adapter-path",), parse=_parse_list,
    )  # fmt: skip
    lora_rank: int = _option(16, "rank of the adapter that is trained", section="model", parse=int)
    lora_alpha: float = _option(32.0, "its scale, times its rank", section="model", parse=float)
    lora_target_modules: tuple[str, ...] = _option(
        ("q_proj", "v_proj"), "layers that it changes, by the last part of their names, with commas",
        section="model", parse=_parse_list,
    )  # fmt: skip
    lora_layers: int | None = _option(
        None, "of the last so many blocks; fewer learn faster (default: all)", section="model", parse=int
    )
    lora_dora: bool = _option(False, "train DoRA's magnitudes too", section="model", parse=_parse_bool)
    max_loras: int = _option(8, "adapters on the device at once, and in one batch", section="model", parse=int)
    max_cpu_loras: int = _option(
        256, "names of adapters that are kept in host memory; one more is refused (default: 256)",
        section="model", parse=int,
    )  # fmt: skip
    max_lora_rank: int = _option(64, "largest rank of an adapter", section="model", parse=int)
    max_lora_bytes: int = _option(2 << 30, "largest adapter, as 2GiB", section="model", parse=parse_bytes)
    # server
    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(8000, "port to listen on", parse=int)
    max_batch_size: int = _option(32, "rows decoded together", aliases=("--max-batch",), parse=int)
    scheduler: str = _option(
        "continuous", "continuous admits at every step; default waits a gather window first",
        choices=("continuous", "default"),
    )  # fmt: skip
    batch_timeout: float = _option(
        0.1, "the gather window, in seconds", aliases=(("--flush-interval-ms", 0.001),), parse=float
    )
    max_concurrent_streams: int = _option(0, "streams beyond it wait in the queue; 0: no limit", parse=int)
    max_queue_size: int = _option(128, "waiting requests beyond it get 429", parse=int)
    request_timeout_seconds: float = _option(600.0, "then the row is freed and the client gets an error", parse=float)
    max_tokens: int | None = _option(
        None, "default completion length (default: chat what the context allows, completions 16)", parse=int
    )
    prefill_step_size: int = _option(2048, "most prompt tokens computed between two decode steps", parse=int)
    dedupe: bool = _option(False, "identical deterministic requests in flight share one computation", parse=_parse_bool)
    api_key: str | None = _option(None, "bearer token that every route but /health and /metrics asks for")
    admin_key: str | None = _option(
        None, "bearer token for routes that change the server: adapters, training, pauses, caches (default: none)"
    )
    keys_file: str | None = _option(
        None, "YAML file of named keys, as 'alice: {key: SECRET, role: user}'; roles are user and admin (default: none)"
    )
    insecure: bool = _option(False, "listen beyond this machine without any key (default: off)", parse=_parse_bool)
    allowed_host: tuple[str, ...] = _option(
        (), "name that requests may address the server by; repeatable, * for any (default: those of this machine while "
        "--host is loopback, any name otherwise)", parse=_parse_list,
    )  # fmt: skip
    cors_allow_origin: tuple[str, ...] = _option(
        (), "origin that browsers may call from; repeatable, * for all", parse=_parse_list
    )
    max_body_size: int = _option(32 << 20, "largest request body, in bytes or as 32MiB", parse=parse_bytes)
    exit_on_engine_failure: bool = _option(
        True,
        "end the process with a non-zero status when the engine fails for good; --no-exit-on-engine-failure keeps it "
        "running with /health at 503 (default: on)",
        parse=_parse_bool,
    )
    drain_timeout_seconds: float = _option(30.0, "how long SIGTERM waits for running requests", parse=float)
    log_level: str = _option("INFO", "DEBUG, INFO, WARNING or ERROR", parse=str.upper)
    log_json: bool = _option(False, "one JSON object per log line", parse=_parse_bool)
    # training
    mode: str = _option(
        "inference", "inference_and_training is --enable-rl-training; training gives requests what it leaves over",
        choices=("inference", "training", "inference_and_training"),
    )  # fmt: skip
    enable_rl_training: bool = _option(
        False, "train an adapter on what is served", section="rl_training", parse=_parse_bool, key="enabled"
    )
    train_adapter: tuple[str, ...] = _option(
        ("policy",), "the adapter that is trained; repeatable, each learns from its own answers",
        section="rl_training", parse=_parse_list,
    )  # fmt: skip
    inference_share: float = _option(
        0.7, "of the engine's time for requests, while there are some and training has work too",
        section="rl_training", parse=float,
    )  # fmt: skip
    trajectory_buffer_size: int = _option(1000, "trajectories that may wait", section="rl_training", parse=int)
    update_frequency: int = _option(
        100, "trajectories that make an update; 0: only when one is asked for", section="rl_training", parse=int
    )
    max_staleness: int | None = _option(
        None, "versions by which a trajectory may be behind (default: any number)", section="rl_training", parse=int
    )
    scoring_function: tuple[str, ...] = _option(
        (), "NAME=module:function or NAME=file.py:function that requests may name; repeatable",
        section="rl_training", parse=_parse_list,
    )  # fmt: skip
    scoring_batch_size: int = _option(32, "answers that are scored in one call", section="rl_training", parse=int)
    scoring_timeout: float = _option(30.0, "seconds that such a call may take", section="rl_training", parse=float)
    reward_model: tuple[str, ...] = _option(
        (), "folder of a reward model, trained here; repeatable as NAME=PATH", section="rl_training", parse=_parse_list
    )
    atropos_url: str | None = _option(None, "Atropos API to take trajectories from", section="rl_training")
    environment: str | None = _option(
        None,
        "Atropos environment to start, as FILE.py or a module, with its own flags behind it",
        section="rl_training",
    )
    algorithm: str = _option(
        "grpo", "what the policy is trained to do", section="rl_training",
        choices=("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce"),
    )  # fmt: skip
    learning_rate: float = _option(
        5e-4, "learning rate of AdamW, as in TRL (default: 5e-4, for LoRA)", section="rl_training", parse=float
    )
    lr_schedule: str = _option(
        "constant", "how it changes", section="rl_training", choices=("constant", "linear", "cosine"), key="schedule"
    )
    warmup_steps: int = _option(0, "updates until it is reached", section="rl_training", parse=int)
    total_steps: int = _option(1000, "updates after which linear and cosine end", section="rl_training", parse=int)
    weight_decay: float = _option(0.0, "of AdamW", section="rl_training", parse=float)
    max_grad_norm: float = _option(1.0, "longer gradients are cut to it", section="rl_training", parse=float)
    train_batch_size: int = _option(
        32, "trajectories of an update, about", section="rl_training", parse=int, key="batch_size"
    )
    train_epochs: int = _option(1, "optimiser steps on one batch", section="rl_training", parse=int, key="epochs")
    clip_low: float = _option(
        0.2,
        "share by which a token's probability may fall (rloo, gspo: an answer's)",
        section="rl_training",
        parse=float,
    )
    clip_high: float = _option(0.2, "share by which it may rise", section="rl_training", parse=float)
    beta: float = _option(0.0, "weight of the KL divergence to the model", section="rl_training", parse=float)
    token_limit: float | None = _option(
        None, "tokens that were drawn this many times likelier or less are left out", section="rl_training", parse=float
    )
    answer_limit: float | None = _option(
        None, "the same for whole answers, by the geometric mean over their tokens", section="rl_training", parse=float
    )
    max_kl: float = _option(
        1.0, "nats a token by which an update may move the policy", section="rl_training", parse=float
    )
    microstep_seconds: float = _option(
        0.5,
        "about how long a piece of an update holds requests up (four times that while there are none)",
        section="rl_training",
        parse=float,
    )
    microbatch_tokens: int = _option(
        0, "tokens of such a piece; 0: what that time allows", section="rl_training", parse=int
    )
    gradient_checkpointing: bool = _option(
        False, "compute blocks twice and keep less", section="rl_training", parse=_parse_bool
    )
    train_seed: int = _option(0, "of all that is random in training", section="rl_training", parse=int, key="seed")
    checkpoint_interval: int = _option(
        500,
        "updates between two checkpoints that stay, beside the one called latest (default: 500)",
        section="checkpointing",
        parse=int,
        key="interval",
    )
    checkpoint_seconds: float = _option(
        60.0,
        "seconds after a change of the training state until it is written to the checkpoint called latest, which a "
        "restart goes on from; it is always written on shutdown; 0: only then (default: 60)",
        section="checkpointing",
        parse=float,
        key="seconds",
    )
    keep_n_checkpoints: int = _option(
        10, "older ones go, but for those with a name", section="checkpointing", parse=int
    )
    checkpoint_dir: str = _option("./checkpoints", "folder for them", section="checkpointing")
    resume: bool = _option(True, "go on from the last checkpoint there", section="checkpointing", parse=_parse_bool)
    # cache
    memory_limit: int | None = _option(
        None,
        "most bytes that the process holds, weights included, as 24GiB (default: what the machine has to spare, within "
        "the container's limit)",
        section="cache",
        parse=parse_bytes,
    )
    kv_cache_memory: int | None = _option(
        None, "most bytes of live keys and values, as 8GiB (default: by memory)", section="cache", parse=parse_bytes
    )
    block_size: int = _option(16, "tokens in a block of the prefix cache", section="cache", parse=int)
    num_blocks: int | None = _option(
        None, "blocks of the prefix cache; 0 turns it off (default: half of the memory for keys and values)",
        section="cache", parse=int,
    )  # fmt: skip
    kv_bits: int | None = _option(None, "keep cached blocks quantised to 8 or 4 bits", section="cache", parse=int)
    ssd: bool = _option(True, "keep cached prompts on SSD too, over restarts", section="cache", parse=_parse_bool)
    ssd_cache_dir: str | None = _option(
        None, "folder for that, private to the user (default: kv in the user's cache folder)", section="cache"
    )
    ssd_max_bytes: int = _option(20_000_000_000, "most bytes in it, as 20GB", section="cache", parse=parse_bytes)
    ssd_ttl_days: float = _option(7.0, "days after which an unused file goes", section="cache", parse=float)
    kv_group_size: int = _option(64, "elements that share a scale in quantised blocks", section="cache", parse=int)

    def __post_init__(self) -> None:
        for name in (
            "max_batch_size",
            "prefill_step_size",
            "max_queue_size",
            "max_body_size",
            "max_loras",
            "max_cpu_loras",
            "max_lora_rank",
            "max_lora_bytes",
            "lora_rank",
            "trajectory_buffer_size",
            "scoring_batch_size",
            "checkpoint_interval",
            "keep_n_checkpoints",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in (
            "batch_timeout",
            "request_timeout_seconds",
            "drain_timeout_seconds",
            "ssd_max_bytes",
            "ssd_ttl_days",
            "update_frequency",
            "scoring_timeout",
            "checkpoint_seconds",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, and is {getattr(self, name)}")
        for name in ("max_staleness", "lora_layers"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, and is {getattr(self, name)}")
        if self.trains:  # what is said of training may stay in a file while it is off
            self._check_training()
        for name in ("api_key", "admin_key", "keys_file"):
            if (value := getattr(self, name)) is not None and not value.strip():
                raise ConfigError(f"{name} is empty: give it a value, or leave it out (unset PARALLM_{name.upper()})")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, not {self.port}")
        if self.max_concurrent_streams < 0:
            raise ConfigError("max_concurrent_streams must not be negative")
        for name in ("max_tokens", "max_model_len", "kv_cache_memory", "memory_limit"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        if not 0 < self.inference_share <= 1:
            raise ConfigError(f"inference_share must be above 0 and at most 1, not {self.inference_share}")
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, not {self.block_size}")
        if self.num_blocks is not None and self.num_blocks < 0:
            raise ConfigError(f"num_blocks must not be negative, and is {self.num_blocks}")
        if self.kv_bits not in (None, 4, 8):
            raise ConfigError(f"kv_bits must be 8 or 4, not {self.kv_bits}")
        if self.kv_group_size not in (32, 64, 128):
            raise ConfigError(f"kv_group_size must be 32, 64 or 128, not {self.kv_group_size}")
        if self.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ConfigError(f"log_level must be DEBUG, INFO, WARNING or ERROR, not {self.log_level}")

    def _check_training(self) -> None:
        if self.update_frequency > self.trajectory_buffer_size:
            raise ConfigError(
                f"update_frequency is {self.update_frequency}, and trajectory_buffer_size holds only "
                f"{self.trajectory_buffer_size}"
            )
        if self.environment is not None and self.atropos_url is None:
            raise ConfigError("--environment needs --atropos-url, the API that it sends its trajectories to")
        if self.lora_rank > self.max_lora_rank:
            raise ConfigError(f"lora_rank is {self.lora_rank}, and max_lora_rank allows {self.max_lora_rank}")
        if len(self.train_adapter) > self.max_loras:
            raise ConfigError(f"{len(self.train_adapter)} adapters to train, and max_loras is {self.max_loras}")

    @property
    def has_keys(self) -> bool:
        return not (self.api_key is None and self.admin_key is None and self.keys_file is None)

    @property
    def trains(self) -> bool:
        return self.enable_rl_training or self.mode in ("training", "inference_and_training")

    @property
    def serving_share(self) -> float:
        """Of the engine's time, where training has work too."""
        return min(0.05, self.inference_share) if self.mode == "training" else self.inference_share

    def named_adapters(self) -> dict[str, str]:
        """Name to folder for each adapter to load at start."""
        adapters: dict[str, str] = {}
        for entry in self.lora_path:
            name, found, path = entry.partition("=")
            name, path = (name, path) if found else (Path(entry).expanduser().resolve().name, entry)
            if name in adapters or name in self.named_models() or name in ("default", "base"):
                raise ConfigError(f"two models or adapters are called {name!r}; give each its own NAME=PATH")
            adapters[name] = path
        return adapters

    def named_reward_models(self) -> dict[str, str]:
        """Name to folder for each reward model to load at start."""
        found: dict[str, str] = {}
        for entry in self.reward_model:
            name, given, path = entry.partition("=")
            name, path = (name, path) if given else (Path(entry).expanduser().resolve().name, entry)
            if name in found:
                raise ConfigError(f"two reward models are called {name!r}; give each its own NAME=PATH")
            found[name] = path
        return found

    def named_models(self) -> dict[str, str | None]:
        """Name to source for each model to serve; None is the embedded default."""
        if not self.model_path:
            return {"SmolLM2-135M-Instruct": None}
        models: dict[str, str | None] = {}
        for entry in self.model_path:
            name, found, path = entry.partition("=")
            name, path = (name, path) if found else (_model_name(entry), entry)
            if name in models:
                raise ConfigError(f"two models are called {name!r}; give each its own NAME=PATH")
            models[name] = path
        return models


C = TypeVar("C", bound=ServeConfig)


def _model_name(source: str) -> str:
    """A hub id names itself; a folder or file is called by its last part."""
    path = Path(source).expanduser()
    if path.exists():
        return path.resolve().stem if path.suffix == ".gguf" else path.resolve().name
    return source


def add_flags(parser: argparse.ArgumentParser, kind: "type[ServeConfig]" = ServeConfig) -> None:
    """Gives `parser` every option of a config, absent ones left out of the namespace."""
    for item in fields(kind):
        meta = item.metadata
        common = dict(dest=item.name, default=argparse.SUPPRESS, help=meta["help"])
        flag = "--" + item.name.replace("_", "-")
        plain = [alias for alias in meta["aliases"] if isinstance(alias, str)]
        if meta["parse"] is _parse_bool:
            parser.add_argument(flag, *plain, action=argparse.BooleanOptionalAction, **common)
        elif meta["parse"] is _parse_list:
            parser.add_argument(flag, *plain, action="append", **common)
        else:
            parser.add_argument(flag, *plain, type=_argparse_type(meta["parse"]), choices=meta["choices"], **common)
        for alias, factor in (alias for alias in meta["aliases"] if not isinstance(alias, str)):
            parser.add_argument(alias, type=lambda text, by=factor: float(text) * by, **common)  # type: ignore[misc]
    parser.add_argument("--config", type=Path, default=argparse.SUPPRESS, help="YAML file of options")


def _argparse_type(parse: Any) -> Any:
    def read(text: str) -> Any:
        try:
            return _parse_number(text, parse) if parse in (int, float) else parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(error.message) from None

    read.__name__ = getattr(parse, "__name__", "value")
    return read


def load_config(
    flags: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    kind: type[C] = ServeConfig,  # type: ignore[assignment]
) -> C:
    """Flags over PARALLM_* over the YAML file named by either."""
    environment = os.environ if environment is None else environment
    _check_variables(environment)
    flags = dict(flags)
    config_file = flags.pop("config", None) or environment.get("PARALLM_CONFIG")
    values = _read_file(Path(config_file), kind) if config_file else {}
    for item in fields(kind):
        text = environment.get(f"PARALLM_{item.name.upper()}")
        if text is not None:
            values[item.name] = _convert(item.metadata, text, f"PARALLM_{item.name.upper()}")
    for name, value in flags.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    loaded = kind(**values)
    for name in ("atropos_url", "environment"):
        if name in flags and not loaded.trains:
            raise ConfigError(f"--{name.replace('_', '-')} needs --enable-rl-training")
    return loaded


# Variables that are no options; Kubernetes sets the last kinds for a service called parallm.
_OTHER_VARIABLE = re.compile(r"PARALLM_(CONFIG|BLAS|NATIVE|SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)")


def _check_variables(environment: Mapping[str, str]) -> None:
    """A misspelt variable is an error: a server must not come up without the key that somebody meant to set."""
    kinds: tuple[type[ServeConfig], ...] = (ServeConfig, *ServeConfig.__subclasses__())
    known = {f"PARALLM_{item.name.upper()}" for kind in kinds for item in fields(kind)}
    for name in sorted(environment):
        if name.startswith("PARALLM_") and name not in known and not _OTHER_VARIABLE.fullmatch(name):
            raise ConfigError(f"the environment variable {name} is not an option{nearest(name, known)}")


def _read_file(path: Path, kind: type[ServeConfig]) -> dict[str, Any]:
    try:
        text = path.read_text()
        document = yaml.safe_load(text) or {}
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"config file {path}{_place(error)}: {error.problem or error}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise ConfigError(f"config file {path}: {reason}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"config file {path}: expected sections such as 'server:', found {type(document).__name__}")
    sections: dict[str, dict[str, Any]] = {}
    for item in fields(kind):
        sections.setdefault(item.metadata["section"], {})[item.metadata["key"] or item.name] = item
    values: dict[str, Any] = {}
    for section, options in document.items():
        if section not in sections:
            where = f"config file {path}{_line(text, section)}"
            raise ConfigError(f"{where}: unknown section {section!r}{nearest(section, sections)}")
        if not isinstance(options, dict):
            raise ConfigError(f"config file {path}: section {section!r} must hold keys and values")
        for key, value in options.items():
            if key not in sections[section]:
                where = f"config file {path}{_line(text, section, key)}"
                raise ConfigError(f"{where}: unknown key {section}.{key}{nearest(key, sections[section])}")
            item = sections[section][key]
            if value is not None:
                where = f"config file {path}{_line(text, section, key)}: {section}.{key}"
                values[item.name] = _convert(item.metadata, value, where)
    return values


def _line(text: str, *keys: object) -> str:
    """Where a key stands in a file that was read already."""
    node, mark = yaml.compose(text), None
    for name in keys:
        pairs = [pair for pair in getattr(node, "value", []) if isinstance(pair, tuple) and pair[0].value == str(name)]
        if not pairs:
            break
        mark, node = pairs[-1][0].start_mark, pairs[-1][1]
    return "" if mark is None else f", line {mark.line + 1}"


def _place(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"


def nearest(name: object, valid: Iterable[str]) -> str:
    """The valid name that is most like an unknown one, as the end of an error message."""
    close = difflib.get_close_matches(str(name), list(valid), n=1, cutoff=0)
    return f"; did you mean {close[0]!r}?" if close else ""


def _convert(metadata: Mapping[str, Any], value: Any, where: str) -> Any:
    parse = metadata["parse"]
    try:
        if parse in (int, float):
            result = _parse_number(value, parse)
        else:
            result = parse(value) if parse in (_parse_list, _parse_bool, parse_bytes) else parse(str(value))
    except (ConfigError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    if metadata["choices"] and result not in metadata["choices"]:
        raise ConfigError(f"{where}: {value!r} is not one of {', '.join(metadata['choices'])}")
    return result
