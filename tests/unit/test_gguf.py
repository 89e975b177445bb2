"""GGUF files of every supported kind load to the same logits as the weights they stand for; others say why not."""

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import _get_classes

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.gguf.architectures import architecture_of
from mlx_parallm.models.gguf.convert import converted, model_config
from mlx_parallm.models.gguf.header import read_header
from mlx_parallm.models.loader import load
from tests.gguf_models import KINDS, model_file
from tests.gguf_writer import GgufFile

TOKENS = mx.array([[5, 90, 17, 203, 44, 44, 9, 260]])


def reference_logits(weights: dict[str, np.ndarray], config: dict[str, Any]) -> mx.array:
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    arrays = {name: mx.array(values) for name, values in weights.items()}
    arrays = model.sanitize(arrays) if hasattr(model, "sanitize") else arrays
    model.load_weights(list(arrays.items()))
    return model(TOKENS)


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_logits_are_those_of_the_stored_weights(architecture: str, kind: str, tmp_path: Path) -> None:
    file, weights, config = model_file(architecture, kind)
    model = load(str(file.write(tmp_path / "model.gguf")), name="m", dtype="float32")
    assert mx.allclose(model.module(TOKENS), reference_logits(weights, config), atol=1e-4)
    assert model.context_length == 512
    assert model.vocab_size == config["vocab_size"]
    assert model.eos_token_ids == {0, 2}
    assert model.precision == "float32"


def test_tied_embeddings_with_their_own_precision(tmp_path: Path) -> None:
    file, weights, config = model_file("llama", "Q4_1", embedding="Q8_0", tied=True)
    path = file.write(tmp_path / "model.gguf")
    model = load(str(path), name="m", dtype="float32")
    assert mx.allclose(model.module(TOKENS), reference_logits(weights, config), atol=1e-4)
    stored = json.loads((converted(path) / "config.json").read_text())["quantization"]
    assert stored == {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}}


def test_quantised_weights_can_stay_so(tmp_path: Path) -> None:
    file, weights, config = model_file("qwen3", "Q4_0", embedding="Q8_0")
    model = load(str(file.write(tmp_path / "model.gguf")), name="m", dtype="quantized")
    assert model.precision == "4-bit"
    assert model.module.model.layers[0].mlp.up_proj.bits == 4
    assert mx.allclose(model.module(TOKENS).astype(mx.float32), reference_logits(weights, config), atol=0.1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype_overrides(dtype: str, tmp_path: Path) -> None:
    file, *_ = model_file("llama", "Q8_0")
    model = load(str(file.write(tmp_path / "model.gguf")), name="m", dtype=dtype)
    assert model.precision == dtype
    assert model.module(TOKENS).dtype == getattr(mx, dtype)


def test_quantized_needs_a_quantised_model(tmp_path: Path) -> None:
    file, *_ = model_file("llama", "F16")
    with pytest.raises(ModelLoadError, match="needs a quantised model"):
        load(str(file.write(tmp_path / "model.gguf")), name="m", dtype="quantized")


def test_conversion_happens_once_and_follows_the_content(tmp_path: Path) -> None:
    path = model_file("llama")[0].write(tmp_path / "model.gguf")
    folder = converted(path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    path.touch()
    assert converted(path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    model_file("llama", seed=1)[0].write(path)
    assert converted(path) != folder
    assert not list(folder.parent.glob(".converting-*"))


def test_a_file_that_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX opens it for writing; in an image, or a system's Python, it belongs to somebody else."""
    path = model_file("llama", seed=2)[0].write(tmp_path / "model.gguf")
    path.chmod(0o444)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    folder = converted(path)
    assert load(str(path), name="m").vocab_size > 0
    assert not list(folder.rglob("*.gguf"))
    assert not list(folder.parent.glob(".converting-*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"general.architecture": "mamba"},
            "architecture 'mamba' is not supported, only llama, mistral3, .* phi3: serve",
        ),
        ({"general.architecture": "clip"}, r"image encoder \(mmproj\).* name the text model's GGUF file"),
        ({"split.count": 3}, "one of 3 parts .* join them first"),
        ({"llama.expert_count": 8}, r"no llama\.expert_used_count"),
        ({"llama.block_count": None}, r"no llama\.block_count"),
        (
            {"llama.rope.scaling.type": "longrope"},
            "rope scaling 'longrope' is not supported for llama, only linear and yarn",
        ),
        ({"llama.rope.dimension_count": 8}, "rope over a part of each head"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported"),
        ({"tokenizer.ggml.pre": "klingon"}, "pre-tokenizer 'klingon' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "tokenizer in its metadata is broken"),
        ({"tokenizer.ggml.merges": ["q q"]}, "tokenizer in its metadata is broken"),
    ],
)
def test_unsupported_files_say_why(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file, *_ = model_file("llama")
    file.metadata = {key: value for key, value in (file.metadata | change).items() if value is not None}
    with pytest.raises(ModelLoadError, match=message):
        converted(file.write(tmp_path / "model.gguf"))


def config_of(name: str, tmp_path: Path, **metadata: Any) -> dict[str, Any]:
    """config.json made of a tiny file, with some metadata changed; `__` stands for a dot, None takes a key away."""
    file, *_ = model_file(name)
    prefix = file.metadata["general.architecture"]
    file.metadata |= {f"{prefix}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    file.metadata = {key: value for key, value in file.metadata.items() if value is not None}
    header = read_header(file.write(tmp_path / "model.gguf"))
    return model_config(header, architecture_of(header))


def test_gemma_3_says_what_its_file_leaves_out(tmp_path: Path) -> None:
    config = config_of("gemma3", tmp_path)
    assert (config["query_pre_attn_scalar"], config["sliding_window_pattern"]) == (32, 6)
    assert config["rope_local_base_freq"] == 10000.0
    assert config["model_type"] == "gemma3_text"
    largest = config_of("gemma3", tmp_path, block_count=62)  # only the 27B model has as many layers
    assert largest["query_pre_attn_scalar"] == 64 // 4
    everywhere = config_of("gemma3", tmp_path, attention__sliding_window=None)
    assert everywhere["sliding_window_pattern"] == 1
    assert config_of("gemma3", tmp_path, rope__freq_base_swa=5000.0)["rope_local_base_freq"] == 5000.0


def test_phi_3_without_long_context_has_plain_rope(tmp_path: Path) -> None:
    file, weights, config = model_file("phi3")
    del file.tensors["rope_factors_long.weight"], file.tensors["rope_factors_short.weight"]
    del file.metadata["phi3.rope.scaling.attn_factor"], file.metadata["phi3.rope.dimension_count"]
    config |= {"rope_scaling": None, "partial_rotary_factor": 1.0}
    model = load(str(file.write(tmp_path / "model.gguf")), name="m", dtype="float32")
    assert mx.allclose(model.module(TOKENS), reference_logits(weights, config), atol=1e-4)


@pytest.mark.parametrize("head_dim", [16, 48, 80, 96, 128])
def test_every_part_of_a_head_that_rope_turns_survives_the_division(head_dim: int, tmp_path: Path) -> None:
    for rotated in range(2, head_dim + 1, 2):
        config = config_of("phi3", tmp_path, rope__dimension_count=rotated, embedding_length=4 * head_dim)
        assert int(head_dim * config["partial_rotary_factor"]) == rotated


def test_the_size_of_experts_can_follow_from_the_whole(tmp_path: Path) -> None:
    assert config_of("qwen3moe", tmp_path)["moe_intermediate_size"] == 32
    assert config_of("qwen3moe", tmp_path, expert_feed_forward_length=None)["moe_intermediate_size"] == 128 // 2


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_stacked_experts_are_read_block_by_block(kind: str, tmp_path: Path) -> None:
    """Each expert's own values, as quantised weights: not only the same logits."""
    file, weights, _ = model_file("qwen3moe", kind)
    folder = converted(file.write(tmp_path / "model.gguf"))
    stored: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    for part in ("gate", "up", "down"):
        name = f"model.layers.1.mlp.switch_mlp.{part}_proj"
        packed = [stored[f"{name}.{suffix}"] for suffix in ("weight", "scales", "biases")]
        values = mx.dequantize(
            packed[0], *(array.astype(mx.float32) for array in packed[1:]), group_size=32, bits=int(kind[1])
        )
        np.testing.assert_allclose(np.array(values), weights[f"{name}.weight"], atol=1e-5)


@pytest.mark.parametrize("architecture", ["gemma3", "phi3", "mistral", "ministral3", "mixtral", "qwen3moe"])
def test_new_architectures_can_stay_quantised(architecture: str, tmp_path: Path) -> None:
    file, weights, config = model_file(architecture, "Q8_0")
    model = load(str(file.write(tmp_path / "model.gguf")), name="m", dtype="quantized")
    assert model.precision == "8-bit"
    assert mx.allclose(model.module(TOKENS).astype(mx.float32), reference_logits(weights, config), atol=0.1)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 7}, "sliding_window_pattern 7 .* 6 layers"),
        ("gemma3", {"gemma3.rope.scaling.type": "yarn"}, "'yarn' is not supported for gemma3, only linear"),
        ("phi3", {"phi3.rope.scaling.attn_factor": 2.0}, r"attn_factor is 2\.0, and only longrope's own"),
        ("phi3", {"phi3.attention.key_length": 32}, "4 heads of size 32 is not supported"),
        ("qwen3moe", {"qwen3moe.rope.scaling.type": "yarn"}, "'yarn' is not supported for qwen3moe, only none"),
        ("mixtral", {"llama.rope.scaling.type": "linear"}, "'linear' is not supported for llama, only none"),
        ("ministral3", {"mistral3.rope.scaling.type": "none"}, "temperature_scale without rope scaling 'yarn'"),
        ("qwen3", {"qwen3.expert_count": 4}, "mixtures of experts are not supported for the architecture qwen3"),
    ],
)
def test_unsupported_kinds_of_an_architecture_say_why(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file, *_ = model_file(name)
    file.metadata |= change
    with pytest.raises(ModelLoadError, match=rf"model\.gguf: .*{message}"):
        converted(file.write(tmp_path / "model.gguf"))


def test_image_encoders_within_the_file_are_refused(tmp_path: Path) -> None:
    file, *_ = model_file("gemma3")
    file.add("v.blk.0.attn_q.weight", np.ones((32, 32)), "F32")
    with pytest.raises(
        ModelLoadError, match=r"model\.gguf: v\.blk\.0\.attn_q\.weight belongs to an image encoder.*mmproj"
    ):
        converted(file.write(tmp_path / "model.gguf"))


def test_half_a_long_rope_is_refused(tmp_path: Path) -> None:
    file, *_ = model_file("phi3")
    del file.tensors["rope_factors_short.weight"]
    with pytest.raises(ModelLoadError, match=r"rope_factors_short\.weight is missing"):
        converted(file.write(tmp_path / "model.gguf"))
    file.add("rope_factors_short.weight", np.ones(6), "F16")
    with pytest.raises(ModelLoadError, match=r"rope_factors_short\.weight has type F16, and must be F32"):
        converted(file.write(tmp_path / "model.gguf"))


def test_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    file, *_ = model_file("llama")
    file.tensors["blk.1.ffn_down.weight"] = ("Q6_K", (64, 256), b"\0" * 64 * 210)
    with pytest.raises(
        ModelLoadError,
        match=r"blk\.1\.ffn_down\.weight has tensor type Q6_K.*only F32, F16, Q4_0, Q4_1, Q8_0: download",
    ):
        converted(file.write(tmp_path / "model.gguf"))


def test_unknown_and_missing_tensors_are_named(tmp_path: Path) -> None:
    file, *_ = model_file("llama")
    file.add("blk.0.attn_sinks.weight", np.ones(4), "F32")
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_sinks\.weight has no place"):
        converted(file.write(tmp_path / "model.gguf"))
    del file.tensors["blk.0.attn_sinks.weight"], file.tensors["token_embd.weight"]
    with pytest.raises(ModelLoadError, match=r"token_embd\.weight is missing"):
        converted(file.write(tmp_path / "model.gguf"))
    file, *_ = model_file("llama")
    del file.tensors["blk.1.attn_v.weight"]
    with pytest.raises(ModelLoadError, match=r"layers\.1\.self_attn\.v_proj\.weight"):
        load(str(file.write(tmp_path / "model.gguf")), name="m")


@pytest.mark.parametrize("size", [3, 20, 100, 3000, 20_000, -33])
def test_truncated_files_are_clear_errors(size: int, tmp_path: Path) -> None:
    path = model_file("llama")[0].write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"truncated|too short"):
        read_header(path)


def test_foreign_files_are_clear_errors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        read_header(path)
    path.write_bytes(b"GGUF\x01\0\0\0" + bytes(100))
    with pytest.raises(ModelLoadError, match="version 1 is not supported"):
        read_header(path)
    with pytest.raises(ModelLoadError, match="there is no file"):
        load(str(tmp_path / "absent.gguf"), name="m")


def test_rope_scaling_of_llama_3_is_recognised(tmp_path: Path) -> None:
    file, *_ = model_file("llama")
    head_dim = file.metadata["llama.attention.key_length"]
    turns = 8192 / (2 * math.pi * 50000.0 ** (np.arange(0, head_dim, 2) / head_dim))
    smooth = np.clip((turns - 1) / 3, 0, 1)
    file.add("rope_freqs.weight", 1 / ((1 - smooth) / 8 + smooth), "F32")
    path = file.write(tmp_path / "model.gguf")
    header = read_header(path)
    scaling = model_config(header, architecture_of(header))["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert (scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]) == (8, 1, 4)
    assert scaling["original_max_position_embeddings"] == 8192
    load(str(path), name="m")
    file.add("rope_freqs.weight", np.linspace(1, 8, head_dim // 2), "F32")
    with pytest.raises(ModelLoadError, match="rope_freqs"):
        converted(file.write(path))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_from_metadata(kind: str, tmp_path: Path) -> None:
    file, weights, config = model_file("llama")
    file.metadata |= {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    file.metadata["llama.rope.scaling.original_context_length"] = 128
    model = load(str(file.write(tmp_path / "model.gguf")), name="m", dtype="float32")
    config["rope_scaling"] = {"type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    assert mx.allclose(model.module(TOKENS), reference_logits(weights, config), atol=1e-4)


def test_an_empty_file_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="missing"):
        converted(GgufFile({"general.architecture": "llama"}).write(tmp_path / "m.gguf"))


def test_a_header_that_names_nothing_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    header = read_header(path)
    assert (header.metadata, header.tensors) == ({}, {})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match="too short"):
        read_header(path)


@pytest.mark.parametrize(
    ("kind", "code", "number"),
    [
        *((0, "B", 200), (1, "b", -3), (2, "H", 60_000), (3, "h", -300), (4, "I", 1 << 31), (5, "i", -70_000)),
        *((6, "f", 0.5), (7, "?", True), (10, "Q", 1 << 63), (11, "q", -(1 << 40)), (12, "d", 0.1)),
    ],
)
def test_numbers_of_each_type_are_read(kind: int, code: str, number: float, tmp_path: Path) -> None:
    name = struct.pack("<Q", 3) + b"n.x"
    one = name + struct.pack(f"<I{code}", kind, number)
    several = struct.pack("<Q", 3) + b"n.y" + struct.pack(f"<IIQ2{code}", 9, kind, 2, number, number)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + one + several)
    assert read_header(path).metadata == {"n.x": number, "n.y": [number, number]}
