"""Which version of a policy sampled which tokens of a completion: one shape from the row to the client. No MLX."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PolicySpan:
    """Tokens of a completion that one version of the policy sampled; version 0 is the model without an adapter."""

    first: int
    end: int  # the token after the last
    version: int

    @classmethod
    def of_json(cls, fields: Mapping[str, int] | Sequence[int]) -> "PolicySpan":
        """Reads a span as orjson wrote it; files of earlier releases have lists."""
        if isinstance(fields, Mapping):
            return cls(first=int(fields["first"]), end=int(fields["end"]), version=int(fields["version"]))
        first, end, version = fields
        return cls(first=int(first), end=int(end), version=int(version))

    def shifted(self, tokens: int) -> "PolicySpan":
        """The same span in a text with so many tokens before it."""
        return PolicySpan(first=self.first + tokens, end=self.end + tokens, version=self.version)


Spans = tuple[PolicySpan, ...]
OPEN_END = 1 << 62  # of a span whose version still samples; `within` cuts it


def spans_between(starts: Sequence[tuple[int, int]], end: int) -> Spans:
    """Makes spans of (first token, version), each up to the next one's first token, the last up to `end`."""
    following = itertools.pairwise([*starts, (end, 0)])
    return tuple(PolicySpan(first, last, version) for (first, version), (last, _) in following)


def within(spans: Iterable[PolicySpan], tokens: int) -> Spans:
    """Returns what they say of the first so many tokens; spans without a token are left out."""
    cut = (replace(span, end=min(span.end, tokens)) for span in spans)
    return tuple(span for span in cut if span.first < span.end)


def as_lists(spans: Iterable[PolicySpan]) -> list[list[int]]:
    """Formats spans as responses have them: [first, end, version]."""
    return [[span.first, span.end, span.version] for span in spans]
