"""Log lines, as text or JSON, each with the id of the request it belongs to. `server_process` sets them up."""

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

import orjson

from mlx_parallm.config.http import HttpConfig
from mlx_parallm.errors import ConfigError

FILE_BYTES = 10_000_000  # of a log file, before the next one begins
OLD_FILES = 4

request_id: ContextVar[str] = ContextVar("request_id", default="-")

_BUILT_IN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "color_message", "asctime", "taskName"}


def set_up(options: HttpConfig, *, helper: bool = False) -> None:
    """`helper`: this process works for another one, which has the log file; its own lines go to standard error."""
    file = None if helper else options.log_file
    handler = StderrHandler() if file is None else _file_handler(Path(file).expanduser())
    handler.setFormatter(JsonFormatter() if options.log_json else TextFormatter())
    handler.addFilter(_add_request_id)
    root = logging.getLogger()
    for earlier in root.handlers:
        if isinstance(earlier, RotatingFileHandler):
            earlier.close()
    root.handlers[:] = [handler]
    root.setLevel(options.log_level)
    for name in ("httpx", "asyncio", "filelock", "urllib3"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))  # we say what it says


def _file_handler(file: Path) -> RotatingFileHandler:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return RotatingFileHandler(file, maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--log-file {file} can't be written: {error.strerror or error}") from error


def _add_request_id(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request_id"):
        record.request_id = request_id.get()
    return True


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what standard error is now: above a line that moves, where there is one (`progress`)."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        time = _time(record).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        message = record.getMessage().replace("\n", "\n  ")
        return f"{time}Z {record.levelname:<7} [{getattr(record, 'request_id', '-')}] {record.name}: {message}"


class JsonFormatter(logging.Formatter):
    """One object per line; what a call gives as `extra` becomes fields of its own."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "request_id": getattr(record, "request_id", "-"),
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _BUILT_IN and key not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()
