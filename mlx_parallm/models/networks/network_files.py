"""The tensors of a network's folder: every safetensors file in it, together."""

from pathlib import Path

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.tensors import Array, TensorError, parse_safetensors

WEIGHTS = "model.safetensors"


def read_weights(folder: Path) -> dict[str, Array]:
    """ModelLoadError names the file."""
    found: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors = parse_safetensors(path.read_bytes())
        except OSError as error:
            raise ModelLoadError(f"{path} can't be read: {error.strerror or error}") from error
        except TensorError as error:
            raise ModelLoadError(f"{path}: {error}") from error
        for name in tensors:
            if name in found:
                raise ModelLoadError(f"{path}: tensor {name!r} is in another file of the folder too")
        found |= tensors
    return found
