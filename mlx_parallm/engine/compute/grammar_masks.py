"""Which tokens the rows' grammars allow next, as packed masks for the sampler."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from mlx_parallm.engine.compute.sampling import Sampler
from mlx_parallm.engine.rows import Row
from mlx_parallm.engine.speculative.drafted import Drafted


def grammar_masks(
    sampler: Sampler, numbers: Sequence[int], vocab_size: int, drafted: Drafted | None = None
) -> mx.array | None:
    """(R, ceil(V / 32)); None where no row has a grammar. `numbers`: how many tokens each has generated."""
    if not sampler.grammar_rows:
        return None
    masks = np.full((len(sampler.rows), -(-vocab_size // 32)), -1, np.int32)
    words = masks.view(np.uint32)
    own = len(sampler.rows) - (0 if drafted is None else len(drafted.rows))
    known = len(sampler.rows) if drafted is None else own + drafted.count
    followed: dict[Row, int] = {}  # drafted tokens that a grammar was taken along for a moment
    for i, row in sampler.grammar_rows:
        if i >= known or numbers[i] < len(row.tokens):  # what is sampled there is not kept
            continue
        if drafted is not None and i >= own:
            row.matcher.consume_token(drafted.tokens[i - own])
            followed[row] = followed.get(row, 0) + 1
        fill_next_token_bitmask(row.matcher, masks, i)
        if not row.may_end_after(numbers[i]):
            for token in row.end_ids:
                words[i, token // 32] &= ~np.uint32(1 << token % 32)
        if row.recorded and int(np.bitwise_count(words[i]).sum()) == 1:
            row.forced.add(numbers[i])
    for row, count in followed.items():
        row.matcher.rollback(count)
    return mx.array(words)
