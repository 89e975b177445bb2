"""What the dashboard shows, without a server: rates and percentiles of snapshots, recent requests, recent groups."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.metrics import EngineMetrics, Histogram, MemoryPlan
from mlx_parallm.policy_spans import PolicySpan
from mlx_parallm.server.api import route_table
from mlx_parallm.server.auth.caller import Caller
from mlx_parallm.server.auth.keys import Key
from mlx_parallm.server.dashboard.page_files import PageFiles
from mlx_parallm.server.dashboard.recent_rollouts import token_texts
from mlx_parallm.server.dashboard.snapshot import RecentPercentiles, Snapshots, cache, memory, rates, read
from mlx_parallm.server.http.request_state import ResponseSummary, enter
from mlx_parallm.server.recent_requests import RecentRequests
from mlx_parallm.training.rl.recent import MAX_GROUPS, MAX_SAMPLES, MAX_TOKENS, RecentGroups
from mlx_parallm.training.rl.trajectories import Trajectory
from tests.tiny import tiny_tokenizer


def engine(**counters: Any) -> EngineMetrics:
    metrics = EngineMetrics()
    for name, value in counters.items():
        setattr(metrics, name, value)
    return metrics


def test_rates_are_differences_over_time() -> None:
    one, other = engine(generated_tokens=10), engine(generated_tokens=5, prompt_tokens=100)
    before = read([one, other])
    one.generated_tokens, one.batches_processed, one.batch_fill_sum = 30, 4, 1.0
    one.cached_tokens = 30
    one.decode_rate.add(20, 1.0)
    other.background.seconds = 0.5
    after = read([one, other])
    after.at = before.at + 2.0
    found = rates(before, after)
    assert found["cached"] == 15.0
    assert (found["generated"], found["prompt"], found["fill"]) == (10.0, 0.0, 0.25)
    assert (found["serving"], found["training"], found["predicting"], found["idle"]) == (0.5, 0.25, 0.0, 0.25)


def test_an_engine_that_has_just_started_has_counted_nothing() -> None:
    metrics = EngineMetrics()
    for steps in (metrics.decode, metrics.prefill):
        assert (steps.count, steps.start_seconds, steps.wait_seconds) == (0, 0.0, 0.0)
    for rate in (metrics.prompt_rate, metrics.decode_rate):
        assert (rate.last, rate.average) == (0.0, 0.0)


def test_steps_are_counted_by_how_full_they_were() -> None:
    metrics = EngineMetrics()
    for rows in (0, 1, 2, 15, 16):
        metrics.count_decode(rows, 16, streaming=False)
    assert metrics.batch_fill_hist == [2, 1, 0, 0, 0, 0, 0, 0, 0, 2]


def test_percentiles_go_on_while_somebody_looks() -> None:
    one = engine()
    client = SimpleNamespace(metrics=one, paused=False)
    models: Any = [SimpleNamespace(name="m", client=client)]
    context: Any = SimpleNamespace(
        models=models,
        state=SimpleNamespace(draining=False),
        runtime=SimpleNamespace(training=SimpleNamespace(metrics=dict)),
    )
    snapshots = Snapshots(context)
    one.time_to_first_token.observe(9.0)  # before anybody looked
    assert snapshots.take()["first_token"]["p50"] is None
    one.time_to_first_token.observe(0.3)
    assert snapshots.take()["first_token"]["p50"] is not None


def test_rates_are_unknown_at_first_and_when_a_model_has_left() -> None:
    now, fewer = read([engine(generated_tokens=9)]), read([engine(generated_tokens=3)])
    assert set(rates(None, now).values()) == {None}
    assert set(rates(now, fewer).values()) == {None}


def test_work_of_several_engines_is_never_more_than_the_time() -> None:
    before = read([engine(), engine()])
    after = read([engine(), engine()])
    after.at, after.serving, after.training = before.at + 1.0, 1.5, 0.5
    found = rates(before, after)
    assert (found["serving"], found["training"], found["idle"]) == (0.75, 0.25, 0.0)


def test_percentiles_are_of_what_came_lately() -> None:
    histogram, percentiles = Histogram(), RecentPercentiles(live=True)
    histogram.observe(9.0)  # before anybody looked
    assert percentiles.take([histogram]) == {"p50": None, "p90": None, "p99": None}
    for hundredths in range(1, 101):
        histogram.observe(hundredths / 100)
    assert percentiles.take([histogram]) == {"p50": 0.51, "p90": 0.91, "p99": 1.0}
    for _ in range(10):
        percentiles.take([histogram])
    assert percentiles.take([histogram])["p50"] is None
    assert RecentPercentiles(live=False).take([histogram])["p99"] == 1.0  # the second highest of 101


def test_the_cache_tells_what_it_has_saved() -> None:
    metrics = engine(prompt_tokens=300, cached_tokens=100)
    metrics.prompt_rate.add(300, 3.0)
    found = cache([metrics])
    assert (found["saved_tokens"], found["saved_share"], found["saved_seconds"]) == (100, 0.25, 1.0)
    assert cache([])["saved_share"] is None


def test_the_folder_on_the_ssd_is_one_and_its_reads_are_each_models_own() -> None:
    one, other = engine(), engine()
    one.ssd.files, one.ssd.bytes, one.ssd.reads = 3, 300, 5
    other.ssd.files, other.ssd.bytes, other.ssd.reads = 4, 400, 2
    found = cache([one, other])["ssd"]
    assert (found["files"], found["bytes"], found["reads"]) == (4, 400, 7)


def test_parts_of_the_memory_add_up_over_models() -> None:
    one = engine(memory=MemoryPlan(limit=100, weights=10, rows=20), active_memory=15)
    other = engine(memory=MemoryPlan(limit=100, weights=5, rows=30), active_memory=15)
    found = memory([one, other])
    assert (found["limit"], found["weights"], found["rows"], found["active"]) == (100, 15, 50, 15)
    assert memory([])["limit"] == 0
    assert MemoryPlan() == MemoryPlan(limit=0, weights=0, rows=0, blocks=0, adapters=0, training=0, kept=0)


def scope(method: str = "POST", **facts: Any) -> dict[str, Any]:
    """Of a request of which these are known."""
    found = {"method": method, "path": "/v1/completions"}
    state = enter(found, route_table())
    for name, fact in {"id": "r", **facts}.items():
        setattr(state, name, fact)
    return found


def test_recent_requests_are_bounded_and_have_numbers() -> None:
    recent = RecentRequests(most=3)
    for status in range(200, 205):
        recent.note(scope(), status, time.perf_counter())
    recent.note(scope(method="GET"), 200, time.perf_counter())
    found = recent.latest(10)
    assert [one.status for one in found] == [204, 203, 202]
    assert found[0].number > found[1].number > found[2].number
    assert recent.latest(10, after=found[1].number) == recent.latest(1) == found[:1]


def test_a_recent_request_has_its_summary() -> None:
    recent, started = RecentRequests(), time.perf_counter() - 2.0
    answer = ResponseSummary(
        model="m", adapter="a@3", prompt_tokens=7, cached_tokens=4, completion_tokens=5, first_token_at=started + 0.5
    )
    alice = Caller(Key.of("alice", "user", "sk-alice"))
    recent.note(scope(summary=lambda: answer, caller=alice, outcome="the client left"), 200, started)
    (one,) = recent.latest(1)
    assert (one.request_id, one.path) == ("r", "/v1/completions")
    assert (one.model, one.adapter, one.key, one.outcome) == ("m", "a@3", "alice", "the client left")
    assert (one.prompt_tokens, one.cached_tokens, one.completion_tokens) == (7, 4, 5)
    assert one.first_token_seconds == pytest.approx(0.5)
    assert 2.0 <= one.seconds < 10.0


def trajectory(group: str, name: str | None, reward: float = 0.0, length: int = 2) -> Trajectory:
    spans = (PolicySpan(first=0, end=length, version=3),)
    return Trajectory([1, 2], [5] * length, reward, group, [-0.5] * length, spans=spans, request_id=name)


def test_groups_wait_and_are_learnt_from() -> None:
    recent = RecentGroups()
    first, second = trajectory("g", "a", 1.0), trajectory("g", "b", 2.0)
    recent.add([first, second])
    recent.add([trajectory("g", "a", 4.0)])  # a later reward for the same answer
    (group,) = recent.latest(5)
    assert (group.state, group.updates) == ("waiting", None)
    assert [(one.request_id, one.reward) for one in group.samples] == [("b", 2.0), ("a", 4.0)]
    recent.settle([first, second], 7, learnt=True)
    recent.add([trajectory("g", "c")])  # the same prompt again, later
    newest, oldest = recent.latest(5)
    assert (newest.state, [one.request_id for one in newest.samples]) == ("waiting", ["c"])
    assert (oldest.state, oldest.updates, len(oldest.samples)) == ("learnt", 7, 2)


def test_groups_from_elsewhere_are_entered_with_their_update() -> None:
    recent = RecentGroups()
    recent.settle([trajectory("g", None, 1.0), trajectory("g", None, 2.0)], 1, learnt=False)
    (group,) = recent.latest(5)
    assert (group.state, [one.reward for one in group.samples]) == ("refused", [1.0, 2.0])


def test_recent_groups_are_bounded() -> None:
    recent = RecentGroups()
    recent.add([trajectory("large", str(number), length=MAX_TOKENS + 9) for number in range(MAX_SAMPLES + 5)])
    (group,) = recent.latest(1)
    assert len(group.samples) == MAX_SAMPLES
    sample = group.samples[0]
    assert (len(sample.completion_ids), sample.length) == (MAX_TOKENS, MAX_TOKENS + 9)
    assert sample.policy_spans == (PolicySpan(0, MAX_TOKENS, 3),)
    recent.add([trajectory(str(number), str(number)) for number in range(2 * MAX_GROUPS)])
    assert len(recent.latest(1000)) == MAX_GROUPS
    assert recent.latest(0) == []


def test_a_character_of_several_tokens_stands_with_the_last() -> None:
    from mlx_parallm.text.detokenize import Vocabulary

    vocabulary = Vocabulary(tiny_tokenizer())
    tokens = vocabulary.tokenizer.encode("aé!", add_special_tokens=False)
    texts = token_texts(tokens, vocabulary)
    assert len(texts) == len(tokens)
    assert "".join(texts) == "aé!"
    assert "�" not in texts


def test_the_page_s_own_files_name_no_other_server() -> None:
    ours = {name: file for name, file in PageFiles()._files.items() if not name.startswith("vendor/")}
    assert {"index.html", "app.js", "style.css", "views/live.js"} <= set(ours)
    for name, file in ours.items():
        text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, name
        assert "https://" not in text, name
    for needed in (
        "preact.js",
        "hooks.js",
        "htm.js",
        "uplot.js",
        "uplot.css",
        "preact.LICENSE.txt",
        "uplot.LICENSE.txt",
    ):
        assert f"vendor/{needed}" in PageFiles()._files
