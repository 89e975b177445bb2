"""The scripts of benchmarks/ on the tiny model: that they run and count right, not how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.embedding_folders import write_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.slow


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_serve_vs_mlx_lm(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    load = ["--clients", "2,4", "--requests", "6", "--repeats", "1", "--temperature", "0,0.8", "--output-tokens", "4-8"]
    answer = run("serve_vs_mlx_lm.py", "--model", str(tiny_folder), *load, "--bare", "--json", str(out))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "of greedy" in answer.stdout
    assert "bare decode loop" in " ".join(answer.stdout.split())
    found: dict[str, Any] = json.loads(out.read_text())
    assert [(row["clients"], row["temperature"]) for row in found["comparison"]] == [(2, 0), (2, 0.8), (4, 0), (4, 0.8)]
    for row in found["comparison"]:
        assert row["mlx_parallm"]["output tok/s"] > 0
        assert bool(row["ratio"]) == (row["temperature"] == 0)
    greedy = found["comparison"][0]
    assert greedy["mlx_parallm"]["output tokens"] == greedy["mlx_lm.server"]["output tokens"]
    assert all(run["summary"]["errors"] == {} for run in found["runs"])


def test_parallel(tiny_folder: Path) -> None:
    load = ["--clients", "2", "--requests", "2", "--rounds", "1", "--output-tokens", "4-8"]
    answer = run("parallel.py", "--model", str(tiny_folder), "--ranks", "2", *load)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "2 clients: 2 ranks / one process, median" in answer.stdout


def test_tuner(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    answer = run("tuner.py", "--model", str(tiny_folder), "--rounds", "1", "--starts", "2", "--json", str(out))
    assert answer.returncode in (0, 1), answer.stdout + answer.stderr  # two layers are too few to say what is fast
    found: dict[str, Any] = json.loads(out.read_text())
    assert sum(one["starts"] for one in found["settings"]) == 2
    assert len(found["settings"]) >= 5
    assert len(found["swept"]) >= 17
    assert all(one["score"] > 0 for one in (*found["settings"], *found["swept"]))


@pytest.mark.slow
def test_exactness(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "exactness.json"
    options = [
        "--dtype",
        "float16",
        "--rows",
        "4",
        "--prompts",
        "4",
        "--tokens",
        "4",
        "--turns",
        "1",
        "--requests",
        "4",
    ]
    answer = run("exactness.py", "--model", str(tiny_folder), *options, "--json", str(out))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = json.loads(out.read_text())
    assert set(found["always"].values()) == {4, 2}
    assert found["fresh"]["ratio"] > 0


def test_speculation(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "speculation.json"
    options = ["--rows", "2", "--turns", "1", "--tokens", "16", "--tasks", "repeat,chat", "--json", str(out)]
    answer = run("speculation.py", "--model", str(tiny_folder), *options)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = json.loads(out.read_text())
    assert list(found) == ["repeat 2", "chat 2"]
    assert all(one["differing"] == 0 and one["ratio"] > 0 for one in found.values())


def test_dashboard(tiny_folder: Path) -> None:
    answer = run("dashboard.py", "--model", str(tiny_folder), "--clients", "2", "--seconds", "1.5", "--turns", "2")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.count("the viewer got") == 2
    assert "Tokens a second: medians" in " ".join(answer.stdout.split())


def test_long_prompt(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--prompt-tokens", "1500", "--prefill-step-size", "128", "--stream-tokens", "300", "--rows", "4"]
    answer = run("long_prompt.py", "--model", str(tiny_folder), *sizes, "--repeats", "1", "--json", str(out))
    assert answer.returncode in (0, 1), (
        answer.stdout + answer.stderr
    )  # two layers are too few for the bound to mean much
    found = json.loads(out.read_text())
    assert found["without"]["count"] > 4 * 200
    assert found["meanwhile"]["count"] >= 4 * 5


def test_rl_act(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    answer = run(
        "rl_act.py", "--clients", "1,3", "--rows", "1,50", "--seconds", "0.5", "--repeats", "1", "--json", str(out)
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found: list[dict[str, Any]] = json.loads(out.read_text())
    assert [(one["clients"], one["rows"]) for one in found] == [(1, 1), (3, 1), (1, 50), (3, 50)]
    for one in found:
        assert 0 < one["p50_ms"] <= one["p99_ms"]
        assert one["ratio"] == pytest.approx(one["actions_per_second"] / one["bare_per_second"])


def test_embeddings(tiny_folder: Path, tmp_path: Path) -> None:
    out, model = tmp_path / "out.json", write_model(tmp_path / "model", "qwen")
    load = ["--texts", "8", "--longest", "20", "--rounds", "1", "--rows", "2", "--stream-tokens", "60"]
    load += ["--embed-tokens", "100", "--embedding-clients", "1"]
    answer = run("embeddings.py", "--model", str(model), "--chat-model", str(tiny_folder), *load, "--json", str(out))
    assert answer.returncode in (0, 1), answer.stdout + answer.stderr  # two layers are too few for the bound
    found = json.loads(out.read_text())
    assert found["process"]["ours"] > 0
    assert found["http"]["ours"] > 0
    assert found["chat"]["embedded_tokens"] >= 100


def test_mixed_load(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    load = ["--seconds", "12", "--interval", "4", "--rate", "25", "--memory-growth", "1000", "--json", str(out)]
    answer = run("mixed_load.py", "--model", str(tiny_folder), *load)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = json.loads(out.read_text())
    assert found["verdict"]["passed"]
    assert found["faults"] == []
    assert {"abort", "refused", "publish", "upload", "update"} <= set(found["verdict"]["by_kind"])
    assert [row["faults"] for row in found["intervals"]][:3] == [0, 0, 0]
    assert all(row["requests"] > 20 and row["rss_mib"] > 0 for row in found["intervals"][:3])
