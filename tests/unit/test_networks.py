"""Networks of network.json: numbers equal torch's, batched equals alone, and what is wrong is said."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.models.kinds import network
from mlx_parallm.models.kinds.network import NetworkPredictor
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
