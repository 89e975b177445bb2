"""The ledger of what was drawn, and the buffer of groups."""

import threading
import time
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from mlx_parallm.engine.rows import Row
from mlx_parallm.errors import InvalidRequestError, NotFoundError, UnavailableError
from mlx_parallm.policy_spans import PolicySpan
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.training.rl.buffer import Buffer
from mlx_parallm.training.rl.follower import BufferFollower
from mlx_parallm.training.rl.records import TOKENS_OF_NAMES, ChoiceKey, PackedRecord, Record
from mlx_parallm.training.rl.request_loop import RequestLoop
from mlx_parallm.training.rl.task_loop import StepReport
from mlx_parallm.training.rl.trajectories import Trajectory, prompt_group
from mlx_parallm.training.storage.ledger import Ledger
from mlx_parallm.types import CompletionNames, Request


class Version:
    def __init__(self, number: int, name: str = "policy") -> None:
        self.number, self.name = number, name


def ended(tokens: list[int], *, stop: int | None = None, name: str = "r", n: int = 1) -> tuple[Request, Row]:
    sampling = SamplingParams(temperature=0.5, n=n)
    row = Row([1, 2, 3], sampling, 0, 0, 10, frozenset())
    row.tokens, row.stop_token, row.finish_reason = tokens, stop, "stop" if stop else "length"
    row.sampled_logprobs = [-0.1 * (place + 1) for place in range(len(tokens) + (stop is not None))]
    row.policies = [(0, Version(3)), (2, Version(4))]
    row.adapter = row.policies[-1][1]
    return Request(f"engine-{name}", row.prompt, sampling, names=CompletionNames(client=name)), row


def test_a_record_says_what_was_drawn() -> None:
    record = Record.of(ended([5, 6, 7], stop=9)[0], 0, ended([5, 6, 7], stop=9)[1])
    assert record.completion_ids == (5, 6, 7, 9)
    assert record.logprobs == pytest.approx((-0.1, -0.2, -0.3, -0.4))
    assert record.spans == (PolicySpan(0, 2, 3), PolicySpan(2, 4, 4))
    assert (record.temperature, record.policy, record.finish_reason) == (0.5, "policy", "stop")
    assert record.cut(2).completion_ids == (5, 6)
    assert Trajectory.recorded(record, 1.0).version == 3  # the oldest


def test_what_was_written_is_read_again_also_as_earlier_releases_wrote_it() -> None:
    record = Record.of(ended([5, 6, 7], stop=9)[0], 0, ended([5, 6, 7], stop=9)[1])
    trajectory = Trajectory.recorded(record, 1.0)
    written = [orjson.loads(one) for one in (record.json(), orjson.dumps(trajectory))]
    earlier = [{**fields, "spans": [[0, 2, 3], [2, 4, 4]]} for fields in written]
    earlier[1]["source"] = ["engine-r", 0]
    for fields, others in (written, earlier):
        assert Record.of_json(fields) == record
        again = Trajectory.of_json(others)
        assert (again.spans, again.source, again.reward) == (trajectory.spans, ChoiceKey("engine-r", 0), 1.0)


def test_the_ledger_finds_by_every_name() -> None:
    ledger = Ledger()
    request, row = ended([5, 6])
    ledger(replace(request, names=CompletionNames("r", "resp_1f", "http-r")), 0, row)
    for name in ("r", "resp_1f", "http-r", "engine-r"):
        assert ledger.find(name).completion_ids == (5, 6)
    with pytest.raises(NotFoundError):
        ledger.find("r", 1)
    with pytest.raises(NotFoundError):
        ledger.find("other")


def test_only_what_was_drawn_and_recorded_is_kept() -> None:
    ledger = Ledger()
    for tokens, logprobs, stop in (([5, 6], [], None), ([], [-0.1], None), ([], [], 9)):
        request, row = ended(tokens, stop=stop)
        row.sampled_logprobs = logprobs
        ledger(request, 0, row)
    assert len(ledger) == 0
    ledger(*_with_index(ended([], stop=9)))
    assert ledger.find("r").completion_ids == (9,)


def test_one_of_several_answers_has_a_name_of_its_own() -> None:
    ledger = Ledger()
    for index in range(2):
        request, row = ended([5, 6 + index], name="two", n=2)
        ledger(request, index, row)
    assert ledger.find("two.1").completion_ids == (5, 7)
    with pytest.raises(InvalidRequestError, match="has 2 answers"):
        ledger.find("two")
    ledger(*_with_index(ended([5, 6], name="one")))
    with pytest.raises(NotFoundError):
        ledger.find("one.0")


def test_what_an_earlier_process_has_kept_is_found_again() -> None:
    first, second = Ledger(), Ledger()
    for name in ("a", "b"):
        first(*_with_index(ended([5, 6], name=name)))
    second.restore(first.records())
    assert [record.id for record in second.records()] == [record.id for record in first.records()]
    assert second.find("a") == first.find("a")


def test_an_answer_belongs_to_the_key_that_asked() -> None:
    ledger = Ledger()
    for owner, token in (("dan", 5), ("eve", 6)):
        request, row = ended([token, token])
        ledger(
            replace(
                request,
                id=f"engine-{owner}",
                owner=owner,
                names=CompletionNames("r", f"cmpl-http-{owner}", f"http-{owner}"),
            ),
            0,
            row,
        )
    assert ledger.find("r", owner="dan").completion_ids == (5, 5)
    assert ledger.find("r", owner="eve").completion_ids == (6, 6)
    assert ledger.find("r").completion_ids == (6, 6)  # the newest, for those who may reward all
    assert ledger.find("cmpl-http-dan", owner="dan").completion_ids == (5, 5)
    for name, owner in (("http-dan", "eve"), ("engine-dan", "eve"), ("r", "mallory"), ("http-dan.0", "eve")):
        with pytest.raises(NotFoundError):
            ledger.find(name, owner=owner)


def test_the_ledger_is_bounded_and_the_last_of_one_name_counts() -> None:
    ledger = Ledger(max_tokens=6 * (5 + TOKENS_OF_NAMES))  # five tokens each
    for number in range(20):
        ledger(*_with_index(ended([5, number], name=f"r{number}")))
    assert len(ledger) == 6
    ledger.find("r19")
    with pytest.raises(NotFoundError):
        ledger.find("r0")
    ledger(*_with_index(ended([7, 7], name="r19")))
    assert ledger.find("r19").completion_ids == (7, 7)
    assert len(ledger) == 6


def test_a_kept_answer_is_the_one_that_was_recorded_and_takes_little_memory() -> None:
    tokens = [300 + number for number in range(20_000)]
    request, row = ended(tokens, stop=9)
    row.forced = {3, 4}
    record, ledger = Record.of(request, 0, row), Ledger()
    ledger(request, 0, row)
    assert ledger.find("r") == record
    assert list(ledger.records()) == [record]
    tracemalloc.start()
    try:
        packed = PackedRecord.of(record)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert packed.unpacked() == record
    assert held <= 13 * len(tokens)  # 4 bytes a token, and 8 its log-probability


def test_many_short_answers_are_bounded_by_their_number() -> None:
    ledger = Ledger(max_tokens=100 * TOKENS_OF_NAMES)
    for number in range(300):
        ledger(*_with_index(ended([5], name=f"r{number}")))
    assert len(ledger) == 100 * TOKENS_OF_NAMES // (4 + TOKENS_OF_NAMES)


def _with_index(pair: tuple[Request, Row]) -> tuple[Request, int, Row]:
    return pair[0], 0, pair[1]


def test_listeners_hear_of_theirs_alone() -> None:
    ledger, heard = Ledger(), []
    ledger.listen(["engine-a"], heard.append)
    ledger(*_with_index(ended([5], name="a")))
    ledger(*_with_index(ended([5], name="b")))
    ledger.forget(["engine-a"])
    ledger(*_with_index(ended([5], name="a")))
    assert [record.names.client for record in heard] == ["a"]


def test_what_was_not_drawn_here_is_off_policy() -> None:
    ledger = Ledger()
    ledger(*_with_index(ended([5, 6], stop=9)))
    drawn = Trajectory([1, 2, 3], [5, 6, 9], 1.0, logprobs=[-0.1, -0.2, -0.3])
    ledger.check(drawn)
    assert not drawn.off_policy
    assert (drawn.temperature, drawn.version) == (0.5, 3)
    part = Trajectory([1, 2, 3], [5, 6], 1.0, logprobs=[-0.1, -0.2], request_id="r")
    ledger.check(part)
    assert not part.off_policy
    for other in (
        Trajectory([1, 2, 3], [5, 6, 8], 1.0, logprobs=[-0.1, -0.2, -0.3]),
        Trajectory([1, 2], [5, 6, 9], 1.0, logprobs=[-0.1, -0.2, -0.3]),
        Trajectory([1, 2, 3], [5, 6, 9], 1.0, logprobs=[-0.1, -0.2, -0.9]),
        Trajectory([1, 2, 3], [4, 6, 9], 1.0),
    ):
        ledger.check(other)
        assert other.off_policy


def test_what_was_recorded_wins_where_the_request_is_known() -> None:
    """A client has log-probabilities after top_p, which are larger: that is no other policy."""
    ledger = Ledger()
    ledger(*_with_index(ended([5, 6], stop=9, n=2)))
    cut = [-0.01, -0.05, 0.0]
    for name in ("r", "r.0", "engine-r"):
        sent = Trajectory([1, 2, 3], [5, 6, 9], 1.0, logprobs=cut, request_id=name)
        ledger.check(sent)
        assert not sent.off_policy
        assert sent.logprobs == pytest.approx((-0.1, -0.2, -0.3))
        assert (sent.temperature, sent.version) == (0.5, 3)
    for other in (
        Trajectory([1, 2, 3], [5, 6, 9], 1.0, logprobs=cut),
        Trajectory([1, 2, 3], [5, 6, 9], 1.0, logprobs=cut, request_id="another"),
        Trajectory([1, 2, 3], [5, 7, 9], 1.0, logprobs=cut, request_id="r"),
    ):
        ledger.check(other)
        assert other.off_policy
        assert other.logprobs == cut


def one(group: str, reward: float = 0.0, version: int = 1) -> Trajectory:
    return Trajectory([1], [2], reward, group, spans=(PolicySpan(0, 1, version),))


def test_groups_are_taken_whole_and_lone_answers_wait() -> None:
    buffer = Buffer(100)
    buffer.add([one("a"), one("a"), one("b"), one("c"), one("c"), one("c")])
    assert (len(buffer), buffer.ready()) == (6, 5)
    assert [each.group_id for each in buffer.take(2, 1)] == ["a", "a"]
    assert [each.group_id for each in buffer.take(99, 1)] == ["c"] * 3
    assert len(buffer) == 1
    buffer.add([one("b")])
    assert buffer.ready() == 2
    assert Trajectory([1, 2], [3], 0.0).group_id == prompt_group([1, 2])


def test_the_oldest_make_room_and_the_stale_are_dropped() -> None:
    buffer = Buffer(4, max_staleness=1)
    buffer.add([one("old"), one("old"), one("a", version=4), one("a", version=5), one("b", version=5)])
    assert buffer.counts.dropped == 2
    assert len(buffer) == 3
    assert buffer.take(99, 6) == []
    assert buffer.counts.stale == 1
    assert len(buffer) == 2


def test_a_later_word_on_the_same_answer_replaces_the_earlier() -> None:
    ledger = Ledger()
    ledger(*_with_index(ended([5, 6])))
    buffer = Buffer(10)
    for reward in (0.0, 1.0):
        buffer.add([Trajectory.recorded(ledger.find("r"), reward)])
    assert (len(buffer), buffer.ready()) == (1, 0)


def test_what_a_stop_string_ended_is_what_its_reader_saw() -> None:
    ledger = Ledger()
    request, row = ended([5, 6, 7])
    row.finish_reason = None
    ledger(request, 0, row, 1)
    record = ledger.find("r")
    assert (record.completion_ids, record.finish_reason, record.spans) == ((5,), "stop", (PolicySpan(0, 1, 3),))


def test_ids_alone_are_enough_for_what_was_drawn_here() -> None:
    ledger = Ledger()
    ledger(*_with_index(ended([5, 6], stop=9)))
    bare = Trajectory([1, 2, 3], [5, 6, 9], 1.0, request_id="r")
    ledger.check(bare)
    assert not bare.off_policy
    assert bare.logprobs == pytest.approx((-0.1, -0.2, -0.3))


def test_updates_follow_the_buffer_as_soon_as_there_is_enough() -> None:
    buffer, updated = Buffer(10), threading.Event()

    def update() -> None:
        buffer.take(99, 1)
        updated.set()

    follower = BufferFollower("policy", buffer, 2, update)
    follower.start()
    try:
        buffer.add([one("a")])
        assert not updated.wait(0.05)
        buffer.add([one("a")])
        assert updated.wait(10)
    finally:
        follower.stop()


def test_a_loop_over_requests_outlives_an_update_that_fails() -> None:
    """The session's part is played: its first update is refused."""
    buffer, reports = Buffer(10), list[StepReport]()
    buffer.add([one("a"), one("a")])
    made = SimpleNamespace(outcome=SimpleNamespace(metrics={"reward_mean": 0.5}))
    answers = iter([InvalidRequestError("nothing to learn"), made, made])

    def update(at_most: int) -> object:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    session: Any = SimpleNamespace(buffer=buffer, update=update)
    found = RequestLoop(session, 2, 2, reports.append).run()
    assert [(report.step, report.reward) for report in found] == [(1, 0.5), (2, 0.5)]
    assert reports == found


def test_waiting_for_enough() -> None:
    buffer = Buffer(10)
    assert not buffer.wait(2, 0.01)
    threading.Timer(0.05, lambda: buffer.add([one("a"), one("a")])).start()
    assert buffer.wait(2, 5)
    assert buffer.wait(1, 0)
    begun = time.monotonic()
    threading.Timer(0.05, buffer.wake).start()
    assert not buffer.wait(3, 30)
    assert time.monotonic() - begun < 20, "who wakes it does not want to wait for it"


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_ids": []},
        {"completion_ids": []},
        {"reward": float("inf")},
        {"reward": 1e39},
        {"advantage": float("nan")},
        {"mask": [True, False]},
        {"logprobs": [float("-inf")]},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        Trajectory(**{"prompt_ids": [1], "completion_ids": [2], "reward": 0.0, **wrong})  # type: ignore[arg-type]


def test_a_group_must_fit_in_the_buffer() -> None:
    buffer = Buffer(3)
    buffer.add([Trajectory([1], [2, place], 0.0, "g") for place in range(2)])
    with pytest.raises(InvalidRequestError, match="would have 4 trajectories, and the buffer holds 3"):
        buffer.add([Trajectory([1], [3, place], 0.0, "g") for place in range(2)])
    assert len(buffer) == 2, "all of them, or none"
    buffer.add([Trajectory([1], [3, place], 0.0, "h") for place in range(2)])
    assert (len(buffer), buffer.counts.dropped) == (2, 2), "the older group makes room"


@pytest.mark.parametrize("value", [0.5, float("nan"), float("-inf")])
def test_log_probabilities_are_finite_and_not_positive(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="log-probability 1 is"):
        Trajectory([1], [2, 3], 0.0, logprobs=[-0.1, value])
    assert Trajectory([1], [2, 3], 0.0, logprobs=[-0.1, 1e-7])


def test_a_loop_over_requests_ends_where_the_session_has_gone() -> None:
    buffer, asked = Buffer(10), []
    buffer.add([one("a"), one("a")])

    def update(at_most: int) -> object:
        asked.append(at_most)
        if len(asked) > 1:
            return SimpleNamespace(outcome=SimpleNamespace(metrics={"reward_mean": 0.5}))
        raise UnavailableError("the server is ending")

    session: Any = SimpleNamespace(buffer=buffer, update=update)
    assert RequestLoop(session, 2, 1, lambda _: None).run() == []
    assert asked == [2]


def test_tokens_of_the_model_alone_are_of_version_0() -> None:
    request, row = ended([5, 6, 7])
    row.policies = [(0, None), (1, Version(3))]
    assert Record.of(request, 0, row).spans == (PolicySpan(0, 1, 0), PolicySpan(1, 3, 3))


def test_a_record_is_of_a_request_for_one_answer_unless_it_says_more() -> None:
    record = Record(
        request="engine-r",
        names=CompletionNames(client="r"),
        index=0,
        prompt_ids=(1,),
        completion_ids=(5,),
        logprobs=(-0.1,),
        spans=(),
        policy=None,
        temperature=1.0,
    )
    assert (record.id, replace(record, choices=2, index=1).id) == ("r", "r.1")
