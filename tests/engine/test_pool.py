"""The pool of models: they come on their first request and go when memory is short, and nobody notices but by time."""

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import DEVICES
from mlx_parallm.engine.delivery import deliver
from mlx_parallm.errors import ConflictError, InvalidRequestError, ModelNotFoundError, UnavailableError
from mlx_parallm.models import kinds
from mlx_parallm.runtime import loading
from mlx_parallm.runtime.entries import PoolEntry
from mlx_parallm.runtime.startup import Runtime, start
from mlx_parallm.runtime.weight_files import weight_bytes
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.types import Delta, ModelStatus, Request
from tests.tiny import save_tiny, tiny
from tests.unit.test_adapters import written

PROMPT = [5, 6, 7, 8, 9]
SLOW_KIND = """
import json, time
from mlx_parallm.models.kinds import Predictor
from mlx_parallm.types import PredictorInfo

def recognises(config):
    return config.get("kind") == "slow"

def load(folder):
    return Slow(**json.loads((folder / "config.json").read_text()))

class Slow(Predictor):
    def __init__(self, kind, seconds, weight_bytes=1000):
        self.seconds = seconds
        self.info = PredictorInfo(kind=kind, weight_bytes=weight_bytes)

    def predict(self, batch):
        time.sleep(self.seconds)
        return [item * 2 for item in batch]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three language models of different weights, and a model that predicts."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("one", "two", "three")):
        (root / name).mkdir()
        save_tiny(tiny("llama", seed=seed, intermediate_size=4096), root / name)
    (root / "slow").mkdir()
    (root / "slow" / "config.json").write_text(json.dumps({"kind": "slow", "seconds": 0.01}))
    module = tmp_path_factory.mktemp("kinds")
    (module / "slow.py").write_text(SLOW_KIND)
    kinds.__path__.append(str(module))
    yield root
    kinds.__path__.pop()


@pytest.fixture
def started() -> Iterator[Callable[..., Runtime]]:
    running: list[Runtime] = []

    def begin(**options: Any) -> Runtime:
        running.append(start(ServeConfig.of(ssd=False, max_batch_size=4, **options), deliver))
        return running[-1]

    yield begin
    for runtime in running:
        runtime.close()


def status(runtime: Runtime, name: str) -> ModelStatus:
    return next(one for one in runtime.pool.statuses() if one.name == name)


def loaded(runtime: Runtime) -> set[str]:
    return {one.name for one in runtime.pool.statuses() if one.status == "ready"}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def answer(runtime: Runtime, name: str, tokens: int = 8) -> list[int]:
    """As a request gets it: the model is held from before it is submitted until it has ended."""
    hold = runtime.pool.acquire(name).result(60)
    try:
        deltas: SimpleQueue[Delta] = SimpleQueue()
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        runtime.models[name].submit(Request("r", list(PROMPT), sampling), deltas.put)
        found: list[int] = []
        while True:
            delta = deltas.get(timeout=60)
            assert delta.error is None, delta.error
            found += delta.tokens
            if delta.finish_reason is not None:
                return found
    finally:
        runtime.pool.release(hold)


def test_models_of_a_folder_load_on_their_first_request(models: Path, started: Callable[..., Runtime]) -> None:
    runtime = started(model_dir=str(models))
    assert {one.name: one.kind for one in runtime.pool.statuses()} == {
        "one": "chat",
        "two": "chat",
        "three": "chat",
        "slow": "slow",
    }
    assert loaded(runtime) == set()
    first = answer(runtime, "two")
    assert loaded(runtime) == {"two"}
    assert answer(runtime, "one") != first
    assert answer(runtime, "two") == first
    hold = runtime.pool.acquire("slow").result(60)
    assert runtime.predictors["slow"].predict([3]).result(60) == [6]
    runtime.pool.release(hold)
    with pytest.raises(ModelNotFoundError, match=r"there is no model 'four' here; there is one, slow, three, two"):
        runtime.pool.acquire("four")


def test_a_model_that_was_unloaded_answers_as_before(models: Path, started: Callable[..., Runtime]) -> None:
    runtime = started(model_path=(f"one={models / 'one'}", f"two={models / 'two'}"))
    before = {name: answer(runtime, name) for name in ("one", "two")}
    held = mx.get_active_memory()
    for name in ("one", "two"):
        runtime.pool.unload(name, 10)
        assert status(runtime, name).status == "unloaded"
    assert held - mx.get_active_memory() >= 2 * weight_bytes(models / "one", DEVICES["cpu"]), "its memory is free again"
    assert not runtime.models
    assert {name: answer(runtime, name) for name in ("two", "one")} == {name: before[name] for name in ("two", "one")}


def test_an_adapter_without_a_name_is_what_the_models_own_name_serves(
    models: Path, tmp_path: Path, started: Callable[..., Runtime]
) -> None:
    folder = written(tmp_path, "few")
    runtime = started(model_path=(f"one={models / 'one'}",), lora_path=(f"named={folder}", str(folder)))
    adapters = runtime.models["one"].adapters
    assert sorted(entry.name for entry in adapters) == ["adapter", "named"]
    assert [route.label for route in adapters.routes] == ["adapter"]


def test_a_model_that_is_not_loaded_may_be_unloaded_and_one_that_loads_may_not(
    models: Path, started: Callable[..., Runtime]
) -> None:
    runtime = started(model_dir=str(models))
    runtime.pool.unload("one", 10)
    assert status(runtime, "one").status == "unloaded"
    loading = runtime.pool.acquire("two")
    if not loading.done():
        with pytest.raises(ConflictError, match=r"'two' is .* now; try again when it is done"):
            runtime.pool.unload("two", 10)
    runtime.pool.release(loading.result(60))


def test_the_longest_unused_leaves_for_another(models: Path, started: Callable[..., Runtime]) -> None:
    size = weight_bytes(models / "one", DEVICES["cpu"])
    runtime = started(model_dir=str(models), memory_limit=int(size * 2.6))
    alone = {name: answer(runtime, name) for name in ("one", "two")}
    assert loaded(runtime) == {"one", "two"}
    answer(runtime, "one")
    alone["three"] = answer(runtime, "three")
    assert loaded(runtime) == {"one", "three"}, "two was not used for longest"
    runtime.pool.load("one", pin=True).result(60)
    answer(runtime, "three")
    answer(runtime, "two")
    assert loaded(runtime) == {"one", "two"}, "one is pinned, so three leaves"
    assert {name: answer(runtime, name) for name in alone} == alone


def test_as_many_leave_as_a_load_needs(models: Path, tmp_path: Path, started: Callable[..., Runtime]) -> None:
    for name in ("one", "two"):
        shutil.copytree(models / name, tmp_path / name)
    (tmp_path / "wide").mkdir()
    save_tiny(tiny("llama", seed=9, intermediate_size=9216), tmp_path / "wide")
    size, wide = weight_bytes(tmp_path / "one", DEVICES["cpu"]), weight_bytes(tmp_path / "wide", DEVICES["cpu"])
    runtime = started(model_dir=str(tmp_path), memory_limit=int(wide + size * 0.6))
    for name in ("one", "two"):
        answer(runtime, name)
    assert loaded(runtime) == {"one", "two"}
    answer(runtime, "wide")
    assert loaded(runtime) == {"wide"}


def test_a_model_in_use_does_not_leave(models: Path, started: Callable[..., Runtime]) -> None:
    size = weight_bytes(models / "one", DEVICES["cpu"])
    runtime = started(model_dir=str(models), memory_limit=int(size * 1.6))
    expected = answer(runtime, "one")
    held = runtime.pool.acquire("one").result(60)
    other: Future[int] = runtime.pool.acquire("two")
    with pytest.raises(FutureTimeout):
        other.result(0.3)
    assert status(runtime, "one").status == "unloading"
    third = runtime.pool.acquire("one")  # comes after the other has had its turn
    runtime.pool.release(held)
    runtime.pool.release(other.result(60))
    runtime.pool.release(third.result(60))
    assert answer(runtime, "one") == expected


def test_a_load_that_waits_for_room_does_not_hold_up_others(models: Path, started: Callable[..., Runtime]) -> None:
    size = weight_bytes(models / "one", DEVICES["cpu"])
    runtime = started(model_dir=str(models), memory_limit=int(size * 1.6))
    held = runtime.pool.acquire("one").result(60)
    waits = runtime.pool.acquire("two")
    slow = runtime.pool.acquire("slow").result(60)
    assert not waits.done()
    runtime.pool.release(slow)
    runtime.pool.release(held)
    runtime.pool.release(waits.result(60))


def test_a_load_gives_up_when_no_model_leaves_in_time(models: Path, started: Callable[..., Runtime]) -> None:
    size = weight_bytes(models / "one", DEVICES["cpu"])
    runtime = started(model_dir=str(models), memory_limit=int(size * 1.6), request_timeout_seconds=0.3)
    held = runtime.pool.acquire("one").result(60)
    with pytest.raises(UnavailableError, match="there is no memory for 'two'"):
        runtime.pool.acquire("two").result(60)
    runtime.pool.release(runtime.pool.acquire("one").result(60))  # which has stayed
    runtime.pool.release(held)
    assert len(answer(runtime, "two")) == 8


def test_a_load_that_waits_for_room_twice_waits_no_longer(models: Path, started: Callable[..., Runtime]) -> None:
    size = weight_bytes(models / "one", DEVICES["cpu"])
    runtime = started(model_dir=str(models), memory_limit=int(size * 1.6), request_timeout_seconds=60)
    held = runtime.pool.acquire("one").result(60)
    second, third = (runtime.pool.acquire(name) for name in ("two", "three"))
    entry = runtime.pool._known.find("three")
    until(lambda: entry in runtime.pool._without_room)
    patience = entry.room_by
    runtime.pool.release(held)
    other = second.result(60)  # it was the first in line
    until(lambda: status(runtime, "two").status == "unloading" and entry in runtime.pool._without_room)
    assert entry.room_by == patience is not None
    runtime.pool.release(other)
    runtime.pool.release(third.result(60))
    assert entry.room_by is None, "the next load has its own time"


def test_a_load_that_found_room_leaves_the_next_one_its_time(models: Path, started: Callable[..., Runtime]) -> None:
    size, patience = weight_bytes(models / "one", DEVICES["cpu"]), 2.0
    runtime = started(model_dir=str(models), memory_limit=int(size * 1.6), request_timeout_seconds=patience)
    held = runtime.pool.acquire("one").result(60)
    waits = runtime.pool.acquire("two")
    until(lambda: status(runtime, "one").status == "unloading")
    runtime.pool.release(held)
    runtime.pool.release(waits.result(60))
    held = runtime.pool.acquire("one").result(60)
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match="there is no memory for 'two'"):
        runtime.pool.acquire("two").result(60)
    assert time.monotonic() - begun > 0.9 * patience
    runtime.pool.release(held)


def test_a_generator_that_comes_later_leaves_predictors_their_memory(
    models: Path, tmp_path: Path, started: Callable[..., Runtime]
) -> None:
    heavy = {"kind": "slow", "seconds": 0, "weight_bytes": 64 << 20}
    (tmp_path / "config.json").write_text(json.dumps(heavy))
    runtime = started(model_path=(f"one={models / 'one'}",), memory_limit=512 << 20)
    alone = runtime.pool.generators["one"].memory
    runtime.pool.load("heavy", str(tmp_path)).result(60)
    beside = runtime.pool.generators["one"].memory
    assert beside.rows + beside.blocks + beside.kept < alone.rows + alone.blocks + alone.kept - (60 << 20)
    runtime.pool.unload("one", 10)
    runtime.pool.load("one").result(60)
    assert runtime.pool.generators["one"].memory == beside
    runtime.pool.unload("heavy", 10)
    assert runtime.pool.generators["one"].memory.rows == alone.rows


def test_nobody_leaves_for_a_model_that_does_not_fit_then_either(models: Path, started: Callable[..., Runtime]) -> None:
    size = weight_bytes(models / "one", DEVICES["cpu"])
    runtime = started(model_dir=str(models), memory_limit=int(size * 1.6))
    runtime.pool.load("one", pin=True).result(60)
    runtime.pool.load("slow").result(60)
    with pytest.raises(UnavailableError, match="there is no memory for 'two'"):
        runtime.pool.load("two").result(60)
    assert loaded(runtime) == {"one", "slow"}


def test_unloading_cuts_off_requests_of_a_model_that_predicts(
    models: Path, started: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "RELEASE_SECONDS", 0.2)  # `old` keeps the model in memory
    runtime = started(model_path=(f"one={models / 'one'}",))
    runtime.pool.load("slow", str(models / "slow")).result(60)
    old = runtime.pool.acquire("slow").result(60)
    call = runtime.predictors["slow"].predict(list(range(100_000)))
    runtime.pool.unload("slow", 0.05)
    with pytest.raises(UnavailableError, match="'slow' was unloaded"):
        call.result(10)
    runtime.pool.load("slow", str(models / "slow")).result(60)
    runtime.pool.release(old)
    assert status(runtime, "slow").users == 0, "it was another model's"
    runtime.pool.unload("slow", 60)


@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/x", "x" * 5000, "LOOP"])
def test_paths_that_can_not_be_are_refused(path: str, tmp_path: Path, started: Callable[..., Runtime]) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    runtime = started(model_dir=str(tmp_path))
    with pytest.raises(InvalidRequestError, match="no path of a model"):
        runtime.pool.load("odd", str(tmp_path / "loop") if path == "LOOP" else path)
    with pytest.raises(InvalidRequestError, match="control characters"):
        runtime.pool.load("a\nb", str(tmp_path))
    assert runtime.pool.statuses() == []


@pytest.mark.parametrize(
    ("config", "header"),
    [
        ({"model_type": "llama"}, b'{"a":{"shape":[1]}}'),
        ({"model_type": "llama"}, b'{"a":{"shape":["x"],"dtype":"F32"}}'),
        ({"model_type": "llama"}, b'{"a":{"shape":[-4],"dtype":"F32"}}'),
        ({"model_type": "llama"}, b'{"a":{"shape":[1],"dtype":["F32"]}}'),
        ({"model_type": "llama"}, b"[" * 50_000),
        ({"model_type": ["bert"], "architectures": 5}, b"{}"),
    ],
)
def test_odd_files_fail_alone(
    config: dict[str, Any], header: bytes, models: Path, tmp_path: Path, started: Callable[..., Runtime]
) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
    (tmp_path / "odd" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "one").symlink_to(models / "one")
    runtime = started(model_dir=str(tmp_path))
    assert {one.name: one.bytes >= 0 for one in runtime.pool.statuses()} == {"odd": True, "one": True}
    with pytest.raises(UnavailableError, match="'odd' can't be loaded"):
        runtime.pool.acquire("odd").result(60)
    assert len(answer(runtime, "one")) == 8


def test_a_folder_that_changes_is_looked_at_again(
    models: Path, tmp_path: Path, started: Callable[..., Runtime]
) -> None:
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "config.json").write_text("{}")
    runtime = started(model_dir=str(tmp_path))
    assert status(runtime, "late").kind == "chat"
    with pytest.raises(UnavailableError):
        runtime.pool.acquire("late").result(60)
    shutil.copy(models / "slow" / "config.json", tmp_path / "late" / "config.json")
    deadline = time.monotonic() + 20
    while status(runtime, "late").kind != "slow":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    runtime.pool.release(runtime.pool.acquire("late").result(60))


def test_messages_for_the_log_name_the_model_and_no_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    entry = PoolEntry("m", str(tmp_path / "link"), "chat")
    assert entry.without_path(f"{tmp_path / 'link'}: {tmp_path / 'real'} is broken") == "'m': 'm' is broken"
    assert PoolEntry("m", None, "chat").without_path("it is broken") == "it is broken"
    assert PoolEntry("m", "a\0b", "chat").without_path("a\0b is none") == "'m' is none"
    said = "'c' is no local folder, and the hub can't be reached"
    assert PoolEntry("c", "c", "chat").without_path(said) == said, "its name is no secret"
    assert PoolEntry("m", "c", "chat").without_path(said) == said.replace("'c'", "''m''"), "words stay whole"


def test_a_load_leaves_no_user_and_no_error(
    models: Path, started: Callable[..., Runtime], caplog: pytest.LogCaptureFixture
) -> None:
    runtime = started(model_dir=str(models))
    runtime.pool.load("one").result(60)
    assert status(runtime, "one").users == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_what_is_pinned_leaves_no_room(models: Path, started: Callable[..., Runtime]) -> None:
    size = weight_bytes(models / "one", DEVICES["cpu"])
    runtime = started(model_dir=str(models), memory_limit=int(size * 1.6))
    runtime.pool.load("one", pin=True).result(60)
    with pytest.raises(UnavailableError, match=r"there is no memory for 'two'.*unload or unpin") as caught:
        runtime.pool.acquire("two").result(60)
    assert caught.value.code == "out_of_memory"
    runtime.pool.load("one", pin=False).result(60)
    assert len(answer(runtime, "two")) == 8, "it was no failure of the model"


def test_a_model_that_fails_says_why(models: Path, tmp_path: Path, started: Callable[..., Runtime]) -> None:
    shutil.copytree(models / "one", tmp_path / "broken")
    weights = next((tmp_path / "broken").glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    runtime = started(model_dir=str(tmp_path))
    with pytest.raises(UnavailableError, match=r"'broken' can't be loaded: .*broken") as caught:
        runtime.pool.acquire("broken").result(60)
    assert caught.value.code == "model_failed"
    assert status(runtime, "broken").status == "failed"
    assert "broken" in str(status(runtime, "broken").error)
    with pytest.raises(UnavailableError, match="POST /v1/models/load tries again"):
        runtime.pool.acquire("broken")
    weights.write_bytes(whole)
    runtime.pool.load("broken").result(60)
    assert len(answer(runtime, "broken")) == 8


def test_predictions_move_when_their_engine_leaves(models: Path, started: Callable[..., Runtime]) -> None:
    runtime = started(model_path=tuple(f"{name}={models / name}" for name in ("one", "two", "slow")))
    predictor = runtime.predictors["slow"]
    calls = [predictor.predict(list(range(number, number + 5))) for number in range(60)]
    runtime.pool.unload("one", 10)
    calls += [predictor.predict([number]) for number in range(60, 80)]
    runtime.pool.unload("two", 10)
    calls += [predictor.predict([number]) for number in range(80, 90)]
    assert [call.result(60)[0] for call in calls] == [2 * number for number in range(90)]
    assert len(answer(runtime, "one")) == 8
    assert predictor.predict([1]).result(60) == [2]


def test_names_and_paths_that_clash_are_refused(models: Path, started: Callable[..., Runtime]) -> None:
    runtime = started(model_path=(f"one={models / 'one'}",))
    runtime.pool.load("extra", str(models / "two")).result(60)
    assert len(answer(runtime, "extra")) == 8
    for name in ("one", "extra"):
        with pytest.raises(ConflictError, match="take another name"):
            runtime.pool.load(name, str(models / "three"))
    runtime.pool.unload("extra", 10)
    with pytest.raises(ModelNotFoundError):
        runtime.pool.acquire("extra")
    assert [one.name for one in runtime.pool.statuses()] == ["one"], "a flag's model stays listed, another does not"


def test_a_model_that_nobody_asks_for_leaves(models: Path, started: Callable[..., Runtime]) -> None:
    runtime = started(model_path=(f"one={models / 'one'}", f"two={models / 'two'}"), idle_unload_seconds=0.3)
    runtime.pool.load("two", pin=True).result(60)
    deadline = time.monotonic() + 20
    while status(runtime, "one").status != "unloaded" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert loaded(runtime) == {"two"}, "a pinned one stays"
    assert len(answer(runtime, "one")) == 8


def test_a_model_is_idle_from_the_end_of_its_last_request(models: Path, started: Callable[..., Runtime]) -> None:
    runtime = started(model_path=(f"slow={models / 'slow'}",), idle_unload_seconds=600)
    hold = runtime.pool.acquire("slow").result(60)
    with runtime.pool._changed:
        runtime.pool._known.find("slow").used -= 1000  # so long ago has the request begun
        runtime.pool.release(hold)
    assert 590 < (status(runtime, "slow").leaves_in or 0) <= 600
    assert loaded(runtime) == {"slow"}


def test_a_model_stays_as_long_as_it_is_kept_alive(models: Path, started: Callable[..., Runtime]) -> None:
    runtime = started(model_path=(f"one={models / 'one'}", f"two={models / 'two'}"))

    def leaves(name: str) -> bool:
        deadline = time.monotonic() + 20
        while status(runtime, name).status != "unloaded" and time.monotonic() < deadline:
            time.sleep(0.02)
        return status(runtime, name).status == "unloaded"

    assert status(runtime, "one").leaves_in is None
    runtime.pool.keep_alive("one", 600)
    assert 590 < (status(runtime, "one").leaves_in or 0) <= 600
    hold = runtime.pool.acquire("one").result(60)
    runtime.pool.keep_alive("one", 0)
    time.sleep(0.1)
    assert loaded(runtime) == {"one", "two"}, "it is in use"
    runtime.pool.release(hold)
    assert leaves("one")
    assert len(answer(runtime, "one")) == 8
    time.sleep(0.1)
    assert loaded(runtime) == {"one", "two"}, "that was for once"
    runtime.pool.keep_alive("one", math.inf)
    assert (status(runtime, "one").pinned, status(runtime, "one").leaves_in) == (True, None)
    runtime.pool.keep_alive("one", 0.05)
    assert leaves("one")
    assert status(runtime, "one").pinned is False
    with pytest.raises(ModelNotFoundError):
        runtime.pool.keep_alive("nobody", 0)


def test_the_model_that_trains_stays(models: Path, tmp_path: Path, started: Callable[..., Runtime]) -> None:
    paths = (f"one={models / 'one'}", f"two={models / 'two'}")
    runtime = started(model_path=paths, enable_rl_training=True, checkpoint_dir=str(tmp_path))
    with pytest.raises(ConflictError, match="trains"):
        runtime.pool.unload("one", 10)
    runtime.pool.unload("two", 10)
    assert loaded(runtime) == {"one"}


def test_who_waits_when_the_server_stops_is_told(models: Path) -> None:
    runtime = start(ServeConfig.of(model_dir=str(models), ssd=False, max_batch_size=4), deliver)
    waiting = [runtime.pool.acquire(name) for name in ("one", "two", "three")]
    stopping = threading.Thread(target=runtime.close)
    stopping.start()
    for future in waiting:
        assert isinstance(future.exception(60), UnavailableError | None)
    stopping.join(60)
    assert not stopping.is_alive()


def test_models_that_come_and_go_leave_no_thread_behind(models: Path, started: Callable[..., Runtime]) -> None:
    """MLX keeps an OS thread for every thread that has computed."""
    runtime, counts = started(model_dir=str(models)), []
    for _ in range(4):
        runtime.pool.release(runtime.pool.acquire("one").result(60))
        runtime.pool.unload("one", 10)
        counts.append(len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 0)
    assert counts[-1] == counts[0]
