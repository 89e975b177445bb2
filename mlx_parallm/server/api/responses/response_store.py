"""Responses that others can continue, in an SQLite file: over restarts, within limits, each for the key that wrote it.

One thread does all that touches the file, in the order in which it is asked: what was put is found by the next `get`. A
response is there whole or not at all, and has a checksum: one that is damaged is not there, and it is said why. When
there are too many, or they hold too much, the longest unused go; using a response uses those that it continues. Several
servers may share a folder.
"""

import asyncio
import contextlib
import hashlib
import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from mlx_parallm.errors import InvalidRequestError, NotFoundError, UnavailableError
from mlx_parallm.server.api.responses.alive import ServerLock, is_alive
from mlx_parallm.server.api.responses.response_types import ResponseObject

log = logging.getLogger(__name__)

MAX_COUNT = 10_000
MAX_CHAIN_BYTES = 64 << 20  # of all that a response continues: they are read at once
MAX_CHAIN = 10_000
KEPT_SECONDS = 30 * 24 * 3600.0  # since the last use, as OpenAI keeps them
FILE_NAME = "responses-1.sqlite3"  # another number for another schema
SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, response BLOB NOT NULL, input BLOB NOT NULL,
  output BLOB NOT NULL, bytes INTEGER NOT NULL, used REAL NOT NULL, digest BLOB, server TEXT);
CREATE INDEX IF NOT EXISTS responses_used ON responses (used, bytes);
CREATE TABLE IF NOT EXISTS items (
  id TEXT NOT NULL, response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
  PRIMARY KEY (id, response)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_response ON items (response);
"""
CHAIN = """
WITH RECURSIVE chain (id, previous, bytes, depth) AS (
  SELECT id, previous, bytes, 0 FROM responses WHERE id = ? AND owner = ?
  UNION ALL
  SELECT r.id, r.previous, r.bytes, depth + 1 FROM responses r JOIN chain ON r.id = chain.previous
  WHERE r.owner = ? AND depth < ?)
SELECT id, previous, bytes FROM chain ORDER BY depth
"""

DAMAGED = "is damaged on the server's disk and can't be read"

T = TypeVar("T")
Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response: ResponseObject
    input: Sequence[Item]
    abandoned: bool = False  # the server that computes it has stopped

    @property
    def id(self) -> str:
        return str(self.response["id"])


class ResponseStore:
    def __init__(self, folder: Path, most_bytes: int, most: int = MAX_COUNT, seconds: float = KEPT_SECONDS) -> None:
        self._path = folder / FILE_NAME
        self._most = most
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._connection: sqlite3.Connection | None = None  # made by the thread, at its first use
        self._lock: ServerLock | None = None  # the same

    @property
    def keeps(self) -> bool:
        return self._most_bytes > 0 and self._most > 0

    def put(self, owner: str, stored: StoredResponse) -> "Future[bool]":
        """Done when it would survive a crash of the process. False where it is not kept, for want of room or of a disk
        that can be written; the log says why."""
        return self._thread.submit(self._put, owner, stored)

    async def get(self, owner: str, identity: str) -> StoredResponse | None:
        return await self._run(lambda: self._get(owner, identity))

    async def chain(self, owner: str, identity: str) -> list[Item]:
        """All items of a response and of those that it continues, in their order."""
        return await self._run(lambda: self._chain(owner, identity))

    async def items(self, owner: str, names: Collection[str]) -> dict[str, Item]:
        """The newest item of each name that is there."""
        return await self._run(lambda: self._items(owner, names))

    async def delete(self, owner: str, identity: str) -> bool:
        return await self._run(lambda: self._delete(owner, identity))

    async def close(self) -> None:
        """When all that was put is written."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError) as error:
            log.warning("stored responses in %s can't be read: %s", self._path, error)
            raise UnavailableError("stored responses can't be read; the server's log says why") from error

    # On the thread

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            try:
                self._connection = self._connect()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):  # locked, or the disk is full: the file may be right
                    raise
                log.warning("%s is damaged and is put aside: %s", self._path, error)
                self._path.replace(self._path.with_suffix(".damaged"))
                for ending in ("-wal", "-shm"):
                    self._path.with_name(self._path.name + ending).unlink(missing_ok=True)
                self._path.touch(mode=0o600)
                self._connection = self._connect()
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=10, check_same_thread=False, isolation_level=None)
        try:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA journal_size_limit = 4194304")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA secure_delete = ON")  # what is deleted is gone
            connection.executescript(SCHEMA)
            columns = {row[1] for row in connection.execute("PRAGMA table_info (responses)")}
            for column, kind in (("digest", "BLOB"), ("server", "TEXT")):
                if column not in columns:  # a file of an earlier release
                    connection.execute(f"ALTER TABLE responses ADD COLUMN {column} {kind}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _put(self, owner: str, stored: StoredResponse) -> bool:
        response = {key: value for key, value in stored.response.items() if key != "output"}
        output = stored.response["output"]
        blobs = [orjson.dumps(part) for part in (response, stored.input, output)]
        items = {item["id"] for item in [*stored.input, *output]}
        size = sum(map(len, blobs)) + sum(len(name) + 100 for name in items)
        if size > self._most_bytes:
            log.warning("%s is not kept: it has %d bytes, and --responses-max-bytes allows fewer", stored.id, size)
            return False
        previous = stored.response["previous_response_id"]
        try:
            connection = self._open()
            with _transaction(connection):
                connection.execute("DELETE FROM responses WHERE id = ?", (stored.id,))
                connection.execute(
                    "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (stored.id, owner, previous, *blobs, size, time.time(), _digest(blobs), self._server()),
                )
                connection.executemany("INSERT INTO items VALUES (?, ?)", [(name, stored.id) for name in items])
                self._evict(connection)
            connection.execute("PRAGMA incremental_vacuum")
        except (sqlite3.Error, OSError) as error:
            log.warning("%s can't be kept in %s: %s", stored.id, self._path, error)
            return False
        return True

    def _server(self) -> str:
        if self._lock is None:
            self._lock = ServerLock(self._path.parent)
        return self._lock.name

    def _evict(self, connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM responses WHERE used < ?", (time.time() - self._seconds,))
        count, size = connection.execute("SELECT COUNT(*), TOTAL(bytes) FROM responses").fetchone()
        if count <= self._most and size <= self._most_bytes:
            return
        gone = []
        for identity, its_bytes in connection.execute("SELECT id, bytes FROM responses ORDER BY used, rowid"):
            if count <= self._most and size <= self._most_bytes:
                break
            gone.append((identity,))
            count = count - 1
            size = size - its_bytes
        connection.executemany("DELETE FROM responses WHERE id = ?", gone)

    def _get(self, owner: str, identity: str) -> StoredResponse | None:
        if not self.keeps:
            return None
        query = "SELECT response, input, output, digest, server FROM responses WHERE id = ? AND owner = ?"
        row = self._open().execute(query, (identity, owner)).fetchone()
        if row is None:
            return None
        *blobs, digest, server = row
        try:
            response, given, output = _read(blobs, digest)
        except ValueError:
            raise NotFoundError(f"the response {identity[:100]!r} {DAMAGED}", param="response_id") from None
        abandoned = response["status"] == "in_progress" and not is_alive(self._path.parent, server or "")
        response["output"] = output
        return StoredResponse(response, given, abandoned)

    def _chain(self, owner: str, identity: str) -> list[Item]:
        if not self.keeps:
            raise _not_found(identity)
        connection = self._open()
        query = "UPDATE responses SET used = ? WHERE id = ? RETURNING response, input, output, digest"
        with _transaction(connection):
            rows = connection.execute(CHAIN, (identity, owner, owner, MAX_CHAIN)).fetchall()
            if not rows:
                raise _not_found(identity)
            if rows[-1][1] is not None:
                raise _not_found(rows[-1][1], before=rows[-1][0])
            if sum(row[2] for row in rows) > MAX_CHAIN_BYTES:
                raise InvalidRequestError(
                    f"the conversation has more than {MAX_CHAIN_BYTES} bytes: begin a new one",
                    param="previous_response_id",
                )
            items: list[Item] = []
            now = time.time()
            for found, _, _ in reversed(rows):
                [(*blobs, digest)] = connection.execute(query, (now, found)).fetchall()
                try:
                    _, given, output = _read(blobs, digest)
                except ValueError:
                    raise _not_found(found, damaged=True) from None
                items += [*given, *output]
        return items

    def _items(self, owner: str, names: Collection[str]) -> dict[str, Item]:
        """Each response that has some of them is read once."""
        found: dict[str, Item] = {}
        if not self.keeps:
            return found
        connection = self._open()
        newest = """SELECT responses.id, bytes FROM items JOIN responses ON responses.id = items.response
                    WHERE items.id = ? AND owner = ? ORDER BY responses.rowid DESC LIMIT 1"""
        places = {name: connection.execute(newest, (name, owner)).fetchone() for name in names}
        if sum(size for _, size in {place for place in places.values() if place is not None}) > MAX_CHAIN_BYTES:
            message = f"the stored items that input refers to are in responses of more than {MAX_CHAIN_BYTES} bytes"
            raise InvalidRequestError(message, param="input")
        for response in {place[0] for place in places.values() if place is not None}:
            query = "SELECT response, input, output, digest FROM responses WHERE id = ?"
            *blobs, digest = connection.execute(query, (response,)).fetchone()
            try:
                _, given, output = _read(blobs, digest)
            except ValueError:
                log.warning("%s in %s is damaged", response, self._path)
                continue
            items = {item["id"]: item for item in [*given, *output]}
            found |= {name: items[name] for name, place in places.items() if place is not None and place[0] == response}
        return found

    def _delete(self, owner: str, identity: str) -> bool:
        if not self.keeps:
            return False
        query = "DELETE FROM responses WHERE id = ? AND owner = ?"
        return self._open().execute(query, (identity, owner)).rowcount > 0

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _digest(blobs: Sequence[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for blob in blobs:
        digest.update(len(blob).to_bytes(8, "little") + blob)
    return digest.digest()


def _read(blobs: Sequence[bytes], digest: bytes | None) -> list[Any]:
    """ValueError where they are not what was written. Earlier releases wrote no digest."""
    if digest is not None and digest != _digest(blobs):
        raise ValueError(DAMAGED)
    return [orjson.loads(blob) for blob in blobs]


def _not_found(identity: str, before: str | None = None, *, damaged: bool = False) -> InvalidRequestError:
    place = "" if before is None else f", which {before} continues,"
    reason = DAMAGED if damaged else "is not stored here"
    return InvalidRequestError(
        f"the response {identity[:100]!r}{place} {reason}: send its items as input instead",
        param="previous_response_id",
        code="previous_response_not_found",
    )


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
