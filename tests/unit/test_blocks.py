"""The prefix cache's book: what matches, who goes first, and that nothing is lost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.kv.blocks import BlockPool, Chain, Match, root_of

ROOT = root_of("model", "")


def chain(tokens: list[int], root: bytes = ROOT, size: int = 4) -> Chain:
    return Chain(root, size).extend(tokens)


def put(pool: BlockPool, tokens: list[int], root: bytes = ROOT) -> list[int]:
    placed, _ = pool.commit(chain(tokens, root), tokens, range(len(tokens) // 4))
    ids = [id_ for _, id_ in placed]
    pool.release(Match(list(ids)))
    return ids


def test_chains_depend_on_all_that_came_before_and_on_the_root() -> None:
    one, other = chain([1, 2, 3, 4, 5, 6, 7, 8, 9]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert len(one.hashes) == 2
    assert not set(one.hashes) & set(other.hashes)
    assert chain([1, 2, 3, 4], root_of("model", "tenant")).hashes != one.hashes[:1]
    assert one.common(chain([1, 2, 3, 4, 5, 6, 7, 0])) == 1
    grown = chain([1, 2, 3, 4, 5])
    assert grown.extend([1, 2, 3, 4, 5, 6, 7, 8]).hashes == one.hashes


def test_matches_to_the_token_and_never_the_last_one() -> None:
    pool = BlockPool(8, 4)
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    put(pool, text)
    for prompt, expected in (
        (text, 7),
        ([*text, 9], 8),
        ([1, 2, 3, 4, 5, 6, 0, 0], 6),
        ([1, 2, 0], 2),
        ([2], 0),
        ([1], 0),
    ):
        match = pool.match(chain(prompt), prompt, len(prompt) - 1)
        assert match.length == expected, prompt
        assert len(match.ids) == -(-expected // 4)
        pool.release(match)
    other = chain(text, root_of("model", "tenant"))
    assert pool.match(other, text, 7).length == 0
    pool.check_integrity()


def test_the_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(4, 4)
    put(pool, [1] * 8)
    put(pool, [2] * 8)
    pool.release(pool.match(chain([1] * 9), [1] * 9, 8))  # used again
    put(pool, [3] * 4)
    assert pool.longest(chain([2] * 8)) == 1
    assert pool.longest(chain([1] * 8)) == 2
    assert pool.evictions == 1
    held = pool.match(chain([1] * 9), [1] * 9, 8)
    assert len(put(pool, [4] * 16)) == 2  # what is held stays, so only two places were left
    assert pool.longest(chain([1] * 8)) == 2
    pool.release(held)
    twice = Match([next(iter(put(pool, [5] * 4)))], 4)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(twice)


def test_the_end_of_a_text_is_found_too_until_it_goes_on() -> None:
    pool = BlockPool(8, 4)
    text = [1, 2, 3, 4, 5, 6]
    put(pool, text)
    tail, _ = pool.commit_tail(chain(text), text)
    assert tail is not None
    pool.release(Match([tail]))
    assert pool.commit_tail(chain(text), text) == (None, [])
    longer = [*text, 7, 8, 9]
    match = pool.match(chain(longer), longer, 8)
    assert match.length == 6
    pool.release(match)
    assert put(pool, longer) == [tail]  # the full block takes the place of the one that was not
    assert pool.match(chain(longer), longer, 8).length == 8
    assert pool.cached == 2
    pool.check_integrity()


def test_the_same_end_among_many_others_is_kept_once() -> None:
    pool = BlockPool(64, 4)
    for text in ([1, 2, 3], *([9, number] for number in range(30)), [1, 2, 3]):
        tail, _ = pool.commit_tail(chain(text), text)
        pool.release(Match([tail] if tail is not None else []))
        pool.check_integrity()
    assert pool.cached == 31
    pool.flush()
    assert pool.cached == 0


def test_a_text_that_grew_goes_from_its_end() -> None:
    pool = BlockPool(4, 4)
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    put(pool, text[:4])
    put(pool, [9] * 4)
    put(pool, text)
    pool.refresh(chain(text))
    put(pool, [7] * 8)
    assert pool.longest(chain(text)) == 2
    put(pool, [6] * 4)
    assert pool.longest(chain(text)) == 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), total=st.integers(1, 12), size=st.integers(1, 5))
def test_nothing_is_lost_whatever_happens(seed: int, total: int, size: int) -> None:
    draw = random.Random(seed)
    pool = BlockPool(total, size)
    held: list[Match] = []
    for _ in range(60):
        tokens = [draw.randrange(2) for _ in range(draw.randint(1, 5 * size))]
        text = Chain(ROOT, size).extend(tokens)
        action = draw.random()
        if action < 0.4:
            placed, gone = pool.commit(text, tokens, range(len(text.hashes)))
            assert len({id_ for _, id_ in placed}) == len(placed)
            assert not {block.hash for block in gone} & set(text.hashes)
            tail, gone = pool.commit_tail(text, tokens)
            assert tail is None or tail not in [id_ for _, id_ in placed]
            pool.release(Match([id_ for _, id_ in placed] + ([tail] if tail is not None else [])))
        elif action < 0.8:
            match = pool.match(text, tokens, len(tokens) - 1)
            known = [token for id_ in match.ids for token in pool[id_].tokens]
            assert known[: match.length] == tokens[: match.length]
            held.append(match)
        elif held:
            pool.release(held.pop(draw.randrange(len(held))))
        elif action > 0.98:
            pool.flush()
        pool.check_integrity()
    for match in held:
        pool.release(match)
    assert pool.referenced == 0
    pool.flush()
    assert pool.cached == 0
    pool.check_integrity()
