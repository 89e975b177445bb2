"""The live requests: who reads which row, who has run out of time, what can be shared. No MLX.

The engine thread alone uses it. A request is added once, and removed when its last choice has ended, and every row in
the scheduler has at least one reader here.
"""

from collections.abc import Iterator
from dataclasses import replace

from mlx_parallm.engine.rows import Reader, Row
from mlx_parallm.types import OnDelta, Request


class LiveRequests:
    def __init__(self, share: bool) -> None:
        self._share = share
        self._entries: dict[str, list[tuple[Row, Reader]]] = {}  # by request id, choices that have not ended
        self._twins: dict[str, list[Row]] = {}  # deterministic computations under way, by what they compute

    def __len__(self) -> int:
        return len(self._entries)

    def rows(self) -> set[Row]:
        return {row for entries in self._entries.values() for row, _ in entries}

    def requests(self) -> list[Request]:
        return [entries[0][1].request for entries in self._entries.values()]

    def add(self, request: Request, rows: list[Row], arrival: float, on_delta: OnDelta) -> bool:
        """Gives the rows their reader. False when rows that run already compute the same: these are not needed."""
        twin = self._twin(request, rows[0]) if self._share else None
        shared = self._twins.get(twin) if twin is not None else None
        if shared is None and twin is not None:
            self._twins[twin] = rows
        entries = []
        for index, row in enumerate(shared or rows):
            reader = Reader(request, index, arrival, on_delta)
            row.readers.append(reader)
            row.rollout = row.rollout and request.rollout
            entries.append((row, reader))
        self._entries[request.id] = entries
        return shared is None

    def entries(self, request_id: str, index: int | None = None) -> list[tuple[Row, Reader]]:
        """The choices of a request that have not ended, or the one of them that is asked for."""
        entries = self._entries.get(request_id, [])
        return [entry for entry in entries if index is None or entry[1].index == index]

    def remove(self, row: Row, reader: Reader) -> None:
        """This choice has ended for this request."""
        row.readers.remove(reader)
        entries = self._entries[reader.request.id]
        entries.remove((row, reader))
        if not entries:
            del self._entries[reader.request.id]
        if self._share:
            # Once a choice has ended, a newcomer could no longer be told all of it.
            self._twins = {twin: rows for twin, rows in self._twins.items() if row not in rows}

    def overdue(self, now: float) -> Iterator[Request]:
        for entries in list(self._entries.values()):
            reader = entries[0][1]
            timeout = reader.request.timeout
            if timeout is not None and now - reader.arrival > timeout:
                yield reader.request

    def _twin(self, request: Request, row: Row) -> str | None:
        """Returns a key of what a deterministic request computes; None for one that samples at random."""
        sampling = request.sampling
        if not sampling.greedy and sampling.seed is None:
            return None
        sampling = replace(sampling, stop=(), seed=None if sampling.greedy else sampling.seed)
        # An adapter by its weights: a name may mean others by now, and a number too once it was unloaded.
        adapter = None if row.adapter is None else (row.adapter.label, row.adapter.packed.digest)
        images = request.images and request.images.digests
        return repr((request.prompt, images, sampling, request.cache_salt, adapter, request.follow, row.recorded))
