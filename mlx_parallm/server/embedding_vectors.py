"""What the dialects' embedding routes share: which prompt stands before a text, and vectors cut to a size."""

import numpy as np
import numpy.typing as npt

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.types import EmbeddingInfo

Vector = npt.NDArray[np.float32]


def prompt_text(name: str | None, info: EmbeddingInfo) -> str:
    """Returns what stands before each text: the prompt of this name, or the model's default."""
    if name is None:
        return info.prompts.get(info.default_prompt or "", "")
    if name not in info.prompts:
        known = f"has the prompts {', '.join(info.prompts)}" if info.prompts else "has no prompts"
        raise InvalidRequestError(f"prompt_name: {name!r} is none of the model's: it {known}", param="prompt_name")
    return info.prompts[name]


def check_dimensions(asked: int | None, info: EmbeddingInfo) -> None:
    """Refuses sizes that the model was not trained for."""
    if asked is None or asked == info.dimensions or asked in info.trained_dimensions:
        return
    sizes = [*info.trained_dimensions, info.dimensions]
    every = len(sizes) == info.dimensions
    known = f"1 to {info.dimensions}" if every else ", ".join(map(str, sizes))
    raise InvalidRequestError(
        f"dimensions: the model gives vectors of {known} numbers, not {asked}", param="dimensions"
    )


def cut(vector: Vector, dimensions: int | None) -> Vector:
    """A cut vector has length 1 again."""
    return vector if dimensions is None or dimensions == len(vector) else normalised(vector[:dimensions])


def normalised(vector: Vector) -> Vector:
    length: np.float32 = np.linalg.norm(vector)
    return vector / max(length, np.float32(1e-12))
