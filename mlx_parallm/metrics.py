"""Every number that is measured: its name, kind, meaning, and what several processes' numbers are together.

The engine thread and other owners write these dataclasses, the server reads them: plain numbers, no locks, no MLX. Each
number has one writer; a reader may see a step half counted, never a torn value. Prometheus text, `/debug/metrics`, the
dashboard and the front of replicas read the declarations (`metrics_of`, `JOINS`).
"""

from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any, Literal

PREFIX = "mlx_parallm_"  # of all names in Prometheus
Kind = Literal["counter", "gauge", "histogram"]
Join = Literal["sum", "max", "mean"]


@dataclass(frozen=True, slots=True)
class Declared:
    """One number. `name` is Prometheus's, without `PREFIX` and without a counter's `_total`."""

    name: str
    kind: Kind
    help: str
    join: Join = "sum"  # of several replicas
    shared: bool = False  # it is the whole process's: all its models show the same


def _metric(kind: Kind, help: str, factory: Any, name: str, join: Join, shared: bool) -> Any:
    metadata = {"kind": kind, "help": help, "name": name, "join": join, "shared": shared}
    return field(default_factory=factory, metadata={"metric": metadata})


def counter(help: str, *, name: str = "", join: Join = "sum", seconds: bool = False) -> Any:
    """A field that only grows. `name`: in Prometheus, where the field's own, with its class's prefix, is another."""
    return _metric("counter", help, float if seconds else int, name, join, False)


def gauge(help: str, *, name: str = "", join: Join = "sum", shared: bool = False, whole: bool = True) -> Any:
    """A field that comes and goes."""
    return _metric("gauge", help, int if whole else float, name, join, shared)


def histogram(help: str, *, name: str = "") -> Any:
    return _metric("histogram", help, Histogram, name, "sum", False)


def metrics_of(kind: type, prefix: str = "") -> dict[str, Declared]:
    """Returns what the fields of a class declare, by the field's name."""
    found = {}
    for one in fields(kind):
        if (said := one.metadata.get("metric")) is not None:
            found[one.name] = Declared(**{**said, "name": said["name"] or prefix + one.name})
    return found


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a model's part of the process may hold, in bytes; `limit` and `kept` are the whole process's."""

    limit: int = gauge("All together", shared=True)
    weights: int = gauge("Weights")
    rows: int = gauge("Keys and values of running rows")
    blocks: int = gauge("Cached blocks")
    adapters: int = gauge("Adapters on the device")
    training: int = gauge("Parameters, optimiser and the activations of a piece of an update")
    kept: int = gauge("Freed memory that MLX keeps for what comes next", shared=True)


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

    files: int = gauge("Files in the SSD cache, of all models", shared=True)
    bytes: int = gauge("Bytes of them", shared=True)
    reads: int = counter("Files read")
    read_bytes: int = counter("Bytes read")
    read_rate: int = gauge("Bytes a second at which files are read", join="max")
    misses: int = counter("Files that were gone when they were wanted")
    writes: int = counter("Files written")
    written_bytes: int = counter("Bytes written")
    dropped: int = counter("Blocks not written, because too much waited or the disk gave errors")
    damaged: int = counter("Files found damaged, and removed")
    pruned: int = counter("Files removed for their age or for lack of room")
    errors: int = counter("Errors that the disk gave")


@dataclass(slots=True)
class PrefixMetrics:
    """The prefix cache."""

    lookups: int = counter("Prompts looked up in the prefix cache")
    hits: int = counter("Prompts whose prefix was found")
    hit_tokens: int = counter("Prompt tokens found")
    evictions: int = counter("Blocks that made room for others")
    blocks_total: int = gauge("Blocks that the prefix cache can hold")
    blocks_cached: int = gauge("Blocks that it holds")
    blocks_referenced: int = gauge("Blocks in use right now")
    bytes: int = gauge("Bytes that it holds in memory")
    snapshots: int = gauge("Snapshots that it holds, for models whose state can't be cut into blocks")


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
        """Returns mean, percentiles and maximum of the last thousand values, and the count of all."""
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

    requests: int = counter("Requests to models that predict")
    inputs: int = counter("Inputs that were computed")
    batches: int = counter("Batches that they were computed in")
    failures: int = counter("Inputs that could not be computed")
    seconds: float = counter("Seconds of the engine's, for predictions", seconds=True)
    waiting: int = gauge("Requests that wait or run", name="predict_queue_depth")


@dataclass(slots=True)
class TrainingMetrics:
    """How the training of one adapter goes: of the last update, and counted since the start."""

    loss: float = gauge("Loss of the last update", name="rl_training_loss", join="max", whole=False)
    reward_mean: float = gauge("Mean reward of the last update", join="max", whole=False)
    kl: float = gauge("KL divergence to the model when last measured, nats a token", join="max", whole=False)
    updates_per_second: float = gauge("Updates published a second", join="max", whole=False)
    buffered: int = gauge("Trajectories that wait", name="rl_trajectories_buffered")
    collected: int = counter("Trajectories", name="rl_trajectories_collected")
    used: int = counter("Trajectories that updates learnt from", name="rl_trajectories_used")
    flat: int = counter("Trajectories of groups without a difference", name="rl_trajectories_flat")
    stale: int = counter("Trajectories that were too old", name="rl_trajectories_stale")
    dropped: int = counter("Trajectories that had to make room", name="rl_trajectories_dropped")
    updates: int = counter("Updates published")
    refused: int = counter("Updates that were not published", name="rl_updates_refused")
    rollbacks: int = counter("Returns to the last good version")
    checkpoint_saves: int = counter("Checkpoints written", name="checkpoint_saves")


@dataclass(slots=True)
class BackgroundMetrics:
    """Work that shares the engine's time with generating: training, or models that predict."""

    steps: int = 0
    seconds: float = counter("Of the engine's, for training", name="training_seconds", seconds=True)
    contended_seconds: float = 0.0  # of them, while there was somebody to serve
    serving_seconds: float = 0.0  # of serving, while there was such work to do
    longest_stall: float = gauge(
        "The longest that rows waited", name="training_longest_stall_seconds", join="max", whole=False
    )

    @property
    def serving_share(self) -> float:
        total = self.contended_seconds + self.serving_seconds
        return self.serving_seconds / total if total else 1.0


@dataclass(slots=True)
class StepMetrics:
    """Steps of one kind, and how the host spends their time: handing them to the device, and waiting for it."""

    count: int = 0
    start_seconds: float = counter("Of the host's, to start steps", name="step_start_seconds", seconds=True)
    wait_seconds: float = counter("Of the host's, waiting for steps", name="step_wait_seconds", seconds=True)


@dataclass(slots=True)
class EngineMetrics:
    queue_depth: int = gauge("Requests that wait to begin")
    running: int = gauge("Rows that are being decoded or prefilled")
    slots_total: int = gauge("Rows that can run together")
    slots_free: int = gauge("Rows that are free")
    kv_bytes: int = gauge("Bytes of live keys and values")
    kv_bytes_limit: int = gauge("Most bytes of live keys and values")
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    tuning: dict[str, Any] = field(default_factory=dict)  # what was measured at the start, and where it is from
    active_memory: int = gauge("Bytes that MLX holds", shared=True)
    peak_memory: int = gauge("Most bytes that MLX has held", shared=True)
    serving_peak_memory: int = gauge("Most bytes that MLX has held between pieces of updates", shared=True)
    spare_memory: int = gauge("Bytes that MLX keeps for what comes next", shared=True)
    steps: int = counter("Steps of the engine")
    batches_processed: int = counter("Decode steps")
    stream_batches_processed: int = counter("Decode steps with a streaming row")
    rows_decoded: int = counter("Rows summed over decode steps")
    prompt_tokens: int = counter("Prompt tokens computed")
    generated_tokens: int = counter("Tokens generated")
    cached_tokens: int = counter("Prompt tokens found in the cache")
    drafted_tokens: int = counter("Tokens drafted by speculation")
    accepted_tokens: int = counter("Drafted tokens that were accepted")
    requests_finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    requests_rejected: int = counter("Requests turned away by a full queue")
    preemptions: int = counter("Rows that lost their place for lack of memory")
    faults: int = counter("Device faults after which all running rows were computed again")
    deduplicated: int = counter("Requests that shared another's computation")
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
    time_to_first_token: Histogram = histogram(
        "Seconds from arrival to the first token", name="time_to_first_token_seconds"
    )
    step_seconds: Histogram = histogram("Seconds per step")
    request_seconds: Histogram = histogram("Seconds from arrival to the end")
    adapter_seconds: Histogram = histogram(
        "Seconds of the engine's for each adapter published, brought in, or put beside others"
    )

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


# Numbers that are counted by other owners than these classes, as adapters' registry and the pool of models.
REQUESTS_FINISHED = Declared("requests_finished", "counter", "Choices that have ended, by how")
LORA_SWAPS = Declared("lora_swaps", "counter", "Adapters copied to the device")
LORA_RESIDENT_BYTES = Declared("lora_resident_bytes", "gauge", "Bytes of adapters on the device")
POLICY_VERSION = Declared("policy_version", "gauge", "The current policy's version", "max")
ADAPTER_REQUESTS = Declared("adapter_requests", "counter", "Requests, by adapter version")
ADAPTER_TOKENS = Declared("adapter_tokens", "counter", "Tokens, by the adapter version that made them")
MODEL_LOADED = Declared("model_loaded", "gauge", "Whether a model is in memory")
MODEL_BYTES = Declared("model_bytes", "gauge", "Bytes of a loaded model's weights")
MODEL_LOADS = Declared("model_loads", "counter", "How often a model was loaded")
SERVER = Declared("server", "gauge", "The server", "max")
COLLECTED = Declared("rl_trajectories_collected", "gauge", "Trajectories since the start")  # as a gauge, too
