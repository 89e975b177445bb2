"""The prefix cache's book: what matches, who goes first, and that nothing is lost."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.kv.block_pool import NEAREST, BlockPool, Chain, Match, root_of

ROOT = root_of("model", "")


def chain(tokens: list[int], root: bytes = ROOT, size: int = 4) -> Chain:
    return Chain(root, size).extend(tokens)


def put(pool: BlockPool, tokens: list[int], root: bytes = ROOT) -> list[int]:
    placed, _ = pool.commit(chain(tokens, root), tokens, range(len(tokens) // 4))
    ids = [id_ for _, id_ in placed]
    pool.release(Match(list(ids)))
    return ids


def test_images_are_told_apart_by_their_digests() -> None:
    """Their tokens are the same: numbers that no token has stand for them, here 7."""
    one, other = 1 << 128 | 5, 1 << 128 | 6
    texts = [[1, 2, image, image, image, image, 3, 4, 5] for image in (7, one, other)]
    assert len({chain(tokens).hashes[0] for tokens in texts}) == 3
    assert chain(texts[1]).hashes == chain(list(texts[1])).hashes
    pool = BlockPool(8, 4)
    put(pool, texts[1])
    assert pool.match(chain(texts[1]), texts[1], 8).length == 8
    assert pool.match(chain(texts[2]), texts[2], 8).length == 2, "what comes before the image is shared"
    assert pool.match(chain(texts[0]), texts[0], 8).length == 2


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


def test_blocks_are_found_by_place_and_by_hash() -> None:
    pool = BlockPool(4, 4)
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    one, other = chain(text).hashes
    assert put(pool, text) == [0, 1]
    assert one in pool
    assert root_of("x") not in pool
    assert (pool.by_hash(other), pool[1].tokens, pool[1].parent) == (pool[1], (5, 6, 7, 8), one)
    assert (pool[0].parent, pool[0].hash, pool[0].id, pool[0].refs) == (ROOT, one, 0, 0)
    assert (pool.cached, pool.referenced, pool.total, pool.size) == (2, 0, 4, 4)
    held = pool.match(chain(text), text, 8)
    assert (held.ids, held.length, pool.referenced, pool[0].refs) == ([0, 1], 8, 2, 1)
    pool.release(held)
    assert (held.ids, held.length, pool.referenced) == ([], 0, 0)


def test_roots_differ_by_every_seed_and_its_kind() -> None:
    roots = {root_of("model", ""), root_of("model"), root_of("", "model"), root_of("model", 1), root_of("model", "1")}
    assert len(roots) == 5
    assert {len(root) for root in roots} == {16}
    assert len(chain([1, 2, 3, 4]).hashes[0]) == 16


def test_what_a_chain_has_in_common_with_another() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    assert chain(text).common(chain(text)) == 2
    assert chain(text).common(chain(text[:4])) == chain(text[:4]).common(chain(text)) == 1
    assert chain(text).common(chain([9] * 8)) == 0
    assert chain([]).common(chain(text)) == 0
    assert chain(text).before(0) == ROOT
    assert chain(text).before(2) == chain(text).hashes[1]


def test_hashes_are_the_same_on_every_machine_and_in_every_version() -> None:
    """Blocks on an SSD are found by them after a restart."""
    assert root_of("model", "").hex() == "9fab55edf407f1aecc945b11ab7cbdbc"
    assert chain([1, 2, 3, 4]).hashes[0].hex() == "8c37c108eb1de4b38331fe78db7450fb"


def test_a_match_goes_no_further_than_the_first_block_that_is_missing() -> None:
    pool = BlockPool(8, 4)
    text = [1] * 4 + [2] * 4 + [3] * 4
    placed, _ = pool.commit(chain(text), text, [0, 2])
    assert placed == [(0, 0), (2, 1)]
    pool.release(Match([0, 1]))
    assert pool.match(chain(text), text, 12).length == 4
    assert pool.longest(chain(text)) == 1
    assert pool.longest(chain([])) == 0


@pytest.mark.parametrize(("limit", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2)])
def test_a_match_is_no_longer_than_its_limit(limit: int, blocks: int) -> None:
    pool = BlockPool(8, 4)
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    put(pool, text)
    match = pool.match(chain(text), text, limit)
    assert (match.length, len(match.ids)) == (limit, blocks)
    pool.release(match)


def test_the_nearest_of_the_newest_siblings_is_taken() -> None:
    pool = BlockPool(64, 4)
    for text in ([1, 1, 1, 1], [1, 2, 2, 2], [1, 2, 3, 3]):
        put(pool, text)
    match = pool.match(chain([1, 2, 3, 9, 9]), [1, 2, 3, 9, 9], 4)
    assert (match.length, pool[match.ids[0]].tokens) == (3, (1, 2, 3, 3))
    newest = pool.match(chain([1, 2, 9, 9, 9]), [1, 2, 9, 9, 9], 4)
    assert (newest.length, pool[newest.ids[0]].tokens) == (2, (1, 2, 3, 3)), "of those that share as much, the newest"
    for number in range(NEAREST - 1):
        put(pool, [5, number, 0, 0])
    assert pool.match(chain([1, 2, 3, 9, 9]), [1, 2, 3, 9, 9], 4).length == 3, "still among them"
    put(pool, [5, 99, 0, 0])
    assert pool.match(chain([1, 2, 3, 9, 9]), [1, 2, 3, 9, 9], 4).length == 0, "thousands of texts may begin alike"


def test_blocks_that_make_room_are_handed_over_with_their_content() -> None:
    pool = BlockPool(2, 4)
    put(pool, [1] * 4)
    put(pool, [2] * 4)
    placed, gone = pool.commit(chain([3] * 4), [3] * 4, [0])
    assert ([block.tokens for block in gone], placed, pool.evictions) == ([(1, 1, 1, 1)], [(0, 0)], 1)
    again, gone = pool.commit(chain([3] * 8), [3] * 8, range(2))
    assert ([number for number, _ in again], [block.tokens for block in gone]) == ([1], [(2, 2, 2, 2)])
    none, gone = pool.commit(chain([4] * 8), [4] * 8, range(2))
    assert (none, gone, pool.evictions) == ([], [], 2), "all are held"
    pool.check_integrity()


def test_a_text_does_not_push_out_its_own_beginning() -> None:
    pool = BlockPool(2, 4)
    put(pool, [1] * 4)
    put(pool, [2] * 4)
    text = [1] * 4 + [3] * 8
    placed, gone = pool.commit(chain(text), text, range(3))
    assert ([number for number, _ in placed], [block.tokens for block in gone]) == ([1], [(2, 2, 2, 2)])


def test_an_end_is_kept_behind_blocks_that_are_there() -> None:
    pool = BlockPool(4, 4)
    text = [1, 2, 3, 4, 5, 6]
    assert pool.commit_tail(chain(text), text) == (None, []), "its beginning is not"
    assert pool.commit_tail(chain(text[:4]), text[:4]) == (None, []), "there is no end"
    short, gone = pool.commit_tail(chain([5, 6]), [5, 6])
    assert (short, gone) == (0, [])
    assert (pool[0].tokens, pool[0].parent, pool[0].refs) == ((5, 6), ROOT, 1)
    assert pool.commit_tail(chain([5]), [5]) == (None, []), "the longer one has it"
    pool.release(Match([0]))
    longer, _ = pool.commit_tail(chain([5, 6, 7]), [5, 6, 7])
    assert (longer, pool.cached) == (0, 1), "in the place of the shorter"
    held, _ = pool.commit_tail(chain([5, 6, 7, 8][:3]), [5, 6, 9])
    assert (held, pool.cached) == (1, 2)


def test_an_end_that_somebody_uses_keeps_its_place() -> None:
    pool = BlockPool(4, 4)
    pool.commit_tail(chain([5, 6]), [5, 6])
    placed, _ = pool.commit(chain([5, 6, 7, 8]), [5, 6, 7, 8], [0])
    assert placed == [(0, 1)]
    assert pool.cached == 2


def test_an_end_finds_no_place_where_all_are_held_and_evicts_where_not() -> None:
    pool = BlockPool(1, 4)
    pool.commit(chain([1] * 4), [1] * 4, [0])
    assert pool.commit_tail(chain([2, 2]), [2, 2]) == (None, [])
    pool.release(Match([0]))
    tail, gone = pool.commit_tail(chain([2, 2]), [2, 2])
    assert (tail, [block.tokens for block in gone], pool.evictions) == (0, [(1, 1, 1, 1)], 1)


def test_a_pool_that_is_cleared_is_empty_and_as_good_as_new() -> None:
    pool = BlockPool(3, 4)
    put(pool, [1] * 8)
    pool.match(chain([1] * 8), [1] * 8, 8)
    pool.clear()
    pool.check_integrity()
    assert (pool.cached, pool.referenced, pool.longest(chain([1] * 8))) == (0, 0, 0)
    assert put(pool, [2] * 12) == [0, 1, 2]


def test_a_flush_leaves_what_is_held() -> None:
    pool = BlockPool(3, 4)
    put(pool, [1] * 4)
    put(pool, [2] * 8)
    held = pool.match(chain([1] * 4), [1] * 4, 4)
    pool.flush()
    assert (pool.cached, pool.longest(chain([1] * 4)), pool.longest(chain([2] * 8))) == (1, 1, 0)
    pool.check_integrity()
    pool.release(held)


def test_what_is_beyond_the_limit_goes_when_it_is_released() -> None:
    pool = BlockPool(4, 4)
    text = [1] * 4 + [2] * 4
    put(pool, [3] * 8)
    held = pool.match(chain([3] * 8), [3] * 8, 8)
    put(pool, text)
    assert pool.set_limit(1) == 2, "the second place is held"
    assert (pool.cached, pool.longest(chain(text))) == (2, 0)
    pool.release(held)
    assert (pool.cached, pool.longest(chain([3] * 8))) == (1, 1)
    pool.check_integrity()


def test_a_refresh_passes_over_blocks_that_are_not_there_or_held() -> None:
    pool = BlockPool(4, 4)
    text = [1] * 4 + [2] * 4 + [3] * 4
    put(pool, text[:8])
    held = pool.match(chain(text[:4]), text[:4], 4)
    pool.refresh(chain(text))
    pool.release(held)
    pool.check_integrity()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.pop(), "a block is lost"),
        (lambda pool: (pool._free.pop(), pool._free.append(0)), "both free and cached"),
        (lambda pool: pool._by_hash.update({pool[0].hash: 1}), "can't be found by its hash"),
        (lambda pool: setattr(pool[0], "refs", 1), "users are miscounted"),
        (lambda pool: pool._children.clear(), None),
    ],
)
def test_integrity_is_checked(damage: Callable[[BlockPool], object], message: str | None) -> None:
    pool = BlockPool(4, 4)
    put(pool, [1] * 8)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()
