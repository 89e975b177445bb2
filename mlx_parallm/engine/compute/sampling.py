"""One sampler for all rows of a step, on the device: no Python per row, no sync.

`Sampler` holds the parameters of a fixed set of rows as arrays; the runner makes a new one when the set changes.
What no row asks for is not computed. A row's random number depends on its seed and the number of its token alone, so
the same seed and prompt give the same tokens whatever else is in the batch.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from mlx_parallm.devices.metal.token_cuts import CutKernel, cut_limits, least_kept
from mlx_parallm.devices.native.token_sampling import SampleKernel
from mlx_parallm.engine.rows import Row
from mlx_parallm.host import to_numpy
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.types import TokenLogprob

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """The kernels that the device has for sampling."""

    sample: SampleKernel | None = None  # for rows that ask for no more than a temperature
    cut: CutKernel | None = None  # the least logit that top-k and top-p keep


@dataclass(slots=True)
class Scores:
    """Log-probabilities of P tokens, on the device."""

    chosen: mx.array  # (P,)
    ranks: mx.array  # (P,)
    top_tokens: mx.array  # (P, K)
    top_logprobs: mx.array  # (P, K), not sorted

    def arrays(self) -> list[mx.array]:
        return [self.chosen, self.ranks, self.top_tokens, self.top_logprobs]

    def on_host(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """Reads them for the tokens they belong to, the likeliest sorted."""
        chosen, ranks, top_tokens, top_logprobs = (to_numpy(array).tolist() for array in self.arrays())
        return [
            TokenLogprob(token, value, rank, tuple(sorted(zip(ids, values, strict=True), key=_by_value)))
            for token, value, rank, ids, values in zip(tokens, chosen, ranks, top_tokens, top_logprobs, strict=True)
        ]


@dataclass(slots=True)
class Sampled:
    """Device arrays of one step."""

    tokens: mx.array  # (R,) int32
    scores: Scores | None = None  # of the rows that asked for log-probabilities
    sampled_logprobs: mx.array | None = (
        None  # (R,): log-probabilities of the tokens at their temperature, before penalties and cuts
    )

    def arrays(self) -> list[mx.array]:
        sampled = [] if self.sampled_logprobs is None else [self.sampled_logprobs]
        return [self.tokens, *(self.scores.arrays() if self.scores else []), *sampled]


class Sampler:
    """`rows` may hold None for free positions: they are computed like greedy rows and ignored.

    An array is made only for what some row asks for: small uploads add up when rows come and go at every step.
    """

    def __init__(self, rows: Sequence[Row | None], vocab_size: int, kernels: SamplingKernels | None = None) -> None:
        self.rows = list(rows)
        kernels = kernels or SamplingKernels()
        self._vocab = vocab_size
        params = [row.sampling if row else GREEDY for row in rows]
        random = [p for p in params if not p.greedy]
        self._random = bool(random)
        if random:
            self._temperature = _column(0.0 if p.greedy else p.temperature for p in params)
            self._seeds = mx.array([row.seed if row else 0 for row in rows], mx.uint32)
        self._any_min_p = any(p.min_p > 0 for p in random)
        if self._any_min_p:
            self._min_p = _column(0.0 if p.greedy else p.min_p for p in params)
        cut = [i for i, p in enumerate(params) if not p.greedy and (p.top_p < 1 or p.top_k > 0)]
        self._cut_rows = mx.array(cut) if cut else None
        if cut:
            # Rounded sums may reach 1 before the last token: above 1, nothing is cut.
            top_p = [params[i].top_p if params[i].top_p < 1 else 2.0 for i in cut]
            top_k = [params[i].top_k or vocab_size for i in cut]
            self._threshold = _cut_by(kernels.cut, top_p, top_k)
        self._bias = _Edits.of([p.logit_bias for p in params])
        early = [row.stop_ids if row and row.sampling.min_tokens else () for row in rows]
        self._stops = _Edits.of([dict.fromkeys(ids, -np.inf) for ids in early])
        if self._stops:
            self._min_tokens = mx.array([p.min_tokens for p in params], mx.int32)
        self.penalized = any(p.penalized for p in params)
        if self.penalized:
            self._presence = _column(p.presence_penalty for p in params)
            self._frequency = _column(p.frequency_penalty for p in params)
            self._repetition = _column(p.repetition_penalty for p in params)
        self.logprob_rows = [i for i, p in enumerate(params) if p.logprobs is not None]
        self._logprob_index = mx.array(self.logprob_rows) if self.logprob_rows else None
        processed = [params[i].processed_logprobs for i in self.logprob_rows]
        self._processed = mx.array(processed)[:, None] if any(processed) else None
        self._top_count = max((params[i].logprobs or 0 for i in self.logprob_rows), default=0)
        self._recorded = any(row.recorded for row in rows if row)
        self.grammar_rows = [(i, row) for i, row in enumerate(rows) if row and row.matcher is not None]
        changed: object = self._any_min_p or cut or self._bias or self._stops or self.penalized or self.grammar_rows
        self._kernel = None if changed else kernels.sample
        if self._kernel is not None:
            self._heats = np.array([0.0 if p.greedy else p.temperature for p in params], np.float32)
            self._host_seeds = np.array([row.seed if row else 0 for row in rows], np.uint32)

    @property
    def counts_tokens(self) -> bool:
        """Whether a call needs to know how many tokens each row has generated."""
        return self._random or self._stops is not None

    def __call__(
        self,
        logits: mx.array,
        numbers: Sequence[int],
        history: "History | None" = None,
        allowed: mx.array | None = None,
    ) -> Sampled:
        """logits (R, V); numbers: how many tokens each row has generated; allowed: packed grammar masks."""
        raw = logits.astype(mx.float32)
        if self._kernel is not None:
            keys = np.stack([self._host_seeds, np.array(numbers, np.uint32)], axis=1)
            tokens, logprobs = self._kernel(raw, self._heats, keys, self._recorded)
            return self._scored(raw, self._at_temperature(raw), tokens, logprobs)
        logits = raw
        count = mx.array(list(numbers), mx.int32) if self.counts_tokens else None
        if self.penalized and history is not None:
            logits = self._penalize(logits, history)
        if self._bias:
            logits = self._bias.applied(logits)
        if self._stops and count is not None:
            logits = self._stops.applied(logits, (count < self._min_tokens)[:, None])
        if allowed is not None:
            logits = mx.where(_unpack(allowed, self._vocab), logits, -mx.inf)
        if count is not None and self._random:
            tokens, logits = self._sample(logits, count)
        else:
            tokens = mx.argmax(logits, axis=-1)
        tokens = tokens.astype(mx.int32)
        logprobs = None
        if self._recorded:
            whole = self._at_temperature(raw)
            logprobs = mx.take_along_axis(whole, tokens[:, None], axis=-1)[:, 0] - log_sum_exp(whole)
        return self._scored(raw, logits, tokens, logprobs)

    def _scored(self, raw: mx.array, logits: mx.array, tokens: mx.array, logprobs: mx.array | None) -> Sampled:
        """Returns the tokens with the log-probabilities that rows ask for: the model's, or those sampled from."""
        if self._logprob_index is None:
            return Sampled(tokens, None, logprobs)
        shown = raw[self._logprob_index]
        if self._processed is not None:
            shown = mx.where(self._processed, logits[self._logprob_index], shown)
        return Sampled(tokens, scores_of(shown, tokens[self._logprob_index], self._top_count), logprobs)

    def _at_temperature(self, raw: mx.array) -> mx.array:
        """Returns the logits to hold a policy that learns against: at its temperature, before penalties and cuts."""
        if not self._random:
            return raw
        return raw / mx.where(self._temperature > 0, self._temperature, 1.0)

    def _sample(self, logits: mx.array, numbers: mx.array) -> tuple[mx.array, mx.array]:
        """Gumbel-max: argmax(logits + temperature * noise) is a sample of softmax(logits / temperature).

        Gives the tokens, and the logits that they are sampled from.
        """
        hot = self._temperature > 0
        scaled = logits / mx.where(hot, self._temperature, 1.0)
        if self._any_min_p:
            floor = scaled.max(axis=-1, keepdims=True) + mx.log(self._min_p)
            scaled = mx.where(scaled >= floor, scaled, -mx.inf)
        if self._cut_rows is not None:
            part = scaled[self._cut_rows]
            scaled[self._cut_rows] = mx.where(part >= self._threshold(part), part, -mx.inf)
        keys = mx.stack([self._seeds, numbers.astype(mx.uint32)], axis=1)  # (R, 2)
        noise = _gumbel(keys, logits.shape[-1])
        sampled_from = mx.where(hot, scaled, logits)
        return mx.argmax(mx.where(hot, scaled + noise, logits), axis=-1), sampled_from

    def _penalize(self, logits: mx.array, history: "History") -> mx.array:
        counts, seen = history.counts(self._vocab)
        factor = mx.where(logits > 0, 1 / self._repetition, self._repetition)
        logits = mx.where(seen, logits * factor, logits)
        return logits - counts * self._frequency - (counts > 0) * self._presence


def _cut_by(kernel: CutKernel | None, top_p: list[float], top_k: list[int]) -> Callable[[mx.array], mx.array]:
    """Returns what finds the least logit that top-k, then top-p, keep: (C, V) -> (C, 1)."""
    if kernel is not None:
        return partial(kernel, limits=cut_limits(top_p, top_k))
    return partial(least_kept, top_p=_column(top_p), top_k=_column(top_k))


def log_sum_exp(logits: mx.array) -> mx.array:
    """Computes log-sum-exp over the last axis, in pieces: MLX's CPU adds one number after another, which is 1e-4 off
    over a vocabulary."""
    size = logits.shape[-1]
    width = next((width for width in (512, 256, 128, 64, 32) if size > width and size % width == 0), None)
    if width is None:
        return mx.logsumexp(logits, axis=-1)
    return mx.logsumexp(mx.logsumexp(logits.reshape(*logits.shape[:-1], -1, width), axis=-1), axis=-1)


def scores_of(logits: mx.array, tokens: mx.array, top: int) -> Scores:
    """The tokens' log-probabilities and ranks, and the `top` likeliest beside them: (P, V), (P,)."""
    top = min(top, logits.shape[-1])
    total = log_sum_exp(logits)[:, None]
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)  # (P, 1)
    ranks = mx.sum(logits > chosen, axis=-1) + 1
    likeliest = (
        mx.argpartition(-logits, min(top, logits.shape[-1] - 1), axis=-1)[:, :top]
        if top
        else mx.zeros((logits.shape[0], 0), mx.uint32)
    )
    best = mx.take_along_axis(logits, likeliest, axis=-1) - total if top else mx.zeros((logits.shape[0], 0))
    return Scores((chosen - total)[:, 0], ranks, likeliest, best)


class History:
    """The rows' tokens on the device, for penalties: kept only while a row in the batch has one."""

    def __init__(self, rows: Sequence[Row | None]) -> None:
        """Starts with what the host knows of the rows: prompt and generated tokens."""
        known = [row.prompt + row.tokens[: row.launched] if row else [] for row in rows]
        self._used = max(map(len, known), default=0)  # no row is longer
        table = np.zeros((len(rows), self._used + 256), np.int32)
        for line, tokens in zip(table, known, strict=True):
            line[: len(tokens)] = tokens
        self.tokens = mx.array(table)
        self.lengths = mx.array([len(tokens) for tokens in known], mx.int32)
        self.prompts = mx.array([len(row.prompt) if row else 0 for row in rows], mx.int32)

    def adopt(
        self, rows: Sequence[Row | None], old: "History | None", old_rows: Sequence[Row | None], last: mx.array
    ) -> None:
        """Takes over what the device alone knows: the lines of rows that stay, the unread token of those that join."""
        places = {id(row): place for place, row in enumerate(old_rows) if row} if old is not None else {}
        stay = [(place, places[id(row)]) for place, row in enumerate(rows) if row and id(row) in places]
        unread = [row is not None and id(row) not in places and row.launched > len(row.tokens) for row in rows]
        self.append(last, mx.array(unread))
        if old is not None and stay:
            self._used = max(self._used, old._used)
            new, was = (mx.array(list(side)) for side in zip(*stay, strict=True))
            self._reserve(old.tokens.shape[1])
            self.tokens[new, : old.tokens.shape[1]] = old.tokens[was]
            self.lengths[new] = old.lengths[was]

    def with_drafts(self, places: Sequence[int], drafts: Sequence[Sequence[int]]) -> "History":
        """The rows, and behind them those at `places` again, each with what is drafted for it."""
        rows = self.tokens.shape[0]
        index = mx.array([*range(rows), *places])
        longest = max(map(len, drafts))
        table = np.zeros((rows + len(drafts), longest), np.int32)
        for line, draft in zip(table[rows:], drafts, strict=True):
            line[: len(draft)] = draft
        drafted = copy.copy(self)
        drafted._reserve(self._used + longest)
        drafted.prompts = self.prompts[index]
        behind = self.lengths[index]
        drafted.lengths = behind + mx.array([0] * rows + [len(draft) for draft in drafts])
        places_behind = behind[:, None] + mx.arange(longest)
        drafted.tokens = mx.put_along_axis(drafted.tokens[index], places_behind, mx.array(table), axis=1)
        return drafted

    def append(self, tokens: mx.array, where: mx.array | None = None) -> None:
        """One token per row; a row left out by `where` keeps its length, so what is written there does not count."""
        self._used += 1
        self._reserve(self._used)
        self.tokens = mx.put_along_axis(self.tokens, self.lengths[:, None], tokens[:, None], axis=1)
        self.lengths = self.lengths + (1 if where is None else where.astype(mx.int32))

    def extend(self, tokens: mx.array, chosen: Sequence[Sequence[int]]) -> None:
        """Each row's own of these tokens: `chosen` has their indices."""
        for place in range(max(map(len, chosen))):
            index = [indices[place] if place < len(indices) else 0 for indices in chosen]
            self.append(tokens[mx.array(index)], mx.array([place < len(indices) for indices in chosen]))

    def _reserve(self, capacity: int) -> None:
        missing = capacity - self.tokens.shape[1]
        if missing > 0:
            self.tokens = mx.pad(self.tokens, [(0, 0), (0, missing + 256)])

    def counts(self, vocab_size: int) -> tuple[mx.array, mx.array]:
        """Returns how often each token was generated, and whether it stands anywhere: (R, V), (R, V)."""
        place = mx.arange(self.tokens.shape[1])
        valid = place < self.lengths[:, None]
        generated = valid & (place >= self.prompts[:, None])
        rows = mx.arange(self.tokens.shape[0])[:, None]
        zeros = mx.zeros((self.tokens.shape[0], vocab_size))
        counts = zeros.at[rows, self.tokens].add(generated.astype(mx.float32))
        seen = zeros.at[rows, self.tokens].add(valid.astype(mx.float32))
        return counts, seen > 0


@dataclass(slots=True)
class _Edits:
    """A few numbers to add per row: ids and values (R, K), padded with zeros for token 0."""

    ids: mx.array
    values: mx.array

    @classmethod
    def of(cls, rows: Sequence[dict[int, float]]) -> "_Edits | None":
        width = max(map(len, rows), default=0)
        if not width:
            return None
        ids = np.zeros((len(rows), width), np.int32)
        values = np.zeros((len(rows), width), np.float32)
        for i, edits in enumerate(rows):
            ids[i, : len(edits)] = list(edits)
            values[i, : len(edits)] = list(edits.values())
        return cls(mx.array(ids), mx.array(values))

    def applied(self, logits: mx.array, where: mx.array | None = None) -> mx.array:
        values = self.values if where is None else mx.where(where, self.values, 0.0)
        return logits.at[mx.arange(logits.shape[0])[:, None], self.ids].add(values)


def _by_value(pair: tuple[int, float]) -> float:
    return -pair[1]


def _column(values: Iterable[float]) -> mx.array:
    return mx.array(list(values), mx.float32)[:, None]


def _gumbel(keys: mx.array, size: int) -> mx.array:
    """Independent noise per row, each from its own key: (R, 2) -> (R, size)."""
    noise: mx.array = mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)
    return noise


def _unpack(words: mx.array, size: int) -> mx.array:
    """Bit masks to booleans: (R, ceil(V / 32)) uint32 -> (R, V)."""
    bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :size].astype(mx.bool_)
