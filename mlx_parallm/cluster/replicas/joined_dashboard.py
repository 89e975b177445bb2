"""The dashboard of all replicas: their snapshots, requests and rollouts together, and each replica beside the whole.

`Front` opens every replica's event stream for a viewer and sends one snapshot a second that is the sum of the latest.
Percentiles can't be added: those of the whole are the slowest replica's.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import orjson
from starlette.types import Send

from mlx_parallm.server.dashboard.snapshot import RATES

SECONDS = 1.0
SUMS = ("queue", "running", "slots", "rejected")
WORST = ("first_token", "step")  # percentiles


def whole_snapshot(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One server's snapshot of all of them, with what each does under `replicas`."""
    found = list(parts.values())
    cache = _sums(one["cache"] for one in found)
    totals = _sums(one["totals"] for one in found)
    looked = cache["saved_tokens"] + totals["prompt"]
    return {
        **found[0],
        **{name: sum(one[name] for one in found) for name in SUMS},
        **{name: _largest([one[name] for one in found]) for name in WORST},
        "draining": any(one["draining"] for one in found),
        "paused": all(one["paused"] for one in found),
        "totals": totals,
        "rates": _rates([one["rates"] for one in found]),
        "fill_histogram": [sum(column) for column in zip(*(one["fill_histogram"] for one in found), strict=True)],
        "cache": cache | {"saved_share": cache["saved_tokens"] / looked if looked else None},
        "memory": _sums(one["memory"] for one in found),
        "training": {name: values for one in reversed(found) for name, values in one["training"].items()},
        "replicas": {name: _brief(one) for name, one in parts.items()},
    }


def _brief(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "running": snapshot["running"],
        "slots": snapshot["slots"],
        "queue": snapshot["queue"],
        "generated": snapshot["rates"]["generated"],
        "first_token": snapshot["first_token"]["p50"],
        "saved_share": snapshot["cache"]["saved_share"],
        "memory": snapshot["memory"]["active"],
        "requests": snapshot["totals"]["requests"],
    }


def _sums(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Number by number; what is null somewhere counts as nothing there."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, Mapping):
                total[name] = _sums((total.get(name, {}), value))
            else:
                total[name] = total.get(name, 0) + (value or 0)
    return total


def _rates(parts: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Amounts are added; shares of the time and of a batch are averaged."""
    rates: dict[str, float | None] = {}
    for name in parts[0]:
        known = [value for part in parts if (value := part.get(name)) is not None]
        count = 1 if RATES.get(name) == "sum" else len(known)
        rates[name] = sum(known) / count if known else None
    return rates


def _largest(parts: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    names = parts[0]
    return {name: max((value for part in parts if (value := part[name]) is not None), default=None) for name in names}


def whole_history(parts: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The points of the charts of all replicas, second by second."""
    seconds: dict[int, list[Mapping[str, Any]]] = {}
    for points in parts:
        for point in points:
            seconds.setdefault(int(point["time"]), []).append(point)
    return [_point(seconds[second]) for second in sorted(seconds)]


def _point(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    percentiles = {name for name in parts[0] if name.startswith(("first_", "step_"))}
    rates = _rates([{name: part.get(name) for name in parts[0] if name not in percentiles} for part in parts])
    slowest = _largest([{name: part.get(name) for name in percentiles} for part in parts])
    amounts = {name: sum(part[name] for part in parts) for name in ("queue", "running")}
    return rates | slowest | amounts | {"time": parts[0]["time"]}


class StreamContent(Protocol):
    def iter_any(self) -> AsyncIterator[bytes]: ...


class BegunStream(Protocol):
    """What is used of aiohttp's answers."""

    @property
    def content(self) -> StreamContent: ...


class EventMerger:
    """The event streams of several replicas, for one viewer, as one."""

    def __init__(self, count: int, lost: tuple[type[Exception], ...]) -> None:
        self._count = count  # of replicas
        self._lost = lost  # what is raised where a replica is gone
        self._latest: dict[str, dict[str, Any]] = {}
        self._histories: dict[str, list[dict[str, Any]]] = {}
        self.begun = asyncio.Event()  # there is a snapshot of each, or one has gone

    async def read(self, name: str, response: BegunStream) -> None:
        """Reads a replica's events until the replica ends the stream, or is gone; it no longer counts then."""
        rest = b""
        try:
            async for part in response.content.iter_any():
                *events, rest = (rest + part).split(b"\n\n")
                for event in events:
                    self._take(name, event)
        except self._lost:
            return
        finally:
            self._latest.pop(name, None)
            self.begun.set()

    def _take(self, name: str, event: bytes) -> None:
        fields = dict(line.partition(b": ")[::2] for line in event.split(b"\n"))
        if fields.get(b"event") == b"snapshot":
            self._latest[name] = orjson.loads(fields[b"data"])
            if len(self._latest) == self._count:
                self.begun.set()
        elif fields.get(b"event") == b"history":
            self._histories[name] = orjson.loads(fields[b"data"])

    def history(self) -> bytes:
        points = whole_history(list(self._histories.values()))
        return b"retry: 2000\nevent: history\ndata: " + orjson.dumps(points) + b"\n\n"

    def snapshot(self) -> bytes | None:
        """None: no replica has sent one yet, or all are gone."""
        if not self._latest:
            return None
        whole = whole_snapshot(dict(sorted(self._latest.items())))
        return b"event: snapshot\ndata: " + orjson.dumps(whole) + b"\n\n"


async def send_merged(
    responses: Mapping[str, BegunStream],
    send: Send,
    still_all: Callable[[], bool],
    lost: tuple[type[Exception], ...] = (OSError,),
) -> None:
    """The streams that replicas have begun, as one, until one of them ends or they are not all replicas any more: the
    page then connects anew."""
    merger = EventMerger(len(responses), lost)
    readers = [asyncio.ensure_future(merger.read(name, response)) for name, response in responses.items()]
    try:
        await merger.begun.wait()
        await send({"type": "http.response.body", "body": merger.history(), "more_body": True})
        while still_all() and not any(reader.done() for reader in readers):
            if (event := merger.snapshot()) is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(SECONDS)
        await send({"type": "http.response.body", "body": b""})
    finally:
        for reader in readers:
            reader.cancel()
