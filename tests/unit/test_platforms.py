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
from mlx_parallm.training import checkpoints


def test_the_cache_is_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert paths.user_cache() == tmp_path / "Library/Caches/mlx-parallm"
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert paths.user_cache() == tmp_path / ".cache/mlx-parallm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert paths.user_cache() == tmp_path / "x/mlx-parallm"


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
