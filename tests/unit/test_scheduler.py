"""Who runs next, tested without a model: the scheduler imports no MLX."""

from mlx_parallm.engine.rows import Job, Reader, Row
from mlx_parallm.engine.scheduler import Limits, Scheduler
from mlx_parallm.types import Request, SamplingParams


def job(length: int, *, n: int = 1, priority: int = 0, stream: bool = False, arrival: float = 0.0) -> Job:
    sampling = SamplingParams(n=n)
    request = Request(f"{length}-{priority}", [1] * length, sampling, lambda delta: None, stream=stream)
    rows = [Row(request.prompt, sampling, priority, 0, 8, frozenset(), [Reader(request, i, arrival)]) for i in range(n)]
    return Job(rows, request.prompt, priority, arrival)


def scheduler(
    *,
    max_rows: int = 8,
    max_streams: int = 0,
    step_tokens: int = 100,
    gather: float = 0.0,
    padding: float | None = 0.0,
    fits: int = 1 << 30,
    now: float = 0.0,
) -> Scheduler:
    limits = Limits(max_rows, max_streams, step_tokens, gather, padding)
    return Scheduler(limits, lambda rows, longest: rows * longest <= fits, clock=lambda: now)


def run(planned: Scheduler) -> list[list[int]]:
    """Plans one step and pretends that it ran; returns the token counts of each pass."""
    passes = []
    for prefill in planned.plan().prefills:
        counts = [min(prefill.count, entry.remaining) for entry in prefill.jobs]
        for entry, count in zip(prefill.jobs, counts, strict=True):
            entry.computed += count
            if not entry.remaining:
                for row in entry.rows:
                    row.launched = 1
                planned.running += entry.rows
        passes.append(counts)
    return passes


def test_first_come_first_served_within_a_priority() -> None:
    planned = scheduler(max_rows=1)
    for length, priority in ((1, 0), (2, 5), (3, -1), (4, 0)):
        planned.add(job(length, priority=priority))
    order = []
    while planned.waiting:
        order += [count for counts in run(planned) for count in counts]
        planned.running.clear()
    assert order == [3, 1, 4, 2]


def test_a_long_prompt_is_cut_and_rows_decode_between_its_pieces() -> None:
    planned = scheduler(step_tokens=100)
    planned.add(job(10))
    run(planned)
    planned.add(job(250))
    assert run(planned) == [[100]]
    assert len(planned.plan().decode) == 1  # the plan above moved the prompt one piece further
    assert planned.partial is not None


def test_the_budget_is_never_exceeded() -> None:
    planned = scheduler(step_tokens=100, max_rows=100)
    for _ in range(40):
        planned.add(job(30))
    while planned.waiting or planned.partial:
        assert sum(count for counts in run(planned) for count in counts) <= 100


def test_a_slow_device_gets_a_smaller_budget() -> None:
    planned = scheduler(step_tokens=2048)
    planned.note_rate(200.0)
    planned.add(job(2000))
    assert run(planned) == [[int(200 * planned.limits.chunk_seconds)]]


def test_similar_prompts_share_a_pass_and_others_do_not() -> None:
    planned = scheduler(step_tokens=1000, padding=0.1)
    for length in (100, 10, 98, 11, 97):
        planned.add(job(length))
    assert run(planned) == [[100, 98, 97], [11, 10]]


def test_prompts_are_computed_alone_where_the_cache_wants_it() -> None:
    planned = scheduler(step_tokens=1000, padding=None)
    for _ in range(3):
        planned.add(job(10))
    assert run(planned) == [[10], [10], [10]]


def test_rows_never_exceed_the_limit_and_n_counts() -> None:
    planned = scheduler(max_rows=4)
    planned.add(job(5, n=3))
    planned.add(job(5, n=2))
    run(planned)
    assert len(planned.running) == 3
    planned.running.clear()
    run(planned)
    assert len(planned.running) == 2


def test_a_prompt_that_does_not_fit_waits_and_is_not_overtaken() -> None:
    planned = scheduler(fits=120)
    planned.add(job(20))
    planned.add(job(90))
    planned.add(job(1))
    assert run(planned) == [[20]]
    assert run(planned) == []
    planned.running.clear()
    assert run(planned) == [[90]]


def test_streams_beyond_their_limit_wait_while_others_pass_none() -> None:
    planned = scheduler(max_streams=1)
    planned.add(job(5, stream=True))
    planned.add(job(6, stream=True))
    assert run(planned) == [[5]]
    assert run(planned) == []
    planned.running.clear()
    assert run(planned) == [[6]]


def test_a_gather_window_delays_admission() -> None:
    assert run(_with_job(scheduler(gather=0.1, now=0.05))) == []
    assert run(_with_job(scheduler(gather=0.1, now=0.11))) == [[5]]


def test_rows_put_back_come_before_new_ones_in_their_old_order() -> None:
    planned = scheduler(max_rows=1)
    planned.add(job(1))
    for order in (7, 3):
        again = job(order)
        again.rows[0].order = order
        planned.put_back(again, again.rows[0])
    assert [entry.remaining for entry in planned.waiting] == [3, 7, 1]


def test_removing_the_last_row_of_a_job_removes_the_job() -> None:
    planned = scheduler(step_tokens=10)
    waiting, long = job(5, n=2), job(50)
    planned.add(long)
    run(planned)
    planned.add(waiting)
    assert planned.partial is long
    planned.remove(long.rows[0])
    planned.remove(waiting.rows[0])
    assert planned.partial is None
    assert planned.waiting == [waiting]
    planned.remove(waiting.rows[0])
    assert planned.idle


def test_the_newest_of_the_lowest_priority_gives_way() -> None:
    planned = scheduler()
    for priority, order in ((0, 1), (1, 2), (1, 3), (0, 4)):
        row = job(1, priority=priority).rows[0]
        row.order = order
        planned.running.append(row)
    assert planned.victim().order == 3


def _with_job(planned: Scheduler) -> Scheduler:
    planned.add(job(5))
    return planned


def test_where_shapes_are_round_pieces_are_too() -> None:
    planned = scheduler(step_tokens=1000, padding=0.5)
    planned.limits.round_to = 128
    planned.add(job(5000))
    counts = []
    while planned.partial or planned.waiting:
        counts += [count for counts in run(planned) for count in counts]
    assert counts == [896] * 5 + [520]
    assert sum(counts) == 5000


def test_where_shapes_are_round_small_rests_share_a_pass() -> None:
    """Each costs as much as the whole step, so that none is worth a pass of its own."""
    planned = scheduler(step_tokens=1000, padding=0.5)
    for length in (120, 5, 30):
        planned.add(job(length))
    assert run(planned) == [[120], [30], [5]]
    planned = scheduler(step_tokens=1000, padding=0.5)
    planned.limits.round_to = 128
    for length in (120, 5, 30):
        planned.add(job(length))
    assert run(planned) == [[120, 30, 5]]


def test_rather_than_start_a_pass_cached_tokens_are_computed_again() -> None:
    def plan(pass_tokens: int, step_tokens: int = 1000) -> list[tuple[int, list[int]]]:
        planned = scheduler(step_tokens=step_tokens, padding=1.0)
        planned.limits.pass_tokens = pass_tokens
        planned.shorten = lambda job, length: setattr(job, "computed", length)
        planned.look_up = lambda job: setattr(job, "computed", known[len(job.tokens)])
        known = {100: 0, 150: 60, 400: 300}
        for length in known:
            planned.add(job(length))
        prefills = planned.plan().prefills
        return [(prefill.jobs[0].computed, sorted(len(job.tokens) for job in prefill.jobs)) for prefill in prefills]

    assert plan(0) == [(0, [100]), (60, [150]), (300, [400])]
    assert plan(60) == [(0, [100, 150]), (300, [400])]
    assert plan(60, step_tokens=300) == [(0, [100]), (60, [150]), (300, [400])]  # the step has no tokens left for it
    assert plan(300) == [(0, [100, 150, 400])]
