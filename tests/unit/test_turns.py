"""Who of those that wait goes next: requests before rollouts beyond their part, and every key its turn."""

from collections.abc import Sequence

from mlx_parallm.engine.rows import Job, Row
from mlx_parallm.engine.scheduler import Limits, Scheduler, displaced, next_job
from mlx_parallm.sampling_params import SamplingParams


def rows(count: int, *, owner: str = "", rollout: bool = False) -> list[Row]:
    sampling = SamplingParams()
    return [
        Row([1], sampling, 0, 0, 8, frozenset(), launched=1, order=order, owner=owner, rollout=rollout)
        for order in range(count)
    ]


def job(number: int, *, n: int = 1, owner: str = "", rollout: bool = False, priority: int = 0) -> Job:
    return Job(rows(n, owner=owner, rollout=rollout), [1], priority, 0.0, number)


def test_a_key_with_fewer_rows_goes_first() -> None:
    first, second = job(1, owner="a"), job(2, owner="b")
    assert next_job([first, second], [], 1) is first
    assert next_job([first, second], rows(1, owner="a"), 1) is second
    assert next_job([first, second], rows(1, owner="a") + rows(1, owner="b"), 1) is first
    urgent = job(3, owner="a", priority=-1)
    assert next_job([first, second, urgent], rows(1, owner="a"), 1) is urgent
    begun = job(-5, owner="a")  # has lost its place
    assert next_job([first, second, begun], rows(1, owner="a"), 1) is begun


def test_rollouts_go_first_only_within_their_part() -> None:
    rollout, request = job(1, rollout=True), job(2)
    assert next_job([rollout, request], rows(1, rollout=True), 2) is rollout
    assert next_job([rollout, request], rows(2, rollout=True), 2) is request
    assert next_job([rollout], rows(2, rollout=True), 2) is rollout  # nobody else wants the place
    assert next_job([], rows(2), 2) is None
    begun = [job(0)]  # a request whose prompt is computed in this step: rollouts wait for the next
    assert next_job([rollout], rows(2, rollout=True), 2, begun) is None
    assert next_job([rollout], rows(1, rollout=True), 2, begun) is rollout
    assert next_job([rollout], rows(2, rollout=True), 2, [job(0, rollout=True)]) is rollout
    large = job(1, n=4, rollout=True)  # more rows than their part: when none of them runs
    assert next_job([large, request], rows(1, rollout=True), 2) is request
    assert next_job([large, request], rows(1), 2) is large


def free(places: int) -> Scheduler:
    return Scheduler(Limits(places, 0, 100, 0.0, 0.0), lambda count, longest: True)


def leaving(ready: Sequence[Job], running: Sequence[Row], *, places: int, part: int = 1, budget: int = 100) -> int:
    admissible = free(places)._admissible
    found = displaced(ready, running, part, budget, admissible)
    newest = sorted((row for row in running if row.rollout), key=lambda row: -row.order)
    assert found == newest[: len(found)]
    return len(found)


def test_the_newest_rollouts_give_up_their_places_to_requests() -> None:
    assert leaving([job(1)], rows(4, rollout=True), places=4) == 1
    assert leaving([job(1), job(2)], rows(4, rollout=True), places=4) == 2
    assert leaving([job(1), job(2)], rows(4, rollout=True), places=5) == 1
    assert leaving([job(1)], rows(3, rollout=True), places=4) == 0  # there is room
    assert leaving([job(number) for number in range(9)], rows(4, rollout=True), places=4, part=2) == 2
    assert leaving([job(1, rollout=True)], rows(4, rollout=True), places=4) == 0
    assert leaving([job(1)], rows(4), places=4) == 0


def test_no_rollout_leaves_in_vain() -> None:
    assert leaving([job(1, n=4)], rows(4, rollout=True), places=4) == 0  # three places would be too few
    assert leaving([job(1, n=4), job(2)], rows(4, rollout=True), places=4) == 0  # who waits behind it waits on
    assert leaving([job(1), job(2, n=4)], rows(4, rollout=True), places=4) == 1
    assert leaving([job(1), job(2)], rows(4, rollout=True), places=4, budget=1) == 1  # what this step can compute


def test_rollouts_stay_while_a_request_s_prompt_is_read_from_the_ssd() -> None:
    planned = Scheduler(Limits(2, 0, 100, 0.0, 0.0), lambda count, longest: True, clock=lambda: 7.0)
    planned.running += rows(2, rollout=True)
    request, rollout = job(1), job(2, rollout=True)
    request.fetching_until = 7.5
    planned.waiting += [request, rollout]
    assert planned.displaced() == []
    request.fetching_until = 7.0
    assert len(planned.displaced()) == 1
