"""`parallm export`: what it reads without torch, what it writes, and what it refuses."""

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.cli.main import main
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.kinds import network, policy
from mlx_parallm.models.networks.torch_file import read_torch, state_dict
from mlx_parallm.tensors import dump_safetensors, parse_safetensors

GOLDEN = Path(__file__).parents[1] / "golden"
CNN: dict[str, Any] = json.loads((GOLDEN / "networks.json").read_text())["cnn"]
TENSORS = parse_safetensors((GOLDEN / "networks.safetensors").read_bytes())


def run(state: Path, layers: dict[str, Any], folder: Path, *flags: str) -> int:
    (folder / "layers.json").write_text(json.dumps(layers))
    return main(
        ["export", str(state), "--layers", str(folder / "layers.json"), "--output", str(folder / "net"), *flags]
    )


def test_a_file_of_torch_is_served_as_torch_computes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(GOLDEN / "state_dict.pt", CNN, tmp_path, "--prefix", "module.") == 0
    printed = capsys.readouterr().out
    assert "a network of 724 weights" in printed
    assert "takes x: float32 (batch, 3, 10, 9)" in printed
    [found] = network.load(tmp_path / "net").predict([{"x": TENSORS["cnn/inputs/x"]}])
    np.testing.assert_allclose(found["y"], TENSORS["cnn/outputs/y"], atol=1e-5)
    assert run(GOLDEN / "state_dict.pt", CNN, tmp_path, "--prefix", "module.") == 2
    assert "--force overwrites it" in capsys.readouterr().err
    assert run(GOLDEN / "state_dict.pt", CNN, tmp_path, "--prefix", "module.", "--force", "--key", "state_dict") == 0
    deeper = ("--prefix", "module.", "--output", str(tmp_path / "not" / "there" / "yet"))
    assert run(GOLDEN / "state_dict.pt", CNN, tmp_path, *deeper) == 0
    assert network.load(tmp_path / "not/there/yet").info.weight_bytes == 4 * 724


def test_names_are_mapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As trainers write a policy: a Sequential in a module, and a log_std of (1, actions)."""
    shapes = {"actor.0.weight": (3, 4), "actor.0.bias": (3,), "actor_logstd": (1, 3), "critic.weight": (1, 4)}
    state = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    (tmp_path / "state.safetensors").write_bytes(dump_safetensors(state))
    layers = {
        "inputs": {"observation": {"shape": ["batch", 4]}},
        "layers": [{"type": "linear", "name": "mean", "from": "actor.0", "out_features": 3}],
        "outputs": {"mean": {}},
        "policy": {"distribution": "gaussian", "mean": "mean", "log_std": "log_std"},
        "tensors": {"log_std": "actor_logstd"},
    }
    assert run(tmp_path / "state.safetensors", layers, tmp_path) == 1
    assert "no layer uses critic.weight of the state_dict" in capsys.readouterr().err
    assert run(tmp_path / "state.safetensors", layers, tmp_path, "--allow-unused") == 0
    assert policy.load(tmp_path / "net").info.kind == "policy"
    assert "from" not in json.loads((tmp_path / "net/network.json").read_text())["layers"][0]
    for change, told in (
        ({"tensors": {"log_st": "actor_logstd"}}, "the network has no tensor 'log_st'; did you mean 'log_std'"),
        ({"tensors": {"log_std": "logstd"}}, "the state_dict has no 'logstd'; did you mean 'actor_logstd'"),
    ):
        assert run(tmp_path / "state.safetensors", layers | change, tmp_path, "--allow-unused", "--force") == 1
        assert told in capsys.readouterr().err


class Evil:
    def __reduce__(self) -> Any:
        return (eval, ("1 + 1",))


def saved(folder: Path, content: bytes, numbers: bytes = b"") -> Path:
    path = folder / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", content)
        archive.writestr("model/data/0", numbers)
    return path


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"it holds a builtins.eval, and only tensors are read"):
        read_torch(saved(tmp_path, pickle.dumps({"a": Evil()})))
    for content in (b"", b"\x80\x02garbage", pickle.dumps({"a": np.zeros(2)})):
        with pytest.raises(ModelLoadError, match="can't be read as a state_dict"):
            read_torch(saved(tmp_path, content))
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ModelLoadError, match=r"is no file of torch.save"):
        read_torch(tmp_path / "text.pt")
    with pytest.raises(ModelLoadError, match="can't be read"):
        read_torch(tmp_path / "nobody.pt")


def test_a_size_of_torch_is_a_tuple(tmp_path: Path) -> None:
    content = b"}(X\x01\x00\x00\x00sctorch\nSize\n((K\x02K\x03ttRu."  # {"s": torch.Size((2, 3))}
    assert read_torch(saved(tmp_path, content)) == {"s": (2, 3)}


class Reference:
    """Pickles as torch pickles a tensor."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


class Pickler(pickle._Pickler):  # the one in Python, which can be told to write a name
    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(value, Reference):
            super().save(value, save_persistent_id)
            return
        self.write(b"ctorch._utils\n_rebuild_tensor_v2\n(")
        self.write(b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ")
        for one in value.arguments:
            super().save(one)
        self.write(b"tR")


def tensor_file(folder: Path, *arguments: Any) -> Path:
    stream = io.BytesIO()
    Pickler(stream, 2).dump({"w": Reference(*arguments)})
    return saved(folder, stream.getvalue(), np.arange(4, dtype="<f4").tobytes())


def test_tensors_stay_within_their_numbers(tmp_path: Path) -> None:
    found = read_torch(tensor_file(tmp_path, 1, (2,), (2,), False, None))
    assert found["w"].tolist() == [1.0, 3.0]
    for arguments in ((0, (5,), (1,)), (3, (2,), (1,)), (-1, (2,), (1,)), (0, (2,), (-1,)), (0, (2, 2), (1,))):
        with pytest.raises(ModelLoadError, match=r"beyond its numbers|negative size or stride"):
            read_torch(tensor_file(tmp_path, *arguments, False, None))


def test_which_dict_is_meant() -> None:
    one = {"w": np.zeros(1)}
    assert state_dict({"model": one, "step": 3}) == one
    assert state_dict({"a": one, "b": one}, "b") == one
    for wrong, key, told in (
        ({"a": one, "b": one}, None, "several dicts of tensors: a, b"),
        ({"a": one}, "c", "has no dict 'c'; it has a"),
        ({"a": 3}, None, "no dict of tensors"),
        ([1], None, "holds a list"),
    ):
        with pytest.raises(ModelLoadError, match=told):
            state_dict(wrong, key)
