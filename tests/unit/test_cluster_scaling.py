"""How many replicas run, by the requests in flight."""

from mlx_parallm.cluster.replicas.scaling import UP_SECONDS, Scaling


def run(scaling: Scaling, load: list[int], current: int, start: float = 0.0) -> list[int]:
    """The replicas after each look, two seconds apart."""
    found = []
    for place, in_flight in enumerate(load):
        current = scaling.wanted(in_flight, current, start + 2 * place)
        found.append(current)
    return found


def test_a_queue_that_lasts_adds_replicas() -> None:
    found = run(Scaling(1, 4, 8, 60), [30] * 8, 1)
    assert found[: int(UP_SECONDS / 2)] == [1] * int(UP_SECONDS / 2)
    assert found[-1] == 4, "30 requests, 8 each"


def test_a_burst_adds_none() -> None:
    assert run(Scaling(1, 4, 8, 60), [0, 0, 100, 100, 0, 0, 100, 0, 0, 0], 1) == [1] * 10


def test_never_more_than_allowed_and_never_fewer() -> None:
    scaling = Scaling(2, 3, 8, 20)
    assert run(scaling, [1000] * 10, 2)[-1] == 3
    assert run(scaling, [0] * 20, 3, start=100)[-1] == 2


def test_they_end_when_fewer_were_enough_for_long() -> None:
    found = run(Scaling(1, 4, 8, 60), [30] * 10 + [9] * 40, 1)
    assert found[9] == 4
    assert found[10 + 28] == 4, "not within a minute"
    assert found[-1] == 2, "nine requests need two"


def test_load_that_comes_and_goes_keeps_them() -> None:
    found = run(Scaling(1, 4, 8, 60), ([30] * 8 + [0] * 8) * 6, 1)
    assert found[8:] == [4] * (len(found) - 8)
