"""The audit log: a JSON line for each call that changes the server, without bodies. `middleware.RequestLog` writes."""

import contextlib
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from mlx_parallm.errors import ConfigError

log = logging.getLogger(__name__)


class AuditLog:
    """A file for its owner alone; lines are appended. `reopen` after it was moved away."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._opened()

    def _opened(self) -> int:
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.fchmod(file, 0o600)
        except OSError as error:
            raise ConfigError(f"audit_log: {self._path} can't be written: {error.strerror}") from None
        return file

    def write(self, **fields: Any) -> None:
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
        try:
            os.write(self._file, orjson.dumps(line) + b"\n")
        except OSError as error:
            log.error("the audit log can't be written: %s", error.strerror)

    def reopen(self) -> None:
        try:
            file = self._opened()
        except ConfigError as error:
            log.error("%s; lines go to the file that was open before", error.message)
            return
        self.close()
        self._file = file

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)
