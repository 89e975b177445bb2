"""Classification heads of every family, against transformers' numbers (tests/golden/make_heads.py)."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.models.kinds.classifier import Classifier, load
from mlx_parallm.types import TextTokens
from tests.support.classifiers import write_classifier

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/heads.json").read_text())["families"]


def inputs(family: dict[str, Any]) -> list[TextTokens]:
    return [TextTokens(case["input_ids"], case.get("token_type_ids")) for case in family["cases"]]


def loaded(name: str, folder: Path, **changes: Any) -> Classifier:
    write_classifier(folder, GOLDEN[name]["config"] | changes, GOLDEN[name]["shapes"])
    return load(folder)


@pytest.mark.parametrize("name", GOLDEN)
def test_it_equals_transformers(name: str, tmp_path: Path) -> None:
    """Alone, and in batches of any order."""
    model, texts = loaded(name, tmp_path), inputs(GOLDEN[name])
    wanted = [np.array(case["logits"]) for case in GOLDEN[name]["cases"]]
    alone = [model.predict([text])[0] for text in texts]
    for found, right in zip(alone, wanted, strict=True):
        np.testing.assert_allclose(found, right, atol=1e-4)
    order = random.Random(0).sample(range(len(texts)), len(texts))
    for place, found in zip(order, model.predict([texts[place] for place in order]), strict=True):
        np.testing.assert_allclose(found, alone[place], atol=1e-5)
