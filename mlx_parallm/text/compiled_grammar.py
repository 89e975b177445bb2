"""What is left of a grammar when it is compiled: requests carry it to the engine. No llguidance, no MLX."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar of `text.grammar` that a row's matcher is copied from, in no time."""

    source: Any  # llguidance's matcher, which has read nothing
    end_ids: frozenset[int]  # tokens that it allows at the end of its text

    def matcher(self) -> Any:
        return self.source.deep_copy()
