"""What a session's updates came to: the report of each, and totals since the training began. No MLX."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.training.rl.trainer import Outcome

HISTORY = 100  # updates that are remembered
SHOWN = (  # of each of them
    "loss", "reward_mean", "reward_std", "kl", "entropy", "clip_fraction", "mismatch_kl", "max_logprob_gap",
    "staleness", "flat_trajectories",
)  # fmt: skip
KEPT = (  # in a checkpoint, beside the history
    "updates", "refused", "rollbacks", "used", "skipped", "off_policy",
    "last_update", "last_reason", "metrics", "kl", "kl_update",
)  # fmt: skip


@dataclass(slots=True)
class Report:
    """What an update came to."""

    version: int
    outcome: Outcome
    published: bool = False
    rolled_back: str = ""  # the alarm
    checkpoint: str | None = None
    saved: bool = False  # in a checkpoint, before the update returned


@dataclass(slots=True)
class Totals:
    updates: int = 0  # published
    refused: int = 0
    rollbacks: int = 0
    used: int = 0  # trajectories
    skipped: int = 0
    off_policy: int = 0
    last_update: float | None = None
    last_reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)  # of the last update
    kl: float | None = None  # to the reference, when it was last measured …
    kl_update: int | None = None  # … and by which update
    stands: int = 0  # updates behind the parameters, as clients are told: counted once the history has them
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    times: deque[float] = field(default_factory=lambda: deque(maxlen=20))  # when updates were published

    @property
    def updates_per_second(self) -> float:
        if len(self.times) < 2:
            return 0.0
        return (len(self.times) - 1) / max(1e-6, max(time.monotonic(), self.times[-1]) - self.times[0])

    def count_published(self) -> None:
        self.updates += 1
        self.last_update = time.time()
        self.times.append(time.monotonic())

    def count(self, report: Report, updates: int, trajectories: int) -> None:
        """An update from so many trajectories, after which so many updates stand."""
        outcome = report.outcome
        self.metrics = {**outcome.metrics, "update_seconds": outcome.seconds}
        if "kl" in outcome.metrics:
            self.kl = outcome.metrics["kl"]
            self.kl_update = updates
        self.used += outcome.used
        self.skipped += outcome.skipped
        self.off_policy += int(outcome.metrics.get("off_policy", 0))
        if outcome.adapter is None:
            self.refused += 1
            self.last_reason = outcome.reason
        entry = {
            "time": time.time(),
            "updates": updates,
            "policy_version": report.version,
            "published": report.published,
            "refused": outcome.reason or None,
            "rolled_back": report.rolled_back or None,
            "trajectories": trajectories,
            "seconds": outcome.seconds,
        }
        self.history.append(entry | {name: outcome.metrics[name] for name in SHOWN if name in outcome.metrics})
        self.stands = updates

    def status(self) -> dict[str, Any]:
        """Returns the totals that clients see."""
        return {
            "updates": self.stands,
            "updates_published": self.updates,
            "updates_refused": self.refused,
            "rollbacks": self.rollbacks,
            "trajectories_used": self.used,
            "trajectories_off_policy": self.off_policy,
            "last_update": self.last_update,
            "last_refusal": self.last_reason or None,
            "loss": self.metrics.get("loss"),
            "reward_mean": self.metrics.get("reward_mean"),
            "kl": self.kl,
            "kl_measured_at_update": self.kl_update,
            "updates_per_second": self.updates_per_second,
            "metrics": self.metrics,
            "history": list(self.history),
        }

    def state(self) -> dict[str, Any]:
        """Returns the totals that a checkpoint keeps."""
        return {name: getattr(self, name) for name in KEPT} | {"history": list(self.history)}

    def restore(self, state: Mapping[str, Any], stands: int) -> None:
        self.stands = stands
        for name, value in state.items():
            if name == "history":
                self.history.extend(value)
            elif hasattr(self, name):
                setattr(self, name, value)
