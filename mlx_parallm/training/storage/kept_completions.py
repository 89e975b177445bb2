"""The completions that may still be rewarded, on disk: feedback on a completion from before a restart finds it.

A thread appends each completion within milliseconds of its end; when the file holds twice what is kept in memory, it is
written anew. Prompts and completions are in it, so only its owner may read it. Any thread; no MLX.
"""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import orjson

from mlx_parallm.training.rl.records import Record
from mlx_parallm.training.storage.checkpoints import to_disk

log = logging.getLogger(__name__)

FILE = "answers.jsonl"


class CompletionFile:
    def __init__(self, folder: Path, max_tokens: int, kept: Callable[[], Iterable[Record]]) -> None:
        """`kept`: the completions to keep when the file is written anew."""
        self._path = folder / FILE
        self._max_tokens = max_tokens
        self._kept = kept
        self._tokens = 0  # in the file
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self.failures = 0

    def read(self) -> Iterator[Record]:
        """What an earlier process has left, the oldest first; one by one, since it may be twice what is kept."""
        try:
            with self._path.open("rb") as file:
                for line in file:
                    with contextlib.suppress(ValueError, TypeError, KeyError):  # cut off by a kill
                        yield Record.of_json(orjson.loads(line))
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("completions from before can't be read: %s", error)

    def start(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write_anew()
        self._thread.start()

    def put(self, record: Record) -> None:
        """Returns at once."""
        self._queue.put(record)

    def close(self) -> None:
        """Writes what is left."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(30)

    def _run(self) -> None:
        while True:
            records = [self._queue.get()]
            while not self._queue.empty():
                records.append(self._queue.get())
            try:
                self._append([record for record in records if record is not None])
            except OSError as error:
                self.failures += 1
                log.error("completions can't be kept for later feedback: %s", error)
            if None in records:
                return

    def _append(self, records: Iterable[Record]) -> None:
        if self._tokens > 2 * self._max_tokens:
            self._write_anew()
            return  # they are among those that are kept
        with self._path.open("ab") as file:
            self._tokens += _write(file, records)

    def _write_anew(self) -> None:
        partial = self._path.with_suffix(".partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            tokens = _write(file, self._kept())
            file.flush()
            to_disk(file.fileno())
        os.replace(partial, self._path)
        self._tokens = tokens


def _write(file: BinaryIO, records: Iterable[Record]) -> int:
    """Their tokens. A new line comes first: the last may be cut off."""
    tokens = 0
    for record in records:
        file.write(b"\n" + record.json())
        tokens += record.size
    return tokens
