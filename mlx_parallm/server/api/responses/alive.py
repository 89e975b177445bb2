"""Which of the servers that share a folder of responses still run: each holds a lock on a file of its own.

A response in progress names the server that computes it. Another server can so tell one that is under way elsewhere
from one whose server has stopped.
"""

import contextlib
import fcntl
import os
import uuid
from pathlib import Path

FOLDER = "servers"


class ServerLock:
    """Held until `release`, or until the process ends, however it does."""

    def __init__(self, folder: Path) -> None:
        """OSError where it can't be made."""
        self.name = uuid.uuid4().hex
        folder = folder / FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in folder.iterdir():
            if not is_alive(folder.parent, path.name):
                path.unlink(missing_ok=True)
        self._path = folder / self.name
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDONLY, 0o600)
        with contextlib.suppress(OSError):  # a network volume may have no locks
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def is_alive(folder: Path, name: str) -> bool:
    """Returns whether the server of this name runs."""
    try:
        descriptor = os.open(folder / FOLDER / name, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
