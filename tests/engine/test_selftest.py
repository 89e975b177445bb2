"""`parallm doctor --selftest`: it passes here, and each planted fault makes it fail by name."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.cli import doctor_command
from mlx_parallm.config import ServeConfig
from mlx_parallm.doctor import machine, operations, selftest
from mlx_parallm.doctor.findings import Finding, TimeLimit
from mlx_parallm.kv import block_store, prefix, slots
from mlx_parallm.kv.slots import SlotCache
from mlx_parallm.lora.registry import Registry
from mlx_parallm.models.language import LanguageModel
from tests.tiny import tiny
from tools import mac_table

OPERATIONS = ["products", "attention", "norms", "rope", "scatter", "gather", "sort", "random", "4-bit", "our kernels"]


ENDLESS = TimeLimit(1e9)


@pytest.fixture(autouse=True)
def enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine tries every case too."""
    monkeypatch.setattr(operations, "SECONDS", 1e9)


@cache
def stand_in() -> LanguageModel:
    """A tokenizer is all that random models take of the embedded one."""
    return tiny()


def findings(test: selftest.RandomModelTest) -> dict[str, Finding]:
    return {finding.name: finding for finding in test.examine()}


@pytest.mark.long
def test_operations_are_as_numpy_has_them() -> None:
    found = list(operations.examine())
    assert [(finding.name, finding.verdict) for finding in found] == [(name, "ok") for name in OPERATIONS]
    assert found[0].numbers["cases"] == 72
    assert found[1].numbers["cases"] == 3 * 7 * 2 * 4


def test_a_check_stops_when_its_time_is_over_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "SECONDS", -1.0)
    (finding,) = operations.examine(["gather"])
    assert (finding.verdict, finding.numbers["complete"]) == ("ok", False)
    assert "the others were not tried in" in finding.found


def test_checks_after_the_limit_are_skipped_by_name() -> None:
    over = TimeLimit(-1.0)
    found = [*selftest._part("4-bit model", over), *selftest.Speed(stand_in(), over).examine()]
    assert [(one.name, one.verdict) for one in found] == [("4-bit model", "skipped"), ("speed", "skipped")]
    report = doctor_command._report(found)
    assert report["ok"]
    assert report["skipped"] == ["4-bit model", "speed"]


def wrong_for(original: Callable[..., mx.array], of: Callable[..., bool]) -> Callable[..., mx.array]:
    """The same operation, whose results are not right for some arguments."""

    def call(*args: Any, **kwargs: Any) -> mx.array:
        found = original(*args, **kwargs)
        return found[..., ::-1] if of(*args, **kwargs) else found

    return call


FAULTS: dict[str, tuple[str, str, Callable[..., bool]]] = {
    "a sum and a product of 13 rows": ("products", "addmm", lambda c, a, b: len(a) == 13),
    "a 4-bit product of 6 rows and more": (
        "4-bit",
        "quantized_matmul",
        lambda x, *_, bits, **__: bits == 4 and len(x) >= 6,
    ),
    "a softmax over several groups of threads": ("norms", "softmax", lambda x, axis, **_: x.shape[-1] > 4096),
    "one number of each row": ("gather", "take_along_axis", lambda a, *_, **__: a.shape == (1000, 96)),
    "running sums of many numbers": ("sort", "cumsum", lambda a, *_, **__: a.shape[-1] > 10000),
    "a write at each row's own place": ("scatter", "put_along_axis", lambda *_, **__: True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_operation_that_is_wrong_is_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, operation, of = FAULTS[fault]
    monkeypatch.setattr(mx, operation, wrong_for(getattr(mx, operation), of))
    assert wrong_operations(name) == {name}


def test_a_mask_that_is_dropped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = mx.fast.scaled_dot_product_attention

    def unmasked(*args: Any, mask: Any = None, **kwargs: Any) -> mx.array:
        return original(*args, mask=None if isinstance(mask, mx.array) and mask.dtype == mx.bool_ else mask, **kwargs)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", unmasked)
    assert wrong_operations("attention") == {"attention"}


def test_rows_that_are_rotated_as_the_first_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = mx.fast.rope

    def rope(x: mx.array, *args: Any, offset: mx.array, **kwargs: Any) -> mx.array:
        return original(x, *args, offset=offset[:1].item() if x.shape[2] == 1 else offset, **kwargs)

    monkeypatch.setattr(mx.fast, "rope", rope)
    assert wrong_operations("rope") == {"rope"}


def test_samples_that_ignore_their_odds_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.random, "categorical", lambda *_, num_samples, **__: mx.zeros((num_samples,), mx.int32))
    assert wrong_operations("random") == {"random"}


def test_an_error_that_is_dropped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "to_numpy", lambda array: None)
    monkeypatch.setattr(machine.mx, "async_eval", lambda array: None)
    assert [finding.name for finding in machine.essentials() if finding.verdict == "wrong"] == ["faults"]


def wrong_operations(only: str) -> set[str]:
    """The names of the checks that fail, of those that are run: one, to save time."""
    return {finding.name for finding in operations.examine([only]) if finding.verdict == "wrong"}


@pytest.mark.slow
def test_a_random_model_is_served_as_it_should_be() -> None:
    for bits in (None, 4):
        name = "16-bit" if bits is None else "4-bit"
        found = findings(selftest.RandomModelTest(bits, stand_in(), ENDLESS))
        assert {finding.verdict for finding in found.values()} == {"ok"}, [one.found for one in found.values()]
        assert list(found) == [f"{check} {name}" for check in ("rows", "prefix", "LoRA", "traced", "ahead 1")]
        assert all(count >= 128 for count in found[f"prefix {name}"].numbers["cached"][1:])


def wrong_engines() -> set[str]:
    found = findings(selftest.RandomModelTest(None, stand_in(), ENDLESS))
    return {finding.name for finding in found.values() if finding.verdict == "wrong"}


@pytest.mark.long
def test_a_stale_block_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = block_store.BlockStore.read

    def read(self: Any, ids: list[int], *sizes: int) -> list[mx.array]:
        return original(self, list(ids)[::-1], *sizes)

    monkeypatch.setattr(block_store.BlockStore, "read", read)
    assert wrong_engines() == {"prefix 16-bit"}


@pytest.mark.slow
def test_a_prefix_that_is_never_found_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix.BlockPrefix, "commit", lambda *_, **__: None)
    assert wrong_engines() == {"prefix 16-bit"}


@pytest.mark.slow
def test_another_rows_adapter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Registry.row_adapters

    def row_adapters(self: Registry, versions: list[Any]) -> Any:
        return original(self, versions[1:] + versions[:1])

    monkeypatch.setattr(Registry, "row_adapters", row_adapters)
    assert wrong_engines() == {"LoRA 16-bit"}


@pytest.mark.slow
def test_a_row_that_reads_beyond_its_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SlotCache.decode

    def decode(self: SlotCache, forward: Any, tokens: mx.array, lengths: list[int], context: Any = None) -> mx.array:
        return original(self, forward, tokens, [*lengths[:-1], lengths[-1] + (len(lengths) > 4)], context)

    monkeypatch.setattr(SlotCache, "decode", decode)
    assert "rows 16-bit" in wrong_engines()


@pytest.mark.slow
def test_a_trace_that_computes_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = mx.compile

    def compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        traced = original(function, *args, **kwargs)

        def call(*inputs: Any) -> Any:
            found = traced(*inputs)
            return (found[0][:, ::-1], found[1]) if isinstance(found, tuple) and len(found) == 2 else found

        return call

    monkeypatch.setattr(slots.mx, "compile", compiled)
    assert wrong_engines() == {"traced 16-bit"}


@pytest.mark.slow
def test_memory_beyond_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selftest._memory_limit(stand_in()).verdict == "ok"
    original = selftest.start_engine

    def unlimited(load: Any, config: ServeConfig, *args: Any, **kwargs: Any) -> Any:
        return original(load, config.but(memory_limit=4 << 30), *args, **kwargs)

    monkeypatch.setattr(selftest, "start_engine", unlimited)
    assert selftest._memory_limit(stand_in()).verdict == "wrong"


@pytest.mark.slow
def test_parts_beside_each_other_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "PARTS", ("norms", "no such part", "random"))
    found = {finding.name: finding.verdict for finding in selftest._parts_beside_each_other(ENDLESS)}
    assert found == {"norms": "ok", "no such part": "wrong", "random": "ok"}


def test_a_busy_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest.os, "getloadavg", lambda: (20.0, 20.0, 20.0))
    assert selftest._quiet().verdict == "slow"


def test_the_table_of_macs_is_made_of_reports() -> None:
    found = [Finding("chip", "Apple M9 (metal)"), Finding("platform", "macOS 26.1, arm64, Python 3.13.1")]
    found += [Finding("memory", "", numbers={"total": 36 << 30}), Finding("versions", "", numbers={"mlx": "0.32.4"})]
    found += [Finding("speed 8", "", numbers={"rate": 1234.5, "mlx_lm": 1000.0, "ratio": 1.2345})]
    report = {"selftest": 1, "slow": ["quiet"], "wrong": ["rope"], "findings": [asdict(one) for one in found]}
    page = mac_table.with_table(mac_table.PAGE.read_text(), [report])
    assert "| Apple M9 (metal) (busy) | 36 GiB | 26.1 | 0.32.4 |  | 1,234 tok/s, 1.23× |  |  | rope |\n" in page
    assert mac_table.with_table(page, []) == mac_table.PAGE.read_text(), "the page is as the script writes it"
    with pytest.raises(SystemExit, match="not written by this version"):
        mac_table.row({"selftest": 0})


@pytest.mark.slow
def test_the_whole_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlx_parallm", "doctor", "--selftest"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    begun = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path, env=env, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert time.monotonic() - begun < 180
    report = json.loads((tmp_path / "parallm-selftest.json").read_text())
    assert report["ok"]
    assert report["wrong"] == []
    names = [finding["name"] for finding in report["findings"]]
    assert set(OPERATIONS) < set(names)
    assert {"rows 16-bit", "LoRA 4-bit", "limit", "parity", "speed 1", "speed 8", "speed 32", "speed prefill"} < set(
        names
    )
    assert str(Path.home()) not in json.dumps(report)
