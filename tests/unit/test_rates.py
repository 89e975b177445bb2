"""Windows, limits and what a caller may use and is charged; no server, a clock of its own."""

import math
import random

import pytest

from mlx_parallm.errors import PermissionDeniedError, RateLimitError
from mlx_parallm.server.auth.caller import ANYBODY, Caller
from mlx_parallm.server.auth.keys import Key, KeyLimits
from mlx_parallm.server.auth.rates import KeyUsage, RateLimits, SlidingWindow, duration


class Clock:
    def __init__(self) -> None:
        self.now = 12345.67

    def __call__(self) -> float:
        return self.now


def test_a_window_forgets_after_a_minute() -> None:
    clock = Clock()
    window = SlidingWindow(clock)
    window.add(3)
    clock.now += 30
    window.add(2)
    assert window.used == 5
    assert 30 <= window.wait(1, 5) <= 30.1
    assert 60 <= window.wait(4, 5) <= 60.1
    assert (window.wait(0, 5), window.wait(6, 5)) == (0, math.inf)
    assert 60 <= window.reset() <= 60.1
    clock.now += 30.1
    assert window.used == 2
    clock.now += 60
    assert (window.used, window.reset()) == (0, 0)


def test_what_was_added_last_can_be_taken_back() -> None:
    clock = Clock()
    window = SlidingWindow(clock)
    for amount in (3, 4, 5):
        window.add(amount)
        clock.now += 1
    window.take_back(7)
    assert window.used == 5
    clock.now += 57.2  # the first has left
    assert window.used == 2
    window.take_back(9)
    assert (window.used, window.reset()) == (0, 0)
    window.add(-3)
    assert window.used == 0


def test_no_minute_has_more_requests_than_the_limit() -> None:
    """Whenever they come, and as many as could be let in."""
    clock, rng, limit = Clock(), random.Random(1), 7
    usage, admitted, refused = KeyUsage(clock), [], 0
    for _ in range(3000):
        clock.now += rng.expovariate(0.5)
        within = [time for time in admitted if time > clock.now - 60]
        try:
            usage.admit(KeyLimits(requests_per_minute=limit))
        except RateLimitError:
            refused += 1
            assert len([time for time in admitted if time > clock.now - 60.1]) == limit
        else:
            assert len(within) < limit
            admitted.append(clock.now)
    assert refused > 500
    assert len(admitted) > 500


def test_the_time_to_wait_is_enough() -> None:
    clock = Clock()
    usage, limits = KeyUsage(clock), KeyLimits(requests_per_minute=1)
    usage.admit(limits)
    with pytest.raises(RateLimitError) as caught:
        usage.admit(limits)
    assert "try again in" in caught.value.message
    clock.now += caught.value.retry_after
    usage.admit(limits)


def test_what_is_refused_is_not_counted() -> None:
    usage = KeyUsage(Clock())
    usage.admit(KeyLimits(requests_per_minute=9, concurrency=1))
    for _ in range(5):
        with pytest.raises(RateLimitError, match="its limit is 1 at once"):
            usage.admit(KeyLimits(requests_per_minute=9, concurrency=1))
    assert (usage.requests.used, usage.running) == (1, 1)


def test_tokens_are_charged_before_and_after() -> None:
    clock = Clock()
    key = Key.of("a", "user", "x", limits=KeyLimits(tokens_per_minute=100))
    caller = Caller(key, RateLimits(clock).usage(key))
    caller.admit()
    caller.charge_prompt(60)
    with pytest.raises(RateLimitError, match="has used 60 tokens within the last minute, and this request has 41"):
        caller.charge_prompt(41)
    caller.charge_output(70)
    assert caller.headers()["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(RateLimitError):
        caller.admit()
    clock.now += 60.1
    caller.admit()
    assert caller.headers() == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "0s",
    }
    with pytest.raises(RateLimitError, match="more than this key may use in a minute: its limit is 100"):
        caller.charge_prompt(101)


def test_answers_that_are_being_generated_count() -> None:
    usage, limits = KeyUsage(Clock()), KeyLimits(tokens_per_minute=100)
    assert usage.expect(300, True, limits) == 300  # one answer may go over
    with pytest.raises(RateLimitError, match="may use 300 more; its limit is 100"):
        usage.expect(1, True, limits)
    usage.expected -= 300
    assert [usage.expect(5000, False, limits) for _ in range(9)] == [12] * 9
    with pytest.raises(RateLimitError):
        usage.expect(1, True, limits)
    assert usage.expect(5000, True, KeyLimits()) == 0


def test_answers_that_must_fit_are_refused_where_they_do_not() -> None:
    usage, limits = KeyUsage(Clock()), KeyLimits(tokens_per_minute=100)
    usage.tokens.add(30)
    assert [usage.reserve(tokens, limits) for tokens in (40, 30)] == [40, 30]
    with pytest.raises(RateLimitError, match="has used 30 tokens within the last minute, and this request has 72;"):
        usage.reserve(2, limits)
    with pytest.raises(RateLimitError, match="has 101 tokens, more than this key may use in a minute"):
        usage.reserve(31, limits)
    assert (usage.reserve(101, KeyLimits()), usage.expected) == (0, 70)


def test_usage_belongs_to_a_key_and_outlives_a_change_of_its_limits() -> None:
    rates = RateLimits(Clock())
    before, after = (Key.of("a", "user", "x", limits=KeyLimits(number)) for number in (5, 6))
    assert rates.usage(before) is rates.usage(after)
    assert rates.usage(before) is not rates.usage(Key.of("b", "user", "x"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0001, "1ms"), (0.12, "120ms"), (1, "1s"), (17.25, "17.25s"), (60, "1m0s"), (61.5, "1m1.5s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_what_a_caller_may_use() -> None:
    key = Key.of("a", "user", "x", models=frozenset({"m"}), adapters=frozenset())
    bound, free = Caller(key), Caller(Key.of("a", "user", "x"))
    assert (bound.may_use_model("m"), bound.may_use_model("n"), bound.may_use_adapter("m")) == (True, False, False)
    assert free.may_use_model("n")
    assert free.may_use_adapter("n")
    assert ANYBODY.may_use_model("n")
    with pytest.raises(PermissionDeniedError):
        bound.check_changes_adapter("x")
    free.check_changes_adapter("x")


def test_no_request_can_ask_for_a_tenants_salt() -> None:
    alice, bob = Caller(Key.of("alice", "user", "x")), Caller(Key.of("bob", "user", "y"))
    shared = Caller(Key.of("carol", "user", "z", shared_cache=True))
    asked = ["", "s", alice.cache_salt(""), alice.cache_salt("s"), 'alice", "s', "request:s"]
    salts = [caller.cache_salt(salt) for caller in (alice, bob, ANYBODY) for salt in asked]
    assert len(set(salts)) == len(salts)
    assert ANYBODY.cache_salt("") == shared.cache_salt("") == ""
    assert ANYBODY.cache_salt("s") == shared.cache_salt("s")
    assert alice.own_name("m") != bob.own_name("m") != shared.own_name("m") == "m"
