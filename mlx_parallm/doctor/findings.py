"""One line of a report: what was looked at, what was found, whether that is good, and what would help."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "slow", "wrong", "skipped"]


@dataclass(slots=True)
class Finding:
    name: str
    found: str
    verdict: Verdict = "ok"
    remedy: str = ""  # what to do about it; empty where there is nothing to do
    numbers: dict[str, Any] = field(default_factory=dict)  # for the report
    seconds: float = 0.0  # that it took

    def line(self) -> str:
        told = f"{self.verdict:<7} {self.name:<11} {self.found}"
        return f"{told}\n        {'':<11} -> {self.remedy}" if self.remedy and self.verdict != "ok" else told


def look(name: str, check: Callable[[], Finding]) -> Finding:
    """A check that fails is a finding, too."""
    begun = time.monotonic()
    try:
        finding = check()
    except Exception as error:  # whatever breaks here is what the user wants to know
        finding = Finding(name, f"{type(error).__name__}: {error}", "wrong", "report this line")
    finding.seconds = round(time.monotonic() - begun, 2)
    return finding


class TimeLimit:
    """Checks that would begin after it are skipped, and say so. One that runs is not cut off."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._ends - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left < 0

    def look(self, name: str, check: Callable[[], Finding]) -> Finding:
        return self.skipped(name) if self.over else look(name, check)

    def skipped(self, name: str) -> Finding:
        found = f"not tried: the {self._seconds:.0f} s of the self-test were over"
        return Finding(name, found, "skipped", "close other programs; a GPU also compiles each kernel at its first use")
