"""The drafted tokens of a step: behind the rows' own, in the order in which they are computed. No MLX here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlx_parallm.engine.rows import Row

Entry = tuple[int, Row, int]  # index in what was sampled, row, its epoch


@dataclass(frozen=True, slots=True)
class Drafted:
    """Entry i of each list belongs to the step's token number `positions + i`."""

    rows: list[Row]
    places: list[int]  # 1 for a row's first drafted token
    tokens: list[int]
    count: int  # without those that only fill a round shape

    @classmethod
    def of(cls, drafts: Mapping[Row, Sequence[int]], round_up: bool = False) -> "Drafted":
        """`round_up`: to a power of two, by computing the last token again."""
        entries = [(row, place, token) for row, draft in drafts.items() for place, token in enumerate(draft, 1)]
        count = len(entries)
        if round_up:
            entries += [entries[-1]] * ((1 << (count - 1).bit_length()) - count)
        rows, places, tokens = (list(column) for column in zip(*entries, strict=True))
        return cls(rows, places, tokens, count)

    @property
    def longest(self) -> int:
        return max(self.places)

    @property
    def slots(self) -> list[int]:
        return [row.position for row in self.rows if row.position is not None]

    @property
    def lengths(self) -> list[int]:
        """Returns how many tokens come before each."""
        return [row.length + place for row, place in zip(self.rows, self.places, strict=True)]

    @property
    def numbers(self) -> list[int]:
        """Returns the number of the token that is sampled behind each."""
        return [row.launched + place for row, place in zip(self.rows, self.places, strict=True)]

    def texts(self) -> list[list[int]]:
        """Returns what has been drafted for a row, up to each token."""
        return [self.tokens[i + 1 - place : i + 1] for i, place in enumerate(self.places[: self.count])] + [
            self.tokens[self.count - place : self.count] for place in self.places[self.count :]
        ]

    def accepted(self, own: Sequence[Entry], sampled: Sequence[int]) -> Iterator[list[Entry]]:
        """Yields the entries of each row that count: its own, and one for each drafted token that was sampled.

        The rows and their drafters take note of it.
        """
        first = len(sampled) - len(self.rows)
        behind: dict[Row, list[int]] = {}
        for i, row in enumerate(self.rows[: self.count]):
            behind.setdefault(row, []).append(i)
        for entry in own:
            _, row, epoch = entry
            kept = [entry]
            for i in behind.get(row, ()):
                if sampled[kept[-1][0]] != self.tokens[i]:
                    break
                kept.append((first + i, row, epoch))
            if row in behind:
                row.drafter.learn(len(behind[row]), len(kept) - 1)
                row.drafted += len(behind[row])
                row.accepted += len(kept) - 1
            yield kept
