"""What differs on a Mac, as far as it can be shown elsewhere: the system's answers are stood in for, not ours."""

import fcntl
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm import paths, platforms
from mlx_parallm.errors import ConfigError
from mlx_parallm.training.storage import checkpoints


def test_the_cache_is_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert paths.user_cache() == tmp_path / "Library/Caches/mlx-parallm"
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert paths.user_cache() == tmp_path / ".cache/mlx-parallm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert paths.user_cache() == tmp_path / "x/mlx-parallm"


def test_data_is_not_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert paths.user_data("responses") == tmp_path / "Library/Application Support/mlx-parallm/responses"
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert paths.user_data("responses") == tmp_path / ".local/share/mlx-parallm/responses"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "x"))
    assert paths.user_data("splits") == tmp_path / "x/mlx-parallm/splits"


def test_data_of_earlier_versions_is_moved_out_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    earlier = paths.user_cache() / "responses"
    earlier.mkdir(parents=True)
    (earlier / "kept").write_text("a response")
    (tmp_path / "data").write_text("a file is in the way")
    assert paths.user_data("responses") == earlier, "nothing is lost where it can't be moved"
    assert "can't be moved" in caplog.text
    (tmp_path / "data").unlink()
    folder = paths.user_data("responses")
    assert (folder / "kept").read_text() == "a response"
    assert not earlier.exists()
    earlier.mkdir()
    assert paths.user_data("responses") == folder, "what is there already is never replaced"
    assert (folder / "kept").exists()


def test_sockets_have_short_paths() -> None:
    folder = paths.socket_folder()
    try:
        assert len(str(folder)) < 30
        assert folder.stat().st_mode & 0o77 == 0
    finally:
        folder.rmdir()


@pytest.mark.parametrize(("arm", "said"), [("1", "runs under Rosetta"), ("0", "Intel processor")])
def test_an_intel_python_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch, arm: str, said: str) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    answer = subprocess.CompletedProcess(["sysctl"], 0, f"{arm}\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: answer)
    with pytest.raises(ConfigError, match=said):
        platforms.check_python()
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    platforms.check_python()


def test_open_files_are_raised_to_what_is_allowed() -> None:
    code = "import resource as r; from mlx_parallm.platforms import raise_open_files as raised\n"
    code += "print(raised(), *r.getrlimit(r.RLIMIT_NOFILE))"

    def limited(soft: int, hard: int) -> str:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=limit, check=True
        )
        return ended.stdout.strip()

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(300, hard)  # where the tests themselves may open no more
    assert limited(256, hard).startswith(f"{min(8192, hard)} ")
    assert limited(256, few) == f"{few} {few} {few}"


def test_a_checkpoint_reaches_the_drive_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, command: asked.append(command))
    checkpoints._write(tmp_path / "file", b"content")
    assert asked == [51]

    def refuse(descriptor: int, command: int) -> None:
        raise OSError("not on this volume")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    checkpoints._write(tmp_path / "file", b"content")
    assert len(synced) == 1


def test_a_mac_is_kept_awake_until_it_need_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    original = subprocess.Popen

    def popen(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        started.append(command)
        return original(["sleep", "60"])

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    platforms.hold_off_sleep()()
    assert not started, "only a Mac has caffeinate"
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    allow_sleep = platforms.hold_off_sleep()
    assert started == [["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]]
    allow_sleep()


def test_a_mac_that_can_not_be_kept_awake_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")  # here without a caffeinate
    platforms.hold_off_sleep()()
    assert "may go to sleep" in caplog.text


@pytest.mark.long
def test_mlx_lm_leaves_the_limit_of_open_files_alone() -> None:
    """It sets 2048 and 4096 as it is imported: an error where 256 are allowed, a loss where more are."""
    code = "import mlx_parallm, mlx_lm, resource as r; print(*r.getrlimit(r.RLIMIT_NOFILE))"

    def limited(soft: int, hard: int) -> str:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=True).stdout.strip()

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limited(256, 256) == "256 256"
    soft, many = min(300, hard), min(9000, hard)
    assert limited(soft, many) == f"{soft} {many}"
