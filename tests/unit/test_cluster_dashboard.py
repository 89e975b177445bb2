"""One dashboard for several replicas: sums, averages and the slowest, from the snapshots that a server really makes."""

import asyncio
from typing import Any

import orjson
import pytest

from mlx_parallm.cluster.replicas import views
from mlx_parallm.cluster.replicas.joined_dashboard import EventMerger, send_merged, whole_history, whole_snapshot
from mlx_parallm.metrics import EngineMetrics
from mlx_parallm.server.api import route_table
from mlx_parallm.server.dashboard.snapshot import Reading, cache, memory, points, rates


def snapshot(running: int, generated: int, first: float | None, *, at: float = 100.0) -> dict[str, Any]:
    """As a server with one engine makes it, two seconds after the one before."""
    engine = EngineMetrics()
    engine.prompt_tokens, engine.cached_tokens = 60, 10 * running
    now = Reading(at, generated=generated, computed=60, cached=10 * running, finished=running, serving=1.0)
    return {
        "time": at,
        "version": "1",
        "draining": False,
        "paused": running == 0,
        "models": ["m"],
        "queue": 1,
        "running": running,
        "slots": 8,
        "rejected": 0,
        "totals": {"generated": generated, "prompt": 60, "requests": running},
        "rates": rates(Reading(at - 2.0), now),
        "fill_histogram": [running, 1],
        "first_token": {"p50": first, "p90": first, "p99": first},
        "step": {"p50": 0.1, "p90": 0.1, "p99": 0.1 * running},
        "cache": cache([engine]),
        "memory": memory([engine]) | {"active": 100},
        "training": {"policy": {"reward": 0.5}} if running else {},
    }


def test_amounts_are_added_shares_averaged_and_percentiles_the_slowest() -> None:
    whole = whole_snapshot({"a": snapshot(3, 40, 0.2), "b": snapshot(0, 20, None)})
    assert (whole["running"], whole["slots"], whole["queue"], whole["paused"]) == (3, 16, 2, False)
    assert whole["totals"] == {"generated": 60, "prompt": 120, "requests": 3}
    assert whole["rates"]["generated"] == 30.0
    assert whole["rates"]["serving"] == 0.5
    assert whole["first_token"]["p50"] == 0.2
    assert whole["step"]["p99"] == pytest.approx(0.3)
    assert whole["fill_histogram"] == [3, 2]
    assert whole["cache"]["saved_share"] == 30 / 150
    assert whole["memory"]["active"] == 200
    assert whole["training"] == {"policy": {"reward": 0.5}}
    assert whole["replicas"]["a"] | {"memory": 0} == {
        "running": 3,
        "slots": 8,
        "queue": 1,
        "generated": 20.0,
        "first_token": 0.2,
        "saved_share": 30 / 90,
        "memory": 0,
        "requests": 3,
    }
    assert whole.keys() == snapshot(1, 1, None).keys() | {"replicas"}


def test_charts_of_all_replicas_have_one_point_a_second() -> None:
    one = [points(snapshot(1, 10, 0.1, at=at)) for at in (100.2, 101.2)]
    other = [points(snapshot(2, 10, None, at=at)) for at in (101.4, 102.4)]
    found = whole_history([one, other])
    assert [int(point["time"]) for point in found] == [100, 101, 102]
    assert [point["running"] for point in found] == [1, 3, 2]
    assert [point["generated"] for point in found] == [5.0, 10.0, 5.0]
    assert [point["first_p50"] for point in found] == [0.1, 0.1, None]
    assert found[0].keys() == one[0].keys()
    slow = points(snapshot(1, 10, 0.4, at=100.9))
    assert whole_history([one, [slow]])[0]["first_p50"] == 0.4, "that of the slowest"


def test_the_front_answers_each_route_as_it_declares() -> None:
    declared = {route.replicas for route in route_table().routes}
    by_the_front_itself = {"", "health", "events", "join", "creates", "owner"}
    assert declared - by_the_front_itself == set(views.VIEWS)


def test_lists_of_all_replicas_are_the_newest_first() -> None:
    answers = {
        "a": orjson.dumps({"requests": [{"time": 3.0, "number": 3}, {"time": 1.0, "number": 1}]}),
        "b": orjson.dumps({"requests": [{"time": 2.0, "number": 2}]}),
    }
    found = orjson.loads(views.VIEWS["requests"](answers, []))
    assert [(one["number"], one["replica"]) for one in found["requests"]] == [(3, "a"), (2, "b"), (1, "a")]
    assert found.keys() == {"requests"}
    answers = {
        "a": orjson.dumps({"adapters": ["x"], "groups": []}),
        "b": orjson.dumps({"adapters": ["x", "y"], "groups": [{"time": 1.0}]}),
    }
    found = orjson.loads(views.VIEWS["rollouts"](answers, []))
    assert found["adapters"] == ["x", "y"]
    assert found["groups"] == [{"time": 1.0, "replica": "b"}]


class Stream:
    """What aiohttp's answers have of a stream, cut at any byte."""

    def __init__(self, data: bytes, size: int) -> None:
        self.content = self
        self._parts = [data[place : place + size] for place in range(0, len(data), size)]

    async def iter_any(self) -> Any:
        for part in self._parts:
            await asyncio.sleep(0)
            yield part
        await asyncio.sleep(30)


def stream(size: int, *snapshots: dict[str, Any]) -> Any:
    history = orjson.dumps([points(one) for one in snapshots])
    data = b"retry: 2000\nevent: history\ndata: " + history + b"\n\n"
    return Stream(data + b"".join(b"event: snapshot\ndata: " + orjson.dumps(one) + b"\n\n" for one in snapshots), size)


@pytest.mark.parametrize("size", [7, 100_000])
async def test_event_streams_become_one(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.cluster.replicas.joined_dashboard.SECONDS", 0.05)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message["body"])

    turns = iter([True] * 20)
    answers = {"b": stream(size, snapshot(1, 10, 0.1)), "a": stream(size, snapshot(2, 20, 0.3))}
    await asyncio.wait_for(send_merged(answers, send, lambda: next(turns, False)), 20)
    assert sent[0].startswith(b"retry: 2000\nevent: history\ndata: [")
    assert sent[-1] == b"", "it ends where replicas come or go, and the page connects anew"
    for event in sent[1:-1]:
        shown = orjson.loads(event.removeprefix(b"event: snapshot\ndata: "))
        assert shown["running"] == 3
        assert list(shown["replicas"]) == ["a", "b"]


async def test_a_replica_that_has_gone_no_longer_counts() -> None:
    merger = EventMerger(2, (OSError,))

    class Broken(Stream):
        async def iter_any(self) -> Any:
            for part in self._parts:
                yield part
            raise ConnectionError

    whole = stream(100_000, snapshot(1, 10, 0.1))
    broken: Any = Broken(b"".join(whole._parts), 100_000)
    await merger.read("a", broken)
    assert merger.begun.is_set()
    assert merger.snapshot() is None
