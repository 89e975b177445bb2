"""Decides what is drafted for which rows. Engine thread only.

A draft never changes an answer: each token is sampled with the key of its number, whether it was drafted or not. How
wide a draft is depends on its row's own tokens alone, so that equal requests are computed alike.
"""

from collections.abc import Sequence

from mlx_parallm.engine.rows import Row
from mlx_parallm.engine.speculative.copying import CopyDrafter
from mlx_parallm.engine.speculative.drafted import Drafted
from mlx_parallm.kv.batch import BatchCache


class Speculation:
    def __init__(self, cache: BatchCache, most: int, round_up: bool) -> None:
        """`most`: drafted tokens of a row in a step; 0: none. `round_up`: their sum, where each new sum is traced."""
        self._cache = cache
        self._most = most
        self._round_up = round_up

    def awaits(self, rows: Sequence[Row]) -> bool:
        """Returns whether to read what is in flight first: some row repeats a text, and goes on beyond that."""
        if not self._most or self._cache.verify is None:
            return False
        return any(
            row.next_known is None
            and len(self._drafter(row).draft(row.tokens, self._most)) > row.launched - len(row.tokens)
            for row in rows
        )

    def draft(self, rows: Sequence[Row]) -> Drafted | None:
        """Returns what is drafted for rows whose tokens are read; None where that is nothing, or has no room."""
        if not self._most or self._cache.verify is None:
            return None
        drafts = {row: draft for row in rows if (draft := self._draft_of(row))}
        if not drafts:
            return None
        drafted = Drafted.of(drafts, self._round_up)
        longest = max(row.length for row in rows) + 1 + drafted.longest
        return drafted if self._cache.fits(len(rows), longest) else None

    def _draft_of(self, row: Row) -> list[int]:
        limit = min(self._most, row.max_tokens - row.launched - 1)
        if limit <= 0 or row.launched != len(row.tokens):
            return []
        draft = self._drafter(row).draft(row.tokens, limit)
        end = next((i for i, token in enumerate(draft) if token in row.stop_ids), len(draft))
        draft = draft[:end]
        if draft and row.matcher is not None:
            draft = draft[: row.matcher.validate_tokens(draft)]
        return draft

    def _drafter(self, row: Row) -> CopyDrafter:
        if row.drafter is None:
            row.drafter = CopyDrafter(row.prompt, self._most)
        drafter: CopyDrafter = row.drafter
        return drafter
