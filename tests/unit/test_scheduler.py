"""Who runs next, tested without a model: the scheduler imports no MLX."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.engine.rows import Job, Reader, Row
from mlx_parallm.engine.scheduler import FETCH_SECONDS, MIN_PIECE, Limits, Scheduler, wants_prompt_logprobs
from mlx_parallm.kv.block_pool import Chain, Match
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.types import ImageInput, PromptImages, Request


def job(length: int, *, n: int = 1, priority: int = 0, stream: bool = False, arrival: float = 0.0) -> Job:
    sampling = SamplingParams(n=n)
    request = Request(f"{length}-{priority}", [1] * length, sampling, stream=stream)
    readers = [Reader(request, index, arrival, lambda delta: None) for index in range(n)]
    rows = [Row(request.prompt, sampling, priority, 0, 8, frozenset(), [reader]) for reader in readers]
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


def test_images_are_encoded_one_at_a_time_before_their_prompt_is_computed_alone() -> None:
    planned = scheduler(padding=10.0)
    image, pictures = ImageInput(b"", {}, [7] * 4), job(20)
    pictures.rows[0].images = PromptImages([image] * 3, [np.arange(start, start + 4) for start in (2, 8, 14)], [])
    planned.look_up = lambda entry: setattr(entry, "computed", 6 if entry is pictures else 0)  # the first is cached
    planned.add(pictures)
    for number in (1, 2):
        (work,) = planned.plan().prefills
        assert (work.jobs, work.count, work.image) == ([pictures], 0, number)
        assert planned.partial is pictures
        pictures.features[number] = object()
    planned.add(job(14))
    assert run(planned) == [[14], [14]]  # the text is not computed with it
    assert planned.partial is None


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


def test_requeued_rows_come_before_new_ones_in_their_old_order() -> None:
    planned = scheduler(max_rows=1)
    planned.add(job(1))
    for order in (7, 3):
        again = job(order)
        again.rows[0].order = order
        planned.requeue(again, again.rows[0])
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


def test_a_row_that_starts_over_waits_until_all_that_it_had_fits() -> None:
    planned = scheduler(fits=2 * 50, padding=None)
    planned.add(job(30))
    run(planned)
    again = job(10)
    again.rows[0].tokens = [1] * 60
    again.rows[0].start_over()
    planned.add(again)
    assert run(planned) == [], "ten tokens would fit, seventy do not"
    again.rows[0].repeated = 0
    assert run(planned) == [[10]]


def test_chunks_end_at_whole_multiples_whatever_else_there_is_to_do() -> None:
    """As many as the budget has room for, and always one; prompts are computed by themselves."""
    planned = scheduler(step_tokens=100, padding=None, max_rows=4)
    planned.limits.chunk = 32
    for length in (20, 70, 150, 10):
        planned.add(job(length))
    assert [[piece.count, len(piece.jobs)] for piece in planned.plan().prefills] == [[32, 1], [32, 1], [6, 1], [20, 1]]


def test_a_prompt_in_chunks_is_done_over_several_steps() -> None:
    planned = scheduler(step_tokens=100, padding=None)
    planned.limits.chunk = 32
    planned.add(job(150))
    planned.add(job(40))
    counts = []
    while planned.partial or planned.waiting:
        counts.append([count for counts in run(planned) for count in counts])
    assert counts == [[32, 32, 32], [32, 22, 32, 8]]
    small = scheduler(step_tokens=10, padding=None)
    small.limits.chunk = 32
    small.add(job(70))
    counts = []
    while small.partial or small.waiting:
        counts.append([count for counts in run(small) for count in counts])
    assert counts == [[32], [32], [6]], "a piece is never shorter than a chunk, but at a prompt's end"


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


def test_the_last_piece_of_a_prompt_leaves_the_rest_of_the_budget_to_others() -> None:
    planned = scheduler(step_tokens=100, padding=None)
    planned.add(job(170))
    assert run(planned) == [[100]]
    for length in (20, 9, 2):
        planned.add(job(length))
    assert run(planned) == [[70], [20], [9]], "what is left of the budget is 1, and the last needs 2"
    assert run(planned) == [[2]]


def test_a_prompt_of_exactly_what_is_left_goes_with_the_others() -> None:
    planned = scheduler(step_tokens=100, padding=None)
    planned.add(job(60))
    planned.add(job(40))
    planned.add(job(1))
    assert run(planned) == [[60], [40]]
    assert run(planned) == [[1]]


def test_a_prompt_of_one_token_fits_into_the_last_of_the_budget() -> None:
    planned = scheduler(step_tokens=100, padding=None)
    planned.add(job(99))
    planned.add(job(1))
    assert run(planned) == [[99], [1]]


def test_a_prompt_is_cut_at_the_end_of_a_budget_only_where_a_long_piece_is_left_and_nothing_runs() -> None:
    for left, started in ((MIN_PIECE, True), (MIN_PIECE - 1, False)):
        planned = scheduler(step_tokens=500, padding=None)
        planned.add(job(500 - left))
        planned.add(job(300))
        assert run(planned) == ([[left], [500 - left]] if started else [[500 - left]])
    planned = scheduler(step_tokens=500, padding=None)
    planned.running.append(job(1).rows[0])
    planned.add(job(300))
    planned.add(job(300))
    assert run(planned) == [[300]]


def test_a_prompt_that_has_all_its_pieces_is_no_longer_under_way() -> None:
    planned = scheduler(step_tokens=100)
    planned.add(job(200))
    run(planned)
    assert planned.partial is not None
    run(planned)
    assert planned.partial is None
    assert (planned.idle, len(planned.running)) == (False, 1)


def test_the_measured_rate_is_a_running_mean_and_pieces_have_a_least_size() -> None:
    planned = scheduler(step_tokens=2048)
    planned.note_rate(200.0)
    planned.note_rate(400.0)
    assert planned.prompt_rate == 300.0
    planned.note_rate(0.001)
    planned.note_rate(0.001)
    planned.note_rate(0.001)
    planned.note_rate(0.001)
    planned.add(job(2000))
    assert run(planned) == [[MIN_PIECE]]
    fast = scheduler(step_tokens=2048)
    fast.note_rate(1e9)
    fast.add(job(5000))
    assert run(fast) == [[2048]]


def test_nobody_new_begins_while_admission_is_closed_and_a_prompt_under_way_goes_on() -> None:
    planned = scheduler(step_tokens=10)
    planned.add(job(25))
    run(planned)
    planned.add(job(3))
    planned.admitting = False
    assert run(planned) == [[10]]
    assert run(planned) == [[5]]
    assert run(planned) == []
    planned.admitting = True
    assert run(planned) == [[3]]


def test_a_full_batch_ends_the_gather_window() -> None:
    planned = scheduler(gather=0.1, now=0.05, max_rows=2)
    planned.add(job(5))
    assert planned.only_waiting
    assert planned.seconds_until_admission() == pytest.approx(0.05)
    planned.add(job(5))
    assert not planned.only_waiting
    assert run(planned) == [[5, 5]]


def test_a_prompt_that_the_ssd_is_read_for_waits_and_others_go_first() -> None:
    planned = scheduler(now=7.0)
    fetched, other = job(5), job(6)
    fetched.fetching_until = 7.5
    planned.add(fetched)
    assert planned.only_waiting
    assert planned.seconds_until_admission() == FETCH_SECONDS
    planned.add(other)
    assert not planned.only_waiting
    assert run(planned) == [[6]]
    fetched.fetching_until = 7.0
    assert run(planned) == [[5]], "the time has come"


def test_a_prompt_that_needed_no_ssd_is_not_fetched_before_the_clock_starts() -> None:
    planned = scheduler(now=-1.0)
    planned.add(job(5))
    assert run(planned) == [[5]]


def test_streams_up_to_their_limit_run_and_others_run_beside_them() -> None:
    planned = scheduler(max_streams=2, padding=None)
    for length, stream in ((5, True), (6, True), (7, False)):
        planned.add(job(length, stream=stream))
    assert run(planned) == [[7], [6], [5]]
    planned.add(job(8, stream=True))
    assert run(planned) == []
    planned.add(job(9, priority=-1))
    assert run(planned) == [[9]], "no stream"
    alone = scheduler(max_streams=1)
    alone.add(job(5, n=3, stream=True))
    assert run(alone) == [[5]], "more streams than the limit in one request go alone"


def test_adapters_in_one_batch_are_bounded() -> None:
    planned = scheduler(padding=None)
    planned.limits = replace(planned.limits, max_adapters=2)
    for adapter in ("a", None, "b", "a", "c"):
        one = job(5)
        one.rows[0].adapter = adapter
        planned.add(one)
    assert run(planned) == [[5]] * 4
    assert [entry.rows[0].adapter for entry in planned.waiting] == ["c"]
    planned.running = [row for row in planned.running if row.adapter != "a"]
    assert run(planned) == [[5]]


def test_memory_is_asked_for_one_token_more_than_the_longest() -> None:
    asked: list[tuple[int, int]] = []
    planned = scheduler(padding=None)
    planned.fits = lambda rows, longest: asked.append((rows, longest)) or True  # type: ignore[func-returns-value]
    planned.add(job(10))
    planned.add(job(7, n=2))
    run(planned)
    assert asked == [(1, 11), (3, 11)]
    planned.running[0].launched = 20
    planned.add(job(3))
    run(planned)
    assert asked[-1] == (4, 10 + 20 - 1 + 1)


def test_alone_a_prompt_begins_whatever_the_memory() -> None:
    planned = scheduler(fits=0)
    planned.add(job(10))
    assert run(planned) == [[10]]
    planned.add(job(1))
    assert run(planned) == []


def known(length: int, tokens: int, computed: int = 0) -> Job:
    """A prompt with hashes, whose first tokens are like those of all others made here."""
    made = job(length)
    text = [1] * tokens + [length] * (length - tokens)
    made.chain, made.match = Chain(b"root", 16).extend(text), Match()
    made.computed = computed
    return made


def test_a_prompt_waits_once_for_one_much_like_it() -> None:
    planned = scheduler(step_tokens=1000, padding=None)
    first, second = known(100, 64), known(101, 64)
    looked, left = [], []
    planned.look_up, planned.release = looked.append, left.append
    planned.add(first)
    planned.add(second)
    assert run(planned) == [[100]]
    assert (looked, left, second.waited) == ([first, second], [second], True)
    third = known(102, 64)
    planned.add(third)
    assert run(planned) == [[101]], "the second goes; the third waits for it"
    assert run(planned) == [[102]]
    assert left == [second, third]
    planned.add(known(103, 64))
    assert run(planned) == [[103]], "nothing like it is being computed"


@pytest.mark.parametrize(
    ("tokens", "computed", "waits"), [(64, 0, True), (63, 0, False), (80, 16, True), (79, 16, False), (64, 16, False)]
)
def test_waiting_pays_from_so_many_shared_tokens_on(tokens: int, computed: int, waits: bool) -> None:
    planned = scheduler(step_tokens=1000, padding=None)
    planned.add(known(200, 160))
    planned.add(known(201, tokens, computed))
    assert len(run(planned)) == (1 if waits else 2)


@pytest.mark.parametrize("missing", ["match", "chain", "the other's chain"])
def test_without_a_prefix_cache_nobody_waits(missing: str) -> None:
    planned = scheduler(step_tokens=1000, padding=None)
    first, second = known(100, 64), known(101, 64)
    if missing == "match":
        second.match = None
    elif missing == "chain":
        second.chain = None
    else:
        first.chain = None
    planned.add(first)
    planned.add(second)
    assert len(run(planned)) == 2


def test_a_prompt_too_long_for_the_rest_of_the_budget_lets_go_of_what_it_found_and_has_not_waited() -> None:
    planned = scheduler(step_tokens=150, padding=None)
    second = known(101, 64)
    left: list[Job] = []
    planned.release = left.append
    planned.add(known(100, 64))
    planned.add(second)
    assert run(planned) == [[100]]
    assert (left, second.waited) == ([second], False)


def test_prompts_with_different_beginnings_computed_are_not_padded_together() -> None:
    planned = scheduler(step_tokens=1000, padding=1.0)
    planned.add(known(100, 0))
    planned.add(known(116, 0, computed=16))
    assert run(planned) == [[100], [100]]


def test_padding_up_to_its_share_exactly() -> None:
    for length, together in ((80, True), (79, False)):
        planned = scheduler(step_tokens=1000, padding=0.125)
        planned.add(job(100))
        planned.add(job(length))
        # 200 tokens computed for 180 or 179: 1.11 or 1.117 of them
        planned.limits = replace(planned.limits, max_padding=20 / 180)
        assert run(planned) == ([[100, length]] if together else [[100], [length]])


def test_prompts_whose_logprobs_are_wanted_are_computed_alone_the_first_time() -> None:
    def scored() -> Job:
        made = job(10)
        made.rows[0].sampling = SamplingParams(prompt_logprobs=0)
        return made

    planned = scheduler(step_tokens=1000)
    first, second = scored(), scored()
    second.rows[0].tokens = [1]  # it was requeued
    assert (wants_prompt_logprobs(first), wants_prompt_logprobs(second)) == (True, False)
    assert not wants_prompt_logprobs(job(10))
    for one in (job(10), second, first, job(10)):
        planned.add(one)
    assert run(planned) == [[10, 10], [10], [10]]


def test_a_row_is_forgotten_wherever_it_is() -> None:
    planned = scheduler(step_tokens=10)
    running, long, waiting = job(5), job(50), job(5, n=2)
    planned.add(running)
    run(planned)
    planned.add(long)
    run(planned)
    planned.add(waiting)
    assert planned.jobs() == [waiting, long]
    assert planned.remove(running.rows[0]) is None
    assert planned.running == []
    assert planned.remove(running.rows[0]) is None, "it is nowhere"
    assert planned.remove(long.rows[0]) is long
    first, second = waiting.rows
    assert planned.remove(second) is None
    assert planned.remove(first) is waiting
    assert (planned.jobs(), planned.queued, planned.idle) == ([], 0, True)


@st.composite
def requests(draw: st.DrawFn) -> Job:
    length, n, priority = draw(st.tuples(st.integers(1, 300), st.integers(1, 3), st.integers(0, 1)))
    made = job(length, n=n, priority=priority, stream=draw(st.booleans()))
    adapter = draw(st.sampled_from([None, None, "a", "b"]))
    for row in made.rows:
        row.adapter = adapter
    return made


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    arrivals=st.lists(st.lists(requests(), max_size=4), min_size=1, max_size=6),
    step_tokens=st.integers(1, 200),
    max_rows=st.integers(3, 6),
    max_streams=st.integers(0, 3),
    padding=st.sampled_from([None, 0.0, 0.5]),
    rate=st.sampled_from([0.0, 30.0, 60.0]),
)
def test_whatever_comes_limits_hold_and_everybody_is_served(
    arrivals: list[list[Job]],
    step_tokens: int,
    max_rows: int,
    max_streams: int,
    padding: float | None,
    rate: float,
) -> None:
    planned = scheduler(step_tokens=step_tokens, max_rows=max_rows, max_streams=max_streams, padding=padding)
    planned.prompt_rate = rate
    every = [one for some in arrivals for one in some]
    steps = iter(arrivals)
    while (some := next(steps, None)) is not None or not planned.idle:
        for one in some or []:
            planned.add(one)
        in_flight = planned.partial
        jobs = {id(one): one.computed for one in planned.jobs()}
        passes = run(planned)
        assert sum(map(sum, passes)) <= min(step_tokens, max(MIN_PIECE, int(rate * 2.5)) if rate else step_tokens)
        assert len(planned.running) <= max_rows
        assert len({row.adapter for row in planned.running} - {None}) <= 1
        if in_flight is not None:
            assert in_flight.computed > jobs[id(in_flight)], "a prompt under way goes on in every step"
        for row in planned.running[: 1 + len(planned.running) // 2]:  # some end
            planned.remove(row)
    assert all(one.remaining == 0 for one in every)


def test_no_more_prompts_share_a_pass_than_may() -> None:
    planned = scheduler(step_tokens=1000, padding=0.5)
    planned.limits.max_prompts = 2
    for _ in range(3):
        planned.add(job(100))
    assert run(planned) == [[100, 100], [100]]
