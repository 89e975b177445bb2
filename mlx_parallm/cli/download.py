"""Large files over HTTP, for `parallm pull`: goes on where an earlier attempt broke off, and checks their SHA-256.

huggingface_hub goes on within a process, and begins each file anew in the next one. What has arrived of a file stands
beside its place as `NAME.partial`, and takes the place once its checksum is right.
"""

import fcntl
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from mlx_parallm.errors import ConflictError, ParallmError, UnavailableError

AT_ONCE = 4  # files
ATTEMPTS = 5  # in a row that bring nothing
FIRST_PAUSE = 0.2  # seconds; doubled after each of them
READ_TIMEOUT = 30.0
PIECE = 1 << 20
LINE_SECONDS = 10.0  # between two lines about a file, where there is no terminal

Report = Callable[[int], None]  # how many bytes of a file there are


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str
    url: str
    size: int
    sha256: str
    path: Path  # where it is to stand

    @property
    def partial(self) -> Path:
        return self.path.with_name(f"{self.path.name}.partial")


def download(files: Sequence[RemoteFile], headers: Mapping[str, str]) -> None:
    """Fetches what is not there yet, and raises the first error: run it again, and it goes on from there."""
    _check_space(files)
    stop = threading.Event()
    timeout = httpx.Timeout(READ_TIMEOUT)
    asked = {**headers, "Accept-Encoding": "identity"}
    with (
        httpx.Client(headers=asked, timeout=timeout, follow_redirects=True) as client,
        _shown(files) as reports,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        try:
            jobs = [pool.submit(_fetch, file, client, reports[file.name], stop) for file in files]
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
        for job in jobs:
            job.result()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Partial:
    """What has arrived of a file, with its checksum so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0
        file.seek(0)
        while piece := file.read(PIECE):
            self._digest.update(piece)
            self.size += len(piece)

    def add(self, piece: bytes) -> None:
        self._file.write(piece)
        self._digest.update(piece)
        self.size += len(piece)

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self.size = 0

    def digest(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()


def _fetch(file: RemoteFile, client: httpx.Client, report: Report, stop: threading.Event) -> None:
    if file.path.is_file():
        if sha256_of(file.path) == file.sha256:
            report(file.size)
            return
        file.path.resolve().unlink()
        file.path.unlink(missing_ok=True)
    file.path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file) as opened:
        partial = _Partial(opened)
        if partial.size > file.size:
            partial.restart()
        _receive_all(file, client, partial, report, stop)
        if stop.is_set():
            return
        if partial.size != file.size or partial.digest() != file.sha256:
            file.partial.unlink()
            raise ParallmError(
                f"{file.name} was damaged on the way: its SHA-256 is not the hub's; it is removed, run the command "
                "again to fetch it anew"
            )
        file.partial.replace(file.path)


@contextmanager
def _locked(file: RemoteFile) -> Iterator[BinaryIO]:
    with file.partial.open("a+b") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConflictError(f"another process downloads {file.name} right now: let it end") from error
        yield opened


def _receive_all(
    file: RemoteFile, client: httpx.Client, partial: _Partial, report: Report, stop: threading.Event
) -> None:
    """Asks again for the rest whenever the connection is cut, until several attempts in a row have brought nothing."""
    failed = 0
    while partial.size < file.size and not stop.is_set():
        report(partial.size)
        before = partial.size
        try:
            _receive(file, client, partial, report, stop)
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            if isinstance(error, httpx.HTTPStatusError) and not _may_pass(error.response.status_code):
                raise ParallmError(f"{file.name} can't be downloaded: {error}") from error
            failed = 1 if partial.size > before else failed + 1
            if failed >= ATTEMPTS:
                raise UnavailableError(
                    f"{file.name} can't be downloaded: {error or type(error).__name__}; {decimal(partial.size)} of "
                    f"{decimal(file.size)} are here, run the command again to go on from there"
                ) from error
            stop.wait(FIRST_PAUSE * 2**failed)
    report(partial.size)


def _may_pass(status: int) -> bool:
    return status in (408, 416, 429) or status >= 500


def _receive(file: RemoteFile, client: httpx.Client, partial: _Partial, report: Report, stop: threading.Event) -> None:
    wanted = {"Range": f"bytes={partial.size}-"} if partial.size else {}
    with client.stream("GET", file.url, headers=wanted) as completion:
        if partial.size and completion.status_code in (200, 416):  # it does not know ranges, or not this one
            partial.restart()
        completion.raise_for_status()
        for piece in completion.iter_raw():  # as it comes: what a buffer holds is lost with the connection
            if stop.is_set() or partial.size > file.size:
                return
            partial.add(piece)
            report(partial.size)


def _check_space(files: Sequence[RemoteFile]) -> None:
    missing = [file for file in files if not file.path.is_file()]
    if not missing:
        return
    here = sum(file.partial.stat().st_size for file in missing if file.partial.is_file())
    needed = sum(file.size for file in missing) - here
    folder = next(parent for parent in missing[0].path.parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ParallmError(
            f"{decimal(needed)} are to be downloaded, and the disk of {folder} has {decimal(free)} free: name a folder "
            "on another one with --to"
        )


@contextmanager
def _shown(files: Sequence[RemoteFile]) -> Iterator[Mapping[str, Report]]:
    """A bar for each file on a terminal, lines otherwise; both on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield {file.name: _Lines(file) for file in files}
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        tasks = {file.name: bars.add_task(file.name, total=file.size) for file in files}
        yield {name: _bar(bars, task) for name, task in tasks.items()}


def _bar(bars: Progress, task: TaskID) -> Report:
    return lambda size: bars.update(task, completed=size)


class _Lines:
    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._told = -1
        self._when = 0.0

    def __call__(self, size: int) -> None:
        done = size >= self._file.size
        now = time.monotonic()
        if size != self._told and (done or now - self._when >= LINE_SECONDS):
            self._told = size
            self._when = now
            share = size / max(self._file.size, 1)
            sys.stderr.write(f"{self._file.name}: {share:.0%} of {decimal(self._file.size)}\n")
            sys.stderr.flush()
