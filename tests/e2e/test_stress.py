"""Under stress nothing is lost, mixed up or leaked: benchmarks/stress.py in two sizes."""

import subprocess
import sys
from pathlib import Path

import pytest

STRESS = Path(__file__).parents[2] / "benchmarks" / "stress.py"


def run_stress(*args: str, seconds: float) -> None:
    answer = subprocess.run([sys.executable, str(STRESS), *args], capture_output=True, text=True, timeout=seconds)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "nothing leaked" in answer.stdout


@pytest.mark.slow
def test_a_little_stress(tiny_folder: Path) -> None:
    sizes = ["--requests", "150", "--clients", "24", "--output-tokens", "12", "--sample", "25"]
    run_stress("--model", str(tiny_folder), *sizes, seconds=120)


@pytest.mark.slow
def test_a_thousand_requests_at_64_clients(tiny_folder: Path) -> None:
    run_stress("--model", str(tiny_folder), "--sample", "100", seconds=600)


@pytest.mark.slow
def test_stress_on_the_embedded_model() -> None:
    run_stress("--requests", "300", "--clients", "64", "--prompt-words", "20", "--output-tokens", "8", seconds=900)
