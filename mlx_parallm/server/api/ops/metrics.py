"""The engines' and training's counters as Prometheus families."""

from collections.abc import Iterator
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
from mlx_parallm.metrics import LATENCY_BUCKETS, BackgroundMetrics, Histogram
from mlx_parallm.runtime.client import RuntimeClient, TrainingClient
from mlx_parallm.server.models import ModelTable
from mlx_parallm.types import TrainingMetrics

PREFIX = "mlx_parallm_"
GAUGES = {
    "queue_depth": "Requests that wait to begin",
    "running": "Rows that are being decoded or prefilled",
    "slots_total": "Rows that can run together",
    "slots_free": "Rows that are free",
    "kv_bytes": "Bytes of live keys and values",
    "kv_bytes_limit": "Most bytes of live keys and values",
    "active_memory": "Bytes that MLX holds",
    "peak_memory": "Most bytes that MLX has held",
    "serving_peak_memory": "Most bytes that MLX has held between pieces of updates",
    "spare_memory": "Bytes that MLX keeps for what comes next",
}
COUNTERS = {
    "steps": "Steps of the engine",
    "batches_processed": "Decode steps",
    "stream_batches_processed": "Decode steps with a streaming row",
    "rows_decoded": "Rows summed over decode steps",
    "prompt_tokens": "Prompt tokens computed",
    "generated_tokens": "Tokens generated",
    "cached_tokens": "Prompt tokens found in the cache",
    "requests_rejected": "Requests turned away by a full queue",
    "preemptions": "Rows that lost their place for lack of memory",
    "faults": "Device faults after which all running rows were computed again",
    "deduplicated": "Requests that shared another's computation",
}
PREFIX_CACHE = {
    "lookups": "Prompts looked up in the prefix cache",
    "hits": "Prompts whose beginning was found",
    "hit_tokens": "Prompt tokens found",
    "evictions": "Blocks that made room for others",
    "blocks_total": "Blocks that the prefix cache can hold",
    "blocks_cached": "Blocks that it holds",
    "blocks_referenced": "Blocks in use right now",
    "bytes": "Bytes that it holds in memory",
    "snapshots": "Snapshots that it holds, for models whose state can't be cut into blocks",
}
SSD_CACHE = {
    "files": "Files in the SSD cache, of all models",
    "bytes": "Bytes of them",
    "reads": "Files read",
    "read_bytes": "Bytes read",
    "read_rate": "Bytes a second at which files are read",
    "misses": "Files that were gone when they were wanted",
    "writes": "Files written",
    "written_bytes": "Bytes written",
    "dropped": "Blocks not written, because too much waited or the disk gave errors",
    "damaged": "Files found damaged, and removed",
    "pruned": "Files removed for their age or for lack of room",
    "errors": "Errors that the disk gave",
}
CACHE_GAUGES = ("blocks_total", "blocks_cached", "blocks_referenced", "bytes", "snapshots", "files", "read_rate")
HISTOGRAMS = {
    "time_to_first_token": "Seconds from arrival to the first token",
    "step_seconds": "Seconds per step",
    "request_seconds": "Seconds from arrival to the end",
    "adapter_seconds": "Seconds of the engine's for each adapter published, brought in, or put beside others",
}
# Each with the field of PredictorMetrics that it shows.
PREDICTOR_METRICS = {
    "predict_requests": ("requests", "Requests to models that predict"),
    "predict_inputs": ("inputs", "Inputs that were computed"),
    "predict_batches": ("batches", "Batches that they were computed in"),
    "predict_failures": ("failures", "Inputs that could not be computed"),
    "predict_seconds": ("seconds", "Seconds of the engine's, for predictions"),
    "predict_queue_depth": ("waiting", "Requests that wait or run"),
}
# Each with the field of TrainingMetrics that it shows.
TRAINING_GAUGES = {
    "rl_training_loss": ("loss", "Loss of the last update"),
    "rl_reward_mean": ("reward_mean", "Mean reward of the last update"),
    "rl_kl": ("kl", "KL divergence to the model when last measured, nats a token"),
    "rl_updates_per_second": ("updates_per_second", "Updates published a second"),
    "rl_trajectories_buffered": ("buffered", "Trajectories that wait"),
    "rl_trajectories_collected": ("collected", "Trajectories since the start"),
}
TRAINING_COUNTERS = {
    "rl_trajectories_collected": ("collected", "Trajectories"),
    "rl_trajectories_used": ("used", "Trajectories that updates learnt from"),
    "rl_trajectories_flat": ("flat", "Trajectories of groups without a difference"),
    "rl_trajectories_stale": ("stale", "Trajectories that were too old"),
    "rl_trajectories_dropped": ("dropped", "Trajectories that had to make room"),
    "rl_updates": ("updates", "Updates published"),
    "rl_updates_refused": ("refused", "Updates that were not published"),
    "rl_rollbacks": ("rollbacks", "Returns to the last good version"),
    "checkpoint_saves": ("checkpoint_saves", "Checkpoints written"),
}


ARM_COUNTERS = {
    "answers": "Answers that have ended, by adapter version",
    "answer_seconds": "Seconds from the submission of those to their end",
    "rewards": "Rewards of answers, by adapter version",
}
ARM_FIELDS = {"answers": "ended", "answer_seconds": "seconds", "rewards": "rewards"}


class EngineCollector(Collector):
    """Turns the counters into Prometheus families when they are asked for; each model is a label."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(f"{PREFIX}server", "The server", {"version": __version__})
        for name, text in GAUGES.items():
            yield self._family(GaugeMetricFamily(PREFIX + name, text, labels=["model"]), name)
        for name, text in COUNTERS.items():
            yield self._family(CounterMetricFamily(PREFIX + name, text, labels=["model"]), name)
        for name, text in PREFIX_CACHE.items():
            yield self._cache("prefix", name, text)
        for name, text in SSD_CACHE.items():
            yield self._cache("ssd", name, text)
        yield self._finished()
        yield from self._steps()
        yield from self._adapters()
        for name, text in HISTOGRAMS.items():
            yield self._histogram(f"{PREFIX}{name.removesuffix('_seconds')}_seconds", name, text)

    def _family(self, family: Any, name: str) -> Metric:
        for served in self._models:
            family.add_metric([served.name], getattr(served.client.metrics, name))
        metric: Metric = family
        return metric

    def _cache(self, tier: str, name: str, text: str) -> Metric:
        kind = GaugeMetricFamily if name in CACHE_GAUGES else CounterMetricFamily
        family = kind(f"{PREFIX}{tier}_cache_{name}", text, labels=["model"])
        for served in self._models:
            family.add_metric([served.name], getattr(getattr(served.client.metrics, tier), name))
        metric: Metric = family
        return metric

    def _finished(self) -> Metric:
        family = CounterMetricFamily(
            f"{PREFIX}requests_finished", "Choices that have ended, by how", labels=["model", "reason"]
        )
        for served in self._models:
            for reason, count in dict(served.client.metrics.requests_finished).items():
                family.add_metric([served.name, reason], count)
        return family

    def _steps(self) -> Iterator[Metric]:
        labels = ["model", "kind"]
        start = CounterMetricFamily(f"{PREFIX}step_start_seconds", "Of the host's, to start steps", labels=labels)
        wait = CounterMetricFamily(f"{PREFIX}step_wait_seconds", "Of the host's, waiting for steps", labels=labels)
        for served in self._models:
            metrics = served.client.metrics
            for kind, steps in (("decode", metrics.decode), ("prefill", metrics.prefill)):
                start.add_metric([served.name, kind], steps.start_seconds)
                wait.add_metric([served.name, kind], steps.wait_seconds)
        yield from (start, wait)

    def _adapters(self) -> Iterator[Metric]:
        """Of the versions that are there now: there would be no end to their number."""
        swaps = CounterMetricFamily(f"{PREFIX}lora_swaps", "Adapters copied to the device", labels=["model"])
        held = GaugeMetricFamily(f"{PREFIX}lora_resident_bytes", "Bytes of adapters on the device", labels=["model"])
        policy = GaugeMetricFamily(f"{PREFIX}policy_version", "The current policy's version", labels=["model"])
        labels = ["model", "adapter", "version"]
        requests = CounterMetricFamily(f"{PREFIX}adapter_requests", "Requests, by adapter version", labels=labels)
        tokens = CounterMetricFamily(
            f"{PREFIX}adapter_tokens", "Tokens, by the adapter version that made them", labels=labels
        )
        arms = {
            name: CounterMetricFamily(f"{PREFIX}adapter_{name}", text, labels=labels)
            for name, text in ARM_COUNTERS.items()
        }
        rewards = GaugeMetricFamily(f"{PREFIX}adapter_reward_mean", "Mean reward, by adapter version", labels=labels)
        for served in self._models:
            registry = served.adapters
            swaps.add_metric([served.name], registry.swaps)
            held.add_metric([served.name], registry.resident_bytes)
            policy.add_metric([served.name], registry.served_version)
            requests.add_metric([served.name, "base", "0"], registry.base.requests)
            tokens.add_metric([served.name, "base", "0"], registry.base.tokens)
            versions = [version for name in registry.names for version in registry.versions(name)]
            stats = {(version.name, str(version.number)): version.stats for version in versions}
            for arm, one in {("base", "0"): registry.base.stats, **stats}.items():
                for name, family in arms.items():
                    family.add_metric([served.name, *arm], getattr(one, ARM_FIELDS[name]))
                rewards.add_metric([served.name, *arm], one.reward_mean)
            for version in versions:
                which = [served.name, version.name, str(version.number)]
                requests.add_metric(which, version.requests)
                tokens.add_metric(which, version.tokens)
        yield from (swaps, held, policy, requests, tokens, *arms.values(), rewards)

    def _histogram(self, full_name: str, name: str, text: str) -> Metric:
        family = HistogramMetricFamily(full_name, text, labels=["model"])
        for served in self._models:
            histogram: Histogram = getattr(served.client.metrics, name)
            family.add_metric([served.name], _buckets(histogram), histogram.total)
        return family


class PoolCollector(Collector):
    """Which models are loaded, and what those do that predict; each model is a label."""

    def __init__(self, runtime: RuntimeClient) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        labels = ["model", "kind"]
        ready = GaugeMetricFamily(f"{PREFIX}model_loaded", "Whether a model is in memory", labels=labels)
        size = GaugeMetricFamily(f"{PREFIX}model_bytes", "Bytes of a loaded model's weights", labels=labels)
        loads = CounterMetricFamily(f"{PREFIX}model_loads", "How often a model was loaded", labels=labels)
        for status in self._runtime.pool.statuses():
            loads.add_metric([status.name, status.kind], status.loads)
            loaded = status.status in ("ready", "unloading")
            ready.add_metric([status.name, status.kind], float(loaded))
            size.add_metric([status.name, status.kind], status.bytes if loaded else 0)
        yield from (ready, size, loads)
        predictors = self._runtime.predictors
        for name, (attribute, text) in PREDICTOR_METRICS.items():
            kind = GaugeMetricFamily if attribute == "waiting" else CounterMetricFamily
            family: Any = kind(PREFIX + name, text, labels=labels)
            for model, client in predictors.items():
                family.add_metric([model, client.info.kind], getattr(client.metrics, attribute))
            yield family


class TrainingCollector(Collector):
    """How training goes; each adapter that learns is a label."""

    def __init__(self, training: TrainingClient, models: ModelTable) -> None:
        self._training = training
        self._models = models

    def collect(self) -> Iterator[Metric]:
        # A server that does not train has them too, at zero: who draws a graph should not have to wait for an event.
        found = self._training.metrics() or {"": TrainingMetrics()}
        for table, family in ((TRAINING_GAUGES, GaugeMetricFamily), (TRAINING_COUNTERS, CounterMetricFamily)):
            for name, (attribute, text) in table.items():
                metric: Any = family(PREFIX + name, text, labels=["adapter"])
                for adapter, metrics in found.items():
                    metric.add_metric([adapter], getattr(metrics, attribute))
                yield metric
        background = next((served.client.metrics.background for served in self._models), BackgroundMetrics())
        yield CounterMetricFamily(f"{PREFIX}training_seconds", "Of the engine's, for training", background.seconds)
        yield GaugeMetricFamily(
            f"{PREFIX}training_longest_stall_seconds", "The longest that rows waited", background.longest_stall
        )


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*map(str, LATENCY_BUCKETS), "+Inf"], histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
