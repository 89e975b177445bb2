"""Networks of network.json: numbers equal torch's, batched equals alone, and what is wrong is said."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.errors import InvalidRequestError, ModelLoadError
from mlx_parallm.models.kinds import kind_of, network
from mlx_parallm.models.kinds.network import NetworkPredictor
from mlx_parallm.models.networks import graph
from mlx_parallm.models.networks.basic import Concat
from mlx_parallm.models.networks.layer import ShapeError
from mlx_parallm.tensors import Array, dump_safetensors, parse_safetensors

GOLDEN = Path(__file__).parents[1] / "golden"
DEFINITIONS: dict[str, Any] = json.loads((GOLDEN / "networks.json").read_text())
TENSORS = parse_safetensors((GOLDEN / "networks.safetensors").read_bytes())


def part(case: str, kind: str) -> dict[str, Array]:
    prefix = f"{case}/{kind}/"
    return {name.removeprefix(prefix): array for name, array in TENSORS.items() if name.startswith(prefix)}


def write(folder: Path, definition: Any, tensors: dict[str, Array]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "network.json").write_text(json.dumps(definition))
    (folder / "model.safetensors").write_bytes(dump_safetensors(tensors))
    return folder


def load(folder: Path, case: str) -> NetworkPredictor:
    return network.load(write(folder, DEFINITIONS[case], part(case, "weights")))


@pytest.mark.parametrize("case", DEFINITIONS)
def test_numbers_are_torchs(case: str, tmp_path: Path) -> None:
    inputs = part(case, "inputs")
    [found] = load(tmp_path, case).predict([inputs])
    wanted = part(case, "outputs")
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", ["cnn", "lstm deep", "gru with state", "branches", "embedding"])
def test_a_batch_of_several_clients_equals_each_alone(case: str, tmp_path: Path) -> None:
    model, inputs = load(tmp_path, case), part(case, "inputs")
    rows = [{name: array[at : at + 1] for name, array in inputs.items()} for at in range(3)]
    blocks = [inputs, *rows, {name: array[:2] for name, array in inputs.items()}]
    if case == "lstm deep":
        blocks.append({"x": inputs["x"][:, :2]})  # another length: another pass
    together = model.predict(blocks)
    for block, found in zip(blocks, together, strict=True):
        [alone] = model.predict([block])
        for name, array in alone.items():
            np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-5)


def test_many_rows_are_computed_in_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = load(tmp_path, "mlp"), np.random.default_rng(0).standard_normal((50, 5)).astype(np.float32)
    [whole] = model.predict([{"x": x}])
    monkeypatch.setattr(graph, "GROUP_ELEMENTS", 1000)
    [pieces] = model.predict([{"x": x}])
    np.testing.assert_allclose(pieces["y"], whole["y"], rtol=0, atol=1e-6)
    monkeypatch.setattr(graph, "ROW_ELEMENTS", 10)
    with pytest.raises(InvalidRequestError, match=r"a row of this shape makes .* numbers"):
        model.predict([{"x": x}])


def test_its_signature_says_what_it_takes(tmp_path: Path) -> None:
    info = load(tmp_path / "cnn", "cnn").info
    assert (info.kind, info.weight_bytes) == ("network", 4 * 724)
    assert info.signature == {
        "inputs": {"x": {"shape": ["batch", 3, 10, 9], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["batch", 4], "dtype": "float32"}},
    }
    deep = load(tmp_path / "deep", "lstm deep").info.signature
    assert deep is not None
    assert deep["outputs"]["y"]["shape"] == ["batch", "time", 10]
    assert deep["axes"] == {"time": {"min": 1, "max": 1024}}
    ids = load(tmp_path / "ids", "embedding").info.signature
    assert ids is not None
    assert ids["inputs"]["x"] == {"shape": ["batch", 4], "dtype": "int64", "minimum": 0, "maximum": 10}


MLP: dict[str, Any] = {
    "inputs": {"x": {"shape": ["batch", 3]}},
    "layers": [{"type": "linear", "name": "fc", "out_features": 2}, {"type": "relu"}],
    "outputs": {"y": {}},
}
WEIGHTS = {"fc.weight": np.ones((2, 3), np.float32), "fc.bias": np.ones(2, np.float32)}


def layers(*entries: dict[str, Any], shape: list[Any] | None = None, dtype: str = "float32") -> dict[str, Any]:
    return {"layers": list(entries), "inputs": {"x": {"shape": shape or ["batch", 3], "dtype": dtype}}}


FC = {"type": "linear", "name": "fc", "out_features": 2}
WRONG_DEFINITIONS: list[tuple[dict[str, Any], str]] = [
    ({"layer": []}, "unknown key 'layer'; did you mean 'layers'"),
    ({"version": 2}, "version 2; this release reads version 1"),
    ({"inputs": {}}, "inputs must be an object with at least one tensor"),
    ({"inputs": {"x": {"shape": [3]}}}, 'inputs.x: shape must be a list that begins with "batch"'),
    ({"inputs": {"x": {"shape": ["batch", -1]}}}, "a size from 1 to .* or the name of a dynamic axis, not -1"),
    ({"inputs": {"x": {"shape": ["batch", 3], "dtype": "float31"}}}, "did you mean 'float32'"),
    ({"inputs": {"x": {"shape": ["batch", 3], "type": "float32"}}}, "unknown key 'type'; did you mean 'dtype'"),
    ({"layers": []}, "layers must be a list of 1 to"),
    (layers({"type": "liner", "name": "fc"}), "layers.0 is of an unknown type 'liner'; did you mean 'linear'"),
    (
        layers({"type": "linear", "name": "fc", "outfeatures": 2}),
        "unknown option 'outfeatures'; did you mean 'out_features'",
    ),
    (layers({"type": "linear", "name": "fc"}), r"layers.0 \(linear 'fc'\) needs 'out_features'"),
    (
        layers({"type": "linear", "name": "fc", "out_features": -2}),
        "out_features must be a whole number from 1 .* not -2",
    ),
    (layers({"type": "linear", "name": "fc", "out_features": True}), "out_features must be a whole number"),
    (layers({"type": "linear", "out_features": 2}), "has weights and needs a name"),
    (layers(FC, FC), "the name 'fc' is taken already"),
    (layers(FC | {"in_features": 4}), "takes 4 features and is given 3"),
    (layers(FC | {"input": "z"}), "there is no layer or input 'z' before it; did you mean 'x'"),
    (layers(FC, {"type": "add", "inputs": ["x"]}), "takes two or more inputs, not 1"),
    (layers(FC, {"type": "add", "inputs": ["x", "fc"]}), "all must have one shape"),
    (layers(FC, {"type": "flatten", "start_axis": 0}), "axis 0 is the batch"),
    (layers(FC, dtype="int64"), "takes floats and is given integers"),
    (layers({"type": "embedding", "name": "fc", "num_embeddings": 2, "embedding_dim": 3}), "takes integers"),
    (layers(FC, shape=["batch", "width"]), "takes 1 features and is given 102 .width is 1 to 1024"),
    (layers({"type": "layer_norm", "name": "n"}, shape=["batch", "width"]), "has weights over a dynamic axis"),
    (layers({"type": "batch_norm", "name": "n"}, shape=["batch"]), "axis 1"),
    (
        layers({"type": "conv2d", "name": "c", "out_channels": 2, "kernel_size": 3}),
        "takes .batch, channels, height, width.",
    ),
    (
        layers({"type": "conv1d", "name": "c", "out_channels": 2, "kernel_size": 5}, shape=["batch", 2, "time"]),
        "a kernel that reaches over 5 where its input has 1 .time is 1 to 1024: axes has their limits",
    ),
    (layers({"type": "lstm", "name": "l", "hidden_size": 2, "batch_first": False}), "batch_first is false"),
    ({"axes": {"time": {"max": 3}}}, "axes has an unknown key 'time'"),
    (
        {"outputs": {"y": {"shape": ["batch", 3]}}},
        r"outputs.y: shape is \['batch', 3\], but the layers give \['batch', 2\]",
    ),
    ({"outputs": {"y": {"from": "cf"}}}, "there is no layer or input 'cf' before it; did you mean 'fc'"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_DEFINITIONS)
def test_a_wrong_definition_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        network.load(write(tmp_path, MLP | change, WEIGHTS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, "tensor 'fc.weight' is missing"),
        ({"fc.weight": np.ones((3, 2), np.float32)}, r"'fc.weight' has shape \[3, 2\], and its layer needs \[2, 3\]"),
        ({"fc2.bias": np.ones(2, np.float32)}, "tensor 'fc2.bias' belongs to no layer; did you mean 'fc.bias'"),
        ({"fc.bias": np.ones(2, np.int32)}, "'fc.bias' has dtype int32, and weights are floats"),
        ({"fc.bias": np.array([1, np.nan], np.float32)}, "'fc.bias' holds NaN or infinity"),
    ],
)
def test_wrong_tensors_are_refused(change: dict[str, Array | None], message: str, tmp_path: Path) -> None:
    tensors = {name: array for name, array in (WEIGHTS | change).items() if array is not None}
    with pytest.raises(ModelLoadError, match=message):
        network.load(write(tmp_path, MLP, tensors))


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, MLP, WEIGHTS)
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelLoadError, match=r"model.safetensors: not a sound safetensors file"):
        network.load(folder)
    for text, message in (("{", "is not JSON"), ("[1]", "is not a JSON object")):
        (folder / "network.json").write_text(text)
        assert kind_of(str(folder)) is network
        with pytest.raises(ModelLoadError, match=message):
            network.load(folder)
    (folder / "network.json").unlink()
    assert kind_of(str(folder)) is None


def test_half_precision_weights_are_taken(tmp_path: Path) -> None:
    model = network.load(write(tmp_path, MLP, {name: array.astype(np.float16) for name, array in WEIGHTS.items()}))
    [found] = model.predict([{"x": np.ones((1, 3), np.float32)}])
    assert found["y"].tolist() == [[4.0, 4.0]]
    assert found["y"].dtype == np.float32


def test_a_long_sequence_is_computed(tmp_path: Path) -> None:
    """A thousand steps are one graph; it must not be too deep."""
    model = load(tmp_path, "gru")
    [found] = model.predict([{"x": np.zeros((1, 1024, 4), np.float32)}])
    assert found["y"].shape == (1, 1024, 5)


@pytest.mark.parametrize(
    ("axis", "shapes", "joined"),
    [
        (-1, [(4, 3), (4, 5)], (4, 8)),
        (1, [(4, 2, 7), (4, 3, 7), (4, 1, 7)], (4, 6, 7)),
        (-2, [(4, 2, 7), (4, 3, 7)], (4, 5, 7)),
    ],
)
def test_concat_joins_along_its_axis(axis: int, shapes: list[tuple[int, ...]], joined: tuple[int, ...]) -> None:
    layer = Concat(axis=axis)
    assert layer.shape(*shapes) == joined
    assert layer.run({}, *map(mx.zeros, shapes)).shape == joined
    with pytest.raises(ShapeError, match="the other axes must agree"):
        layer.shape(shapes[0], (*shapes[0][:-2], shapes[0][-2] + 1, shapes[0][-1] + 1))


X = np.random.default_rng(4).standard_normal((3, 2, 4)).astype(np.float32)
E = np.exp(X.astype(np.float64))


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ({"type": "identity"}, X),
        ({"type": "clip", "min": -0.5, "max": 0.25}, np.clip(X, -0.5, 0.25)),
        ({"type": "clip", "min": 0.1}, np.maximum(X, 0.1)),
        ({"type": "scale", "factor": 3, "offset": -1}, 3 * X - 1),
        ({"type": "elu", "alpha": 0.5}, np.where(X > 0, X, 0.5 * (E - 1))),
        ({"type": "leaky_relu", "negative_slope": 0.2}, np.where(X > 0, X, 0.2 * X)),
        ({"type": "gelu", "approximate": "tanh"}, X / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (X + 0.044715 * X**3)))),
        ({"type": "softplus"}, np.log1p(E)),
        ({"type": "softmax", "axis": 1}, E / E.sum(axis=1, keepdims=True)),
        ({"type": "log_softmax", "axis": 1}, X - np.log(E.sum(axis=1, keepdims=True))),
        (
            {"type": "layer_norm", "affine": False, "epsilon": 0.5},
            (X - X.mean(-1, keepdims=True)) / (X.var(-1, keepdims=True) + 0.5) ** 0.5,
        ),
        ({"type": "flatten"}, X.reshape(3, 8)),
        ({"type": "reshape", "sizes": [4, -1]}, X.reshape(3, 4, 2)),
        ({"type": "transpose", "axes": [0, 2, 1]}, X.transpose(0, 2, 1)),
        ({"type": "select"}, X[:, -1]),
        ({"type": "select", "index": 1, "axis": -1}, X[:, :, 1]),
        ({"type": "mean", "axes": [1, 2]}, X.mean(axis=(1, 2))),
        ({"type": "mean", "axes": [-1]}, X.mean(axis=-1)),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_layers_without_weights_are_what_their_names_say(
    layer: dict[str, Any], expected: Array, tmp_path: Path
) -> None:
    definition = {"inputs": {"x": {"shape": ["batch", 2, 4]}}, "layers": [layer | {"name": "y"}], "outputs": {"y": {}}}
    [found] = network.load(write(tmp_path, definition, {})).predict([{"x": X}])
    np.testing.assert_allclose(found["y"], expected, rtol=1e-5, atol=1e-6)


def test_numbers_of_classes_become_rows_of_ones_and_zeros(tmp_path: Path) -> None:
    definition = {
        "inputs": {"x": {"shape": ["batch", 2], "dtype": "int32"}},
        "layers": [{"type": "one_hot", "name": "y", "num_classes": 3}],
        "outputs": {"y": {}},
    }
    model = network.load(write(tmp_path, definition, {}))
    [found] = model.predict([{"x": np.array([[0, 2], [1, 1]], np.int32)}])
    assert found["y"].tolist() == [[[1, 0, 0], [0, 0, 1]], [[0, 1, 0], [0, 1, 0]]]
    assert model.info.tensors.inputs[0].bounds == (0, 2), "others are refused before they get here"
