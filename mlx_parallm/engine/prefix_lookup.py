"""Prompts in the prefix cache: their blocks' hashes, what is known of their prefixes, and for how long it is held.

The scheduler looks prompts up as it plans them; intake, policies and preemption have their blocks hashed. Without a
prefix cache nothing is found. Engine thread only.
"""

import time
from collections import deque
from collections.abc import Callable

from mlx_parallm.devices.freed_memory import give_memory_back
from mlx_parallm.engine.compute.runner import Runner
from mlx_parallm.engine.rows import Job
from mlx_parallm.engine.scheduler import Scheduler, wants_prompt_logprobs
from mlx_parallm.kv.block_pool import Chain
from mlx_parallm.kv.disk import DiskTier
from mlx_parallm.kv.payload import Payload
from mlx_parallm.kv.prefix import Prefix

WRITE_SECONDS = 0.1  # between two writes, while rows run
FETCH_SECONDS = 5.0  # for which a prompt waits for a piece, before it is computed
MAX_FETCHES = 2  # at a time: what was read and not taken over is in memory twice
SAVE_SECONDS = 10.0  # for what still waits, before the end


class SsdTransfers:
    def __init__(
        self, prefix: Prefix, disk: DiskTier, scheduler: Scheduler, later: Callable[[Callable[[], None]], None]
    ) -> None:
        """`later` has the engine thread call a function between two steps; from any thread."""
        self._prefix = prefix
        self._disk = disk
        self._scheduler = scheduler
        self._later = later
        self._written = 0.0
        self._to_fetch: deque[Job] = deque()  # waiting prompts of which the SSD has something
        self._fetches = 0  # reads under way

    def fetch(self, job: Job) -> None:
        """Has what the SSD holds of a prompt read while the prompt waits."""
        if job.chain is None or wants_prompt_logprobs(job) or self._disk.stuck:
            return
        if self._prefix.on_disk(job.chain, job.tokens):
            self._to_fetch.append(job)
            job.fetching_until = time.monotonic() + FETCH_SECONDS
            self._start_fetches()

    def write_some(self) -> None:
        """Called at every turn; hands over a little now and then."""
        if time.monotonic() - self._written > WRITE_SECONDS:
            self._write()

    def write_while(self, idle: Callable[[], bool]) -> None:
        """Hands over what waits, as fast as the disk takes it."""
        while idle() and self._prefix.waiting_to_write:
            if not self._write():
                time.sleep(0.01)  # the disk is behind

    def save(self) -> None:
        """Writes what still waits to the SSD before the end, within reason."""
        deadline = time.monotonic() + SAVE_SECONDS
        self.write_while(lambda: time.monotonic() < deadline)
        self._disk.close(max(0.1, deadline - time.monotonic()))

    def _write(self) -> bool:
        self._written = time.monotonic()
        if not self._prefix.to_write:
            return False
        self._prefix.write_down()
        return True

    def _start_fetches(self) -> None:
        while self._to_fetch and self._fetches < MAX_FETCHES and not self._disk.stuck:
            job = self._to_fetch.popleft()
            job.fetching_until = 0.0
            chain = job.chain if job in self._scheduler.waiting else None
            wanted = self._prefix.on_disk(chain, job.tokens) if chain is not None else []
            if chain is not None and wanted:
                self._fetches += 1
                job.fetching_until = time.monotonic() + FETCH_SECONDS
                self._read_for(job, chain, wanted)

    def _read_for(self, job: Job, chain: Chain, wanted: list[bytes]) -> None:
        self._disk.read(wanted, lambda found: self._later(lambda: self._fetched(job, chain, wanted, found)))

    def _fetched(self, job: Job, chain: Chain, wanted: list[bytes], found: list[Payload]) -> None:
        """Takes over what was read; a job that no longer waits for it may find it all the same."""
        self._fetches -= 1
        more = self._prefix.adopt(chain, job.content, wanted, found)
        if more and len(found) == len(wanted) and job.chain is chain:  # it may go on with another adapter by now
            self._to_fetch.appendleft(job)
        else:
            job.fetching_until = 0.0
        self._start_fetches()


class PrefixLookup:
    def __init__(self, prefix: Prefix | None, runner: Runner) -> None:
        self._prefix = prefix
        self._runner = runner

    def hash_blocks(self, job: Job) -> None:
        """Names the blocks of a prompt, so that the prefix cache can find and keep them."""
        if self._prefix is None:
            return
        adapter = job.rows[0].adapter
        salt = job.rows[0].readers[0].request.cache_salt
        job.chain = self._prefix.chain(job.content, salt, "" if adapter is None else adapter.packed.digest)
        for row in job.rows:
            row.chain = Chain(job.chain.root, job.chain.size, list(job.chain.hashes))

    def look_up(self, job: Job) -> None:
        """Finds what is known of a prompt's prefix, and holds it."""
        # A prompt whose own log-probabilities are asked for must be computed in whole.
        if self._prefix is not None and job.chain is not None and job.match is None and not wants_prompt_logprobs(job):
            self._runner.share(job.chain)
            job.match = self._prefix.match(job.chain, job.content)
            job.computed = job.match.length

    def shorten(self, job: Job, length: int) -> None:
        """Uses only so much of what was found."""
        assert self._prefix is not None
        assert job.match is not None
        self._prefix.shorten(job.match, length)
        job.computed = job.match.length

    def release(self, job: Job) -> None:
        """Holds what was found no longer."""
        if self._prefix is not None and job.match is not None:
            self._prefix.release(job.match)
            job.match = None
            job.computed = 0

    def flush(self) -> int:
        """Forgets every cached block that is not in use, and says how many; features of images, too."""
        self._runner.contexts.forget_images()
        if self._prefix is None:
            return 0
        metrics = self._prefix.metrics
        before = metrics.blocks_cached + metrics.snapshots
        self._prefix.flush()
        give_memory_back()
        return before - metrics.blocks_cached - metrics.snapshots
