"""What is shown while a step of a start takes its time."""

import io
import logging
import sys
import threading
import time

import pytest

from mlx_parallm import progress as module
from mlx_parallm.progress import progress, unknown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(module, "NEXT_SECONDS", 0.05)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.1)


def test_the_log_without_a_terminal(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with progress("loading m", lambda: 0.4):
        time.sleep(0.2)
    assert caplog.messages[0] == "loading m: 40%, 0 s so far"
    assert len(caplog.messages) >= 2
    begin, end = capsys.readouterr().out.splitlines()
    assert begin == "  loading m ..."
    assert end.startswith("  loading m: done in 0.")


def test_what_the_step_does_now(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with progress("loading m", unknown) as tell:
        tell("converting m.gguf")
        time.sleep(0.1)
    assert caplog.messages[0] == "converting m.gguf: 0 s so far"


def test_a_step_with_a_bar_of_its_own_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with progress("loading owner/model"):
        time.sleep(0.2)
    assert caplog.messages == []


def test_a_line_moves_on_a_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("loading m", lambda: 0.4) as tell:
        tell("reading m")
        time.sleep(0.5)
    shown = terminal.getvalue()
    assert "reading m" in shown
    assert "40%" in shown
    assert caplog.messages == []
    assert sys.stderr is terminal


def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError, match="no"), progress("loading m", unknown):
        raise ValueError("no")
    assert "progress" not in [thread.name for thread in threading.enumerate()]
