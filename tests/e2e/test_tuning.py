"""What a start measures is kept for the next one, can be seen, and can be pinned."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers import ours, running
from tests.tiny import save_tiny, tiny


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model on a machine where no server has run."""
    monkeypatch.delenv("PARALLM_PROFILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    save_tiny(tiny(), folder)
    return f"chat={folder}"


def tuning(model: str, *flags: str) -> dict[str, Any]:
    with running(ours(model, flags)) as server:
        (found,) = httpx.get(f"{server.url}/server_info").json()["models"]
        body = {"model": "chat", "prompt": "one two", "max_tokens": 3}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    result: dict[str, Any] = found["tuning"]
    return result


@pytest.mark.slow
def test_the_second_start_works_as_the_first_and_a_file_pins_it(model: str, tmp_path: Path) -> None:
    first = tuning(model)
    assert first["source"] == "measured at this start"
    (kept,) = (tmp_path / "cache" / "mlx-parallm" / "profiles").iterdir()
    assert json.loads(kept.read_text())["measured"]["seconds"] <= 4  # on a busy machine a piece of it takes longer
    assert tuning(model) == first | {"source": "measured at an earlier start"}
    pinned = tmp_path / "mine.json"
    pinned.write_text(json.dumps(first | {"slot_steps": [1, 8, 256], "steps_in_flight": 1}))
    told = tuning(model, "--profile", str(pinned))
    assert told == first | {"slot_steps": [1, 8, 256], "steps_in_flight": 1, "source": f"--profile {pinned}"}


def test_a_wrong_file_ends_the_start_before_a_model_is_loaded(model: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"steps_in_flight": 1, "slot_steps": [8, 1], "view_step": 64}')
    command = [sys.executable, "-m", "mlx_parallm", "serve", "--model-path", "/no/such/folder", "--profile", str(wrong)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "--profile" in ended.stderr
    assert "slot_steps must be" in ended.stderr
    assert "/no/such/folder" not in ended.stderr
