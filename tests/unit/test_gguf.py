"""GGUF files of every supported kind load to the same logits as the weights they stand for; others say why not."""

import json
import math
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import _get_classes

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.gguf import converted, model_config, read_header
from mlx_parallm.models.gguf_tokenizer import build_tokenizer, end_token_ids
from mlx_parallm.models.loader import load
from tests.gguf_writer import HEAD_DIM, GgufFile, model_file
from tests.tiny import tiny_tokenizer

TOKENS = mx.array([[5, 90, 17, 203, 44, 44, 9, 260]])


def reference_logits(weights: dict[str, np.ndarray], config: dict[str, Any]) -> mx.array:
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.load_weights([(name, mx.array(values)) for name, values in weights.items()])
    return model(TOKENS)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
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
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported, only llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.block_count": None}, r"no llama\.block_count"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
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


def test_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    file, *_ = model_file("llama")
    file.tensors["blk.1.ffn_down.weight"] = ("Q6_K", (64, 256), b"\0" * 64 * 210)
    with pytest.raises(
        ModelLoadError, match=r"blk\.1\.ffn_down\.weight has tensor type Q6_K.*only F32, F16, Q4_0, Q4_1, Q8_0"
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
    turns = 8192 / (2 * math.pi * 50000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    smooth = np.clip((turns - 1) / 3, 0, 1)
    file.add("rope_freqs.weight", 1 / ((1 - smooth) / 8 + smooth), "F32")
    path = file.write(tmp_path / "model.gguf")
    scaling = model_config(read_header(path))["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert scaling["factor"] == 8
    load(str(path), name="m")
    file.add("rope_freqs.weight", np.linspace(1, 8, HEAD_DIM // 2), "F32")
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


def test_byte_level_tokenizer_is_restored(tmp_path: Path) -> None:
    model = load(str(model_file("llama")[0].write(tmp_path / "model.gguf")), name="m")
    expected = tiny_tokenizer()
    for text in ("the sand and the other of", "naïve 日本 🙂\n\tx = 1234", "<|im_start|>user\nhi<|im_end|>", ""):
        assert model.tokenizer.encode(text) == expected.encode(text)
        assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    messages = [{"role": "user", "content": "hello"}]
    render = {"add_generation_prompt": True, "tokenize": False}
    assert model.tokenizer.apply_chat_template(messages, **render) == expected.apply_chat_template(messages, **render)
    assert model.tokenizer.bos_token == "<|endoftext|>"
    assert model.tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("cut", "pieces"),
    [
        ("gpt-2", ["Hello", "Ġ123456", "'", "S", "Ġit"]),  # GPT-2 knows 's, not 'S
        ("smollm", ["Hello", "Ġ", "1", "2", "3", "4", "5", "6", "'", "S", "Ġit"]),
        ("llama-bpe", ["Hello", "Ġ", "123", "456", "'S", "Ġit"]),
        ("qwen2", ["Hello", "Ġ", "1", "2", "3", "4", "5", "6", "'S", "Ġit"]),
    ],
)
def test_text_is_cut_as_the_file_says(cut: str, pieces: list[str]) -> None:
    metadata = model_file("llama")[0].metadata | {"tokenizer.ggml.pre": cut}
    tokenizer = build_tokenizer(metadata, "file")
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("Hello 123456'S it")] == pieces


def sentencepiece_metadata() -> dict[str, Any]:
    words = [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "ll",
        "he",
        "▁w",
        "or",
        "▁hell",
        "▁he",
        "▁hello",
        "ld",
        "▁world",
        "▁wor",
    ]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = [0.0] * 259 + [-float(len(words) - len(word)) for word in words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_tokenizer_is_restored() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata(), "file")
    assert tokenizer.encode("hello world").tokens == ["<s>", "▁hello", "▁world"]
    assert tokenizer.encode("hello é").tokens == ["<s>", "▁hello", "▁", "<0xC3>", "<0xA9>"]
    for text in ("hello world", "held é 日本", "  two  spaces"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_model_loads(tmp_path: Path) -> None:
    file, *_ = model_file("llama")
    del file.metadata["tokenizer.ggml.merges"], file.metadata["tokenizer.ggml.add_bos_token"]
    file.metadata |= sentencepiece_metadata()
    size = len(file.metadata["tokenizer.ggml.tokens"])
    file.add("token_embd.weight", np.random.default_rng(0).normal(size=(size, 64)), "F32")
    file.add("output.weight", np.random.default_rng(1).normal(size=(size, 64)), "F32")
    model = load(str(file.write(tmp_path / "model.gguf")), name="m")
    detokenizer = model.tokenizer.detokenizer
    for token in model.tokenizer.encode("hello world", add_special_tokens=False):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == "hello world"
    assert model.vocab_size == size


def test_end_tokens_by_id_and_by_name() -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<|eot_id|>", "<|im_end|>", "</x>"],
        "tokenizer.ggml.token_type": [1, 3, 1, 3],  # an ordinary token may look like one
        "tokenizer.ggml.eos_token_id": 3,
    }
    assert end_token_ids(metadata) == [1, 3]


def test_an_empty_file_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="missing"):
        read_header(GgufFile({"general.architecture": "llama"}).write(tmp_path / "m.gguf"))
