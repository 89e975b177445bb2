"""A rank's part of an adapter, where the model is split over several processes. `Layout` packs it; NumPy alone.

Of a layer that is split by its outputs a rank has some rows of b, of one that is split by its inputs some columns of a;
layers that are another rank's it does not have at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_parallm.lora.adapter import Adapter, AdapterError, Part, Target


@dataclass(frozen=True, slots=True)
class Split:
    """The way in which a model is split, as adapters see it."""

    rank: int
    targets: Mapping[str, Target]  # the whole model's layers
    refused: str | None = None  # why adapters can't be split so

    def part_of(self, adapter: Adapter, own: Mapping[str, Target]) -> Adapter:
        """Returns what of an adapter is for the layers that this rank has, which may be none."""
        if self.refused is not None:
            raise AdapterError(self.refused)
        parts = {path: part for path, part in adapter.parts.items() if path in own}
        return Adapter({path: self._part(part, self.targets[path], own[path]) for path, part in parts.items()})

    def _part(self, part: Part, whole: Target, own: Target) -> Part:
        rows = self._own(own.out_features, whole.out_features)
        columns = self._own(own.size, whole.size)
        return Part(part.a[:, columns], part.b[rows], None if part.m is None else part.m[rows])

    def _own(self, own: int, whole: int) -> slice:
        return slice(None) if own == whole else slice(self.rank * own, (self.rank + 1) * own)
