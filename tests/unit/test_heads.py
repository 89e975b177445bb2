"""Classification heads of every family, against transformers' numbers (tests/golden/make_heads.py)."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.devices.device import DEVICES
from mlx_parallm.devices.padding import warm_up_shapes
from mlx_parallm.errors import InvalidRequestError, ModelLoadError
from mlx_parallm.models.kinds import kind_of
from mlx_parallm.models.kinds.classifier import Classifier, load
from mlx_parallm.types import TextTokens
from tests.support.classifiers import with_labels, write_classifier

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/heads.json").read_text())["families"]
FOUR = TextTokens([5, 6, 7, 8])


def inputs(family: dict[str, Any]) -> list[TextTokens]:
    return [TextTokens(case["input_ids"], case.get("token_type_ids")) for case in family["cases"]]


def loaded(name: str, folder: Path, labels: tuple[str, ...] | None = None, **changes: Any) -> Classifier:
    config, shapes = GOLDEN[name]["config"], GOLDEN[name]["shapes"]
    if labels is not None:
        config, shapes = with_labels(config, shapes, labels)
    write_classifier(folder, config | changes, shapes)
    kind = kind_of(str(folder))
    assert kind is not None
    model = kind.load(folder)
    assert isinstance(model, Classifier)
    assert kind.__name__.endswith(model.info.kind), "the config tells before the weights do"
    return model


@pytest.mark.parametrize("name", GOLDEN)
def test_it_equals_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and in batches of any order."""
    model, texts = loaded(name, tmp_path), inputs(GOLDEN[name])
    wanted = [np.array(case["logits"]) for case in GOLDEN[name]["cases"]]
    alone = [model.predict([text])[0] for text in texts]
    for found, right in zip(alone, wanted, strict=True):
        np.testing.assert_allclose(found, right, atol=1e-4)
    order = random.Random(0).sample(range(len(texts)), len(texts))
    for place, found in zip(order, model.predict([texts[place] for place in order]), strict=True):
        np.testing.assert_allclose(found, alone[place], atol=1e-5)
    monkeypatch.setattr("mlx_parallm.devices.padding.this_device", lambda: DEVICES["cuda"])  # more rows than texts
    for right, found in zip(alone, model.predict(texts[:3]), strict=False):
        np.testing.assert_allclose(found, right, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "labels", "changes", "expected"),
    [
        ("bert", ("bad", "good"), {}, ("classifier", "single_label", "softmax")),
        ("bert", ("a", "b"), {"problem_type": "multi_label_classification"}, ("classifier", "multi_label", "sigmoid")),
        ("bert", ("a", "b"), {"problem_type": "regression"}, ("classifier", "regression", "identity")),
        ("roberta", ("score",), {}, ("classifier", "regression", "sigmoid")),
        ("roberta", ("score",), {"problem_type": "regression"}, ("classifier", "regression", "identity")),
        (
            "bert",
            ("score",),
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("classifier", "regression", "identity"),
        ),
        (
            "bert",
            ("score",),
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            ("classifier", "regression", "sigmoid"),
        ),
        ("qwen3", ("score",), {}, ("reward", "regression", "sigmoid")),
        ("qwen3", ("no", "yes"), {}, ("classifier", "single_label", "softmax")),
        ("llama_tokens", ("score",), {}, ("classifier", "regression", "sigmoid")),
    ],
)
def test_what_a_config_says_of_its_head(
    name: str, labels: tuple[str, ...], changes: dict[str, Any], expected: tuple[str, ...], tmp_path: Path
) -> None:
    model = loaded(name, tmp_path, labels, **changes)
    assert (model.info.kind, model.info.problem, model.info.activation) == expected
    assert model.info.labels == labels
    assert model.info.per_token is name.endswith("tokens")
    assert model.predict([FOUR])[0].shape == ((4, len(labels)) if model.info.per_token else (len(labels),))
    assert model.info.weight_bytes == sum(
        4 * np.prod(shape) for shape in with_labels({}, GOLDEN[name]["shapes"], labels)[1].values()
    )


def test_limits_are_those_of_weights_tokenizer_and_window(tmp_path: Path) -> None:
    assert loaded("bert", tmp_path / "bert").info.context_length == 64
    assert loaded("roberta", tmp_path / "roberta").info.context_length == 62
    assert loaded("gemma2", tmp_path / "gemma2", sliding_window=16).info.context_length == 16
    assert loaded("gemma3", tmp_path / "gemma3").info.context_length == 64, "its layers know of the window"
    (tmp_path / "bert/tokenizer_config.json").write_text(json.dumps({"model_max_length": 20}))
    assert load(tmp_path / "bert").info.context_length == 20
    (tmp_path / "bert/tokenizer_config.json").write_text(json.dumps({"model_max_length": 1e30}))
    assert load(tmp_path / "bert").info.context_length == 64


def test_what_requests_will_need_is_computed_once_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the first pass of a shape builds its kernels."""
    monkeypatch.setattr("mlx_parallm.devices.padding.this_device", lambda: DEVICES["cuda"])
    model, shapes = loaded("bert", tmp_path), []
    compute = model.predict

    def predict(batch: Sequence[TextTokens]) -> Any:
        shapes.append((len(batch), len(batch[0].tokens)))
        return compute(batch)

    monkeypatch.setattr(model, "predict", predict)
    model.warm_up()
    assert shapes == list(warm_up_shapes(64)) != []


def test_labels_without_names_have_those_of_transformers(tmp_path: Path) -> None:
    model = loaded("bert", tmp_path, id2label=None)
    assert model.info.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize("tokens", [[], [5] * 65, [64], [-1]])
def test_wrong_tokens_are_refused(tokens: list[int], tmp_path: Path) -> None:
    model = loaded("bert", tmp_path)
    with pytest.raises(InvalidRequestError):
        model.predict([FOUR, TextTokens(tokens)])
    np.testing.assert_allclose(model.predict([FOUR])[0], model.predict([FOUR, FOUR])[1], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("bert", {"id2label": {"0": "one"}}, "id2label"),
        ("bert", {"problem_type": "guessing"}, "problem_type"),
        ("bert", {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}, "id2label": None}, None),
        ("bert", {"architectures": ["DebertaV2ForSequenceClassification"], "model_type": "deberta-v2"}, "deberta-v2"),
        ("modernbert_cls", {"classifier_pooling": "max"}, "classifier_pooling"),
        ("llama", {"hidden_size": 48}, "can't be loaded"),
        ("llama", {"is_causal": False}, "is_causal is False"),
    ],
)
def test_wrong_configs_are_named(name: str, changes: dict[str, Any], words: str | None, tmp_path: Path) -> None:
    write_classifier(tmp_path, GOLDEN[name]["config"] | changes, GOLDEN[name]["shapes"])
    if words is None:
        assert load(tmp_path).info.activation == "softmax", "it is for a model with one label"
        return
    with pytest.raises(ModelLoadError, match=words):
        load(tmp_path)


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in GOLDEN["bert"]["shapes"].items() if not name.startswith("classifier")}
    write_classifier(tmp_path, GOLDEN["bert"]["config"], shapes)
    with pytest.raises(ModelLoadError, match="no classification head"):
        load(tmp_path)
