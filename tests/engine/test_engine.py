"""The engine's behaviour around the numbers: who waits, who is refused, who shares, what happens when it breaks."""

import json
import threading
import time
from collections.abc import Generator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.freed_memory import AllocatorCache
from mlx_parallm.devices.native.token_sampling import sample_kernel
from mlx_parallm.engine import build
from mlx_parallm.engine.delivery import deliver
from mlx_parallm.engine.recovery import MAX_FAULTS
from mlx_parallm.engine.start import StartingEngine, plan_engines, start_engine
from mlx_parallm.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelLoadError,
    QueueFullError,
    RequestTimeoutError,
    UnavailableError,
)
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.loader import load
from mlx_parallm.text.grammar import json_grammar
from tests.engine.harness import Bare, driver, driver_of, no_engine_runs
from tests.tiny import save_tiny, tiny

PROMPT = list(range(10, 40))


def test_a_priority_overtakes_the_queue() -> None:
    finished: list[str] = []
    with driver("llama", max_batch_size=1) as running:
        blocker = running.submit(PROMPT, max_tokens=60, ignore_eos=True)[1]
        entries = [running.submit([20 + p], priority=p, max_tokens=2, ignore_eos=True)[1] for p in (5, 0, -5)]
        watchers = [
            threading.Thread(target=lambda e=entry, p=p: (e.wait(), finished.append(p)))
            for entry, p in zip(entries, ("5", "0", "-5"), strict=True)
        ]
        for watcher in watchers:
            watcher.start()
        blocker.wait()
        for watcher in watchers:
            watcher.join(30)
        running.settle()
    assert finished == ["-5", "0", "5"]


def test_a_full_queue_refuses_and_says_so() -> None:
    with driver("llama", max_batch_size=1, max_queue_size=2) as running:
        request_id, blocker = running.submit(PROMPT, max_tokens=2000, ignore_eos=True, stream=True)
        blocker.wait_for_tokens(1)
        waiting = [running.submit(PROMPT, max_tokens=1)[1] for _ in range(2)]
        with pytest.raises(QueueFullError):
            running.submit(PROMPT)
        assert running.engine.metrics.requests_rejected == 1
        running.engine.cancel(request_id)
        for pending in waiting:
            assert pending.wait()[0].last.finish_reason in ("length", "stop")
        running.settle()


def test_a_request_that_takes_too_long_is_told_and_frees_its_row() -> None:
    with driver("llama", max_batch_size=2) as running:
        slow = running.submit(PROMPT, max_tokens=2000, ignore_eos=True, timeout=0.3)[1]
        beside = running.submit(PROMPT, max_tokens=5, ignore_eos=True)[1]
        assert isinstance(slow.wait()[0].last.error, RequestTimeoutError)
        assert len(beside.wait()[0].tokens) == 5
        running.settle()


def test_cancelling_frees_the_row_wherever_it_is() -> None:
    with driver("llama", max_batch_size=1, prefill_step_size=8) as running:
        first = running.submit(PROMPT, max_tokens=2000, ignore_eos=True, stream=True)
        first[1].wait_for_tokens(2)
        queued = running.submit(PROMPT, max_tokens=2000)
        running.engine.cancel(queued[0])
        running.engine.cancel(first[0])
        running.engine.cancel("nobody")
        assert running.ask(PROMPT, max_tokens=3, ignore_eos=True).last.finish_reason == "length"
        running.settle()


def test_one_choice_can_end_while_the_others_go_on() -> None:
    with driver("llama", max_batch_size=4) as running:
        options = {"n": 3, "max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 3}
        whole = running.submit(PROMPT, **options)[1].wait()
        request_id, pending = running.submit(PROMPT, stream=True, **options)
        pending.wait_for_tokens(2)
        running.engine.cancel(request_id, 1)
        deadline = time.monotonic() + 30
        while any(pending.answers[i].last.finish_reason is None for i in (0, 2) if pending.answers[i].deltas):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.settle()
        for index in (0, 2):
            assert pending.answers[index].tokens == whole[index].tokens
        assert len(pending.answers[1].tokens) < 40


def test_n_choices_prefill_once() -> None:
    with driver("llama", max_batch_size=4) as running:
        running.submit(PROMPT, n=4, temperature=1.0, seed=1)[1].wait()
        running.settle()
        assert running.engine.metrics.prompt_tokens == len(PROMPT)


def test_equal_requests_share_one_computation_when_asked_to() -> None:
    with driver("llama", max_batch_size=4, dedupe=True, num_blocks=0) as running:
        first_id, first = running.submit(PROMPT, max_tokens=40, ignore_eos=True, stream=True)
        first.wait_for_tokens(5)
        twin = running.submit(PROMPT, max_tokens=40, ignore_eos=True, stream=True)[1]
        plain = running.submit(PROMPT, max_tokens=40, ignore_eos=True)[1]
        other = running.submit(PROMPT, max_tokens=40, ignore_eos=True, temperature=1.0)[1]
        running.engine.cancel(first_id)  # the others keep the row alive
        assert twin.wait()[0].tokens == plain.wait()[0].tokens
        assert len(twin.answers[0].tokens) == 40
        other.wait()
        running.settle()
        assert running.engine.metrics.deduplicated == 2
        assert running.engine.metrics.prompt_tokens == 2 * len(PROMPT)


@pytest.mark.long
def test_rows_that_outgrow_memory_take_turns_and_answer_the_same() -> None:
    prompts = [[20 + i, *PROMPT] for i in range(6)]
    options = {"max_tokens": 300, "ignore_eos": True}
    with driver("llama", max_batch_size=6) as running:
        free = [running.submit(prompt, **options)[1] for prompt in prompts]
        expected = [pending.wait()[0].tokens for pending in free]
        per_token = running.engine._parts.compute.runner.cache.bytes_per_token  # type: ignore[attr-defined]
    with driver("llama", max_batch_size=6, kv_cache_memory=2 * 512 * per_token) as running:
        tight = [running.submit(prompt, **options)[1] for prompt in prompts]
        assert [pending.wait()[0].tokens for pending in tight] == expected
        running.settle()
        assert running.engine.metrics.preemptions > 0
        with pytest.raises(ContextLengthError, match="memory"):
            running.submit([5] * 1200)


def test_a_gather_window_puts_requests_into_one_batch() -> None:
    with driver("llama", max_batch_size=4, scheduler="default", batch_timeout=1.5) as running:
        begin = time.monotonic()
        first = running.submit(PROMPT, max_tokens=2, ignore_eos=True)[1]
        time.sleep(0.1)
        second = running.submit(PROMPT, max_tokens=2, ignore_eos=True)[1]
        first.wait()
        second.wait()
        assert time.monotonic() - begin >= 1.5
        running.settle()
        assert running.engine.metrics.rows_decoded == 2
        assert running.engine.metrics.batches_processed == 1


def test_grammar_rows_share_the_batch_with_free_ones() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    grammar = json_grammar({**schema, "additionalProperties": False})
    with driver("llama", max_batch_size=4) as running:
        bare = Bare(tiny("llama"))
        free = running.submit(PROMPT, max_tokens=20)[1]
        bound = [running.submit([p], grammar=grammar, max_tokens=60, temperature=1.0, seed=p)[1] for p in (30, 31)]
        texts = [running.engine.model.tokenizer.decode(pending.wait()[0].tokens) for pending in bound]
        tokens = free.wait()[0].tokens
        running.settle()
        assert tokens == bare.greedy(PROMPT, 20)[0]
        for text in texts:
            assert json.loads(text)["a"] in ("x", "y")


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([], {}, InvalidRequestError),
        ([100_000], {}, InvalidRequestError),
        ([-1], {}, InvalidRequestError),
        ([5] * 3000, {}, ContextLengthError),
        ([5], {"n": 9}, InvalidRequestError),
    ],
)
def test_wrong_requests_are_refused_by_submit(prompt: list[int], options: dict[str, int], error: type) -> None:
    with driver("llama", max_batch_size=2) as running:
        with pytest.raises(error):
            running.submit(prompt, **options)
        assert running.ask(PROMPT).tokens


def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    with driver("llama", max_batch_size=2) as running:
        pending = running.submit(PROMPT, max_tokens=30, ignore_eos=True)[1]
        assert running.engine.drain(30)
        assert len(pending.wait()[0].tokens) == 30
        with pytest.raises(UnavailableError):
            running.submit(PROMPT)


def test_stopping_tells_open_requests() -> None:
    with driver("llama", max_batch_size=2) as running:
        pending = running.submit(PROMPT, max_tokens=2000, ignore_eos=True)[1]
        running.engine.stop()
        assert isinstance(pending.wait()[0].last.error, UnavailableError)


def test_a_dead_engine_tells_everyone_at_once() -> None:
    with driver("llama", max_batch_size=1) as running:
        said = threading.Event()
        running.engine.on_failure = lambda why: said.set()
        runs = running.submit(PROMPT, max_tokens=2000, ignore_eos=True, stream=True)[1]
        waits = running.submit(PROMPT)[1]
        runs.wait_for_tokens(1)

        def break_down() -> None:
            raise RuntimeError("the device is gone")

        for _ in range(MAX_FAULTS):
            running.engine._thread.inbox.put(break_down)
        for pending in (runs, waits):
            error = pending.wait()[0].last.error
            assert isinstance(error, UnavailableError)
            assert "the device is gone" in error.message
        assert said.wait(5)
        assert running.engine.failure == "RuntimeError: the device is gone"
        with pytest.raises(UnavailableError, match="the device is gone"):
            running.submit(PROMPT)
        assert running.engine.drain(1)


def test_a_model_that_fails_to_load_is_an_error_of_start() -> None:
    def load() -> None:
        raise ModelLoadError("no such file")

    with pytest.raises(ModelLoadError, match="no such file"):
        start_engine(load, ServeConfig.of(), lambda events: None)  # type: ignore[arg-type]


def test_an_engine_that_failed_has_put_everything_in_order_before_its_error_is_told() -> None:
    released = []

    class Slow(AllocatorCache):
        def release(self, owner: object) -> None:
            time.sleep(0.2)
            super().release(owner)
            released.append(owner)

    def load() -> LanguageModel:
        raise ModelLoadError("no such file")

    starting = StartingEngine(load, ServeConfig.of(ssd=False), deliver, allocator_cache=Slow())
    with pytest.raises(ModelLoadError, match="no such file"):
        starting.load()
    assert len(released) == 1


def test_an_engine_can_be_stopped_before_it_starts() -> None:
    config, before = ServeConfig.of(ssd=False), threading.active_count()
    never = StartingEngine(tiny, config, deliver)
    never.stop()
    waiting = StartingEngine(tiny, config, deliver)
    assert waiting.weight_bytes == 0, "nothing is loaded yet"
    loaded = waiting.load()
    assert waiting.weight_bytes == loaded.model.weight_bytes > 0
    waiting.stop()
    assert threading.active_count() == before
    with pytest.raises(UnavailableError, match="shutting down"):
        waiting.start(plan_engines([loaded], config)[0])


def test_a_started_engine_can_be_stopped_by_who_started_it() -> None:
    config = ServeConfig.of(ssd=False)
    starting = StartingEngine(tiny, config, deliver)
    engine = starting.start(plan_engines([starting.load()], config)[0])
    starting.stop()
    assert engine.drain(1)
    with pytest.raises(UnavailableError):
        engine.flush_cache()


def test_tokens_are_drawn_by_our_own_kernel_on_a_cpu() -> None:
    if this_device().kind != "cpu" or sample_kernel() is None:
        pytest.skip("MLX draws them on GPUs, and without a C compiler")
    with driver("llama") as running:
        assert running.engine._parts.compute.runner._kernels.sample is not None


def test_whatever_goes_wrong_on_the_way_up_is_an_error_of_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("out of luck")

    before = mx.set_cache_limit(1 << 20)
    monkeypatch.setattr(build, "warm_up", fail)
    with pytest.raises(ModelLoadError, match="the model can't be loaded: out of luck"):
        start_engine(tiny, ServeConfig.of(ssd=False), deliver)
    assert no_engine_runs()
    assert mx.set_cache_limit(before) == 1 << 20, "what it was allowed to keep is still allowed"


def test_memory_of_other_work_is_counted_apart() -> None:
    def steps() -> Generator[None, None, None]:
        mx.eval(mx.zeros((25_000_000,)))
        yield
        mx.reset_peak_memory()  # as the trainer does, to measure a piece
        mx.eval(mx.zeros((1000,)))

    with driver("llama") as running:
        running.ask(PROMPT, max_tokens=3)
        metrics = running.engine.metrics
        before = metrics.peak_memory
        assert metrics.serving_peak_memory == before
        running.engine.work(steps()).result()
        running.ask(PROMPT, max_tokens=3)
        running.settle()
        assert metrics.peak_memory >= metrics.active_memory + 100_000_000
        assert before <= metrics.serving_peak_memory < before + 50_000_000


def test_freed_memory_that_nobody_uses_goes_back() -> None:
    before = mx.set_cache_limit(0)
    try:
        with driver("llama", allocator_cache=AllocatorCache(), max_batch_size=2, kv_cache_memory=256 << 20) as running:
            limit = mx.set_cache_limit(0)
            assert limit == (256 << 20) // this_device().kept_of_rows
            mx.set_cache_limit(limit)
            running.ask(PROMPT, max_tokens=2, ignore_eos=True)
            mx.clear_cache()
            part = limit // 128  # float32 numbers: 27 of them are 27 of 32 parts, in sizes that no step has
            stale = [mx.zeros((size * part,)) for size in (8, 9, 10)]
            mx.eval(stale)
            del stale
            assert mx.get_cache_memory() > limit // 4 * 3
            running.ask(PROMPT, max_tokens=2, ignore_eos=True)
            assert mx.get_cache_memory() <= limit // 4 * 3
    finally:
        mx.set_cache_limit(before)


def test_a_tokenizer_that_knows_more_than_the_embedding_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tiny(vocab_size=100), tmp_path)
    with driver_of(lambda: load(str(tmp_path), name="small"), max_batch_size=4) as running:
        assert "a tokenizer of 284 tokens and an embedding of 100" in caplog.text
        with pytest.raises(InvalidRequestError, match="token 200 is not in the vocabulary"):
            running.ask([5, 6, 200], max_tokens=3)
        assert len(running.ask([5, 6, 7], max_tokens=3, ignore_eos=True).tokens) == 3
