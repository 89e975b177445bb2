"""Files of keys: JSON, TOML or YAML, by their ending; written whole or not at all, for their owner alone."""

import contextlib
import fcntl
import json
import os
import secrets
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mlx_parallm.errors import ConfigError

Document = dict[str, Any]  # names to entries
FileVersion = tuple[int, int, int]  # what changes when a file does

EXPECTED = "write names with a key each, as in 'alice: {key: SECRET, role: user}'"


def read_document(path: Path) -> Document:
    parse = _READERS.get(path.suffix.lower(), yaml.safe_load)
    try:
        text = path.read_text()
        document = parse(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"keys file {path} can't be read: {_reason(error)}") from None
    if document is None:  # an empty file has no keys, and lets nobody in
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"keys file {path}: {EXPECTED}")
    return document


def _reason(error: Exception) -> str:
    """Returns what is wrong and where, without the line itself: a key may stand in it."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark or error.context_mark) is not None:
        return f"{error.problem or 'wrong YAML'}, line {mark.line + 1}, column {mark.column + 1}"
    if isinstance(error, json.JSONDecodeError | tomllib.TOMLDecodeError):
        return str(error)
    return "it is no text" if isinstance(error, UnicodeDecodeError) else type(error).__name__


def version_of(path: Path) -> FileVersion | None:
    """None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


@contextlib.contextmanager
def changing(path: Path) -> Iterator[Document]:
    """The file's document to change, then written; nobody else changes it meanwhile. A new file begins empty."""
    path = path.resolve()  # the file that a link means, not the link
    with _locked(path.parent):
        document = read_document(path) if path.exists() else {}
        yield document
        _write(path, _WRITERS.get(path.suffix.lower(), _as_yaml)(document))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{folder} can't be opened: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise ConfigError(f"keys file {path} can't be written: {error.strerror}") from None


def _as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def _as_yaml(document: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True))


def _as_toml(document: Mapping[str, Any]) -> str:
    """A table for each key, of texts, numbers, booleans and lists of texts, which JSON writes as TOML does."""
    tables = [
        "\n".join([f"[{_text(name)}]", *(f"{_text(key)} = {_text(value)}" for key, value in entry.items())])
        for name, entry in document.items()
    ]
    return "\n\n".join(tables) + "\n"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


_READERS: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": tomllib.loads}
_WRITERS: dict[str, Callable[[Mapping[str, Any]], str]] = {".json": _as_json, ".toml": _as_toml}
