"""The replicas of a running server, as processes of this machine."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import httpx


def processes_below(server: int) -> dict[int, str]:
    """A server's process and those started by it, with their command lines. Linux."""
    parents, names = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, IndexError, ValueError):
                continue
    return {pid: name for pid, name in names.items() if _is_below(pid, server, parents)}


def replica_pids(server: int) -> list[int]:
    """Processes of Ray's with an engine in them, below a server's own."""
    return [pid for pid, name in processes_below(server).items() if "ServeReplica" in name]


def resident(pids: Iterable[int]) -> int:
    """Bytes of memory that processes hold; what they share is counted once for each."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # it has ended
            continue
    return total


def _is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid]
    return pid == ancestor


def wait_ready(url: str, count: int, patience: float = 180) -> float:
    """Waits for so many replicas; the seconds that it took."""
    begun = time.monotonic()
    while httpx.get(f"{url}/health", timeout=30).json()["replicas"]["ready"] < count:
        assert time.monotonic() - begun < patience, "the replica has not returned"
        time.sleep(0.1)
    return time.monotonic() - begun
