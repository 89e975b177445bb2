"""What is drafted by copying, how that adapts, and what it costs at worst."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.engine.rows import Row
from mlx_parallm.engine.speculative.copying import LEAST_MATCH, MOST_MATCH, SIZE, CopyDrafter
from mlx_parallm.engine.speculative.drafted import Drafted
from mlx_parallm.sampling_params import SamplingParams

TEXT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def row_of(prompt: list[int], position: int, launched: int = 1) -> Row:
    row = Row(prompt, SamplingParams(), 0, seed=0, max_tokens=50, stop_ids=frozenset())
    row.position = position
    row.launched = launched
    row.drafter = CopyDrafter(prompt, 8)
    return row


def test_a_text_that_begins_again_is_copied_on_wider_and_wider() -> None:
    drafter = CopyDrafter([*TEXT, 99], 8)
    assert drafter.draft([], 8) == []
    assert drafter.draft([11, 12], 8) == []
    assert drafter.draft([11, 12, 13], 8) == [14]
    drafter.learn(1, 1)
    assert drafter.draft(TEXT[:5], 8) == [16, 17]
    drafter.learn(2, 2)
    assert drafter.draft(TEXT[:8], 8) == [19, 20, 99, 11], "and beyond the end, as if it began again"
    assert drafter.draft(TEXT[:8], 2) == [19, 20]


def test_drafts_that_are_wrong_get_narrower_and_ask_for_more_alike() -> None:
    drafter = CopyDrafter([*TEXT, 99, *TEXT[:3]], 8)
    drafter.learn(4, 4)
    assert len(drafter.draft([], 8)) == 8
    drafter.learn(8, 2)
    assert len(drafter.draft([], 8)) == 2
    for _ in range(MOST_MATCH):
        drafter.learn(2, 0)
    assert drafter.draft([], 8) == [], "three tokens alike are no longer enough"
    assert drafter.draft(TEXT[3:9], 8) == [20], "nine are"
    drafter.learn(1, 1)
    assert drafter._least_match == MOST_MATCH
    drafter.learn(8, 8)
    assert drafter._least_match == LEAST_MATCH


def test_the_longest_match_is_copied_not_the_newest() -> None:
    long, short = [1, 2, 3, 4, 5, 6, 7, 8, 70], [6, 7, 8, 80]
    assert CopyDrafter([*long, *short, *long[:8]], 8).draft([], 1) == [70]
    assert CopyDrafter([*long, *short, 90, 6, 7, 8], 8).draft([], 1) == [80]


@settings(deadline=None)
@given(prompt=st.lists(st.integers(0, 3), max_size=60), generated=st.lists(st.integers(0, 3), max_size=60))
def test_a_draft_is_what_followed_a_place_that_is_alike(prompt: list[int], generated: list[int]) -> None:
    drafter = CopyDrafter(prompt, 8)
    for count in range(len(generated) + 1):
        text = [*prompt, *generated[:count]]
        draft = drafter.draft(generated[:count], 8)
        if not draft:
            continue
        ahead = drafter._ahead
        assert ahead is not None
        for token in draft:
            assert text[-LEAST_MATCH:] == text[-LEAST_MATCH - ahead : -ahead] or len(text) > len(prompt) + count
            assert token == text[len(text) - ahead]
            text.append(token)
        drafter.learn(len(draft), random.Random(count).randint(0, len(draft)))


@pytest.mark.parametrize("period", [[0], [1, 0, 0, 0], [256, 1], None], ids=["zeros", "shifted", "bytes", "bits"])
def test_a_hostile_text_costs_as_much_as_any(period: list[int] | None) -> None:
    """Bytes that match where tokens don't, and texts that are alike everywhere: the search is bounded."""
    length = 200_000
    prompt = random.Random(1).choices((0, 1), k=length) if period is None else period * (length // len(period))
    drafter = CopyDrafter(prompt, 8)
    generated: list[int] = []
    begun = time.process_time()
    for step in range(200):
        drafter.draft(generated, 8)
        drafter.learn(4, 0)
        generated.append(step % 2)
    assert time.process_time() - begun < 2.0, "some 20 microseconds a step"
    assert len(drafter._text) == SIZE * (len(prompt) + 199)


def test_drafted_tokens_have_the_places_of_their_rows() -> None:
    one, other = row_of([1] * 10, 0), row_of([1] * 20, 3, launched=5)
    drafted = Drafted.of({one: [7, 8, 9], other: [4, 5]}, round_up=True)
    assert (drafted.count, len(drafted.rows), drafted.longest) == (5, 8, 3)
    assert drafted.slots == [0, 0, 0, 3, 3, 3, 3, 3]
    assert drafted.lengths == [11, 12, 13, 25, 26, 26, 26, 26]
    assert drafted.numbers == [2, 3, 4, 6, 7, 7, 7, 7]
    assert drafted.texts() == [[7], [7, 8], [7, 8, 9], [4], *[[4, 5]] * 4]


def test_what_is_kept_ends_at_the_first_wrong_draft() -> None:
    rows = [row_of([1], 0), row_of([1], 1), row_of([1], 2)]
    drafted = Drafted.of({rows[0]: [7, 8, 9], rows[2]: [4, 5]})
    own = [(position, row, row.epoch) for position, row in enumerate(rows)]
    sampled = [7, 50, 4, 8, 60, 61, 62, 63]  # the rows' own, then what comes behind 7, 8, 9, 4 and 5
    kept = list(drafted.accepted(own, sampled))
    assert [[index for index, *_ in entries] for entries in kept] == [[0, 3, 4], [1], [2, 6]]
    assert [(row.drafted, row.accepted) for row in rows] == [(3, 2), (0, 0), (2, 1)]
