"""What passes depend on beside tokens and caches: the rows' adapters, their images, and positions that these move.

The runner asks for it when rows change, and for each piece of a prompt. Engine thread only.
"""

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_parallm.engine.rows import Job, Row
from mlx_parallm.lora.registry import Registry
from mlx_parallm.lora.row_adapters import RowAdapters
from mlx_parallm.models.forward import RowInputs
from mlx_parallm.models.vision.encoder import ImageEncoder

PassContext = RowAdapters | RowInputs | None  # None: tokens are all that the rows have


class PassContexts:
    def __init__(
        self,
        adapters: Registry | None = None,
        encoder: ImageEncoder | None = None,  # of a model that reads images
        on_adapters: Callable[[float], None] = lambda seconds: None,  # adapters were brought in or put together
    ) -> None:
        self._adapters = adapters
        self._encoder = encoder
        self._on_adapters = on_adapters

    def of_rows(self, rows: Sequence[Row | None]) -> PassContext:
        """Returns the context of decode steps of these rows."""
        adapters = self._row_adapters(rows)
        if self._encoder is None:
            return adapters
        shifts = [row.images.shift if row and row.images else 0 for row in rows]
        return RowInputs(adapters, mx.array(shifts)) if any(shifts) else adapters

    def of_piece(self, job: Job, start: int, count: int, jobs: Sequence[Job] = (), height: int = 1) -> PassContext:
        """Returns the context of a pass over a piece of a prompt, or of `jobs` computed together in `height` rows."""
        rows = [other.rows[0] for other in jobs or (job,)]
        adapters = self._row_adapters([*rows, *[None] * (height - len(rows))])
        if self._encoder is None or rows[0].images is None:
            return adapters
        return self._encoder.row_inputs(rows[0].images, job.features, start, count, adapters)

    def encode(self, job: Job, number: int) -> mx.array:
        """The features of one of a prompt's images."""
        images = job.rows[0].images
        assert self._encoder is not None
        assert images is not None
        job.features[number] = self._encoder.features(images.images[number])
        return job.features[number]

    def forget_images(self) -> None:
        if self._encoder is not None:
            self._encoder.forget()

    def _row_adapters(self, rows: Sequence[Row | None]) -> RowAdapters | None:
        versions = [None if row is None else row.adapter for row in rows]
        if self._adapters is None or not any(versions):
            return None
        begun = time.perf_counter()
        known = self._adapters.swaps, self._adapters.joins
        adapters = self._adapters.row_adapters(versions)
        if known != (self._adapters.swaps, self._adapters.joins):
            self._on_adapters(time.perf_counter() - begun)
        return adapters
