"""What the server is doing right now, from the engines' counters: totals, and rates since the snapshot before.

`feed` makes one a second for all viewers. Reading costs microseconds; nothing here waits for an engine.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from mlx_parallm import __version__
from mlx_parallm.metrics import DiskMetrics, EngineMetrics, Histogram, Join, MemoryPlan, PrefixMetrics, metrics_of
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.schema import response_body

WINDOW = 10  # snapshots over which percentiles are taken
LONGEST_GAP = 5.0  # seconds between two snapshots; beyond it rates would be averages over a time nobody looked at
# What a second of the chart has, and how that of several replicas is joined.
RATES: Mapping[str, Join] = {
    "generated": "sum",
    "prompt": "sum",
    "cached": "sum",
    "requests": "sum",
    "fill": "mean",
    "serving": "mean",
    "training": "mean",
    "predicting": "mean",
    "idle": "mean",
}
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(slots=True)
class Reading:
    """The counters of all models together at one moment."""

    at: float
    generated: int = 0
    computed: int = 0  # prompt tokens
    cached: int = 0  # prompt tokens
    finished: int = 0
    steps: int = 0
    fill: float = 0.0
    serving: float = 0.0  # seconds
    training: float = 0.0
    predicting: float = 0.0


class RecentPercentiles:
    """Percentiles of what histograms saw during the last snapshots; not `live`: of the last thousand of each."""

    def __init__(self, live: bool) -> None:
        self._live = live
        self._counts: dict[int, deque[int]] = {}

    def forget(self) -> None:
        self._counts.clear()

    def take(self, histograms: Sequence[Histogram]) -> dict[str, float | None]:
        """Returns the percentiles in seconds; None where there was nothing. To be called once for each snapshot."""
        self._counts = {
            id(one): self._counts.get(id(one)) or deque([one.count if self._live else 0], WINDOW) for one in histograms
        }
        seen: list[float] = []
        for one in histograms:
            counts = self._counts[id(one)]
            recent = list(one.recent)
            new = min(one.count - counts[0], len(recent))
            seen += recent[len(recent) - new :] if new > 0 else []
            counts.append(one.count)
        seen.sort()
        return {
            name: seen[min(len(seen) - 1, int(share * len(seen)))] if seen else None
            for name, share in PERCENTILES.items()
        }


@response_body
class TokenTotals(TypedDict):
    """Since the start."""

    generated: int
    prompt: int
    requests: int


@response_body
class CacheNote(TypedDict):
    memory: dict[str, Any]
    ssd: dict[str, Any]
    saved_tokens: Annotated[int, Field(description="Of prompts, found in a cache")]
    saved_share: float | None
    saved_seconds: float


@response_body
class ServerSnapshot(TypedDict):
    """What the event stream sends each second; rates are null in a single one."""

    time: float
    version: str
    draining: bool
    paused: bool
    models: list[str]
    queue: int
    running: int
    slots: int
    rejected: int
    totals: TokenTotals
    rates: Annotated[
        dict[str, float | None], Field(description="Tokens and requests a second, batch fill, shares of the time")
    ]
    fill_histogram: Annotated[list[int], Field(description="Decode steps by how full the batch was, in tenths")]
    first_token: Annotated[
        dict[str, float | None], Field(description="Percentiles of the last ten snapshots, in seconds")
    ]
    step: Annotated[
        dict[str, float | None], Field(description="The same for steps: what a stream waits between two tokens")
    ]
    cache: CacheNote
    memory: dict[str, int]
    training: dict[str, dict[str, Any]]
    viewers: NotRequired[int]
    replicas: NotRequired[Annotated[dict[str, Any], Field(description="What each does, where there are several")]]


class Snapshots:
    """Each is made from the one before: there is one maker for all viewers."""

    def __init__(self, context: ServerContext, *, live: bool = True) -> None:
        self._models = context.models
        self._runtime = context.runtime
        self._state = context.state
        self._before: Reading | None = None
        self._first_token = RecentPercentiles(live)
        self._step = RecentPercentiles(live)

    def take(self) -> ServerSnapshot:
        engines = [served.client.metrics for served in self._models]
        now = read(engines)
        before = self._before if self._before and now.at - self._before.at <= LONGEST_GAP else None
        self._before = now
        if before is None:
            self._first_token.forget()
            self._step.forget()
        return {
            "time": time.time(),
            "version": __version__,
            "draining": self._state.draining,
            "paused": bool(engines) and all(served.client.paused for served in self._models),
            "models": [served.name for served in self._models],
            "queue": sum(one.queue_depth for one in engines),
            "running": sum(one.running for one in engines),
            "slots": sum(one.slots_total for one in engines),
            "rejected": sum(one.requests_rejected for one in engines),
            "totals": {"generated": now.generated, "prompt": now.computed, "requests": now.finished},
            "rates": rates(before, now),
            "fill_histogram": [sum(counts) for counts in zip(*(one.batch_fill_hist for one in engines), strict=True)],
            "first_token": self._first_token.take([one.time_to_first_token for one in engines]),
            "step": self._step.take([one.step_seconds for one in engines]),
            "cache": cache(engines),
            "memory": memory(engines),
            "training": {name: asdict(one) for name, one in self._runtime.training.metrics().items()},
        }


def read(engines: Iterable[EngineMetrics]) -> Reading:
    reading = Reading(time.monotonic())
    for one in engines:
        reading.generated += one.generated_tokens
        reading.computed += one.prompt_tokens
        reading.cached += one.cached_tokens
        reading.finished += sum(dict(one.requests_finished).values())
        reading.steps += one.batches_processed
        reading.fill += one.batch_fill_sum
        reading.serving += one.decode_rate.seconds + one.prompt_rate.seconds
        reading.training += one.background.seconds
        reading.predicting += one.predictions.seconds
    return reading


def rates(before: Reading | None, now: Reading) -> dict[str, float | None]:
    """Tokens and requests a second, how full batches were, and what the time went to; None: not known yet."""
    if before is None or now.generated < before.generated:  # the first one, or a model has left
        return dict.fromkeys(RATES)
    seconds = max(now.at - before.at, 1e-6)
    busy = {
        name: max(0.0, getattr(now, name) - getattr(before, name)) for name in ("serving", "training", "predicting")
    }
    whole = max(seconds, sum(busy.values()))
    return {
        "generated": (now.generated - before.generated) / seconds,
        "prompt": max(0, now.computed - before.computed) / seconds,
        "cached": max(0, now.cached - before.cached) / seconds,
        "requests": max(0, now.finished - before.finished) / seconds,
        "fill": (now.fill - before.fill) / (now.steps - before.steps) if now.steps > before.steps else None,
        **{name: value / whole for name, value in busy.items()},
        "idle": 1 - sum(busy.values()) / whole,
    }


def over_models(kind: type, parts: Sequence[Any]) -> dict[str, Any]:
    """The declared numbers of all models of a process as one: added up, but for those that are the process's."""
    found = {}
    for name, one in metrics_of(kind).items():
        if one.kind != "histogram":
            values = [getattr(part, name) for part in parts] or [0]
            found[name] = max(values) if one.shared else sum(values)
    return found


def cache(engines: Sequence[EngineMetrics]) -> CacheNote:
    """Both tiers of the prefix cache, and what they have saved."""
    computed = sum(one.prompt_tokens for one in engines)
    found = sum(one.cached_tokens for one in engines)
    seconds = sum(one.cached_tokens / one.prompt_rate.average for one in engines if one.prompt_rate.average)
    return {
        "memory": over_models(PrefixMetrics, [one.prefix for one in engines]),
        "ssd": over_models(DiskMetrics, [one.ssd for one in engines]),
        "saved_tokens": found,
        "saved_share": found / (found + computed) if found + computed else None,
        "saved_seconds": seconds,
    }


def memory(engines: Sequence[EngineMetrics]) -> dict[str, int]:
    """The plan in bytes, and what MLX holds."""
    parts = over_models(MemoryPlan, [one.memory for one in engines])
    whole = over_models(EngineMetrics, engines)
    held = {name: whole[f"{name}_memory"] for name in ("active", "peak", "serving_peak", "spare")}
    return parts | held | {"kv": sum(one.kv_bytes for one in engines), "kv_limit": parts["rows"]}


def points(snapshot: ServerSnapshot) -> dict[str, Any]:
    """Returns what the charts keep of a snapshot."""
    return {
        "time": snapshot["time"],
        "queue": snapshot["queue"],
        "running": snapshot["running"],
        **snapshot["rates"],
        **{f"first_{name}": value for name, value in snapshot["first_token"].items()},
        **{f"step_{name}": value for name, value in snapshot["step"].items()},
    }
