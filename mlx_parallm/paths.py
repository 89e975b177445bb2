"""Where the user's files live: caches, which can be made again, and data, which can't."""

import logging
import os
import platform
import shutil
import tempfile
from pathlib import Path

NAME = "mlx-parallm"

log = logging.getLogger(__name__)


def user_cache() -> Path:
    """Our folder in the user's cache; it may not exist yet, and all in it can be made again."""
    usual = "Library/Caches" if _is_mac() else ".cache"
    return _base("XDG_CACHE_HOME", usual) / NAME


def user_data(kind: str) -> Path:
    """Returns the folder of one kind of the user's data, such as `responses`; it may not exist yet.

    Earlier versions kept data in the cache, which a system may empty: what is found there is moved.
    """
    usual = "Library/Application Support" if _is_mac() else ".local/share"
    folder = _base("XDG_DATA_HOME", usual) / NAME / kind
    earlier = user_cache() / kind
    if earlier.is_dir() and not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.move(earlier, folder)
            log.info("moved %s to %s", earlier, folder)
        except OSError as error:
            if not folder.is_dir():  # another server may have moved it meanwhile
                log.warning("%s can't be moved to %s and is used where it is: %s", earlier, folder, error)
                return earlier
    return folder


def socket_folder() -> Path:
    """Makes a folder for Unix sockets that only this user can read; its path is short, because a socket's may have 103
    bytes on macOS, and TMPDIR there takes half of them."""
    return Path(tempfile.mkdtemp(prefix="parallm-", dir="/tmp"))


def _is_mac() -> bool:
    return platform.system() == "Darwin"


def _base(variable: str, usual: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / usual)
