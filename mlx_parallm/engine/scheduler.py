"""What the next step computes, under a token budget, and who goes next. No MLX; the engine thread owns it.

`plan()` says what the next step computes: pieces of prompts under the budget, and one token for every running row.
A long prompt is computed alone, piece by piece, with a decode step after each; short prompts of similar length are
computed together. The images of a prompt are encoded before it, one at a time. A prompt that does not fit in memory
beside the running rows waits at the head of the queue, so that rows behind it can't starve it.
"""

import bisect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mlx_parallm.engine.rows import Job, Plan, Prefill, Row

Admissible = Callable[[Job, Sequence[Row], Sequence[Job]], bool]  # (job, rows that run, jobs admitted before it)


def next_job(ready: Sequence[Job], beside: Sequence[Row], rollout_rows: int, started: Sequence[Job] = ()) -> Job | None:
    """`beside`: rows that run, or are about to. `rollout_rows`: that rollouts may hold while requests wait. `started`:
    jobs of this step, whose first tokens the prompts of more rollouts would hold up."""
    if any(not job.rollout for job in (*ready, *started)):
        held = sum(row.rollout for row in beside)
        ready = [job for job in ready if not job.rollout or not held or held + len(job.rows) <= rollout_rows]
    if len(ready) < 2:
        return ready[0] if ready else None
    return min(ready, key=_order(beside))


def displaced(
    ready: Sequence[Job], running: Sequence[Row], rollout_rows: int, budget: int, admissible: Admissible
) -> list[Row]:
    """Rows of rollouts whose places go to requests that wait, the newest first; `budget`: prompt tokens of a step."""
    rollouts = sorted((row for row in running if row.rollout), key=lambda row: -row.order)
    spare = rollouts[: max(len(rollouts) - rollout_rows, 0)]
    leaving: list[Row] = []
    admitted: list[Job] = []
    for job in sorted((job for job in ready if not job.rollout), key=_order(running)) if spare else ():
        wanted = next(
            (
                count
                for count in range(len(leaving), len(spare) + 1)
                if admissible(job, [row for row in running if row not in spare[:count]], admitted)
            ),
            None,
        )
        if wanted is None:
            break
        leaving = spare[:wanted]
        admitted.append(job)
        budget -= job.remaining
        if budget <= 0:
            break
    return leaving


def _order(beside: Sequence[Row]) -> Callable[[Job], tuple[int, bool, int, int]]:
    rows = Counter(row.owner for row in beside)
    return lambda job: (job.priority, job.number >= 0, rows[job.owner], job.number)


BEGUN = 1 << 62  # requeued rows are numbered below every new job
FETCH_SECONDS = 0.1  # between two looks at the clock, while nothing but the SSD is at work
MIN_PIECE = 128  # no smaller piece of a prompt is started at the end of a budget


@dataclass(slots=True)
class Limits:
    max_rows: int
    max_streams: int  # 0: no limit
    step_tokens: int  # most prompt tokens between two decode steps
    gather_seconds: float  # 0: admit at every step
    max_padding: float | None  # share that padding may add to prompts computed together; None: one by one
    max_adapters: int = 1  # in one batch
    max_prompts: int | None = None  # that are computed in one pass; None: any number
    rollout_rows: int = 1  # that rollouts may hold while requests wait
    chunk_seconds: float = 2.5  # prompts aim to take no longer between two decode steps; only slow devices notice
    round_to: int = 1  # prompts are computed in pieces of whole multiples of so many tokens
    pass_tokens: int = 0  # rather than start a pass of its own for a prompt, compute so many cached tokens again
    chunk: int = 0  # tokens: pieces of prompts end at whole multiples of it alone; 0: anywhere
    worth_waiting: int = 64  # tokens that a prompt shares with one being computed, to wait a turn and find them cached


@dataclass(slots=True)
class Scheduler:
    limits: Limits
    fits: Callable[[int, int], bool]  # (rows, longest) within the memory limit?
    clock: Callable[[], float] = time.monotonic
    look_up: Callable[[Job], None] = lambda job: None  # finds what is known of a prompt's prefix, and holds it
    release: Callable[[Job], None] = lambda job: None  # holds it no longer
    shorten: Callable[[Job, int], None] = lambda job, length: None  # uses only so much of what is known
    waiting: list[Job] = field(default_factory=list)  # in order of (priority, number)
    partial: Job | None = None  # a long prompt under way
    running: list[Row] = field(default_factory=list)
    admitting: bool = True  # False: who has not begun waits
    prompt_rate: float = 0.0  # measured prompt tokens per second
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(1 << 62)))

    def add(self, job: Job) -> None:
        job.number = next(self._numbers)
        bisect.insort(self.waiting, job, key=lambda other: other.key)

    def requeue(self, job: Job, row: Row) -> None:
        """A row that has lost its place goes before all that have not begun, in the order in which such rows began."""
        job.number = row.order - BEGUN
        bisect.insort(self.waiting, job, key=lambda other: other.key)

    def remove(self, row: Row) -> Job | None:
        """Forgets a row wherever it is. Returns its job if the job now has no row left."""
        if row in self.running:
            self.running.remove(row)
            return None
        for job in self.jobs():
            if row in job.rows:
                job.rows.remove(row)
                if job.rows:
                    return None
                if job is self.partial:
                    self.partial = None
                else:
                    self.waiting.remove(job)
                return job
        return None

    def jobs(self) -> list[Job]:
        return [*self.waiting, *([self.partial] if self.partial else [])]

    @property
    def queued(self) -> int:
        return len(self.waiting)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.partial or self.running)

    @property
    def only_waiting(self) -> bool:
        """Whether all there is to do is to wait, for the gather window or for the SSD."""
        return not (self.partial or self.running) and not self._may_gather()

    def note_rate(self, rate: float) -> None:
        self.prompt_rate = (self.prompt_rate + rate) / 2 if self.prompt_rate else rate

    def plan(self) -> Plan:
        prefills = self._plan_prefills()
        return Plan(prefills, [row for row in self.running if row.wants_more])

    def seconds_until_admission(self) -> float:
        """Returns the seconds that an idle engine may sleep: the rest of the gather window, or while the SSD reads."""
        arrivals = [job.arrival for job in self.waiting if not self._fetching(job)]
        return max(0.0, min(arrivals) + self.limits.gather_seconds - self.clock()) if arrivals else FETCH_SECONDS

    def victim(self) -> Row:
        """Who gives up its place when memory runs out: the lowest priority, and the newest within it."""
        return max(self.running, key=lambda row: (row.priority, row.order))

    def _plan_prefills(self) -> list[Prefill]:
        budget = self._budget()
        pieces: list[Prefill] = []
        whole: list[Job] = []
        if self.partial:
            pieces += self._pieces(self.partial, budget)
            budget -= sum(piece.count for piece in pieces)
        gathered = self.admitting and self._may_gather()  # once the first has waited long enough, all go
        while gathered and budget > 0 and not self.partial:
            started = [*dict.fromkeys(piece.jobs[0] for piece in pieces), *whole]
            job = self._next_job(started)
            if job is None or not self._admissible(job, self.running, started):
                break
            self.look_up(job)
            too_long = started and job.remaining > budget and (budget < MIN_PIECE or self.running)
            shares = not too_long and not job.waited and any(self._worth_waiting(job, other) for other in started)
            if too_long or shares:
                job.waited |= shares
                self.release(job)
                break
            self.waiting.remove(job)
            if job.remaining <= min(budget, self.limits.chunk or budget) and job.next_image is None:
                whole.append(job)
                budget -= job.remaining
            else:
                own = self._pieces(job, budget)
                pieces += own
                budget = 0 if self.partial else budget - sum(piece.count for piece in own)
        return pieces + self._group(whole, budget)

    def _budget(self) -> int:
        if not self.prompt_rate:
            return self.limits.step_tokens
        return min(self.limits.step_tokens, max(MIN_PIECE, int(self.prompt_rate * self.limits.chunk_seconds)))

    def _pieces(self, job: Job, budget: int) -> list[Prefill]:
        """Pieces of a prompt: one, or as many chunks as the budget has room for, and always one."""
        image = job.next_image
        if image is not None:
            self.partial = job
            return [Prefill([job], 0, image)]
        if not self.limits.chunk:
            count = min(budget, job.remaining)
            if count < job.remaining and count > self.limits.round_to:
                count -= count % self.limits.round_to
            counts = [count]
        else:
            counts = [min(self.limits.chunk, job.remaining)]
            while following := min(self.limits.chunk, job.remaining - sum(counts)):
                if sum(counts) + following > budget or job.has_images:
                    break
                counts.append(following)
        self.partial = job if sum(counts) < job.remaining else None
        return [Prefill([job], count) for count in counts]

    def _fetching(self, job: Job) -> bool:
        return job.fetching_until > 0 and job.fetching_until > self.clock()

    def _may_gather(self) -> bool:
        if all(self._fetching(job) for job in self.waiting):
            return False
        if not self.limits.gather_seconds or len(self.waiting) >= self.limits.max_rows:
            return True
        return self.seconds_until_admission() <= 0

    def _next_job(self, started: Sequence[Job]) -> Job | None:
        beside = [*self.running, *(row for job in started for row in job.rows)]
        if len(beside) >= self.limits.max_rows:
            return None
        ready = [job for job in self.waiting if not self._fetching(job)]
        return next_job(ready, beside, self.limits.rollout_rows, started)

    def displaced(self) -> list[Row]:
        """Rows of rollouts whose places go to requests that wait."""
        if not self.waiting or not self.admitting or self.partial or not self._may_gather():
            return []
        ready = [job for job in self.waiting if not self._fetching(job)]
        return displaced(ready, self.running, self.limits.rollout_rows, self._budget(), self._admissible)

    def _admissible(self, job: Job, running: Sequence[Row], admitted: Sequence[Job]) -> bool:
        beside = [*running, *(row for other in admitted for row in other.rows)]
        rows = len(beside) + len(job.rows)
        if rows > self.limits.max_rows:
            return False
        streams = sum(row.streams for row in (*beside, *job.rows))
        if self.limits.max_streams and beside and job.rows[0].streams and streams > self.limits.max_streams:
            return False
        adapters = {row.adapter for row in (*beside, *job.rows) if row.adapter is not None}
        if len(adapters) > self.limits.max_adapters:
            return False
        lengths = [row.length for row in running] + [other.known_length for other in (*admitted, job)]
        return self.fits(rows, max(lengths) + 1) or not beside

    def _worth_waiting(self, job: Job, other: Job) -> bool:
        """Returns whether much of `job` is being computed for `other`, and will be in the cache at the next turn."""
        if job.match is None or job.chain is None or other.chain is None:
            return False
        return job.chain.common(other.chain) * job.chain.size - job.computed >= self.limits.worth_waiting

    def _group(self, jobs: list[Job], budget: int) -> list[Prefill]:
        """Prompts of similar length together, as long as the padding stays small.

        `budget`: tokens that the step has left, for prefixes that are computed again to save a pass.
        """
        groups: list[Prefill] = []
        real = 0
        for job in sorted(jobs, key=lambda job: (job.computed, -job.remaining)):
            group = groups[-1] if groups else None
            again = job.computed - group.jobs[0].computed if group else 0
            size = self._rounded(job.remaining + again)
            if group and again <= min(self.limits.pass_tokens, budget) and self._together(group, job, real, size):
                if again:
                    self.shorten(job, group.jobs[0].computed)
                    budget -= again
                group.jobs.append(job)
                group.count = max(group.count, job.remaining)
                real += size
            else:
                groups.append(Prefill([job], job.remaining))
                real = self._rounded(job.remaining)
        return groups

    def _together(self, group: Prefill, job: Job, real: int, size: int) -> bool:
        """Returns whether a prompt that costs `size` belongs to a group whose prompts cost `real`, without padding."""
        if self.limits.max_padding is None or any(_runs_alone(other) for other in (job, group.jobs[0])):
            return False
        if self.limits.max_prompts is not None and len(group.jobs) >= self.limits.max_prompts:
            return False
        padded = (len(group.jobs) + 1) * max(self._rounded(group.count), size)
        return padded <= (real + size) * (1 + self.limits.max_padding)

    def _rounded(self, count: int) -> int:
        """Returns the cost of computing so many tokens."""
        return -(-count // self.limits.round_to) * self.limits.round_to


def _runs_alone(job: Job) -> bool:
    return wants_prompt_logprobs(job) or job.rows[0].images is not None


def wants_prompt_logprobs(job: Job) -> bool:
    """Only the first time: a requeued row has had its prompt's log-probabilities."""
    row = job.rows[0]
    return row.sampling.prompt_logprobs is not None and not row.tokens
