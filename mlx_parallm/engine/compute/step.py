"""A forward pass under way, and what is read of it."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_parallm.engine.compute.sampling import Sampled, Sampler, Scores
from mlx_parallm.engine.rows import Row
from mlx_parallm.engine.speculative.drafted import Drafted
from mlx_parallm.types import TokenLogprob


@dataclass(slots=True)
class Token:
    row: Row
    token: int
    logprob: TokenLogprob | None
    sampled_logprob: float | None = None  # at its temperature, before penalties and cuts
    valid: bool = True  # False: it was sampled from logits that are not numbers


@dataclass(slots=True)
class Step:
    """One forward pass under way."""

    kind: str  # "prefill" or "decode"
    count: int  # prompt tokens, or rows
    shape: tuple[int, ...] = ()  # of a pass over prompts: rows, tokens computed, tokens before them
    rows: list[tuple[int, Row, int]] = field(default_factory=list)  # index in `sampled`, row, its epoch
    sampler: Sampler | None = None
    sampled: Sampled | None = None
    repeated: int = 0  # rows whose token was known, since they lost their place
    drafted: Drafted | None = None  # computed behind the rows' own tokens
    invalid: mx.array | None = None  # (rows,) of a prompt's pass: whether logits are not numbers
    fence: list[mx.array] = field(default_factory=list)  # what to wait for when nothing was sampled
    prompt_scores: list[tuple[list[TokenLogprob | None], list[int], Scores]] = field(default_factory=list)
    launched_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0  # when the host had handed all of it to the device


def with_known(sampled: mx.array, rows: Iterable[tuple[int, Row | None]]) -> mx.array:
    """What was sampled at each place, but where a row that is computed again has the token already."""
    known = [(place, row.next_known) for place, row in rows if row is not None and row.next_known is not None]
    if not known:
        return sampled
    places, tokens = zip(*known, strict=True)
    result = sampled + 0
    result[mx.array(places)] = mx.array(tokens, mx.int32)
    return result
