"""Files and folders of the SSD tier, as far as one can get at them. No MLX."""

import os
from pathlib import Path


def write_new_file(path: Path, data: bytes) -> None:
    """Writes a file that is not there yet, for this user alone."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:  # a write may take only part of it
            view = view[file.write(view) :]


def subfolders(folder: Path) -> list[Path]:
    """None where the folder can't be read."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def modified_at(folder: Path) -> float:
    """In nanoseconds; 0 where there is no such folder."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0
