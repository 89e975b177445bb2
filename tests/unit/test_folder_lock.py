"""Folders of checkpoints that one process at a time writes into."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.training.storage.folder_lock import FolderLock

HOLD = """
import sys, time
from pathlib import Path
from mlx_parallm.training.storage.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_has_one_process_until_that_ends(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="is in use by another process"):
            FolderLock(folder)
        other.kill()
    lock = FolderLock(folder)
    with pytest.raises(ConfigError):
        FolderLock(folder)
    lock.release()
    lock.release()
    FolderLock(folder).release()


def test_what_can_not_be_a_folder_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        FolderLock(tmp_path / "file")
