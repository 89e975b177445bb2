"""Folders of the small models that tests/golden/make_embeddings.py has made, and what sentence-transformers gives."""

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from tests.support.random_weights import random_tensors

GOLDEN = Path(__file__).parents[1] / "golden"
_DESCRIBED: dict[str, Any] = json.loads((GOLDEN / "embeddings.json").read_text())
MODELS: dict[str, Any] = _DESCRIBED["models"]
TEXTS: list[str] = _DESCRIBED["texts"]
VECTORS = load_file(GOLDEN / "embeddings.safetensors")


def write_model(folder: Path, name: str) -> Path:
    model = MODELS[name]
    for path, text in (model["files"] | {"tokenizer.json": model["tokenizer"]}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for path, shapes in model["shapes"].items():
        save_file(random_tensors(shapes), folder / path)
    return folder


def edit_json(file: Path, **changes: Any) -> None:
    """None takes a key out."""
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({key: value for key, value in (values | changes).items() if value is not None}))
