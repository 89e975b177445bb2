"""What the operating system must allow: a Python that MLX has a build for, open files, no sleep. Imports no MLX."""

import logging
import os
import platform
import subprocess
from collections.abc import Callable

from mlx_parallm.errors import ConfigError

OPEN_FILES = 8192

log = logging.getLogger(__name__)


def check_python() -> None:
    """MLX has no build for Intel Macs; on Apple Silicon an Intel Python, under Rosetta, is the usual reason."""
    if platform.system() != "Darwin" or platform.machine() != "x86_64":
        return
    if _is_apple_silicon():
        raise ConfigError(
            "this Python is built for Intel and runs under Rosetta, where MLX can't be used: install a native one "
            "(python.org's universal installer, or Homebrew in /opt/homebrew) and remove .venv"
        )
    raise ConfigError("MLX needs a Mac with Apple Silicon; this one has an Intel processor")


def _is_apple_silicon() -> bool:
    """Asks the system, which does not pretend as Python's `platform` does under Rosetta."""
    try:
        answer = subprocess.run(["sysctl", "-n", "hw.optional.arm64"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return False
    return answer.stdout.strip() == "1"


MLX_LM_LIMITS = (2048, 4096)  # what mlx-lm sets as it is imported


def keep_open_files_limit() -> None:
    """Has mlx-lm leave the limit of open files alone: it fails where less is allowed, and lowers it where more is."""
    if platform.system() == "Windows":
        return
    import resource

    original = resource.setrlimit

    def setrlimit(kind: int, limits: tuple[int, int]) -> None:
        if kind != resource.RLIMIT_NOFILE or tuple(limits) != MLX_LM_LIMITS:
            original(kind, limits)

    resource.setrlimit = setrlimit


def raise_open_files() -> int:
    """Every connection is an open file, and a Mac allows 256 unless asked; the limit that holds now."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        return soft
    return wanted


def hold_off_sleep() -> Callable[[], None]:
    """Keeps a Mac from sleeping while nobody touches it, until the function that is returned is called or this process
    ends, however it does. Does nothing elsewhere. The lid and the menu still send it to sleep."""
    if platform.system() != "Darwin":
        return lambda: None
    command = ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        log.warning("the machine may go to sleep while it serves: caffeinate can't be started: %s", error)
        return lambda: None

    def allow_sleep() -> None:
        process.terminate()
        process.wait()

    return allow_sleep
