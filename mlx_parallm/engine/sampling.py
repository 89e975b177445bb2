"""One sampler for all rows of a step, on the device: no Python per row, no sync.

`Sampler` holds the parameters of a fixed set of rows as arrays; the runner makes a new one when the set changes.
What no row asks for is not computed. A row's random draw depends on its seed and the number of its token alone, so
the same seed and prompt give the same tokens whatever else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_parallm.engine.rows import Row


@dataclass(slots=True)
class Sampled:
    """Device arrays of one step, for R rows of which P asked for log-probabilities."""

    tokens: mx.array  # (R,) int32
    chosen: mx.array | None = None  # (P,) log-probability of the sampled token
    ranks: mx.array | None = None  # (P,)
    top_tokens: mx.array | None = None  # (P, K)
    top_logprobs: mx.array | None = None  # (P, K), not sorted

    def arrays(self) -> list[mx.array]:
        every = (self.tokens, self.chosen, self.ranks, self.top_tokens, self.top_logprobs)
        return [array for array in every if array is not None]


class Sampler:
    """`rows` may hold None for free positions: they are computed like greedy rows and ignored."""

    def __init__(self, rows: Sequence[Row | None], vocab_size: int) -> None:
        params = [row.sampling if row else None for row in rows]
        self.rows = list(rows)
        self._vocab = vocab_size
        self._temperature = _column([p.temperature if p and not p.greedy else 0.0 for p in params])
        self._seeds = mx.array([row.seed if row else 0 for row in rows], mx.uint32)
        self._random = any(p and not p.greedy for p in params)
        self._min_p = _column([p.min_p if p and not p.greedy else 0.0 for p in params])
        self._any_min_p = any(p and p.min_p > 0 and not p.greedy for p in params)
        cut = [i for i, p in enumerate(params) if p and not p.greedy and (p.top_p < 1 or p.top_k > 0)]
        self._cut_rows = mx.array(cut) if cut else None
        self._top_p = _column([p.top_p for i in cut if (p := params[i])])
        self._top_k = _column([p.top_k or vocab_size for i in cut if (p := params[i])])
        self._bias_ids, self._bias = _sparse([p.logit_bias if p else {} for p in params])
        self._stop_ids, self._stop_bias = _sparse(
            [dict.fromkeys(row.stop_ids, -np.inf) if row and row.sampling.min_tokens else {} for row in rows]
        )
        self._min_tokens = mx.array([p.min_tokens if p else 0 for p in params], mx.int32)
        self.penalized = any(
            p and (p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1) for p in params
        )
        self._presence = _column([p.presence_penalty if p else 0.0 for p in params])
        self._frequency = _column([p.frequency_penalty if p else 0.0 for p in params])
        self._repetition = _column([p.repetition_penalty if p else 1.0 for p in params])
        self.logprob_rows = [i for i, p in enumerate(params) if p and p.logprobs is not None]
        self._logprob_index = mx.array(self.logprob_rows) if self.logprob_rows else None
        self._top_count = max((p.logprobs or 0 for i in self.logprob_rows if (p := params[i])), default=0)
        self.grammar_rows = [i for i, row in enumerate(rows) if row and row.matcher is not None]

    def __call__(
        self, logits: mx.array, numbers: mx.array, history: "History | None", allowed: mx.array | None
    ) -> Sampled:
        """logits (R, V), numbers (R,): how many tokens each row has generated; allowed: packed grammar masks."""
        raw = logits.astype(mx.float32)
        logits = raw
        if self.penalized and history is not None:
            logits = self._penalize(logits, history)
        if self._bias_ids is not None:
            logits = _add_at(logits, self._bias_ids, self._bias)
        if self._stop_ids is not None:
            early = (numbers < self._min_tokens)[:, None]
            logits = _add_at(logits, self._stop_ids, mx.where(early, self._stop_bias, 0.0))
        if allowed is not None:
            logits = mx.where(_unpack(allowed, self._vocab), logits, -mx.inf)
        tokens = self._draw(logits, numbers) if self._random else mx.argmax(logits, axis=-1)
        return self._with_logprobs(raw, tokens.astype(mx.int32))

    def _draw(self, logits: mx.array, numbers: mx.array) -> mx.array:
        """Gumbel-max: argmax(logits + temperature * noise) is a draw from softmax(logits / temperature)."""
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
        return mx.argmax(mx.where(hot, scaled + noise, logits), axis=-1)

    def _threshold(self, scaled: mx.array) -> mx.array:
        """The least logit that top-k, then top-p, keep: (C, V) -> (C, 1)."""
        ordered = -mx.sort(-scaled, axis=-1)
        inside = mx.arange(ordered.shape[-1]) < self._top_k
        probs = mx.softmax(mx.where(inside, ordered, -mx.inf), axis=-1)
        before = mx.cumsum(probs, axis=-1) - probs
        kept = mx.sum(inside & (before < self._top_p), axis=-1, keepdims=True)
        return mx.take_along_axis(ordered, mx.maximum(kept, 1) - 1, axis=-1)

    def _penalize(self, logits: mx.array, history: "History") -> mx.array:
        counts, seen = history.counts(self._vocab)
        factor = mx.where(logits > 0, 1 / self._repetition, self._repetition)
        logits = mx.where(seen, logits * factor, logits)
        return logits - counts * self._frequency - (counts > 0) * self._presence

    def _with_logprobs(self, raw: mx.array, tokens: mx.array) -> Sampled:
        if self._logprob_index is None:
            return Sampled(tokens)
        raw, picked = raw[self._logprob_index], tokens[self._logprob_index]
        return Sampled(tokens, *logprobs_of(raw, picked, self._top_count))


def logprobs_of(
    logits: mx.array, tokens: mx.array, top: int
) -> tuple[mx.array, mx.array, mx.array | None, mx.array | None]:
    """The tokens' log-probabilities and ranks, and the `top` likeliest beside them: (P, V), (P,)."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)  # (P, 1)
    ranks = mx.sum(logits > chosen, axis=-1) + 1
    if not top:
        return (chosen - total)[:, 0], ranks, None, None
    likeliest = mx.argpartition(-logits, top, axis=-1)[:, :top]
    return (chosen - total)[:, 0], ranks, likeliest, mx.take_along_axis(logits, likeliest, axis=-1) - total


class History:
    """The rows' tokens on the device, for penalties: kept only while a row in the batch has one."""

    def __init__(self, rows: Sequence[Row | None]) -> None:
        """Starts with what the host knows of the rows: prompt and generated tokens."""
        known = [row.prompt + row.tokens if row else [] for row in rows]
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

    def append(self, tokens: mx.array, where: mx.array | None = None) -> None:
        """One token per row; a row left out by `where` keeps its length, so what is written there does not count."""
        self._used += 1
        self._reserve(self._used)
        self.tokens = mx.put_along_axis(self.tokens, self.lengths[:, None], tokens[:, None], axis=1)
        self.lengths = self.lengths + (1 if where is None else where.astype(mx.int32))

    def _reserve(self, capacity: int) -> None:
        missing = capacity - self.tokens.shape[1]
        if missing > 0:
            self.tokens = mx.pad(self.tokens, [(0, 0), (0, missing + 256)])

    def counts(self, vocab_size: int) -> tuple[mx.array, mx.array]:
        """How often each token was generated, and whether it stands anywhere: (R, V), (R, V)."""
        place = mx.arange(self.tokens.shape[1])
        valid = place < self.lengths[:, None]
        generated = valid & (place >= self.prompts[:, None])
        rows = mx.arange(self.tokens.shape[0])[:, None]
        zeros = mx.zeros((self.tokens.shape[0], vocab_size))
        counts = zeros.at[rows, self.tokens].add(generated.astype(mx.float32))
        seen = zeros.at[rows, self.tokens].add(valid.astype(mx.float32))
        return counts, seen > 0


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values) or [0.0], mx.float32)[:, None]


def _sparse(rows: Sequence[dict[int, float]]) -> tuple[mx.array | None, mx.array]:
    """A few edits per row as ids and values (R, K), padded with zeros added to token 0."""
    width = max(map(len, rows), default=0)
    if not width:
        return None, mx.zeros((1,))
    ids, values = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.float32)
    for i, edits in enumerate(rows):
        ids[i, : len(edits)] = list(edits)
        values[i, : len(edits)] = list(edits.values())
    return mx.array(ids), mx.array(values)


def _add_at(logits: mx.array, ids: mx.array, values: mx.array) -> mx.array:
    return logits.at[mx.arange(logits.shape[0])[:, None], ids].add(values)


def _gumbel(keys: mx.array, size: int) -> mx.array:
    """Independent noise per row, each from its own key: (R, 2) -> (R, size)."""
    noise: mx.array = mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)
    return noise


def _unpack(words: mx.array, size: int) -> mx.array:
    """Bit masks to booleans: (R, ceil(V / 32)) uint32 -> (R, V)."""
    bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :size].astype(mx.bool_)
