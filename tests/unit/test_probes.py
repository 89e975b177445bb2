"""What `parallm doctor` makes of the rates that it has measured; e2e/test_doctor.py measures them."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.doctor.findings import Finding
from mlx_parallm.doctor.probes import LONG_PROMPT, Measured, Probe


class Given(Probe):
    """Rates that are given: of prompts, and of tokens by their number of rows."""

    def __init__(self, prefill: float, decode: dict[int, float]) -> None:
        super().__init__(SimpleNamespace(model=SimpleNamespace(vocab_size=300)))  # type: ignore[arg-type]
        self._rates = prefill, decode

    def ask(self, prompts: Any, **options: Any) -> list[Measured]:
        return [Measured(times=[time.perf_counter() + LONG_PROMPT / self._rates[0]]) for _ in prompts]

    def decode_rate(self, rows: int, **options: Any) -> float:
        return self._rates[1][rows]


class Broken(Given):
    """Every measurement of which goes wrong."""

    def _fail(self, *arguments: object) -> Finding:
        raise RuntimeError("out of luck")

    _parity = _decode = _prefill = _sampler = _adapters = _joins = _fail


def test_a_measurement_that_goes_wrong_has_its_name_and_the_others_are_made() -> None:
    found = [(finding.name, finding.verdict) for finding in Broken(1.0, {}).examine()]
    names = ["parity", "decode", "prefill", "sampler", "adapters", "joins"]
    assert found == [(name, "wrong") for name in names]


@pytest.mark.parametrize(("prefill", "verdict"), [(100.0, "ok"), (60.0, "slow")])
def test_a_prompt_is_to_be_twice_as_fast_as_a_row_alone(prefill: float, verdict: str) -> None:
    found = Given(prefill, {1: 40.0, 2: 60.0})._prefill()
    assert found.verdict == verdict
    assert found.numbers["rate"] == pytest.approx(prefill, rel=0.1)
