"""examples/cartpole.py: Gymnasium's CartPole over HTTP, by an MLP and by a GRU that needs its state."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "cartpole.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="needs gymnasium: the extra rl-env"),
]


def test_poles_are_held_over_http(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--out", str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    scores = [float(score) for score in re.findall(r": ([\d.]+) steps on average", answer.stdout)]
    assert len(scores) == 4
    assert min(scores[:3]) >= 475
    assert scores[3] < 200, "with its state shuffled, the policy must not know how fast anything moves"
