"""Operations: `/health`, `/metrics` and `/debug/metrics`, read from the engines' counters; `/flush_cache`."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm import __version__
from mlx_parallm.config import ServeConfig
from mlx_parallm.metrics import LATENCY_BUCKETS, EngineMetrics, Histogram
from mlx_parallm.server import answers
from mlx_parallm.server.errors import JSONResponse
from mlx_parallm.server.models import ModelTable
from mlx_parallm.server.state import ServerState
from mlx_parallm.training.manager import TrainingManager
from mlx_parallm.training.session import Session

log = logging.getLogger(__name__)

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


class EngineCollector(Collector):
    """Turns the counters into Prometheus families when they are asked for; each model is a label."""

    def __init__(self, table: ModelTable) -> None:
        self._table = table

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
        for served in self._table:
            family.add_metric([served.name], getattr(served.engine.metrics, name))
        metric: Metric = family
        return metric

    def _cache(self, tier: str, name: str, text: str) -> Metric:
        kind = GaugeMetricFamily if name in CACHE_GAUGES else CounterMetricFamily
        family = kind(f"{PREFIX}{tier}_cache_{name}", text, labels=["model"])
        for served in self._table:
            family.add_metric([served.name], getattr(getattr(served.engine.metrics, tier), name))
        metric: Metric = family
        return metric

    def _finished(self) -> Metric:
        family = CounterMetricFamily(
            f"{PREFIX}requests_finished", "Choices that have ended, by how", labels=["model", "reason"]
        )
        for served in self._table:
            for reason, count in dict(served.engine.metrics.requests_finished).items():
                family.add_metric([served.name, reason], count)
        return family

    def _steps(self) -> Iterator[Metric]:
        labels = ["model", "kind"]
        start = CounterMetricFamily(f"{PREFIX}step_start_seconds", "Of the host's, to start steps", labels=labels)
        wait = CounterMetricFamily(f"{PREFIX}step_wait_seconds", "Of the host's, waiting for steps", labels=labels)
        for served in self._table:
            metrics = served.engine.metrics
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
        for served in self._table:
            registry = served.engine.adapters
            swaps.add_metric([served.name], registry.swaps)
            held.add_metric([served.name], registry.resident_bytes)
            policy.add_metric([served.name], registry.policy_version)
            requests.add_metric([served.name, "base", "0"], registry.base_requests)
            tokens.add_metric([served.name, "base", "0"], registry.base_tokens)
            for version in [version for entry in registry for version in registry.versions(entry.name)]:
                which = [served.name, version.name, str(version.number)]
                requests.add_metric(which, version.requests)
                tokens.add_metric(which, version.tokens)
        yield from (swaps, held, policy, requests, tokens)

    def _histogram(self, full_name: str, name: str, text: str) -> Metric:
        family = HistogramMetricFamily(full_name, text, labels=["model"])
        for served in self._table:
            histogram: Histogram = getattr(served.engine.metrics, name)
            family.add_metric([served.name], _buckets(histogram), histogram.total)
        return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*map(str, LATENCY_BUCKETS), "+Inf"], histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


class TrainingCollector(Collector):
    """How training goes; each adapter that learns is a label."""

    def __init__(self, training: TrainingManager) -> None:
        self._training = training

    def collect(self) -> Iterator[Metric]:
        # A server that does not train has them too, at zero: who draws a graph should not have to wait for an event.
        sessions: dict[str, Session | None] = {**self._training.sessions} or {"": None}
        gauges: tuple[tuple[str, str, Callable[[Session], float]], ...] = (
            ("rl_training_loss", "Loss of the last update", lambda one: one.totals.metrics.get("loss", 0.0)),
            (
                "rl_reward_mean",
                "Mean reward of the last update",
                lambda one: one.totals.metrics.get("reward_mean", 0.0),
            ),
            ("rl_kl", "KL divergence to the model when last measured, nats a token", lambda one: one.totals.kl or 0.0),
            ("rl_updates_per_second", "Updates published a second", lambda one: one.totals.updates_per_second),
            ("rl_trajectories_buffered", "Trajectories that wait", lambda one: len(one.buffer)),
        )
        for name, text, read in gauges:
            family: Any = GaugeMetricFamily(PREFIX + name, text, labels=["adapter"])
            for label, session in sessions.items():
                family.add_metric([label], read(session) if session is not None else 0.0)
            yield family
        counters: tuple[tuple[str, str, Callable[[Session], float]], ...] = (
            ("rl_trajectories_collected", "Trajectories", lambda one: one.buffer.counts.collected),
            ("rl_trajectories_used", "Trajectories that updates learnt from", lambda one: one.totals.used),
            ("rl_trajectories_flat", "Trajectories of groups without a difference", lambda one: one.buffer.counts.flat),
            ("rl_trajectories_stale", "Trajectories that were too old", lambda one: one.buffer.counts.stale),
            ("rl_trajectories_dropped", "Trajectories that had to make room", lambda one: one.buffer.counts.dropped),
            ("rl_updates", "Updates published", lambda one: one.totals.updates),
            ("rl_updates_refused", "Updates that were not published", lambda one: one.totals.refused),
            ("rl_rollbacks", "Returns to the last good version", lambda one: one.totals.rollbacks),
            ("checkpoint_saves", "Checkpoints written", lambda one: one.checkpoints.saves if one.checkpoints else 0),
        )
        for name, text, count in counters:
            counter: Any = CounterMetricFamily(PREFIX + name, text, labels=["adapter"])
            for label, session in sessions.items():
                counter.add_metric([label], count(session) if session is not None else 0.0)
            yield counter
        background = self._training.engine.metrics.background
        yield CounterMetricFamily(f"{PREFIX}training_seconds", "Of the engine's, for training", background.seconds)
        yield GaugeMetricFamily(
            f"{PREFIX}training_longest_stall_seconds", "The longest that rows waited", background.longest_stall
        )


class Operations:
    def __init__(
        self, table: ModelTable, config: ServeConfig, state: ServerState, training: TrainingManager | None = None
    ) -> None:
        self._table = table
        self._config = config
        self._state = state
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(table))
        if training is not None:
            self._registry.register(TrainingCollector(training))

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Operations"])
        for path, endpoint, answer, summary in (
            ("/health", self.health, answers.Health, "Whether the engine is alive"),
            ("/metrics", self.metrics, answers.MetricsSummary, "Prometheus metrics"),
            ("/debug/metrics", self.debug_metrics, answers.DebugMetrics, "The engine's counters"),
        ):
            responses = answers.responses(answer)
            if path == "/health":
                router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False, response_model=None)
            if path == "/metrics":
                responses[200]["content"] = {"text/plain": {"example": "mlx_parallm_queue_depth 0.0"}}
            router.add_api_route(
                path, endpoint, methods=["GET"], summary=summary, response_model=None, responses=responses
            )
        for path in ("/flush_cache", "/reset_prefix_cache"):
            router.add_api_route(
                path,
                self.flush_cache,
                methods=["POST"],
                summary="Forget cached prompts",
                response_model=None,
                responses=answers.responses(answers.Flushed),
            )
        return router

    async def health(self) -> Response:
        """200 while requests are served; 503 once the engine has died or the server shuts down, with the reason."""
        if dead := [served for served in self._table if served.engine.failure is not None]:
            reason = f"{dead[0].name}: {dead[0].engine.failure}"
            return JSONResponse({"status": "unhealthy", "model_loaded": False, "reason": reason}, 503)
        if self._state.draining:
            body = {"status": "draining", "model_loaded": True, "reason": "the server is shutting down"}
            return JSONResponse(body, 503)
        return JSONResponse({"status": "healthy", "model_loaded": True})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, or with `Accept: application/json` a summary."""
        if "application/json" not in request.headers.get("accept", ""):
            return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)
        summary = {
            "current_policy_version": self._table.default.engine.adapters.policy_version,
            "queue_depth": sum(served.engine.metrics.queue_depth for served in self._table),
            "max_batch_size": self._config.max_batch_size,
            "flush_interval_ms": 1000 * self._config.batch_timeout,
        }
        return JSONResponse(summary)

    async def flush_cache(self) -> Response:
        """Forgets every cached block that no running request is using, and checks that the books balance."""
        flushed, balanced = 0, True
        for served in self._table:
            flushed += await asyncio.to_thread(served.engine.flush_cache)
            try:
                await asyncio.to_thread(served.engine.check_integrity)
            except AssertionError as error:
                log.error("the books of %s do not balance: %s", served.name, error)
                balanced = False
        return JSONResponse({"success": balanced, "flushed_blocks": flushed})

    async def debug_metrics(self) -> Response:
        """Counters since the start; those of the first model, and of each when there are several."""
        answer = debug_summary(self._table.default.engine.metrics)
        models = {served.name: debug_summary(served.engine.metrics) for served in self._table}
        return JSONResponse(answer | ({"models": models} if len(models) > 1 else {}))


def debug_summary(metrics: EngineMetrics) -> dict[str, Any]:
    plain = {item.name: getattr(metrics, item.name) for item in fields(metrics)}
    for name in ("prompt_rate", "decode_rate", "queue_depth", "rows_decoded", "batch_fill_sum", *HISTOGRAMS):
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
