"""Rows take tokens one at a time and know when they end; readers get all of it once. No MLX."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.engine.rows import Job, Plan, Prefill, Reader, Row, row_seed
from mlx_parallm.policy_spans import OPEN_END, PolicySpan
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.types import Request, TokenLogprob

STOP = 9


def reader(index: int = 0, *, stream: bool = False, sampling: SamplingParams = SamplingParams()) -> Reader:  # noqa: B008
    return Reader(Request("id", [1], sampling, stream=stream), index, 0.0, lambda delta: None)


def row(sampling: SamplingParams = SamplingParams(), *, max_tokens: int = 8) -> Row:  # noqa: B008
    return Row([1, 2, 3], sampling, 0, 0, max_tokens, frozenset({STOP}))


def score(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, 2, ((5, -0.1), (6, -0.2), (token, -1.0)))


def test_a_stop_token_counts_from_min_tokens_on() -> None:
    one = row(SamplingParams(min_tokens=2))
    one.accept(STOP, None)
    one.accept(STOP, None)
    assert (one.tokens, one.finish_reason, one.stop_token) == ([STOP, STOP], None, None)
    one.accept(STOP, None)
    assert (one.tokens, one.finish_reason, one.stop_token) == ([STOP, STOP], "stop", STOP)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    tokens=st.lists(st.sampled_from([4, 5, STOP]), min_size=12, max_size=12),
    max_tokens=st.integers(1, 10),
    min_tokens=st.integers(0, 10),
)
def test_a_row_ends_with_its_first_stop_token_after_the_least_or_its_last_token(
    tokens: list[int], max_tokens: int, min_tokens: int
) -> None:
    one = row(SamplingParams(min_tokens=min_tokens), max_tokens=max_tokens)
    stops = [place for place, token in enumerate(tokens) if token == STOP and place >= min_tokens]
    end = min([*stops, max_tokens])
    for place, token in enumerate(tokens):
        assert one.finish_reason is None
        one.accept(token, None, -float(place))
        if one.finish_reason is not None:
            break
    stopped = end in stops and end < max_tokens
    assert one.tokens == tokens[:end]
    assert (one.finish_reason, one.stop_token) == (("stop", STOP) if stopped else ("length", None))
    assert one.sampled_logprobs == [-float(place) for place in range(end + stopped)], "the stop token's too"


def test_a_row_whose_prompt_alone_is_scored_takes_no_token() -> None:
    one = row(max_tokens=0)
    one.accept(5, None, -0.5)
    assert (one.tokens, one.finish_reason, one.sampled_logprobs) == ([], "length", [-0.5])


def test_a_row_has_as_many_of_the_likeliest_as_it_asked_for() -> None:
    one = row(SamplingParams(logprobs=2))
    one.accept(4, score(4))
    one.accept(STOP, score(STOP))
    assert [entry.top for entry in one.logprobs] == [((5, -0.1), (6, -0.2))]
    assert one.logprobs[0].logprob == -1.0
    assert one.stop_logprob is not None
    assert (one.stop_logprob.token, len(one.stop_logprob.top)) == (STOP, 2)
    none = row(SamplingParams(logprobs=0))
    none.accept(4, score(4))
    assert none.logprobs[0].top == ()
    without = row()
    without.accept(4, None)
    assert (without.logprobs, without.sampled_logprobs) == ([], [])


def test_a_complete_grammar_ends_the_row_even_with_its_last_token() -> None:
    one = row(max_tokens=1)
    one.complete = True
    one.accept(4, None)
    assert (one.tokens, one.finish_reason, one.stop_token) == ([4], "stop", None)


class Matcher:
    """llguidance's, as far as rows ask it."""

    def __init__(self, *, stopped: bool = False, takes: bool = True, error: str = "") -> None:
        self.stopped, self.takes, self.error = stopped, takes, error
        self.consumed: list[int] = []

    def is_error(self) -> bool:
        return bool(self.error)

    def get_error(self) -> str:
        return self.error

    def is_stopped(self) -> bool:
        return self.stopped

    def consume_token(self, token: int) -> bool:
        self.consumed.append(token)
        return self.takes


def bound(matcher: Matcher, *, end_ids: frozenset[int] = frozenset({STOP}), min_tokens: int = 0) -> Row:
    one = row(SamplingParams(min_tokens=min_tokens))
    one.matcher, one.end_ids = matcher, end_ids
    return one


def test_a_grammar_is_moved_on_by_all_tokens_but_the_one_that_ends_the_row() -> None:
    one = bound(Matcher())
    assert (one.follow_grammar(4), one.matcher.consumed, one.complete) == ("", [4], False)
    assert (one.follow_grammar(STOP), one.matcher.consumed) == ("", [4])
    early = bound(Matcher(), min_tokens=1)
    assert (early.follow_grammar(STOP), early.matcher.consumed) == ("", [STOP]), "it does not end the row yet"
    early.tokens.append(4)
    assert (early.follow_grammar(STOP), early.matcher.consumed) == ("", [STOP])


def test_what_is_wrong_with_a_token_is_said_in_a_line() -> None:
    assert bound(Matcher(takes=False)).follow_grammar(4) == "a token does not fit it"
    assert bound(Matcher(error="too deep\nand more")).follow_grammar(4) == "too deep"
    assert bound(Matcher(error="too deep")).follow_grammar(STOP) == "too deep"


def test_a_text_that_is_complete_ends_where_no_end_token_may_follow() -> None:
    ends = bound(Matcher(stopped=True))
    ends.follow_grammar(4)
    assert not ends.complete, "the end token follows"
    for one in (bound(Matcher(stopped=True), end_ids=frozenset({7})), bound(Matcher(stopped=True), min_tokens=2)):
        assert one.follow_grammar(4) == ""
        assert one.complete
    second = bound(Matcher(stopped=True), min_tokens=2)
    second.tokens.append(4)
    second.follow_grammar(4)
    assert not second.complete, "with this token it has two"


def test_an_end_token_may_come_after_the_least_number() -> None:
    one = bound(Matcher(), min_tokens=2)
    assert [one.may_end_after(count) for count in (1, 2, 3)] == [False, True, True]
    assert not bound(Matcher(), end_ids=frozenset({7})).may_end_after(5)


def test_a_row_wants_more_until_all_its_tokens_are_asked_for() -> None:
    one = row(max_tokens=2)
    assert (one.wants_more, one.length) == (True, 2)
    one.launched = 1
    assert (one.wants_more, one.length) == (True, 3)
    one.launched = 2
    assert (one.wants_more, one.length) == (False, 4)
    ended = row()
    ended.finish_reason = "stop"
    assert not ended.wants_more


def test_a_row_streams_if_one_of_its_readers_does() -> None:
    one = row()
    assert not one.streams
    one.readers = [reader(), reader(stream=True)]
    assert one.streams
    one.readers.pop()
    assert not one.streams


def test_who_streams_or_looks_for_stop_strings_reads_along() -> None:
    assert not reader().eager
    assert reader(stream=True).eager
    assert reader(sampling=SamplingParams(stop=("x",))).eager


class Version:
    def __init__(self, number: int) -> None:
        self.number = number


def test_policies_say_which_adapter_made_which_tokens() -> None:
    one, (first, second) = row(), (Version(1), Version(2))
    one.take_adapter(first)
    one.launched = 3
    one.take_adapter(first)
    assert one.policies == [(0, first)]
    one.take_adapter(second)
    assert (one.policies, one.adapter) == ([(0, first), (3, second)], second)
    one.take_adapter(None)
    assert one.policies == [(0, first), (3, None)], "nothing was made with the second"
    assert one.delta_for(reader()).spans == (PolicySpan(0, 3, 1), PolicySpan(3, OPEN_END, 0))


def test_a_requeued_row_forgets_what_was_not_read() -> None:
    one, (first, second) = row(), (Version(1), Version(2))
    one.take_adapter(first)
    one.tokens, one.launched = [4, 5], 3
    one.take_adapter(second)
    one.rewind()
    assert (one.launched, one.policies) == (2, [(0, first), (2, second)])


def test_readers_are_told_everything_once() -> None:
    one, who = row(SamplingParams(logprobs=1)), reader(3)
    one.prompt_logprobs, one.cached = [None, score(2)], 2
    one.accept(4, score(4))
    delta = one.delta_for(who)
    assert (delta.request_id, delta.index, delta.tokens) == ("id", 3, [4])
    assert (delta.prompt_logprobs, delta.cached_tokens) == ([None, score(2)], 2)
    assert [entry.token for entry in delta.logprobs or []] == [4]
    assert (who.sent, who.started) == (1, True)
    one.accept(5, score(5))
    one.accept(STOP, score(STOP))
    last = one.delta_for(who)
    assert (last.tokens, last.finish_reason, last.stop_token) == ([5], "stop", STOP)
    assert (last.prompt_logprobs, last.cached_tokens) == (None, 0)
    assert [entry.token for entry in last.logprobs or []] == [5]
    assert last.stop_logprob is not None
    late = one.delta_for(reader())
    assert (late.tokens, late.cached_tokens) == ([4, 5], 2)
    assert row().delta_for(reader()).logprobs is None
    assert row().delta_for(reader()).cached_tokens == 0


def test_jobs_prefills_and_plans_know_their_sizes() -> None:
    one = Job([row()], [1, 2, 3, 4, 5], 2, 0.0, number=7)
    one.computed = 2
    assert (one.remaining, one.key) == (3, (2, 7))
    assert Prefill([one, one], 3).padded == 6
    assert not Plan([], [])
    assert Plan([Prefill([one], 3)], [])
    assert Plan([], [row()])


def test_choices_of_one_seed_have_seeds_of_their_own() -> None:
    seeds = {row_seed(seed, index) for seed in (0, 1, -1, 2**63 - 1) for index in range(50)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert max(seeds) > 2**31, "all 32 bits are used"
    assert row_seed(7, 0) == row_seed(7, 0) == 2870378373


@pytest.mark.parametrize("index", range(3))
def test_the_seed_of_a_choice_is_the_same_in_every_version(index: int) -> None:
    """Clients keep seeds: the same seed must draw the same tokens after an update."""
    assert row_seed(42, index) == [3020249820, 3856427147, 2389378531][index]
