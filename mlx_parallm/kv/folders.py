"""Files and folders of the SSD tier, as far as one can get at them. No MLX."""

import os
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

PARTS_PER_WRITE = 64  # Linux and macOS take up to 1,024
MAX_PART_BYTES = 16 << 20  # so that a write stays below the 2 GiB that macOS takes


def write_new_file(path: Path, parts: Sequence[memoryview]) -> None:
    """Writes a file that is not there yet, for this user alone. Parts are of bytes, one behind another."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        waiting = deque(
            part[start : start + MAX_PART_BYTES] for part in parts for start in range(0, len(part), MAX_PART_BYTES)
        )
        while waiting:
            written = os.writev(descriptor, list(islice(waiting, PARTS_PER_WRITE)))
            while written:  # a write may take only part of it
                part = waiting.popleft()
                if written < len(part):
                    waiting.appendleft(part[written:])
                written -= min(written, len(part))
    finally:
        os.close(descriptor)


def subfolders(folder: Path) -> list[Path]:
    """None where the folder can't be read."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def modified_at(folder: Path) -> float:
    """Returns when a folder was last modified, in nanoseconds; 0 where there is no such folder."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0
