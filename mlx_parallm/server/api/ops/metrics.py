"""The declared numbers as Prometheus families, as JSON, and how those of several replicas are joined."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mlx_parallm import __version__
from mlx_parallm.arms import ArmStats
from mlx_parallm.metrics import (
    ADAPTER_REQUESTS,
    ADAPTER_TOKENS,
    COLLECTED,
    LATENCY_BUCKETS,
    LORA_RESIDENT_BYTES,
    LORA_SWAPS,
    MODEL_BYTES,
    MODEL_LOADED,
    MODEL_LOADS,
    POLICY_VERSION,
    PREFIX,
    REQUESTS_FINISHED,
    SERVER,
    BackgroundMetrics,
    Declared,
    DiskMetrics,
    EngineMetrics,
    Histogram,
    Join,
    MemoryPlan,
    PredictorMetrics,
    PrefixMetrics,
    Rate,
    StepMetrics,
    TrainingMetrics,
    metrics_of,
)
from mlx_parallm.runtime.client import RuntimeClient, TrainingClient
from mlx_parallm.server.model_table import ModelTable

ENGINE = metrics_of(EngineMetrics)
PREFIX_CACHE = metrics_of(PrefixMetrics, "prefix_cache_")
SSD_CACHE = metrics_of(DiskMetrics, "ssd_cache_")
BACKGROUND = metrics_of(BackgroundMetrics)
STEPS = metrics_of(StepMetrics)
PREDICTORS = metrics_of(PredictorMetrics, "predict_")
TRAINING = metrics_of(TrainingMetrics, "rl_")
ARMS = metrics_of(ArmStats, "adapter_")
HISTOGRAMS = {name: one for name, one in ENGINE.items() if one.kind == "histogram"}
TABLES = (ENGINE, PREFIX_CACHE, SSD_CACHE, BACKGROUND, STEPS, PREDICTORS, TRAINING, ARMS, metrics_of(MemoryPlan))
OTHERS = (
    *(REQUESTS_FINISHED, LORA_SWAPS, LORA_RESIDENT_BYTES, POLICY_VERSION, ADAPTER_REQUESTS, ADAPTER_TOKENS),
    *(MODEL_LOADED, MODEL_BYTES, MODEL_LOADS, SERVER, COLLECTED),
)
# Numbers that only the JSON responses of /metrics and /debug/metrics have, which are made of declared ones.
DERIVED: Mapping[str, Join] = {
    "avg_batch_fill_pct": "mean",
    "queue_depth_last": "sum",
    "prompt_tps_last": "sum",
    "prompt_tps_avg": "sum",
    "decode_tps_last": "sum",
    "decode_tps_avg": "sum",
    "current_policy_version": "max",
    "max_batch_size": "max",
    "flush_interval_ms": "max",
    # Of a histogram's summary.
    "mean": "mean",
    "p50": "max",
    "p99": "max",
    "max": "max",
}
# How the numbers of several replicas are joined, by their names in Prometheus and in JSON; those that are not here are
# added up.
JOINS: Mapping[str, Join] = {
    **{one.name: one.join for table in TABLES for one in table.values()},
    **{one.name: one.join for one in OTHERS},
    **{name: one.join for table in TABLES for name, one in table.items()},
    **DERIVED,
}
COUNTED_BY_HAND = ("rows_decoded", "queue_depth", "batch_fill_sum")  # fields that /debug/metrics has in other words


def joined(name: str, values: Sequence[float]) -> float:
    """One number for those of several replicas."""
    match JOINS.get(name, "sum"):
        case "max":
            return max(values)
        case "mean":
            return sum(values) / len(values)
        case _:
            return sum(values)


def debug_summary(metrics: EngineMetrics) -> dict[str, Any]:
    """An engine's numbers for people who look for a fault."""
    plain = {item.name: getattr(metrics, item.name) for item in fields(metrics)}
    for name, value in list(plain.items()):
        if name in COUNTED_BY_HAND or isinstance(value, Rate | Histogram):
            del plain[name]
    return plain | {
        "adapter_seconds": metrics.adapter_seconds.summary(),
        "avg_batch_fill_pct": metrics.avg_batch_fill_pct,
        "queue_depth_last": metrics.queue_depth,
        "prompt_tps_last": metrics.prompt_rate.last,
        "prompt_tps_avg": metrics.prompt_rate.average,
        "decode_tps_last": metrics.decode_rate.last,
        "decode_tps_avg": metrics.decode_rate.average,
    }


def family(one: Declared, *labels: str) -> Any:
    """The empty family of a declared number."""
    kind = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
    return kind(PREFIX + one.name, one.help, labels=labels)


def families(
    table: Mapping[str, Declared], labels: Sequence[str], found: Iterable[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    """Yields the metrics of a class's numbers; `found`: objects of that class, each with its labels."""
    sources = list(found)
    for attribute, one in table.items():
        metric = family(one, *labels)
        for values, source in sources:
            metric.add_metric(values, getattr(source, attribute))
        yield metric


class EngineCollector(Collector):
    """Turns the counters into Prometheus families when they are asked for; each model is a label."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(PREFIX + SERVER.name, SERVER.help, {"version": __version__})
        engines = [([served.name], served.client.metrics) for served in self._models]
        plain = {name: one for name, one in ENGINE.items() if name not in HISTOGRAMS}
        yield from families(plain, ["model"], engines)
        yield from families(PREFIX_CACHE, ["model"], [(label, metrics.prefix) for label, metrics in engines])
        yield from families(SSD_CACHE, ["model"], [(label, metrics.ssd) for label, metrics in engines])
        yield self._finished()
        parts = [
            ([*label, kind], getattr(metrics, kind)) for label, metrics in engines for kind in ("decode", "prefill")
        ]
        yield from families(STEPS, ["model", "kind"], parts)
        yield from self._adapters()
        for name, one in HISTOGRAMS.items():
            yield self._histogram(one, name)

    def _finished(self) -> Metric:
        metric = family(REQUESTS_FINISHED, "model", "reason")
        for served in self._models:
            for reason, count in dict(served.client.metrics.requests_finished).items():
                metric.add_metric([served.name, reason], count)
        found: Metric = metric
        return found

    def _adapters(self) -> Iterator[Metric]:
        """Yields metrics of the adapter versions that are there now: of all that ever were, there would be no end."""
        swaps = family(LORA_SWAPS, "model")
        held = family(LORA_RESIDENT_BYTES, "model")
        policy = family(POLICY_VERSION, "model")
        labels = ("model", "adapter", "version")
        requests = family(ADAPTER_REQUESTS, *labels)
        tokens = family(ADAPTER_TOKENS, *labels)
        arms: list[tuple[Sequence[str], ArmStats]] = []
        for served in self._models:
            registry = served.adapters
            swaps.add_metric([served.name], registry.swaps)
            held.add_metric([served.name], registry.resident_bytes)
            policy.add_metric([served.name], registry.served_version)
            requests.add_metric([served.name, "base", "0"], registry.base.requests)
            tokens.add_metric([served.name, "base", "0"], registry.base.tokens)
            arms.append(([served.name, "base", "0"], registry.base.stats))
            for version in (version for name in registry.names for version in registry.versions(name)):
                which = [served.name, version.name, str(version.number)]
                requests.add_metric(which, version.requests)
                tokens.add_metric(which, version.tokens)
                arms.append((which, version.stats))
        yield from (swaps, held, policy, requests, tokens)
        yield from families(ARMS, labels, arms)

    def _histogram(self, one: Declared, attribute: str) -> Metric:
        metric = HistogramMetricFamily(PREFIX + one.name, one.help, labels=["model"])
        for served in self._models:
            histogram: Histogram = getattr(served.client.metrics, attribute)
            metric.add_metric([served.name], _buckets(histogram), histogram.total)
        return metric


class PoolCollector(Collector):
    """Which models are loaded, and what those do that predict; each model is a label."""

    def __init__(self, runtime: RuntimeClient) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        labels = ("model", "kind")
        ready, size, loads = (family(one, *labels) for one in (MODEL_LOADED, MODEL_BYTES, MODEL_LOADS))
        for status in self._runtime.pool.statuses():
            loads.add_metric([status.name, status.kind], status.loads)
            loaded = status.status in ("ready", "unloading")
            ready.add_metric([status.name, status.kind], float(loaded))
            size.add_metric([status.name, status.kind], status.bytes if loaded else 0)
        yield from (ready, size, loads)
        clients = self._runtime.predictors.items()
        yield from families(PREDICTORS, labels, [([name, one.info.kind], one.metrics) for name, one in clients])


class TrainingCollector(Collector):
    """How training goes; each adapter that learns is a label."""

    def __init__(self, training: TrainingClient, models: ModelTable) -> None:
        self._training = training
        self._models = models

    def collect(self) -> Iterator[Metric]:
        # A server that does not train has them too, at zero: who draws a graph should not have to wait for an event.
        found = self._training.metrics() or {"": TrainingMetrics()}
        gauge = family(COLLECTED, "adapter")
        for adapter, metrics in found.items():
            gauge.add_metric([adapter], metrics.collected)
        yield gauge
        yield from families(TRAINING, ["adapter"], [([adapter], metrics) for adapter, metrics in found.items()])
        background = next((served.client.metrics.background for served in self._models), BackgroundMetrics())
        yield from families(BACKGROUND, [], [((), background)])


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*map(str, LATENCY_BUCKETS), "+Inf"], histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
