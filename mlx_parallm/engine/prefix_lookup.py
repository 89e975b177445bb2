"""Prompts in the prefix cache: their blocks' hashes, what is known of their beginnings, and for how long it is held.

The scheduler looks prompts up as it plans them; intake, policies and preemption have their blocks hashed. Without a
prefix cache nothing is found. Engine thread only.
"""

from mlx_parallm.devices.device import give_memory_back
from mlx_parallm.engine.rows import Job
from mlx_parallm.engine.runner import Runner
from mlx_parallm.engine.scheduler import wants_prompt_logprobs
from mlx_parallm.kv.block_pool import Chain
from mlx_parallm.kv.prefix import Prefix


class PrefixLookup:
    def __init__(self, prefix: Prefix | None, runner: Runner) -> None:
        self._prefix = prefix
        self._runner = runner

    def hash_blocks(self, job: Job) -> None:
        """Names the blocks of a prompt, so that the prefix cache can find and keep them."""
        if self._prefix is None:
            return
        adapter, salt = job.rows[0].adapter, job.rows[0].readers[0].request.cache_salt
        job.chain = self._prefix.chain(job.content, salt, "" if adapter is None else adapter.packed.digest)
        for row in job.rows:
            row.chain = Chain(job.chain.root, job.chain.size, list(job.chain.hashes))

    def look_up(self, job: Job) -> None:
        """Finds what is known of a prompt's beginning, and holds it."""
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
            job.match, job.computed = None, 0

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
