"""The prefix cache's second tier: files in a folder that is private to the user. No MLX.

One thread of its own keeps the index and writes, a few more read beside each other; nobody else touches the files, and
nothing here raises into the engine. A file is named by the hash of what it holds, written aside and renamed, and
carries a checksum: what can't be read, or is not what its name says, is a miss, is removed and is counted. Several
servers may share the folder. Files that have not been used for long go first when there are too many bytes; `touch` on
a file's time is how use is remembered.
"""

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import shutil
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from mlx_parallm.kv.folders import modified_at, subfolders, write_new_file
from mlx_parallm.kv.payload import VERSION, Damaged, Payload, encode, read_file
from mlx_parallm.metrics import DiskMetrics

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
MAX_QUEUED_BYTES = 128 << 20  # of payloads that wait to be written; what comes then is dropped
FIRST_READ_RATE = 1e9  # bytes a second, before anything has been read
RATE_SAMPLE_BYTES = 4 << 20  # less says little of how fast files are read
LOOK_AGAIN_SECONDS = 10.0  # for what another server has written
FULL_SCAN_SECONDS = 600.0
REST_AFTER_ERROR_SECONDS = 30.0
STALE_SECONDS = 3600.0  # a file that was never renamed belongs to a process that died
READERS = 4  # files that are read and checked at once
STUCK_SECONDS = 5.0  # at one piece of work: the disk does not answer
TOUCH_SECONDS = 60.0  # a file's time is renewed at most so often


@dataclass(slots=True)
class _File:
    size: int
    used: float


@dataclass(slots=True)
class _Work:
    """The disk thread's work: writes wait for all else."""

    calls: deque[Callable[[], None]] = field(default_factory=deque)
    writes: OrderedDict[bytes, Payload] = field(default_factory=OrderedDict)
    write_bytes: int = 0
    closing: bool = False


class DiskTier:
    """`identity` names the model and how its state is kept: another never sees these files."""

    def __init__(
        self,
        folder: Path,
        identity: str,
        max_bytes: int,
        ttl_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = folder / f"v{VERSION}"
        self._own = self._root / hashlib.sha256(identity.encode()).hexdigest()[:24]
        self._max_bytes = max_bytes
        self._ttl = ttl_seconds
        self._clock = clock
        self._files: OrderedDict[str, _File] = OrderedDict()  # by path below the root, the longest unused first
        self._by_folder: dict[str, set[str]] = {}
        self._busy_since: float | None = None
        self._folder_times: dict[str, float] = {}
        self._scanned = 0.0
        self._looked = 0.0
        self._rest_until = 0.0
        self._numbers = itertools.count()
        self._work = _Work()
        self._wake = threading.Condition()
        self._done = threading.Event()  # nothing is queued and nothing under way
        self._done.set()
        self._thread = threading.Thread(target=self._main, name="kv-disk", daemon=True)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kv-read")
        self.folder = folder
        self.problem: str | None = None  # why nothing can be kept
        self.metrics = DiskMetrics()
        self.read_rate = FIRST_READ_RATE  # bytes a second, as measured

    # From the engine thread.

    def start(self) -> None:
        """Reads the folder, so that what an earlier server left is known from the start."""
        try:
            # A folder that was there before keeps its mode: what we put into it is private all the same.
            self._root.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            self._root.mkdir(mode=0o700, exist_ok=True)
            if self._root.stat().st_mode & 0o077:
                self._root.chmod(0o700)
        except OSError as error:
            self.problem = f"can't use {self._root.parent}: {error.strerror or error}"
            log.warning("the SSD cache %s", self.problem)
        self._scan()
        self._prune()
        self._call(self._remove_older_formats)
        self._thread.start()

    def __contains__(self, hash_: bytes) -> bool:
        return self._name(hash_) in self._files or hash_ in self._work.writes

    def write(self, hash_: bytes, payload: Payload) -> None:
        """Takes what is to be written, unless too much waits already."""
        with self._wake:
            if hash_ in self._work.writes or self._work.closing:
                return
            if payload.nbytes > self.room:
                self.metrics.dropped += 1
                return
            self._work.writes[hash_] = payload
            self._work.write_bytes += payload.nbytes
            self._done.clear()
            self._wake.notify()

    @property
    def room(self) -> int:
        """Bytes that `write` would still take; what is larger than all that may wait has to wait alone."""
        return MAX_QUEUED_BYTES - self._work.write_bytes if self._work.writes else 1 << 62

    def read(self, hashes: Sequence[bytes], then: Callable[[list[Payload]], None]) -> None:
        """Reads up to the first that is not there, and hands over what there was, on the thread of this tier."""
        wanted = list(hashes)
        self._call(lambda: self._read(wanted, then))

    def flush(self) -> None:
        """Forgets all files of this model, soon: `settle` waits for it."""
        with self._wake:
            self._work.writes.clear()
            self._work.write_bytes = 0
        self._call(self._remove_own)

    @property
    def stuck(self) -> bool:
        """Whether the disk does not answer: nothing more should be asked of it."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > STUCK_SECONDS

    def settle(self, timeout: float) -> bool:
        """Waits until all that was asked for is done."""
        return self._done.wait(timeout)

    def close(self, timeout: float) -> None:
        """Writes what waits, as far as the time allows."""
        self.settle(timeout)
        with self._wake:
            self._work.closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _call(self, work: Callable[[], None]) -> None:
        with self._wake:
            self._work.calls.append(work)
            self._done.clear()
            self._wake.notify()

    # The thread of this tier.

    def _main(self) -> None:
        while True:
            with self._wake:
                if not (self._work.calls or self._work.writes):
                    self._done.set()
                    if not self._work.closing:
                        self._wake.wait(LOOK_AGAIN_SECONDS)
                if self._work.closing:
                    return
                call = self._work.calls.popleft() if self._work.calls else None
                write = next(iter(self._work.writes.items()), None) if call is None else None
            self._busy_since = time.monotonic() if call is not None or write is not None else None
            try:
                if call is not None:
                    call()
                elif write is not None:
                    self._put(*write)
                if self._clock() - self._looked > LOOK_AGAIN_SECONDS:
                    self._look_again()
            except Exception:  # whatever it was, the next file may be better
                self.metrics.errors += 1
                log.exception("the SSD cache stumbled")
            self._busy_since = None
            if write is not None:
                with self._wake:  # only now: a hash is known as long as it waits
                    if self._work.writes.get(write[0]) is write[1]:
                        del self._work.writes[write[0]]
                        self._work.write_bytes -= write[1].nbytes

    def _read(self, hashes: list[bytes], then: Callable[[list[Payload]], None]) -> None:
        found: list[Payload] = []
        begin = time.perf_counter()
        try:
            waiting = [self._work.writes.get(hash_) or self._readers.submit(self._load, hash_) for hash_ in hashes]
            for hash_, one in zip(hashes, waiting, strict=True):
                payload = one if isinstance(one, Payload) else self._take(hash_, one)
                if payload is None:
                    break
                found.append(payload)
            size = sum(payload.nbytes for payload in found)
            if size >= RATE_SAMPLE_BYTES:
                self.read_rate = (self.read_rate + size / (time.perf_counter() - begin)) / 2
        finally:
            then(found)  # somebody waits

    def _load(self, hash_: bytes) -> Payload:
        """Reads a file, on one of the readers' threads."""
        return read_file(self._root / self._name(hash_), hash_.hex())

    def _take(self, hash_: bytes, reading: "Future[Payload]") -> Payload | None:
        name = self._name(hash_)
        try:
            payload = reading.result()
        except FileNotFoundError:
            self._forget(name)
            self.metrics.misses += 1
            return None
        except OSError as error:
            self._complain("read", error)
            return None
        except Damaged as error:
            log.warning("the SSD cache had a damaged file, which is removed: %s: %s", name, error)
            self.metrics.damaged += 1
            self._remove(name)
            return None
        self.metrics.reads += 1
        self.metrics.read_bytes += payload.nbytes
        self._touch(name)
        return payload

    def _put(self, hash_: bytes, payload: Payload) -> None:
        name = self._name(hash_)
        if name in self._files:
            return
        if self._clock() < self._rest_until:
            self.metrics.dropped += 1
            return
        parts = encode(payload, hash_.hex())
        size = sum(map(len, parts))
        if size > self._max_bytes:
            self.metrics.dropped += 1
            return
        path = self._root / name
        aside = path.with_name(f".{path.stem}.{os.getpid()}.{next(self._numbers)}.tmp")
        try:
            path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            write_new_file(aside, parts)
            aside.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            self._complain("write", error)
            self._rest_until = self._clock() + REST_AFTER_ERROR_SECONDS
            return
        self._remember(name, size, self._clock())
        self.metrics.writes += 1
        self.metrics.written_bytes += size
        if self.metrics.bytes > self._max_bytes:
            self._prune()

    def _remove_own(self) -> None:
        prefix = f"{self._own.name}/"
        for name in [name for name in self._files if name.startswith(prefix)]:
            self._remove(name)

    def _remove_older_formats(self) -> None:
        """Files of an earlier version of this server can't be read any more, and would stay for ever."""
        for folder in subfolders(self._root.parent):
            if folder.name.startswith("v") and folder.name[1:].isdigit() and int(folder.name[1:]) < int(VERSION):
                shutil.rmtree(folder, ignore_errors=True)

    def _look_again(self) -> None:
        """Takes note of what other servers have written or removed, in folders that have changed."""
        now = self._looked = self._clock()
        # A slow moment is not for ever: what is not read is not measured either.
        self.read_rate += max(0.0, FIRST_READ_RATE - self.read_rate) / 10
        self.metrics.read_rate = round(self.read_rate)
        if now - self._scanned > FULL_SCAN_SECONDS:
            self._scan()
            self._prune()
            return
        for folder in subfolders(self._own):
            changed = modified_at(folder)
            if self._folder_times.get(folder.name) != changed:
                self._folder_times[folder.name] = changed
                self._scan_folder(self._own, folder)

    def _scan(self) -> None:
        """Brings the index in line with the files, of all models."""
        self._scanned = self._looked = self._clock()
        there = {f"{model.name}/{folder.name}" for model in subfolders(self._root) for folder in subfolders(model)}
        for name in [name for folder in set(self._by_folder) - there for name in self._by_folder[folder]]:
            self._forget(name)
        for name in there:
            folder = self._root / name
            if folder.parent == self._own:
                self._folder_times[folder.name] = modified_at(folder)
            self._scan_folder(folder.parent, folder)
        self._files = OrderedDict(sorted(self._files.items(), key=lambda item: item[1].used))

    def _scan_folder(self, model: Path, folder: Path) -> None:
        prefix = f"{model.name}/{folder.name}/"
        seen = set()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if not entry.name.endswith((SUFFIX, ".tmp")) or not entry.is_file(follow_symlinks=False):
                        continue
                    stat = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(SUFFIX):
                        seen.add(prefix + entry.name)
                        known = self._files.get(prefix + entry.name)
                        if known is None or known.size != stat.st_size:
                            self._remember(prefix + entry.name, stat.st_size, stat.st_mtime)
                    elif self._clock() - stat.st_mtime > STALE_SECONDS:
                        os.unlink(entry.path)
        for name in self._by_folder.get(prefix.rstrip("/"), set()) - seen:
            self._forget(name)

    def _prune(self) -> None:
        """Removes what is too old; then, while there is too much, what has not been used for longest."""
        oldest = self._clock() - self._ttl
        while self._files:
            name, file = next(iter(self._files.items()))
            if file.used >= oldest and self.metrics.bytes <= self._max_bytes:
                return
            self._remove(name)
            self.metrics.pruned += 1

    def _touch(self, name: str) -> None:
        file = self._files.get(name)
        now = self._clock()
        if file is None:  # another server's, not yet seen
            with contextlib.suppress(OSError):
                self._remember(name, (self._root / name).stat().st_size, now)
            return
        self._files.move_to_end(name)
        if now - file.used > TOUCH_SECONDS:
            file.used = now
            with contextlib.suppress(OSError):
                os.utime(self._root / name, (now, now))

    def _remember(self, name: str, size: int, used: float) -> None:
        self._forget(name)
        self._files[name] = _File(size, used)
        self._by_folder.setdefault(name.rpartition("/")[0], set()).add(name)
        self.metrics.files += 1
        self.metrics.bytes += size

    def _forget(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            self._by_folder[name.rpartition("/")[0]].discard(name)
            self.metrics.files -= 1
            self.metrics.bytes -= file.size

    def _remove(self, name: str) -> None:
        self._forget(name)
        with contextlib.suppress(OSError):
            (self._root / name).unlink()

    def _complain(self, verb: str, error: OSError) -> None:
        self.metrics.errors += 1
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or error
        log.warning("the SSD cache can't %s: %s", verb, reason)

    def _name(self, hash_: bytes) -> str:
        text = hash_.hex()
        return f"{self._own.name}/{text[:2]}/{text}{SUFFIX}"
