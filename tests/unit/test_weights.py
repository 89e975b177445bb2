"""How many bytes a model's weights will take, before they are loaded."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlx_parallm.devices.device import DEVICES
from mlx_parallm.runtime.weight_files import weight_bytes


@pytest.mark.parametrize("name", ["F64", "I64", "U64", "I32", "U32", "F32", "F16", "I16", "U16", "I8", "U8", "BOOL"])
def test_tensors_of_each_type_take_their_bytes(name: str, tmp_path: Path) -> None:
    kinds = {"F": "f", "I": "i", "U": "u", "B": "b"}
    width = 1 if name == "BOOL" else int(name[1:]) // 8
    save_file({"x": np.zeros((3, 5), f"{kinds[name[0]]}{width}")}, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, DEVICES["metal"]) == 15 * width
    assert weight_bytes(tmp_path, DEVICES["cpu"]) == 15 * (4 if name == "F16" else width), (
        "halves are computed in float32"
    )


def test_quantised_weights_take_what_they_are_computed_in(tmp_path: Path) -> None:
    """Eight numbers of four bits in each word, which only Apple's GPUs multiply by as they are."""
    save_file({"x": np.zeros((3, 5), np.uint32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization": {"group_size": 64, "bits": 4}}')
    assert [weight_bytes(tmp_path, DEVICES[kind]) for kind in ("metal", "cpu", "cuda")] == [60, 15 * 8 * 4, 15 * 8 * 2]
