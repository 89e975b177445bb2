"""Log lines, as text or JSON, each with the id of the request it belongs to. `server.http.server_process` sets them
up."""

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

import orjson

request_id: ContextVar[str] = ContextVar("request_id", default="-")

_BUILT_IN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "color_message", "asctime", "taskName"}


def set_up(level: str, as_json: bool) -> None:
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    handler.addFilter(_add_request_id)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in ("httpx", "asyncio", "filelock", "urllib3"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))  # we say what it says


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
