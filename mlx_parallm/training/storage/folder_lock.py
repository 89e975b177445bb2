"""One process at a time writes into a folder of checkpoints: two would remove each other's journals. No MLX."""

import contextlib
import fcntl
import os
from pathlib import Path

from mlx_parallm.errors import ConfigError


class FolderLock:
    """Held until `release`, or until the process ends, however it does."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder where there is none; ConfigError where it is in use, OSError where it can't be made."""
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a network volume may have no locks
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                raise ConfigError(
                    f"--checkpoint-dir {folder} is in use by another process that trains: give each a folder of its own"
                ) from None

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
