"""What is measured at a start, what is made of it, and the files that keep it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.profile import SLOT_STEPS, DeviceProfile
from mlx_parallm.devices.tuning import Tuning, TuningFiles, read_profile
from mlx_parallm.engine.compute import tuner
from mlx_parallm.engine.compute.batching import slot_cache
from mlx_parallm.engine.compute.tuned import tuned_by
from mlx_parallm.engine.compute.tuner import Tuner, clearly_best, worthwhile_steps
from mlx_parallm.errors import ConfigError
from mlx_parallm.kv.slots import SlotCache
from mlx_parallm.models.forward import Forward
from tests.tiny import tiny

PROFILE = DeviceProfile.of("cpu")
TUNING = Tuning.of(PROFILE)


def test_ties_and_doubts_keep_the_default() -> None:
    assert clearly_best([{0: 1.0, 1: 0.97, 2: 1.2}] * 3, 0) == 0
    assert clearly_best([{0: 1.0, 1: 0.9, 2: 0.8}] * 3, 0) == 2
    assert clearly_best([{0: 1.0, 1: 0.5}, {0: 1.0, 1: 0.5}, {0: 1.0, 1: 0.99}], 0) == 0  # not each time
    assert clearly_best([{0: 1.0, 1: 0.9}, {0: 2.0, 1: 1.8}], 0) == 0  # a busy machine


def test_numbers_of_rows_follow_what_they_take() -> None:
    def chosen(seconds: dict[int, float], *fewer: int) -> list[int]:
        return sorted(worthwhile_steps([seconds] * 3, {1, 2, 4, 8}, fewer, 8))

    flat = dict.fromkeys(range(1, 9), 1.0)
    assert chosen(flat, 5, 6, 7, 4) == [1, 2, 4, 8]
    each = {count: float(count) for count in range(1, 9)}
    assert chosen(each, 5, 6, 7, 4) == [1, 2, 4, 5, 6, 7, 8]
    # A kernel that takes 6 at a time: 5 costs what 6 does.
    assert chosen({4: 4.0, 5: 6.0, 6: 6.0, 7: 8.0, 8: 8.0}, 5, 6, 7, 4) == [1, 2, 4, 6, 8]
    # One that begins at 8 and is faster than the one for fewer.
    assert chosen({4: 9.0, 5: 9.0, 6: 9.0, 7: 9.0, 8: 8.0}, 5, 6, 7, 4) == [1, 2, 8]


@pytest.fixture
def slots() -> Iterator[tuple[Forward, SlotCache]]:
    model = tiny()
    cache = slot_cache(len(model.module.layers), 8, 1 << 26, PROFILE)
    yield Forward(model.module), cache
    assert cache.positions == 0, "rows of a measurement are left"


def test_it_measures_within_its_time_and_leaves_nothing(slots: tuple[Forward, SlotCache]) -> None:
    forward, cache = slots
    method = cache.method
    one = Tuner(forward, cache, PROFILE, 600, seconds=120.0)
    found = one.run()
    assert cache.method == method
    assert set(one.measured) == {"steps_in_flight", "rows", "prefill", "seconds"}
    assert set(one.measured["rows"]) >= set("45678")
    assert found.slot_steps[0] == 1
    assert set(found.slot_steps) >= set(SLOT_STEPS) - set(range(1, 9))


def test_what_there_is_no_time_for_stays_as_it_is(slots: tuple[Forward, SlotCache]) -> None:
    forward, cache = slots
    one = Tuner(forward, cache, PROFILE, 2048, seconds=0.0)
    assert one.run() == TUNING


def test_traced_steps_have_their_views_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    profile = DeviceProfile.of("metal")
    cache = slot_cache(len(model.module.layers), 4, 1 << 26, profile)
    one = Tuner(Forward(model.module), cache, profile, 512, seconds=60.0)
    one.run()
    assert one.measured["view_step"]["trace"] > 0
    # A trace that takes as long as many steps wants long views; one that takes nothing wants short ones.
    monkeypatch.setattr(one, "_step_and_first", lambda length: (0.01 if length == tuner.NEAR else 0.010001, 2.0))
    assert one._view_step() == {"view_step": 512}
    monkeypatch.setattr(one, "_step_and_first", lambda length: (0.001 if length == tuner.NEAR else 0.01, 0.001))
    assert one._view_step() == {"view_step": 64}


def tune(config: ServeConfig, files: TuningFiles) -> Any:
    model = tiny()
    cache = slot_cache(len(model.module.layers), 4, 1 << 26, PROFILE)
    config = config.but(prefill_step_size=32)
    found = tuned_by(config, files)(model, Forward(model.module), cache, PROFILE)
    assert cache.method.slot_steps == found.profile.slot_steps
    return found


def test_two_starts_find_the_same_while_nothing_differs(slots: tuple[Forward, SlotCache]) -> None:
    forward, cache = slots
    one = Tuner(forward, cache, PROFILE, 64, seconds=60.0)
    times = iter([1.0, 1.3, 0.9, 1.2, 1.1, 1.25, 0.95] * 200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "_time_steps", lambda decode, in_flight, first, count: count * next(times))
        patch.setattr(one, "_prefill_seconds", lambda tokens: tokens * next(times) / 1e6)
        patch.setattr(one, "_check", lambda needed=0.0: None)
        assert one.run() == TUNING


def test_a_second_start_works_as_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = TuningFiles(tmp_path)
    first = tune(ServeConfig.of(), files)
    assert first.source == "measured at this start"
    monkeypatch.setattr(Tuner, "run", lambda self: pytest.fail("measured again"))
    assert tune(ServeConfig.of(), files).profile == first.profile
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    assert document["identity"]["mlx"] == mx.__version__
    assert Tuning.parse(document["tuning"]) == Tuning.of(first.profile)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"tuning": {"steps_in_flight": 99}}', '{"tuning": null}'])
def test_a_damaged_file_is_measured_anew(damage: str, tmp_path: Path) -> None:
    files = TuningFiles(tmp_path)
    tune(ServeConfig.of(), files)
    (path,) = tmp_path.iterdir()
    path.write_text(damage)
    assert tune(ServeConfig.of(), files).source == "measured at this start"
    assert tune(ServeConfig.of(), files).source == "measured at an earlier start"


def test_a_folder_that_takes_nothing_costs_only_the_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert tune(ServeConfig.of(), TuningFiles(tmp_path / "file")).source == "measured at this start"


def test_a_pinned_profile_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuner, "run", lambda self: pytest.fail("measured"))
    path = tmp_path / "profile.json"
    document = {"steps_in_flight": 1, "slot_steps": [1, 3, 8], "view_step": 64, "prefill_step": 512, "source": "here"}
    path.write_text(json.dumps(document))
    found = tune(ServeConfig.of(profile=str(path)), TuningFiles(tmp_path / "none"))
    assert found.as_json() == {**document, "exact_rows": [], "source": f"--profile {path}"}
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "said",
    [
        "no JSON",
        "[1]",
        "{}",
        '{"steps_in_flight": -1, "slot_steps": [1], "view_step": 64}',
        '{"steps_in_flight": 1, "slot_steps": [2, 4], "view_step": 64}',
        '{"steps_in_flight": 1, "slot_steps": [1, 4, 4], "view_step": 64}',
        '{"steps_in_flight": 1, "slot_steps": [1, "x"], "view_step": 64}',
        '{"steps_in_flight": 1, "slot_steps": [1, 1e9], "view_step": 64}',
        '{"steps_in_flight": true, "slot_steps": [1], "view_step": 64}',
        '{"steps_in_flight": 1, "slot_steps": [1], "view_step": 1e400}',
        '{"steps_in_flight": 1, "slot_steps": {"1": 2}, "view_step": 64}',
        '{"steps_in_flight": 1, "slot_steps": [1], "view_step": 64, "exact_rows": 8}',
        '{"steps_in_flight": 1, "slot_steps": [1], "view_step": 64, "exact_rows": [8, 4]}',
        '{"steps_in_flight": 1, "slot_steps": [1], "view_step": 64, "exact_rows": [0]}',
        '{"steps_in_flight": 1, "slot_steps": [1], "view_step": 64, "exact_rows": ["x"]}',
    ],
)
def test_a_file_that_is_no_profile_says_so(said: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(said)
    with pytest.raises(ConfigError, match="--profile"):
        read_profile(str(path))
    with pytest.raises(ConfigError, match="can't be read"):
        read_profile(str(tmp_path / "missing.json"))
