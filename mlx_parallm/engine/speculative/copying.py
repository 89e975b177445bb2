"""Drafts by copying: what followed the last place where a row's text ended as it ends now.

Code, JSON and edits repeat much of what the row has read. How much is drafted depends on the row's own tokens alone, so
that equal requests are computed alike.
"""

from array import array
from collections.abc import Sequence

LEAST_MATCH = 3  # tokens that the text has to repeat before more of it is drafted
MOST_MATCH = 8  # … after drafts that were wrong
WINDOW = 16384  # tokens that are searched: 64 KiB, in some microseconds
TRIES = 8  # places where bytes match and tokens do not
SIZE = array("i").itemsize


class CopyDrafter:
    """The drafts of one row."""

    def __init__(self, prompt: Sequence[int], most: int) -> None:
        """`most`: tokens of a draft."""
        self._text = bytearray(array("i", prompt).tobytes())
        self._generated = 0
        self._most = most
        self._width = 1  # tokens of the next draft
        self._least_match = LEAST_MATCH
        self._ahead: int | None = None  # how far back the place is from which it copies

    def draft(self, generated: Sequence[int], limit: int) -> list[int]:
        """Returns up to `limit` tokens that may come next; none where nothing says so."""
        self._text += array("i", generated[self._generated :]).tobytes()
        self._generated = len(generated)
        if self._ahead is None or not self._still_repeats(self._ahead):
            self._ahead = self._found()
        if self._ahead is None:
            return []
        drafted: list[int] = []
        length = len(self._text) // SIZE
        first = length - self._ahead
        known = array("i", bytes(self._text[SIZE * first : SIZE * (first + min(self._width, limit))]))
        for place in range(min(self._width, limit)):  # a text that repeats itself goes on beyond its end
            drafted.append(known[place] if place < self._ahead else drafted[place - self._ahead])
        return drafted

    def learn(self, drafted: int, accepted: int) -> None:
        """Takes note of how many tokens of its draft were right."""
        if accepted == drafted:
            if drafted == self._most:
                self._least_match = LEAST_MATCH
            self._width = min(2 * drafted, self._most)
            return
        self._width = max(accepted, 1)
        if not accepted:
            self._least_match = min(self._least_match + 1, MOST_MATCH)

    def _still_repeats(self, ahead: int) -> bool:
        end = len(self._text)
        before = end - SIZE * ahead
        match = SIZE * self._least_match
        return before >= match and self._text[end - match :] == self._text[before - match : before]

    def _found(self) -> int | None:
        """Returns how many tokens ago the text ended as it ends now, most alike first."""
        lengths = (MOST_MATCH, self._least_match) if self._least_match < MOST_MATCH else (MOST_MATCH,)
        return next((ahead for length in lengths if (ahead := self._repeated(length)) is not None), None)

    def _repeated(self, length: int) -> int | None:
        end = len(self._text)
        if end <= SIZE * length:
            return None
        ending = self._text[end - SIZE * length :]
        last = end - 1
        for _ in range(TRIES):
            place = self._text.rfind(ending, max(0, end - SIZE * WINDOW), last)
            if place < 0:
                return None
            if place % SIZE == 0:
                return (end - place) // SIZE - length
            last = place + len(ending) - 1
        return None
