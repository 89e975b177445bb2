"""Who of those that wait goes next: requests before rollouts, and every key its turn. No MLX; the scheduler asks.

Within a priority, rows that have begun go first, then the key with the fewest rows, then who came first. Rollouts (of
training and of /v1/rl/rollout) may take every place that nobody else wants; while requests wait, they keep no more than
their part of the places, and a request takes the place of the newest of them.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from mlx_parallm.engine.rows import Job, Row

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
