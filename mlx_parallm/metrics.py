"""Counters that the engine thread writes and the server reads: plain numbers, no locks, no MLX.

Each number has one writer (the engine thread); a reader may see a step half counted, never a torn value.
`server.ops` turns them into Prometheus text and the JSON summaries.
"""

from collections import deque
from dataclasses import dataclass, field

from mlx_parallm.types import MemoryPlan


@dataclass(slots=True)
class Rate:
    """Work over time: the last step's rate and the average over all."""

    amount: int = 0
    seconds: float = 0.0
    last: float = 0.0

    def add(self, amount: int, seconds: float) -> None:
        if amount and seconds > 0:
            self.amount += amount
            self.seconds += seconds
            self.last = amount / seconds

    @property
    def average(self) -> float:
        return self.amount / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class DiskMetrics:
    """The prefix cache's tier on SSD. Its own thread writes most of these."""

    files: int = 0
    bytes: int = 0  # of all models in the folder
    reads: int = 0
    read_bytes: int = 0
    read_rate: int = 0  # bytes a second
    misses: int = 0  # files that were known, and gone when they were wanted
    writes: int = 0
    written_bytes: int = 0
    dropped: int = 0  # not written: too much waited, or the disk gave errors
    damaged: int = 0
    pruned: int = 0
    errors: int = 0


@dataclass(slots=True)
class PrefixMetrics:
    """The prefix cache."""

    lookups: int = 0
    hits: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    blocks_total: int = 0
    blocks_cached: int = 0
    blocks_referenced: int = 0
    bytes: int = 0
    snapshots: int = 0


LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class Histogram:
    """Cumulative-bucket histogram over `LATENCY_BUCKETS`, in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS) + 1))
    total: float = 0.0
    count: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=1000))

    def observe(self, seconds: float) -> None:
        index = next((i for i, bound in enumerate(LATENCY_BUCKETS) if seconds <= bound), len(LATENCY_BUCKETS))
        self.counts[index] += 1
        self.total += seconds
        self.count += 1
        self.recent.append(seconds)

    def summary(self) -> dict[str, float]:
        """Of the last thousand."""
        last = sorted(self.recent)
        if not last:
            return {"count": 0, "mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}
        quantiles = {
            name: last[min(len(last) - 1, int(share * len(last)))] for name, share in (("p50", 0.5), ("p99", 0.99))
        }
        return {"count": self.count, "mean": sum(last) / len(last), **quantiles, "max": last[-1]}


@dataclass(slots=True)
class PredictorMetrics:
    """A model that predicts."""

    requests: int = 0
    inputs: int = 0
    batches: int = 0
    failures: int = 0  # inputs that could not be computed
    seconds: float = 0.0  # of its thread's
    waiting: int = 0  # requests that wait or run


@dataclass(slots=True)
class BackgroundMetrics:
    """Work that shares the engine's time with generating: training, or models that predict."""

    steps: int = 0
    seconds: float = 0.0
    contended_seconds: float = 0.0  # of them, while there was somebody to serve
    serving_seconds: float = 0.0  # of serving, while there was such work to do
    longest_stall: float = 0.0  # seconds for which rows waited

    @property
    def serving_share(self) -> float:
        total = self.contended_seconds + self.serving_seconds
        return self.serving_seconds / total if total else 1.0


@dataclass(slots=True)
class StepMetrics:
    """Steps of one kind, and how the host spends their time: handing them to the device, and waiting for it."""

    count: int = 0
    start_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass(slots=True)
class EngineMetrics:
    # gauges
    queue_depth: int = 0
    running: int = 0
    slots_total: int = 0
    slots_free: int = 0
    kv_bytes: int = 0
    kv_bytes_limit: int = 0
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    active_memory: int = 0  # bytes that MLX holds now
    peak_memory: int = 0
    serving_peak_memory: int = 0  # the same without steps of other work
    spare_memory: int = 0  # bytes that MLX keeps for what comes next
    # counters
    steps: int = 0
    batches_processed: int = 0  # decode steps
    stream_batches_processed: int = 0  # decode steps with a streaming row
    rows_decoded: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    requests_finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    requests_rejected: int = 0
    preemptions: int = 0
    faults: int = 0  # after which rows were computed again
    deduplicated: int = 0
    batch_fill_hist: list[int] = field(default_factory=lambda: [0] * 10)
    batch_fill_sum: float = 0.0
    prefix: PrefixMetrics = field(default_factory=PrefixMetrics)
    ssd: DiskMetrics = field(default_factory=DiskMetrics)
    background: BackgroundMetrics = field(default_factory=BackgroundMetrics)
    predictions: BackgroundMetrics = field(default_factory=BackgroundMetrics)
    decode: StepMetrics = field(default_factory=StepMetrics)
    prefill: StepMetrics = field(default_factory=StepMetrics)
    prompt_rate: Rate = field(default_factory=Rate)
    decode_rate: Rate = field(default_factory=Rate)
    time_to_first_token: Histogram = field(default_factory=Histogram)
    step_seconds: Histogram = field(default_factory=Histogram)
    request_seconds: Histogram = field(default_factory=Histogram)
    adapter_seconds: Histogram = field(default_factory=Histogram)  # that adapters coming or changing cost the engine

    def count_decode(self, rows: int, capacity: int, streaming: bool) -> None:
        fill = rows / capacity
        self.batches_processed += 1
        self.stream_batches_processed += streaming
        self.rows_decoded += rows
        self.batch_fill_sum += fill
        self.batch_fill_hist[min(int(fill * 10), 9)] += 1

    def count_finish(self, reason: str) -> None:
        self.requests_finished[reason] = self.requests_finished.get(reason, 0) + 1

    @property
    def avg_batch_fill_pct(self) -> float:
        return 100 * self.batch_fill_sum / self.batches_processed if self.batches_processed else 0.0
