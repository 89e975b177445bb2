"""Options from flags, environment and file: their order, their spellings, and what is said of wrong ones."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config import ServeConfig, add_flags, load_config, parse_bytes
from mlx_parallm.errors import ConfigError
from mlx_parallm.train_cli import settings_of


def parse(*arguments: str, environment: dict[str, str] | None = None) -> ServeConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    return load_config(vars(parser.parse_args(arguments)), environment or {})


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_defaults() -> None:
    config = parse()
    assert (config.host, config.port, config.max_batch_size, config.scheduler) == ("127.0.0.1", 8000, 32, "continuous")
    assert (config.max_queue_size, config.request_timeout_seconds, config.prefill_step_size) == (128, 600, 2048)
    assert config.named_models() == {"SmolLM2-135M-Instruct": None}


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "server: {port: 1, host: file, max_batch_size: 7}")
    environment = {"PARALLM_PORT": "2", "PARALLM_HOST": "environment", "PARALLM_CONFIG": file}
    config = parse("--port", "3", environment=environment)
    assert (config.port, config.host, config.max_batch_size) == (3, "environment", 7)
    assert parse("--config", file).port == 1


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
    assert getattr(parse(*arguments), field) == value


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
    assert getattr(parse(environment={f"PARALLM_{name}": text}), field) == value


def test_file_with_sections(tmp_path: Path) -> None:
    text = (
        "server: {max_tokens: 64, api_key: null}\nmodel: {base_model_path: some/model}\ncache: {kv_cache_memory: 1GB}"
    )
    config = parse("--config", write(tmp_path / "c.yaml", text))
    assert (config.max_tokens, config.api_key, config.kv_cache_memory) == (64, None, 10**9)
    assert config.named_models() == {"some/model": "some/model"}
    assert parse("--config", write(tmp_path / "empty.yaml", "")) == ServeConfig()


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
        {"log_level": "LOUD"},
    ],
)
def test_values_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServeConfig(**wrong)


@pytest.mark.parametrize(
    ("text", "size"),
    [("12", 12), (12, 12), ("1KB", 1000), ("1 kib", 1024), ("1.5GB", 1_500_000_000), ("2GiB", 2 << 30), ("1T", 10**12)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


def test_named_models(tmp_path: Path) -> None:
    file = tmp_path / "My-Model.Q4_0.gguf"
    file.touch()
    models = ServeConfig(model_path=("a=x/y", "org/name", str(file), str(tmp_path))).named_models()
    assert models == {"a": "x/y", "org/name": "org/name", "My-Model.Q4_0": str(file), tmp_path.name: str(tmp_path)}
    with pytest.raises(ConfigError, match="two models are called 'a'"):
        ServeConfig(model_path=("a=x", "a=y")).named_models()


def test_modes_of_training() -> None:
    assert not ServeConfig().trains
    assert ServeConfig(enable_rl_training=True).trains
    assert ServeConfig(mode="inference_and_training").serving_share == 0.7
    assert ServeConfig(mode="training").serving_share < 0.1
    for wrong in ({"inference_share": 0.0}, {"max_staleness": -1}, {"checkpoint_interval": 0}):
        with pytest.raises(ConfigError):
            ServeConfig(**wrong)  # type: ignore[arg-type]
    many = tuple(f"a{number}" for number in range(9))
    with pytest.raises(ConfigError, match="9 adapters"):
        ServeConfig(enable_rl_training=True, train_adapter=many)


def test_a_reward_model_has_a_rate_of_its_own_unless_one_is_given() -> None:
    reward = {"mode": "rm", "pairs": "pairs.jsonl"}
    assert settings_of({}, {}).learning_rate == 5e-4
    assert settings_of(reward, {}).learning_rate == 2e-4
    assert settings_of(reward | {"learning_rate": 1e-3}, {}).learning_rate == 1e-3
    assert settings_of(reward, {"PARALLM_LEARNING_RATE": "1e-5"}).learning_rate == 1e-5
    assert settings_of(reward, {}).mode == "rm"


def test_what_training_needs_is_asked_for_when_it_is_on() -> None:
    for wrong in ({"lora_rank": 128}, {"update_frequency": 5000}, {"environment": "env.py"}):
        assert not ServeConfig(**wrong).trains  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            ServeConfig(enable_rl_training=True, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["PARALLM_SERVICE_HOST", "PARALLM_PORT_8000_TCP_ADDR", "PARALLM_BLAS", "PARALLM_STEPS"]
)
def test_variables_of_others_are_none_of_ours(name: str) -> None:
    assert parse(environment={name: "x"}).port == 8000


def test_a_misspelt_variable_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="PARALLM_MAX_BATCHSIZE is not an option; did you mean 'PARALLM_MAX_BATCH_SIZE'"
    ):
        parse(environment={"PARALLM_MAX_BATCHSIZE": "3"})
