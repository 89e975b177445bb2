"""Encoders beside transformers' (tests/golden/make_encoders.py), batches beside single inputs, and wrong folders."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlx_parallm.devices.device import DEVICES
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.encoders import Encoder, load_encoder, packed
from mlx_parallm.models.encoders import encoder_layers as layers
from tests.support.random_weights import random_tensors

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS: dict[str, Any] = json.loads((GOLDEN / "encoders.json").read_text())
HIDDEN = load_file(GOLDEN / "encoders.safetensors")


def write(folder: Path, name: str, prefix: str = "", config: dict[str, Any] | None = None) -> Path:
    model = MODELS[name]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model["config"] | (config or {})))
    tensors = random_tensors(model["shapes"])
    save_file({prefix + key: value for key, value in tensors.items()}, folder / "model.safetensors")
    return folder


def inputs(name: str) -> tuple[mx.array, mx.array, mx.array | None]:
    model = MODELS[name]
    tokens = mx.array(model["tokens"])
    mask = mx.arange(tokens.shape[1]) < mx.array(model["lengths"])[:, None]
    return tokens, mask, None if model["types"] is None else mx.array(model["types"])


def hidden_of(encoder: Encoder, name: str) -> Any:
    tokens, mask, types = inputs(name)
    return np.array(encoder(tokens, mask, types))[np.array(mask)]


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    encoder = load_encoder(write(tmp_path, name))
    np.testing.assert_allclose(hidden_of(encoder, name)[:, ::2], HIDDEN[name], atol=1e-4, rtol=0)
    if encoder.pooler is not None:
        pooled = np.array(encoder.pooled(encoder(*inputs(name))))
        np.testing.assert_allclose(pooled, HIDDEN[f"{name}.pooled"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_gives_what_each_gets_alone(name: str, tmp_path: Path) -> None:
    encoder = load_encoder(write(tmp_path, name))
    together, (tokens, mask, types) = np.array(encoder(*inputs(name))), inputs(name)
    for row, length in enumerate(MODELS[name]["lengths"]):
        one = [None if part is None else part[row : row + 1, :length] for part in (tokens, mask, types)]
        assert one[0] is not None
        assert one[1] is not None
        alone = np.array(encoder(one[0], one[1], one[2]))
        np.testing.assert_allclose(alone[0], together[row, :length], atol=1e-5, rtol=0)
    assert np.isfinite(together).all()  # padding included


@pytest.mark.parametrize(("name", "prefix"), [("bert", "bert."), ("roberta", "roberta."), ("modernbert", "model.")])
def test_names_may_have_a_prefix(name: str, prefix: str, tmp_path: Path) -> None:
    encoder = load_encoder(write(tmp_path, name, prefix))
    np.testing.assert_allclose(hidden_of(encoder, name)[:, ::2], HIDDEN[name], atol=1e-4, rtol=0)


def test_weights_may_lie_in_several_files(tmp_path: Path) -> None:
    folder = write(tmp_path, "bert")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {f"model-{number}.safetensors": list(tensors)[number::2] for number in range(2)}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    np.testing.assert_allclose(hidden_of(load_encoder(folder), "bert")[:, ::2], HIDDEN["bert"], atol=1e-4, rtol=0)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-1\.safetensors is missing"):
        load_encoder(folder)


def test_every_so_manieth_layer_of_modernbert_sees_all_tokens(tmp_path: Path) -> None:
    config = dict(MODELS["modernbert"]["config"])
    depth = config["num_hidden_layers"]
    assert depth > 2
    kinds = ["sliding_attention" if index % 2 else "full_attention" for index in range(depth)]
    told = load_encoder(write(tmp_path / "told", "modernbert", config={"layer_types": kinds, "local_attention": 2}))
    folder = write(tmp_path / "counted", "modernbert")
    config |= {"global_attn_every_n_layers": 2, "local_attention": 2}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    np.testing.assert_array_equal(hidden_of(load_encoder(folder), "modernbert"), hidden_of(told, "modernbert"))


def test_configs_of_nomic_itself(tmp_path: Path) -> None:
    """Names of GPT-2's config, as the published models have them."""
    folder = write(tmp_path, "nomic_bert")
    config = json.loads((folder / "config.json").read_text())
    names = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
    }
    own = {new: config[old] for old, new in names.items()}
    own |= {"model_type": "nomic_bert", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "type_vocab_size": 2}
    own |= {"activation_function": "swiglu", "prenorm": False, "use_rms_norm": False, "qkv_proj_bias": False}
    (folder / "config.json").write_text(json.dumps(own))
    encoder = load_encoder(folder)
    np.testing.assert_allclose(hidden_of(encoder, "nomic_bert")[:, ::2], HIDDEN["nomic_bert"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("bert", {"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ("bert", {"is_decoder": True}, "is_decoder is True"),
        ("bert", {"num_hidden_layers": 4}, r"the tensor encoder\.layer\.3\.attention\.self\.query\.weight is missing"),
        ("bert", {"hidden_size": 64}, r"has the shape \(60, 32\)"),
        ("bert", {"hidden_size": -1}, "hidden_size is -1"),
        ("bert", {"num_attention_heads": 5}, "num_attention_heads is 5"),
        ("bert", {"model_type": "deberta"}, "type 'deberta' are not supported"),
        ("nomic_bert", {"num_experts": 8}, "num_experts is 8"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(name: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_encoder(write(tmp_path, name, config=config))


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path, "bert")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"no model\.safetensors: it has pytorch_model\.bin, and only safetensors"):
        load_encoder(folder)
    (folder / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors can't be read"):
        load_encoder(folder)


def test_an_input_without_tokens_gives_numbers(tmp_path: Path) -> None:
    encoder = load_encoder(write(tmp_path, "modernbert"))
    hidden = encoder(mx.array([[3] * 12, [4] * 12]), mx.array([[1] * 12, [0] * 12]))
    assert np.isfinite(np.array(hidden)).all()


@pytest.mark.parametrize("name", ["bert_tanh", "roberta", "modernbert", "nomic_bert"])
def test_the_pass_without_padding_is_that_of_mlx(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups and slabs of a few tokens, with lengths on both sides of a kernel's steps."""
    monkeypatch.setattr(packed, "GROUP", 50)
    monkeypatch.setattr(packed, "SLAB", 7)
    encoder = load_encoder(write(tmp_path, name))
    if encoder.packed is None:
        pytest.skip("there are no kernels here")
    lengths = np.array([1, 3, 4, 5, 31, 32, 33, 39, 0, 17, 40])
    tokens = np.random.RandomState(3).randint(2, 60, (len(lengths), 40))
    mask = np.arange(40) < lengths[:, None]
    without = np.array(encoder(mx.array(tokens), mx.array(mask)))
    encoder.packed = None
    expected = np.array(encoder(mx.array(np.where(mask, tokens, 1)), mx.array(mask)))
    np.testing.assert_allclose(without[mask], expected[mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_composed_attention_is_that_of_mlx(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA computes, on this device."""
    encoder = load_encoder(write(tmp_path, name))
    encoder.packed = None
    expected = hidden_of(encoder, name)
    np.testing.assert_allclose(expected[:, ::2], HIDDEN[name], atol=1e-4, rtol=0)
    monkeypatch.setattr(layers, "this_device", lambda: DEVICES["cuda"])
    np.testing.assert_allclose(hidden_of(encoder, name), expected, atol=1e-5, rtol=0)
