"""What a model does on this machine: the same answers alone and together, and the rates of each kind of work.

All of it through the engine that serves, with few tokens: a minute on a slow CPU. Verdicts are by ratios within one
run, since nobody knows how fast a machine ought to be.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np

from mlx_parallm.doctor.findings import Finding, look
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ParallmError
from mlx_parallm.lora.adapter import Adapter, Part
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.types import Delta, Request

ROWS = (1, 4, 8, 16, 32)
STEPS = 8  # tokens of a measured completion, the first not counted
PROMPT = 24
LONG_PROMPT = 512
EXACT = 1e-4  # how far log-probabilities may differ in float32
ADAPTER = "doctor"


@dataclass(slots=True)
class Measured:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each piece arrived
    cached: int = 0  # tokens of the prompt that were found in the cache


class Probe:
    """Asks an engine of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = itertools.count()
        vocab = engine.model.vocab_size
        random = np.random.default_rng(7)
        high = min(vocab, 20_000)
        self.prompts = [random.integers(3, high, PROMPT + 3 * number).tolist() for number in range(max(ROWS))]
        self.long = random.integers(3, high, LONG_PROMPT).tolist()

    def ask(
        self,
        prompts: Sequence[list[int]],
        *,
        adapter: str | None = None,
        adapters: Sequence[str | None] = (),
        salt: str | None = None,
        midway: Callable[[], None] | None = None,
        **sampling: object,
    ) -> list[Measured]:
        """All at one moment; what comes back, in their order. `adapter` is all prompts', `adapters` are each one's own.
        `salt`: prompts with the same one may find each other's prefixes in the cache. `midway` is called when each has
        some tokens."""
        settings = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": STEPS, **sampling})  # type: ignore[arg-type]
        inbox: SimpleQueue[Delta] = SimpleQueue()
        requests = [
            Request(
                f"doctor-{next(self._ids)}",
                prompt,
                settings,
                stream=True,
                adapter=adapters[number] if adapters else adapter,
                cache_salt=salt or f"doctor {next(self._ids)}",
            )
            for number, prompt in enumerate(prompts)
        ]
        numbers = {request.id: number for number, request in enumerate(requests)}
        completions = [Measured() for _ in prompts]
        open_ = len(prompts)
        self.engine.submit_all(requests, inbox.put)
        while open_:
            delta = inbox.get(timeout=300)
            if delta.error is not None:
                raise delta.error
            number = numbers[delta.request_id]
            completions[number].tokens += delta.tokens
            completions[number].cached += delta.cached_tokens
            completions[number].logprobs += [score.logprob for score in delta.logprobs or []]
            completions[number].times += [time.perf_counter()] * len(delta.tokens)
            open_ -= delta.finish_reason is not None
            if midway is not None and min(len(completion.tokens) for completion in completions) >= STEPS:
                midway()
                midway = None
        return completions

    def decode_rate(self, rows: int, **options: object) -> float:
        """Tokens a second of so many rows, once all of them run."""
        completions = self.ask(self.prompts[:rows], **options)  # type: ignore[arg-type]
        begun = max(completion.times[0] for completion in completions)
        ended = max(completion.times[-1] for completion in completions)
        counted = sum(time > begun for completion in completions for time in completion.times)
        return counted / max(ended - begun, 1e-9)

    def examine(self) -> Iterator[Finding]:
        self.ask(self.prompts[:2])  # the first time takes longer
        yield look("parity", self.parity)
        rates: dict[int, float] = {}
        yield look("decode", lambda: self._decode(rates))
        yield look("prefill", self._prefill)
        yield look("sampler", self._sampler)
        yield look("adapters", self._adapters)
        yield look("joins", self._joins)

    def parity(self) -> Finding:
        """Batched completions equal those of each prompt alone."""
        prompts = [self.prompts[0], self.prompts[5], self.long[:80], self.prompts[2]]
        together = self.ask(prompts, logprobs=0)
        alone = [self.ask([prompt], logprobs=0)[0] for prompt in prompts]
        same = sum(one.tokens == other.tokens for one, other in zip(together, alone, strict=True))
        gaps = [
            abs(a - b)
            for one, other in zip(together, alone, strict=True)
            for a, b, s, t in zip(one.logprobs, other.logprobs, one.tokens, other.tokens, strict=True)
            if s == t
        ]
        largest = max(gaps, default=0.0)
        precision = self.engine.model.precision
        found = f"{same} of {len(prompts)} completions are the same together as alone, "
        found += f"log-probabilities within {largest:.1e} in {precision}"
        numbers = {"same": same, "of": len(prompts), "largest_gap": largest, "precision": precision}
        wrong = precision == "float32" and (same < len(prompts) or largest > EXACT)
        wrong |= same < len(prompts) // 2 or largest > 1.0
        remedy = "report this: batches give wrong tokens here"
        return Finding("parity", found, "wrong" if wrong else "ok", remedy, numbers)

    def _decode(self, rates: dict[int, float]) -> Finding:
        for rows in ROWS:
            rates[rows] = max(self.decode_rate(rows) for _ in range(2))
        found = ", ".join(f"{rate:,.0f} tok/s at {rows}" for rows, rate in rates.items()) + " rows"
        slow = rates[max(ROWS)] < 2 * rates[1]
        remedy = "batching hardly pays here: see BLAS and kernels above; on a GPU, avoid quantised weights on CUDA"
        numbers = {str(rows): rate for rows, rate in rates.items()}
        return Finding("decode", found, "slow" if slow else "ok", remedy, numbers)

    def _prefill(self) -> Finding:
        seconds = []
        for _ in range(2):
            begun = time.perf_counter()
            (completion,) = self.ask([self.long], max_tokens=1)
            seconds.append(completion.times[0] - begun)
        rate = LONG_PROMPT / min(seconds)
        single = self.decode_rate(1)
        found = f"{rate:,.0f} tok/s for a prompt of {LONG_PROMPT} tokens"
        slow = rate < 2 * single
        return Finding("prefill", found, "slow" if slow else "ok", "see BLAS and kernels above", {"rate": rate})

    def _ratio(self, rows: int, options: Mapping[str, object]) -> float:
        """Returns how much longer a step takes with these options, alternating with steps without."""
        pairs = [(self.decode_rate(rows), self.decode_rate(rows, **options)) for _ in range(3)]
        return statistics.median(plain / other for plain, other in pairs)

    def _sampler(self) -> Finding:
        sampled: dict[str, object] = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1}
        ratio = self._ratio(8, sampled)
        found = f"temperature, top-p and top-k take {ratio - 1:+.0%} of a step of 8 rows"
        return Finding("sampler", found, "slow" if ratio > 1.5 else "ok", "use temperature alone", {"ratio": ratio})

    def _adapters(self) -> Finding:
        random = np.random.default_rng(1)
        targets = [
            (path, target)
            for path, target in self.engine.adapters.targets.items()
            if target.kind == "linear" and path.endswith(("q_proj", "v_proj"))
        ]
        if not targets:
            return Finding("adapters", "this model has no q_proj and v_proj to adapt")
        parts = {
            path: Part(
                random.standard_normal((16, target.size), np.float32),
                random.standard_normal((target.out_features, 16), np.float32),
            )
            for path, target in targets
        }
        self.engine.adapters.publish(ADAPTER, Adapter(parts), "doctor")
        try:
            ratio = self._ratio(8, {"adapter": ADAPTER})
        finally:
            self.engine.adapters.unload(ADAPTER)
        found = f"one of rank 16 on q and v takes {ratio - 1:+.0%} of a step of 8 rows"
        return Finding("adapters", found, "slow" if ratio > 1.4 else "ok", "adapt fewer layers", {"ratio": ratio})

    def _joins(self) -> Finding:
        """Returns how long rows that run wait for their next token when another joins."""
        joined: list[float] = []

        def join() -> None:
            joined.append(time.perf_counter())
            request = Request("doctor-join", self.long[:64], SamplingParams(max_tokens=1), cache_salt="join")
            self.engine.submit(request, lambda delta: None)

        completions = self.ask(self.prompts[:8], max_tokens=3 * STEPS, midway=join)
        before = _longest_gap([[time for time in completion.times if time < joined[0]] for completion in completions])
        after = _longest_gap([[time for time in completion.times if time >= joined[0]] for completion in completions])
        found = (
            f"eight rows wait {1000 * before:.0f} ms for a token, {1000 * after:.0f} when a prompt of 64 tokens joins"
        )
        return Finding("joins", found, numbers={"before_seconds": before, "join_seconds": after})


def _longest_gap(times: Sequence[Sequence[float]]) -> float:
    return max((b - a for one in times for a, b in itertools.pairwise(one)), default=0.0)


def failed(error: ParallmError) -> Finding:
    return Finding("model", error.message, "wrong", "name a model that loads with --model-path")
