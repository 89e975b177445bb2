"""Operations: `/health`, `/metrics` and `/debug/metrics`, read from the engines' counters; `/flush_cache`."""

import asyncio
import logging
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from mlx_parallm.errors import NotFoundError
from mlx_parallm.metrics import EngineMetrics
from mlx_parallm.server.api.ops.metrics import EngineCollector, PoolCollector, TrainingCollector, debug_summary
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import router_of
from mlx_parallm.server.http.schema import response_body

log = logging.getLogger(__name__)


@response_body
class Health(TypedDict):
    status: Literal["healthy", "draining", "unhealthy"]
    model_loaded: bool
    reason: NotRequired[str]


@response_body
class MetricsSummary(TypedDict):
    """What /metrics answers to `Accept: application/json`."""

    current_policy_version: int
    queue_depth: int
    max_batch_size: int
    flush_interval_ms: float


@response_body
class DebugMetrics(TypedDict):
    tuning: Annotated[dict[str, Any], Field(description="What was measured on this machine, as in /server_info")]
    batches_processed: int
    avg_batch_fill_pct: float
    batch_fill_hist: Annotated[list[int], Field(description="Decode steps by how full the batch was, in tenths")]
    queue_depth_last: int
    stream_batches_processed: int
    prompt_tps_last: float
    prompt_tps_avg: float
    decode_tps_last: float
    decode_tps_avg: float
    running: int
    slots_total: int
    slots_free: int
    kv_bytes: int
    kv_bytes_limit: int
    memory: Annotated[
        dict[str, int], Field(description="The budget in bytes: the process's limit, and what each part may hold")
    ]
    active_memory: int
    peak_memory: int
    serving_peak_memory: Annotated[int, Field(description="The same without the pieces of updates")]
    spare_memory: Annotated[int, Field(description="Bytes that MLX keeps for what comes next")]
    steps: int
    decode: Annotated[
        dict[str, float], Field(description="Its steps, seconds to start them, and seconds waited for them")
    ]
    prefill: Annotated[dict[str, float], Field(description="The same for prompts")]
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    drafted_tokens: Annotated[int, Field(description="Tokens drafted by speculation")]
    accepted_tokens: Annotated[int, Field(description="Drafted tokens that were accepted")]
    requests_finished: dict[str, int]
    requests_rejected: int
    preemptions: int
    faults: Annotated[int, Field(description="Device faults after which all running rows were computed again")]
    deduplicated: int
    adapter_seconds: Annotated[
        dict[str, float],
        Field(description="Of the engine's time, for each adapter published, brought in or put beside others"),
    ]
    prefix: Annotated[
        dict[str, int], Field(description="The prefix cache: lookups, hits, hit_tokens, evictions, blocks, bytes")
    ]
    background: Annotated[
        dict[str, float], Field(description="Training: its steps and seconds, and the longest wait for it")
    ]
    predictions: Annotated[dict[str, float], Field(description="The same for models that predict")]
    ssd: Annotated[
        dict[str, int], Field(description="Its tier on SSD: files, bytes, reads, writes, dropped, damaged, pruned")
    ]
    models: NotRequired[
        Annotated[dict[str, "DebugMetrics"] | None, Field(description="Each model's own, when several are served")]
    ]


@response_body
class Flushed(TypedDict):
    success: Annotated[bool, Field(description="Whether the engine's books balance")]
    flushed_blocks: int


class Operations:
    def __init__(self, context: ServerContext) -> None:
        self._models = context.models
        self._config = context.config
        self._state = context.state
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(context.models))
        self._registry.register(PoolCollector(context.runtime))
        self._registry.register(TrainingCollector(context.runtime.training, context.models))

    async def health(self) -> Response:
        """200 while requests are served; 503 once the engine has died or the server shuts down, with the reason."""
        if dead := [served for served in self._models if served.client.failure is not None]:
            reason = f"{dead[0].name}: {dead[0].client.failure}"
            return JSONResponse(Health(status="unhealthy", model_loaded=False, reason=reason), 503)
        if self._state.draining:
            reason = "the server is shutting down"
            return JSONResponse(Health(status="draining", model_loaded=True, reason=reason), 503)
        return JSONResponse(Health(status="healthy", model_loaded=True))

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, or with `Accept: application/json` a summary."""
        if "application/json" not in request.headers.get("accept", ""):
            return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)
        summary = MetricsSummary(
            current_policy_version=next((one.adapters.served_version for one in self._models), 0),
            queue_depth=sum(served.client.metrics.queue_depth for served in self._models),
            max_batch_size=self._config.batch.max_batch_size,
            flush_interval_ms=1000 * self._config.batch.batch_timeout,
        )
        return JSONResponse(summary)

    async def cluster(self) -> Response:
        """A server alone has none to join."""
        raise NotFoundError("this server does not share its model: --share-model has it do so")

    async def flush_cache(self) -> Response:
        """Forgets every cached block that no running request is using, and checks that the books balance."""
        flushed = 0
        balanced = True
        for served in self._models:
            flushed += await asyncio.to_thread(served.client.flush_cache)
            try:
                await asyncio.to_thread(served.client.check_integrity)
            except AssertionError as error:
                log.error("the books of %s do not balance: %s", served.name, error)
                balanced = False
        return JSONResponse(Flushed(success=balanced, flushed_blocks=flushed))

    async def debug_metrics(self) -> Response:
        """Counters since the start; those of the first model, and of each when there are several."""
        answer = debug_summary(next((served.client.metrics for served in self._models), EngineMetrics()))
        models = {served.name: debug_summary(served.client.metrics) for served in self._models}
        if len(models) > 1:
            answer["models"] = models
        return JSONResponse(answer)


CLUSTER_PATH = "/debug/cluster"  # the front of replicas answers it, where --share-model says so
ROUTES = (
    Route("/health", "HEAD", Operations.health, role=None, probe=True, replicas="health"),
    Route(
        "/health",
        "GET",
        Operations.health,
        Health,
        "Whether the engine is alive",
        role=None,
        probe=True,
        replicas="health",
    ),
    Route(
        "/metrics",
        "GET",
        Operations.metrics,
        MetricsSummary,
        "Prometheus metrics",
        role=None,  # for scrapers, as vLLM leaves it
        probe=True,
        replicas="metrics",
        content={"text/plain": {"example": "mlx_parallm_queue_depth 0.0"}},
    ),
    Route(
        "/debug/metrics",
        "GET",
        Operations.debug_metrics,
        DebugMetrics,
        "The engine's counters",
        role="admin",
        replicas="whole_and_parts",
    ),
    Route("/flush_cache", "POST", Operations.flush_cache, Flushed, "Forget cached prompts", role="trainer"),
    Route("/reset_prefix_cache", "POST", Operations.flush_cache, Flushed, "Forget cached prompts", role="trainer"),
    Route(CLUSTER_PATH, "GET", Operations.cluster, role="admin", replicas="join"),
)


def router(context: ServerContext) -> APIRouter:
    return router_of("Operations", ROUTES, Operations(context), route_class=APIRoute)
