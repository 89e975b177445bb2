"""One adapter that learns: its trainer, trajectories, versions and checkpoints. The server has one for each of them.

An update runs on the engine, in pieces; what comes out is packed here, on the caller's thread, and published between
two steps. A version is good once the answers drawn from it have given no alarm; an alarm brings the last good one back,
parameters, optimiser and all. Any thread but the engine's; one update at a time.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from mlx_parallm.adapters.registry import Route
from mlx_parallm.adapters.weights import Adapter
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ConfigError, InvalidRequestError, ParallmError, UnavailableError
from mlx_parallm.models.device import device_kind
from mlx_parallm.models.memory import size_flag, size_text
from mlx_parallm.training.checkpoints import BEST, Checkpoint, Checkpoints, adapter_files, check_name
from mlx_parallm.training.trainer import Outcome, RLConfig, Snapshot, Trainer
from mlx_parallm.training.trajectories import Buffer, Trajectory
from mlx_parallm.training.tree import LoRAConfig

log = logging.getLogger(__name__)

T = TypeVar("T")
FAILURE_SECONDS = 1.0  # before another attempt
RECENT = 5  # updates over which rewards are averaged
GOOD = "good."  # before the names of the last good version's arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarms:
    """What brings the last good version back; None: never."""

    kl: float | None = 10.0  # nats a token to the model without the adapter, more than that
    entropy: float | None = 1e-3  # nats a token, less than that
    reward_drop: float | None = 3.0  # of the best average, in deviations of the rewards


@dataclass(slots=True)
class Report:
    """What an update came to."""

    version: int
    outcome: Outcome
    published: bool = False
    rolled_back: str = ""  # the alarm
    checkpoint: str | None = None


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
    metrics: dict[str, float] = field(default_factory=dict)
    times: deque[float] = field(default_factory=lambda: deque(maxlen=20))  # when updates were published

    @property
    def updates_per_second(self) -> float:
        if len(self.times) < 2:
            return 0.0
        return (len(self.times) - 1) / max(1e-6, max(time.monotonic(), self.times[-1]) - self.times[0])


class Session:
    def __init__(
        self,
        engine: Engine,
        name: str,
        lora: LoRAConfig,
        config: RLConfig,
        *,
        checkpoints: Checkpoints | None = None,
        checkpoint_interval: int = 500,
        buffer_size: int = 1000,
        max_staleness: int | None = None,
        alarms: Alarms | None = None,
        memory: int | None = None,  # bytes that learning may take; None: what is there
    ) -> None:
        self._memory = memory
        self.engine = engine
        self.name = name
        self.lora = lora
        self.config = config
        self.checkpoints = checkpoints
        self.buffer = Buffer(buffer_size, max_staleness)
        self.totals = Totals()
        self.extra: dict[str, Any] = {}  # of whoever drives this, kept with checkpoints
        self._interval = checkpoint_interval
        self._alarms = alarms or Alarms()
        self._lock = threading.Lock()
        self._rewards: deque[float] = deque(maxlen=RECENT)
        self._deviations: deque[float] = deque(maxlen=RECENT)
        self._best_reward = -np.inf
        self._good: tuple[int | None, Snapshot] | None = None  # its version; None: it was before a restart
        self._closed = False
        self._thread: threading.Thread | None = None
        self.trainer: Trainer

    def _check_memory(self) -> None:
        needed = self.trainer.working_bytes * 5 // 4
        if self._memory is not None and self._memory < needed:
            limit = self.engine.memory.limit + 4 * (needed - self._memory)
            raise ConfigError(
                f"training {self.name!r} takes at least {size_text(needed)} and there is {size_text(self._memory)} for "
                f"it: give --memory-limit {size_flag(limit)}, a smaller --lora-rank or fewer --lora-layers"
            )

    # Start and end.

    def start(self, *, resume: bool = True, serve: bool = True) -> None:
        """Makes the trainer, as its last checkpoint left it, and publishes; `serve`: as the model's own name too."""
        self.trainer = self._on_engine(lambda: Trainer(self.engine.model, self.lora, self.config, self._memory))
        self._check_memory()
        if device_kind() != "cpu":
            self._on_engine(self.trainer.rehearse)
        number = 1
        if self.checkpoints is not None:
            self.checkpoints.tidy()
            kept = self.checkpoints.latest() if resume else None
            number = self.checkpoints.number_for(kept)
            if kept is not None:
                self._on_engine(lambda: self.trainer.load_state(kept.arrays, int(kept.state["updates"])))
                self._good = self._on_engine(lambda: self._good_of(kept))
                self.extra = dict(kept.state.get("extra", {}))
                best = kept.state.get("best_reward")
                self._best_reward = -np.inf if best is None else float(best)
                self._rewards.extend(kept.state.get("recent_rewards", ()))
                self._deviations.extend(kept.state.get("recent_deviations", ()))
                log.info("%s goes on from %s, %d updates", self.name, kept.path.name, self.trainer.updates)
        self._publish(self._on_engine(self.trainer.adapter), number)
        if serve:
            self.engine.policies.serve([Route(self.name, None, 1.0)])

    def follow_buffer(self, update_frequency: int) -> None:
        """Updates whenever so many trajectories are ready, on a thread of its own."""

        def run() -> None:
            while not self._closed:
                if self.buffer.wait(update_frequency, 0.5) and not self._closed:
                    try:
                        self.update()
                    except UnavailableError:
                        return
                    except Exception:  # the next may do better
                        log.exception("an update of %s has failed", self.name)
                        time.sleep(FAILURE_SECONDS)

        self._thread = threading.Thread(target=run, name=f"train-{self.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self.buffer.wake()
        if self._thread is not None:
            self._thread.join(60)

    @property
    def version(self) -> int:
        """What the name means now."""
        return self.engine.adapters.find(self.name).number

    # Updates.

    def update(
        self,
        trajectories: Sequence[Trajectory] | None = None,
        *,
        publish: bool = True,
        checkpoint_name: str | None = None,
        at_most: int | None = None,
    ) -> Report:
        """One update now, from these or from the buffer."""
        if checkpoint_name is not None:
            check_name(checkpoint_name)
            if self.checkpoints is None:
                raise InvalidRequestError("this server keeps no checkpoints", param="checkpoint_name")
        with self._lock:
            if trajectories is None:
                trajectories = self.buffer.take(at_most or self.config.batch_size, self.version)
            if not trajectories:
                raise InvalidRequestError(
                    "there are no trajectories to learn from: groups need at least two answers", param="trajectories"
                )
            before = self.version, self._on_engine(self.trainer.snapshot)
            self._good = self._good or before
            ages = [before[0] - one.version for one in trajectories if one.spans]
            outcome = self.engine.work(self.trainer.update(trajectories, self.engine.is_serving)).result()
            outcome.metrics["staleness"] = float(np.mean(ages)) if ages else 0.0
            report = Report(before[0], outcome)
            self._count(outcome)
            alarm = self._alarm(outcome.metrics)
            if alarm:
                self._roll_back(alarm, report)
            elif outcome.adapter is not None:
                self._good = before
                if publish:
                    report.version, report.published = self._publish_or_undo(outcome.adapter, before[1]), True
                    self.totals.updates += 1
                    self.totals.last_update = time.time()
                    self.totals.times.append(time.monotonic())
            self._keep(report, checkpoint_name)
            return report

    def checkpoint(self, name: str | None = None) -> str:
        """Writes one now."""
        if self.checkpoints is None:
            raise InvalidRequestError("this server keeps no checkpoints")
        with self._lock:
            return self._save(name or f"step-{self.trainer.updates:08d}")

    def restore(self, name: str | None, version: int | None) -> tuple[str, int]:
        """Goes on from a checkpoint, by its name or by the version it was written of; its name, and the new version."""
        if self.checkpoints is None:
            raise InvalidRequestError("this server keeps no checkpoints", param="checkpoint")
        with self._lock:
            kept = self.checkpoints.load(name) if name is not None else self.checkpoints.of_version(version)
            self._on_engine(lambda: self.trainer.load_state(kept.arrays, int(kept.state["updates"])))
            self.extra = dict(kept.state.get("extra", {}))
            self._good = None
            self._rewards.clear()
            self._deviations.clear()
            number = self._publish(self._on_engine(self.trainer.adapter))
            self._try_save(f"step-{self.trainer.updates:08d}")  # the newest: what a restart goes on from
            return kept.path.name, number

    def _count(self, outcome: Outcome) -> None:
        totals = self.totals
        totals.metrics = {**totals.metrics, **outcome.metrics, "update_seconds": outcome.seconds}
        totals.used += outcome.used
        totals.skipped += outcome.skipped
        totals.off_policy += int(outcome.metrics.get("off_policy", 0))
        self.buffer.counts.flat += outcome.skipped
        totals.last_reason = outcome.reason
        if outcome.adapter is None and outcome.used:
            totals.refused += 1
            log.warning("an update of %s was refused: %s", self.name, outcome.reason)

    def _alarm(self, metrics: dict[str, float]) -> str:
        """What is wrong with the policy that the trajectories came from; empty: nothing."""
        limits = self._alarms
        if limits.kl is not None and metrics.get("kl", 0.0) > limits.kl:
            return f"its KL divergence to the model is {metrics['kl']:.3g}, over {limits.kl:g}"
        if limits.entropy is not None and metrics.get("entropy", np.inf) < limits.entropy:
            return f"its entropy is {metrics['entropy']:.3g}, under {limits.entropy:g}"
        if not np.isfinite(metrics["reward_mean"]):
            return ""
        self._rewards.append(metrics["reward_mean"])
        self._deviations.append(metrics["reward_std"])
        average = float(np.mean(self._rewards))
        if len(self._rewards) == RECENT and limits.reward_drop is not None:
            deviation = max(float(np.mean(self._deviations)), 1e-6)
            if self._best_reward - average > limits.reward_drop * deviation:
                return f"rewards have fallen from {self._best_reward:.3g} to {average:.3g}"
        return ""

    def _roll_back(self, alarm: str, report: Report) -> None:
        report.rolled_back = alarm
        self.totals.rollbacks += 1
        self._rewards.clear()
        self._deviations.clear()
        assert self._good is not None
        version, snapshot = self._good
        self._on_engine(lambda: self.trainer.go_back(snapshot))
        report.version = self._back_to(version)
        log.error("%s: %s; back to version %d", self.name, alarm, report.version)
        self._try_save(f"step-{self.trainer.updates:08d}")  # a restart must not bring the other back

    def _publish_or_undo(self, adapter: Adapter, before: Snapshot) -> int:
        try:
            return self._publish(adapter)
        except BaseException:
            self._on_engine(lambda: self.trainer.go_back(before))
            raise

    def _back_to(self, version: int | None) -> int:
        try:
            if version is not None:
                return self.engine.policies.rollback(self.name, version).number
        except ParallmError:  # it is no longer kept: its weights are
            pass
        return self._publish(self._on_engine(self.trainer.adapter))

    def _publish(self, adapter: Adapter, at_least: int = 0) -> int:
        newest = max((version.number for version in self.engine.adapters.versions(self.name)), default=0)
        number = at_least if at_least > newest else None
        config = {"fine_tune_type": "dora" if adapter.dora else "lora", "lora_parameters": {"scale": self.lora.scale}}
        return self.engine.policies.publish(self.name, adapter, "training", number, config).number

    def _keep(self, report: Report, name: str | None) -> None:
        """Checkpoints: those asked for, those that are due, and the best."""
        if name is not None:
            report.checkpoint = self._save(name)
        if not report.published:
            return
        average = float(np.mean(self._rewards)) if len(self._rewards) == RECENT else -np.inf
        better, first = average > self._best_reward, self._best_reward == -np.inf
        self._best_reward = max(self._best_reward, average)
        if self.trainer.updates % self._interval == 0:
            saved = self._try_save(f"step-{self.trainer.updates:08d}")
            report.checkpoint = report.checkpoint or saved
        if better and not first:
            self._try_save(BEST)

    def _try_save(self, name: str) -> str | None:
        if self.checkpoints is None:
            return None
        try:
            return self._save(name)
        except OSError as error:  # a full disk must not end the training
            log.error("checkpoint %s can't be written: %s", name, error)
            return None

    def _save(self, name: str) -> str:
        assert self.checkpoints is not None
        good = self._good[1] if self._good is not None else None
        if (
            good is not None and good.parameters is self.trainer.parameters
        ):  # after a rollback: it is the one that is kept
            good = None
        arrays, adapter = self._on_engine(lambda: (self._arrays(good), self.trainer.adapter()))
        source = self.engine.model.source
        state = {
            "updates": self.trainer.updates,
            "good_updates": None if good is None else good.updates,
            "adapter": self.name,
            "policy_version": self.version,
            "best_reward": None if self._best_reward == -np.inf else self._best_reward,
            "recent_rewards": list(self._rewards),
            "recent_deviations": list(self._deviations),
            "totals": {"used": self.totals.used, "skipped": self.totals.skipped, "refused": self.totals.refused},
            "seed": self.config.seed,
            "metrics": self.totals.metrics,
            "extra": self.extra,
        }
        files = adapter_files(adapter, self.lora.scale, self.lora.rank, source)
        return self.checkpoints.save(name, files, arrays, state).name

    def _arrays(self, good: Snapshot | None) -> dict[str, Any]:
        earlier = {} if good is None else self.trainer.state(good)
        return self.trainer.state() | {f"{GOOD}{name}": array for name, array in earlier.items()}

    def _good_of(self, kept: Checkpoint) -> tuple[None, Snapshot] | None:
        """What an alarm goes back to, where it is not what the checkpoint is of."""
        updates = kept.state.get("good_updates")
        if updates is None:
            return None
        arrays = {name.removeprefix(GOOD): array for name, array in kept.arrays.items() if name.startswith(GOOD)}
        return None, self.trainer.snapshot_of(arrays, int(updates))

    def adapter_steps(self) -> Generator[None, None, Adapter]:
        """For the engine: the parameters as they are now."""
        return once(self.trainer.adapter)

    def _on_engine(self, work: Callable[[], T]) -> T:
        return self.engine.work(once(work)).result()

    def status(self) -> dict[str, Any]:
        totals, counts = self.totals, self.buffer.counts
        return {
            "current_lora": self.name,
            "policy_version": self.version,
            "updates": self.trainer.updates,
            "updates_published": totals.updates,
            "updates_refused": totals.refused,
            "rollbacks": totals.rollbacks,
            "trajectories_collected": counts.collected,
            "trajectories_buffered": len(self.buffer),
            "trajectories_ready": self.buffer.ready(),
            "trajectories_used": totals.used,
            "trajectories_flat": counts.flat,
            "trajectories_stale": counts.stale,
            "trajectories_dropped": counts.dropped,
            "trajectories_off_policy": totals.off_policy,
            "last_update": totals.last_update,
            "last_refusal": totals.last_reason or None,
            "loss": totals.metrics.get("loss"),
            "reward_mean": totals.metrics.get("reward_mean"),
            "kl": totals.metrics.get("kl"),
            "updates_per_second": totals.updates_per_second,
            "metrics": totals.metrics,
            "available_checkpoints": [] if self.checkpoints is None else self.checkpoints.names(),
        }


def once(work: Callable[[], T]) -> Generator[None, None, T]:
    """One step that gives a result."""
    yield from ()
    return work()
