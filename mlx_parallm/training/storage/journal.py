"""What has happened since the last checkpoint was written, a line each: a kill loses nothing that was acknowledged.

A journal holds the trajectories that were taken into the buffer and the version numbers that were given out. A
checkpoint says from which of its files on the lines came later than itself; the files before it are removed. A line is
in the operating system's hands before `append` returns, so it outlasts a kill; with `durable` it is on the disk, so it
outlasts a loss of power. A line that a kill or a full disk cut off is not read. Any thread; no MLX.
"""

import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from mlx_parallm.training.storage.checkpoints import to_disk

log = logging.getLogger(__name__)

FILE = re.compile(r"journal-(\d{8})\.jsonl")


class Journal:
    def __init__(self, folder: Path, first: int = 0) -> None:
        """`first`: the number of the file that the newest checkpoint names; older ones may be gone."""
        self._folder = folder
        self._lock = threading.Lock()
        self._number = max([first, *self.numbers()])
        self._descriptor: int | None = None

    def numbers(self) -> list[int]:
        """Returns the numbers of its files, the oldest first."""
        if not self._folder.is_dir():
            return []
        files = (path.name for path in self._folder.iterdir() if path.is_file())
        return sorted(int(match[1]) for name in files if (match := FILE.fullmatch(name)))

    def append(self, *entries: dict[str, Any], durable: bool = False) -> None:
        """Raises OSError where they can't be written; then none of them is in the journal."""
        data = b"".join(orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" for entry in entries)
        with self._lock:
            descriptor = self._open()
            end = os.fstat(descriptor).st_size
            try:
                written = 0
                while written < len(data):
                    written += os.write(descriptor, data[written:])
                if durable:
                    to_disk(descriptor)
            except OSError:
                os.ftruncate(descriptor, end)
                raise

    def rotate(self) -> int:
        """Begins another file, and returns its number: what is appended from now on is in it."""
        with self._lock:
            self._close()
            self._number += 1
            return self._number

    def drop_before(self, number: int) -> None:
        """Removes files that a checkpoint has made superfluous."""
        for old in self.numbers():
            if old < number:
                self._path(old).unlink(missing_ok=True)

    def read(self, first: int = 0) -> Iterator[dict[str, Any]]:
        """The entries of the files from a number on, in order."""
        for number in self.numbers():
            if number < first:
                continue
            for line in self._path(number).read_bytes().splitlines():
                try:
                    entry = orjson.loads(line)
                except ValueError:
                    log.warning("%s has a line that was cut off", self._path(number).name)
                    continue
                if isinstance(entry, dict):
                    yield entry

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path(self._number), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            if os.fstat(self._descriptor).st_size:
                os.write(self._descriptor, b"\n")  # behind a line that a kill may have cut off
        return self._descriptor

    def _path(self, number: int) -> Path:
        return self._folder / f"journal-{number:08d}.jsonl"
