"""Load on any OpenAI-compatible URL, as a library: `run_load(spec) -> LoadResult`.

`parallm bench` (bench_cli) and the scripts of benchmarks/ call it. Prompts are random common words, the same
for the same seed and distinct within a run, so that no prefix cache helps unless `shared_prefix_words` asks for it.
Times of a stream are those of its text events as they arrive; token counts come from the server's `usage`.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import orjson

from mlx_parallm.common_words import WORDS
from mlx_parallm.errors import ConfigError, UnavailableError
from mlx_parallm.http_client import Endpoint, HttpResponse, WireError, send, tls_context

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """One load. With `rate` infinite each client sends its next request when the last has ended (closed loop);
    otherwise requests arrive at that many a second, Poisson, and at most `concurrency` are open at once."""

    url: str
    model: str = ""  # empty: the first that the server lists
    endpoint: Literal["chat", "completions"] = "chat"
    concurrency: int = 8
    requests: int | None = None
    duration: float | None = None  # seconds during which requests start; instead of `requests`
    prompt_words: Span = (32, 128)
    output_tokens: Span = (16, 48)
    stream_share: float = 0.5
    rate: float = math.inf
    seed: int = 0
    salt: str = ""  # another one: other words, but the same lengths and arrivals
    temperature: float = 0.0
    warmup: int = 0  # requests sent before, and not counted
    ignore_eos: bool = False
    shared_prefix_words: int = 0
    api_key: str | None = None
    ca: str | None = None  # PEM file of certificates to trust; None: the system's
    insecure: bool = False  # the server's certificate is not checked
    timeout: float = 600.0

    @property
    def server(self) -> Endpoint:
        return Endpoint.parse(self.url, self.api_key, tls_context(self.ca, self.insecure))

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError("concurrency must be at least 1")
        if (self.requests is None) == (self.duration is None):
            raise ConfigError("give either a number of requests or a duration")
        if (self.requests is not None and self.requests < 1) or (self.duration is not None and not self.duration > 0):
            raise ConfigError("the number of requests, or the duration, must be positive")
        for name in ("prompt_words", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ConfigError(f"{name} must be a range from at least 1, not {low}-{high}")
        if not 0 <= self.stream_share <= 1:
            raise ConfigError("stream_share must lie between 0 and 1")
        if not self.rate > 0:
            raise ConfigError("rate must be positive")


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request. Times are seconds from its start, which is its arrival when a rate is given."""

    streamed: bool
    started: float
    first: float | None = None  # until the first text; only streams tell
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between text events of a stream
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False  # the server said how many tokens; else text events are counted
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None  # its kind; None when the request ended right


@dataclass(slots=True)
class LoadResult:
    spec: LoadSpec
    records: list[RequestRecord]
    seconds: float  # from the first request's start to the last one's end
    client_cpu: float  # CPU seconds that this process spent meanwhile

    @property
    def finished(self) -> list[RequestRecord]:
        return [record for record in self.records if record.error is None]

    def summary(self) -> "BenchSummary":
        done = self.finished
        return BenchSummary(
            concurrency=self.spec.concurrency,
            requests=len(self.records),
            seconds=self.seconds,
            prompt_tokens=sum(record.prompt_tokens for record in done),
            output_tokens=sum(record.output_tokens for record in done),
            requests_finished=len(done),
            streams=sum(record.first is not None for record in done),
            ttft=Percentiles.of([record.first for record in done if record.first is not None]),
            itl=Percentiles.of([gap for record in done for gap in record.gaps]),
            latency=Percentiles.of([record.total for record in done]),
            errors=dict(Counter(record.error for record in self.records if record.error)),
            estimated=sum(not record.counted for record in done),
            client_cpu=self.client_cpu,
        )


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of times in seconds; all zero when nothing was measured."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    mean: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        if not values:
            return cls()
        ordered = sorted(values)
        p50, p95, p99 = (percentile(ordered, share) for share in (0.50, 0.95, 0.99))
        return cls(p50, p95, p99, ordered[-1], sum(ordered) / len(ordered), len(ordered))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest values of an ascending sequence."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True, slots=True)
class BenchSummary:
    concurrency: int
    requests: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    requests_finished: int
    streams: int
    ttft: Percentiles
    itl: Percentiles
    latency: Percentiles
    errors: dict[str, int]
    estimated: int  # requests whose tokens were counted by events, for want of `usage`
    client_cpu: float

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    @property
    def request_rate(self) -> float:
        return self.requests_finished / self.seconds


def make_prompt(spec: LoadSpec, index: int) -> str:
    """The prompt of request `index`: the same for the same seed, whatever else the spec says."""
    shared = random.Random(f"{spec.seed} shared").choices(WORDS, k=spec.shared_prefix_words)
    length = random.Random(f"{spec.seed} {index} prompt").randint(*spec.prompt_words)
    return " ".join(shared + random.Random(f"{spec.seed} {index} {spec.salt}").choices(WORDS, k=length))


def make_body(spec: LoadSpec, index: int) -> dict[str, Any]:
    """The JSON body of request `index`. Streams are spread evenly: each stretch of requests holds its share."""
    stream = math.floor((index + 1) * spec.stream_share) > math.floor(index * spec.stream_share)
    length = random.Random(f"{spec.seed} {index} output").randint(*spec.output_tokens)
    body: dict[str, Any] = {
        "model": spec.model,
        "max_tokens": length,
        "temperature": spec.temperature,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    if spec.ignore_eos:
        body["ignore_eos"] = True
    prompt = make_prompt(spec, index)
    if spec.endpoint == "chat":
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": prompt}


class _Watch:
    """Listens to one stream's events and writes their times into its record."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.last = 0.0
        self.pieces: list[str] = []
        self.ended = False

    def __call__(self, event: bytes) -> None:
        now = time.perf_counter()
        if event == b"[DONE]":
            self.ended = True
            return
        chunk = orjson.loads(event)
        if usage := chunk.get("usage"):
            _count_tokens(self.record, usage)
        if "error" in chunk:
            self.record.error = f"in stream: {_error_name(chunk)}"
        for choice in chunk.get("choices") or ():
            self.record.finish_reason = choice.get("finish_reason") or self.record.finish_reason
            if text := _chunk_text(choice):
                self._mark(now, text)

    def _mark(self, now: float, text: str) -> None:
        record = self.record
        if record.first is None:
            record.first = now - record.started
        else:
            record.gaps.append(now - self.last)
        self.last = now
        self.pieces.append(text)

    def close(self) -> None:
        self.record.text = "".join(self.pieces)
        if not self.ended and self.record.error is None:
            self.record.error = "stream without [DONE]"
        if not self.record.counted:
            self.record.output_tokens = len(self.pieces)


def _chunk_text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return text or ("".join(str(call) for call in delta.get("tool_calls") or ()))


def _count_tokens(record: RequestRecord, usage: dict[str, Any]) -> None:
    record.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    record.output_tokens = int(usage.get("completion_tokens") or 0)
    record.counted = True


def _error_name(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or error.get("message") or "error")
    return str(error or "error")[:80]


async def ask(
    endpoint: Endpoint, path: str, body: dict[str, Any], *, limit: float = 600.0, started: float | None = None
) -> RequestRecord:
    """Sends one request and waits for its end; failures are told in the record, not raised."""
    record = RequestRecord(bool(body.get("stream")), time.perf_counter() if started is None else started)
    watch = _Watch(record)
    try:
        response = await send(
            endpoint, path, orjson.dumps(body), on_event=watch if record.streamed else None, limit=limit
        )
        _read_response(record, watch, response)
    except WireError as error:
        record.error = error.kind
    record.total = time.perf_counter() - record.started
    return record


def _read_response(record: RequestRecord, watch: _Watch, response: HttpResponse) -> None:
    if response.status != 200:
        record.error = f"HTTP {response.status}: {_error_name(_json(response.body))}"
    elif record.streamed:
        watch.close()
    else:
        body = _json(response.body)
        choice = body["choices"][0] if isinstance(body, dict) and body.get("choices") else None
        if choice is None:
            record.error = "answer without choices"
            return
        if usage := body.get("usage"):
            _count_tokens(record, usage)
        record.finish_reason = choice.get("finish_reason")
        record.text = choice.get("text") or (choice.get("message") or {}).get("content") or ""


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


async def first_model(endpoint: Endpoint) -> str:
    """The first model that the server lists; raises when nothing answers."""
    try:
        response = await send(endpoint, "/v1/models", limit=30)
    except WireError as error:
        raise UnavailableError(f"no server answers at {endpoint.url} ({error})") from None
    body = _json(response.body)
    if response.status != 200 or not isinstance(body, dict):
        raise UnavailableError(f"{endpoint.url}/v1/models answered {response.status}: {_error_name(body)}")
    models = body.get("data") or []
    return str(models[0]["id"]) if models else "default"


def _arrivals(spec: LoadSpec) -> Iterator[float]:
    """Seconds after the start at which each request arrives; with an infinite rate, at once."""
    rng = random.Random(f"{spec.seed} arrivals")
    now = 0.0
    while True:
        yield now
        if math.isfinite(spec.rate):
            now += rng.expovariate(spec.rate)


async def _offer(spec: LoadSpec, first: int, on_done: Callable[[RequestRecord], None]) -> list[RequestRecord]:
    """Clients that take requests in turn until there are no more; `first` is the first request's number."""
    endpoint = spec.server
    path = "/v1/chat/completions" if spec.endpoint == "chat" else "/v1/completions"
    begin = time.perf_counter()
    work = zip(count(), _arrivals(spec), strict=False)
    records: list[RequestRecord] = []

    async def client() -> None:
        for number, arrival in work:
            if spec.requests is not None and number >= spec.requests:
                return
            if spec.duration is not None and max(arrival, time.perf_counter() - begin) >= spec.duration:
                return
            due = begin + arrival
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            started = due if math.isfinite(spec.rate) else None
            record = await ask(endpoint, path, make_body(spec, first + number), limit=spec.timeout, started=started)
            records.append(record)
            on_done(record)

    await asyncio.gather(*(client() for _ in range(spec.concurrency)))
    return records


async def load(spec: LoadSpec, on_done: Callable[[RequestRecord], None] = lambda record: None) -> LoadResult:
    """Warms up, then offers the load; `on_done` hears of each measured request's end."""
    if not spec.model:
        spec = replace(spec, model=await first_model(spec.server))
    if spec.warmup:
        warm = replace(spec, requests=spec.warmup, duration=None, rate=math.inf)
        await _offer(warm, 1_000_000_000, lambda record: None)  # numbers that the measured requests do not have
    cpu = time.process_time()
    begin = time.perf_counter()
    records = await _offer(spec, 0, on_done)
    return LoadResult(spec, records, time.perf_counter() - begin, time.process_time() - cpu)


def run_load(spec: LoadSpec, on_done: Callable[[RequestRecord], None] = lambda record: None) -> LoadResult:
    return asyncio.run(load(spec, on_done))
