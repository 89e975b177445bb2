"""Options from flags, environment and file: their order, their spellings, and what is said of wrong ones."""

import argparse
import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_parallm.config import (
    ServeConfig,
    TrainConfig,
    add_serve_flags,
    add_train_flags,
    load_config,
    load_train_config,
    parse_bytes,
)
from mlx_parallm.config.options import options_of
from mlx_parallm.errors import ConfigError
from mlx_parallm.integrated import RLIntegratedServer
from mlx_parallm.training.runs import _check_writable


def parse(*arguments: str, environment: dict[str, str] | None = None) -> ServeConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_serve_flags(parser)
    return load_config(vars(parser.parse_args(arguments)), environment or {})


def value_of(config: ServeConfig, name: str) -> Any:
    """Of an option by name."""
    (path,) = (option.path for option in options_of(type(config)) if option.name == name)
    return functools.reduce(getattr, path, config)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_defaults() -> None:
    config = parse()
    http, batch = config.http, config.batch
    assert (http.host, http.port, batch.max_batch_size, batch.scheduler) == ("127.0.0.1", 8000, 32, "continuous")
    assert (batch.max_queue_size, batch.request_timeout_seconds, batch.prefill_step_size) == (128, 600, 2048)
    assert config.named_models() == {"SmolLM2-135M-Instruct": None}


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "server: {port: 1, host: file, max_batch_size: 7}")
    environment = {"PARALLM_PORT": "2", "PARALLM_HOST": "environment", "PARALLM_CONFIG": file}
    config = parse("--port", "3", environment=environment)
    assert (config.http.port, config.http.host, config.batch.max_batch_size) == (3, "environment", 7)
    assert parse("--config", file).http.port == 1


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--max-batch", "4"], "max_batch_size", 4),
        (["--model", "a", "--model-path", "b"], "model_path", ("a", "b")),
        (["--flush-interval-ms", "250"], "batch_timeout", 0.25),
        (["--batch-timeout", "2"], "batch_timeout", 2.0),
        (["--dedupe"], "dedupe", True),
        (["--no-dedupe"], "dedupe", False),
        (["--kv-cache-memory", "2GiB"], "kv_cache_memory", 2 << 30),
        (["--log-level", "debug"], "log_level", "DEBUG"),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
    ],
)
def test_flags(arguments: list[str], field: str, value: Any) -> None:
    assert value_of(parse(*arguments), field) == value


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("DEDUPE", "yes", "dedupe", True),
        ("MODEL_PATH", "a=x, b=y", "model_path", ("a=x", "b=y")),
        ("MAX_BODY_SIZE", "1 MB", "max_body_size", 1_000_000),
        ("MAX_MODEL_LEN", "512", "max_model_len", 512),
    ],
)
def test_environment(name: str, text: str, field: str, value: Any) -> None:
    assert value_of(parse(environment={f"PARALLM_{name}": text}), field) == value


def test_file_with_sections(tmp_path: Path) -> None:
    text = (
        "server: {max_tokens: 64, api_key: null}\nmodel: {base_model_path: some/model}\ncache: {kv_cache_memory: 1GB}"
    )
    config = parse("--config", write(tmp_path / "c.yaml", text))
    assert (config.batch.max_tokens, config.http.api_key, config.cache.kv_cache_memory) == (64, None, 10**9)
    assert config.named_models() == {"some/model": "some/model"}
    assert parse("--config", write(tmp_path / "empty.yaml", "")) == ServeConfig.of()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server: {prot: 1}", "unknown key server.prot; did you mean 'port'?"),
        ("sever: {port: 1}", "unknown section 'sever'; did you mean 'server'?"),
        ("server: 5", "section 'server' must hold keys and values"),
        ("- a", "expected sections"),
        ("server: {port: many}", r"server.port: .*many"),
        ("server: {port: true}", "line 1: server.port: True is not a whole number"),
        ("server: {dedupe: maybe}", "server.dedupe: 'maybe' is not a boolean"),
        ("model: {dtype: int3}", "model.dtype: 'int3' is not one of auto, float32"),
        ("cache: {kv_cache_memory: lots}", "'lots' is not a size"),
        ("server: {port: 70000}", "port must be between 0 and 65535"),
        ("server: [", "line 1, column 10: "),
        ("server:\n  port: 1\n  hots: x", "line 3: unknown key server.hots"),
        ("cache:\n  kv_bits: many", "line 2: cache.kv_bits: 'many' is not a whole number"),
    ],
)
def test_wrong_files_say_what_and_where(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("--config", write(tmp_path / "c.yaml", text))


def test_absent_file() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        parse("--config", "nowhere.yaml")


@pytest.mark.parametrize(("given", "missing"), [("tls_cert", "tls_key"), ("tls_key", "tls_cert")])
def test_https_takes_a_certificate_and_its_key(given: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"^{given} needs {missing} too"):
        ServeConfig.of(**{given: "file.pem"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_batch_size": 0},
        {"max_queue_size": 0},
        {"prefill_step_size": -1},
        {"batch_timeout": -0.1},
        {"request_timeout_seconds": float("nan")},
        {"port": -1},
        {"max_concurrent_streams": -1},
        {"max_tokens": 0},
        {"max_model_len": 0},
        {"idle_unload_seconds": 0.0},
        {"log_level": "LOUD"},
    ],
)
def test_values_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServeConfig.of(**wrong)


@pytest.mark.parametrize(
    ("text", "size"),
    [("12", 12), (12, 12), ("1KB", 1000), ("1 kib", 1024), ("1.5GB", 1_500_000_000), ("2GiB", 2 << 30), ("1T", 10**12)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


def test_named_models(tmp_path: Path) -> None:
    file = tmp_path / "My-Model.Q4_0.gguf"
    file.touch()
    models = ServeConfig.of(model_path=("a=x/y", "org/name", str(file), str(tmp_path))).named_models()
    assert models == {"a": "x/y", "org/name": "org/name", "My-Model.Q4_0": str(file), tmp_path.name: str(tmp_path)}
    with pytest.raises(ConfigError, match="two models are called 'a'"):
        ServeConfig.of(model_path=("a=x", "a=y")).named_models()


def test_modes_of_training() -> None:
    assert not ServeConfig.of().trains
    assert ServeConfig.of(enable_rl_training=True).trains
    assert ServeConfig.of(mode="inference_and_training").serving_share == 0.7
    assert ServeConfig.of(mode="training").serving_share < 0.1
    for wrong in ({"inference_share": 0.0}, {"max_staleness": -1}, {"checkpoint_interval": 0}):
        with pytest.raises(ConfigError):
            ServeConfig.of(**wrong)  # type: ignore[arg-type]
    many = tuple(f"a{number}" for number in range(9))
    with pytest.raises(ConfigError, match="9 adapters"):
        ServeConfig.of(enable_rl_training=True, train_adapter=many)


def test_a_server_for_training_has_no_session_before_it_has_begun() -> None:
    with pytest.raises(ConfigError, match="not loaded yet: run_inference or run_training_loop does that"):
        RLIntegratedServer("no/model").session  # noqa: B018


def test_a_reward_model_has_a_rate_of_its_own_unless_one_is_given() -> None:
    reward = {"mode": "rm", "pairs": "pairs.jsonl"}
    assert load_train_config({}, {}).training.rl.learning_rate == 5e-4
    assert load_train_config(reward, {}).training.rl.learning_rate == 2e-4
    assert load_train_config(reward | {"learning_rate": 1e-3}, {}).training.rl.learning_rate == 1e-3
    assert load_train_config(reward, {"PARALLM_LEARNING_RATE": "1e-5"}).training.rl.learning_rate == 1e-5
    assert load_train_config(reward, {}).mode == "rm"


def test_what_training_needs_is_asked_for_when_it_is_on() -> None:
    for wrong in ({"lora_rank": 128}, {"update_frequency": 5000}, {"environment": "env.py"}):
        assert not ServeConfig.of(**wrong).trains  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            ServeConfig.of(enable_rl_training=True, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["PARALLM_SERVICE_HOST", "PARALLM_PORT_8000_TCP_ADDR", "PARALLM_BLAS", "PARALLM_STEPS"]
)
def test_variables_of_others_are_none_of_ours(name: str) -> None:
    assert parse(environment={name: "x"}).http.port == 8000


def test_a_misspelt_variable_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="PARALLM_MAX_BATCHSIZE is not an option; did you mean 'PARALLM_MAX_BATCH_SIZE'"
    ):
        parse(environment={"PARALLM_MAX_BATCHSIZE": "3"})


def test_an_option_has_one_name_and_one_place() -> None:
    for kind in (ServeConfig, TrainConfig):
        options = options_of(kind)
        assert len({option.name for option in options}) == len(options)
        assert len({(option.section, option.key) for option in options}) == len(options)


def test_the_prefix_cache_may_be_given_in_whole_contexts() -> None:
    config = ServeConfig.of(sequence_cache_size=3, block_size=16)
    assert [config.cache.blocks(length, config.cache.block_size) for length in (1, 96, 100)] == [3, 18, 21]
    assert ServeConfig.of(num_blocks=7).cache.blocks(100, 16) == 7
    assert ServeConfig.of().cache.blocks(100, 16) is None


def test_options_are_changed_by_name() -> None:
    config = ServeConfig.of(port=1, lora_rank=4, ssd=False)
    changed = config.but(port=2, learning_rate=0.1)
    assert (changed.http.port, changed.training.rl.learning_rate, changed.training.lora.rank) == (2, 0.1, 4)
    assert (config.http.port, changed.cache.ssd) == (1, False)
    for wrong in (ServeConfig.of, config.but):
        with pytest.raises(TypeError, match="ServeConfig has no option 'prot'"):
            wrong(prot=1)
    with pytest.raises(ConfigError, match="lora_rank must be at least 1, not 0"):
        config.but(lora_rank=0)


@pytest.mark.parametrize("add", [add_serve_flags, add_train_flags])
def test_every_line_of_help_stands_alone(add: Any) -> None:
    parser = argparse.ArgumentParser()
    add(parser)
    groups = [group.title for group in parser._action_groups]
    assert "memory and caches" in groups
    for action in parser._actions[1:]:
        assert action.help is not None
        assert "(default: " in action.help, action.option_strings
        assert action.help.split(" ", 1)[0] not in ("it", "its", "the", "that", "such", "of"), action.help


def test_a_mode_of_training_has_defaults_of_its_own() -> None:
    sft = load_train_config({"mode": "sft", "dataset": "x.jsonl"}, {})
    assert (sft.training.rl.schedule, sft.training.rl.batch_size, sft.training.adapters) == ("linear", 16, ["sft"])
    assert (sft.training.update_frequency, sft.checkpoints.checkpoint_interval) == (0, 20)
    assert load_config({"mode": "training_only"}, {}).mode == "training"
    assert load_config({"mode": "inference_only"}, {}).mode == "inference"
    scored = load_config({"enable_rl_training": True, "environment": "gsm8k"}, {})
    assert scored.training.built_in_scorer == "gsm8k"
    with pytest.raises(ConfigError, match=r"needs --atropos-url.*gsm8k"):
        load_config({"enable_rl_training": True, "environment": "mine.py"}, {})
    assert load_train_config({"steps": 40}, {}).training.rl.total_steps == 40
    assert load_train_config({"steps": 40, "total_steps": 90}, {}).training.rl.total_steps == 90
    given = load_train_config({"mode": "sft", "dataset": "x.jsonl", "lr_schedule": "cosine"}, {})
    assert given.training.rl.schedule == "cosine"


# Names that users of other programs know, and what each sets.
CACHE_KEYS = {
    "block_size": (8, "cache.block_size"),
    "num_blocks": (64, "cache.num_blocks"),
    "kv_bits": (8, "cache.kv_bits"),
    "kv_group_size": (32, "cache.kv_group_size"),
    "ssd_enabled": (False, "cache.ssd"),
    "ssd_cache_dir": ("/tmp/x", "cache.ssd_cache_dir"),
    "ssd_ttl_days": (3.0, "cache.ssd_ttl_days"),
    "max_batch_size": (5, "batch.max_batch_size"),
    "prefill_batch_size": (2, "batch.prefill_batch_size"),
    "completion_batch_size": (5, "batch.max_batch_size"),
    "max_kv_size": (512, "model.max_model_len"),
    "sequence_cache_size": (4, "cache.sequence_cache_size"),
    "max_queue_size": (9, "batch.max_queue_size"),
    "request_timeout_s": (12.0, "batch.request_timeout_seconds"),
    "default_max_tokens": (77, "batch.max_tokens"),
    "default_temperature": (0.3, "batch.default_temperature"),
    "default_top_p": (0.9, "batch.default_top_p"),
    "use_distributed": (True, "cluster.use_distributed"),
}


@pytest.mark.parametrize("key", CACHE_KEYS)
def test_the_cache_by_its_own_names(tmp_path: Path, key: str) -> None:
    value, place = CACHE_KEYS[key]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"cache": {key: value}}))
    config: object = load_config({"config": str(file)}, {})
    for part in place.split("."):
        config = getattr(config, part)
    assert config == value


def test_two_names_of_one_option_that_disagree_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("server: {max_batch_size: 8}\ncache: {completion_batch_size: 5}\n")
    with pytest.raises(ConfigError, match="completion_batch_size is max_batch_size"):
        load_config({"config": str(file)}, {})
    file.write_text("server: {max_batch_size: 5}\ncache: {completion_batch_size: 5}\n")
    assert load_config({"config": str(file)}, {}).batch.max_batch_size == 5


@pytest.mark.parametrize("flags", [{"default_temperature": 3.0}, {"default_top_p": 0.0}, {"prefill_batch_size": 0}])
def test_defaults_out_of_range_are_errors(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load_config(flags, {})


@pytest.mark.parametrize("flag", ["checkpoint_dir", "peft_export"])
def test_a_folder_that_training_can_not_write_is_named_before_it_begins(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    given = {"checkpoint_dir": str(tmp_path / "runs"), "peft_export": str(tmp_path / "peft")}
    _check_writable(TrainConfig.of(**given))
    assert (tmp_path / "peft").is_dir()
    with pytest.raises(ConfigError, match=f"^--{flag.replace('_', '-')} {tmp_path}/file/x can't be written: "):
        _check_writable(TrainConfig.of(**given | {flag: str(tmp_path / "file/x")}))
