"""One adapter that learns: its trainer, trajectories, versions and checkpoints. The server has one for each of them.

An update runs on the engine, in pieces; what comes out is packed here, on the caller's thread, and published between
two steps. A version is good once the answers drawn from it have given no alarm; an alarm brings the last good one back,
parameters, optimiser and all. Any thread but the engine's; one update at a time.

A version number names one set of weights, for ever: it is on the disk before anybody can see it, and never given out
again. Updates that are not published have none. The trainer as it was at each version that is still loaded is kept, so
a rollback takes it back too.

What a kill must not lose is on the disk in one of two ways: in a checkpoint (trainer, counters, waiting trajectories),
or in the journal of what came after it. The checkpoint `latest` is written a while after a change and at the end;
trajectories of updates that came after it are in the journal, and wait in the buffer again.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import orjson

from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ConfigError, InvalidRequestError, ParallmError, UnavailableError
from mlx_parallm.lora.registry import KEPT_VERSIONS
from mlx_parallm.lora.weights import Adapter
from mlx_parallm.models.device import device_kind
from mlx_parallm.models.memory import size_flag, size_text
from mlx_parallm.training.checkpoints import (
    BEST,
    BUFFER,
    LATEST,
    Checkpoint,
    Checkpoints,
    adapter_files,
    check_name,
)
from mlx_parallm.training.journal import Journal
from mlx_parallm.training.model import LoRAConfig
from mlx_parallm.training.trainer import LearnerState, Outcome, RLConfig, Trainer
from mlx_parallm.training.trajectories import Buffer, Trajectory
from mlx_parallm.types import AdapterRoute

log = logging.getLogger(__name__)

T = TypeVar("T")
FAILURE_SECONDS = 1.0  # before another attempt
RECENT = 5  # updates over which rewards are averaged
GOOD = "good."  # before the names of the last good version's arrays
SERVED = "served."  # before those of the version that is served, where the trainer has gone on without publishing
HISTORY = 100  # updates that are remembered


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
    saved: bool = False  # in a checkpoint, before anybody was told


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
    kl: float | None = None  # to the model without the adapter, when it was last measured …
    kl_update: int | None = None  # … and by which update
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    times: deque[float] = field(default_factory=lambda: deque(maxlen=20))  # when updates were published

    @property
    def updates_per_second(self) -> float:
        if len(self.times) < 2:
            return 0.0
        return (len(self.times) - 1) / max(1e-6, max(time.monotonic(), self.times[-1]) - self.times[0])

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        numbers = ("updates", "refused", "rollbacks", "used", "skipped", "off_policy")
        last = ("last_update", "last_reason", "metrics", "kl", "kl_update")
        return {name: getattr(self, name) for name in (*numbers, *last)} | {"history": list(self.history)}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            if name == "history":
                self.history.extend(value)
            elif hasattr(self, name):
                setattr(self, name, value)


@dataclass(frozen=True, slots=True)
class _Captured:
    """All that a checkpoint holds, at one moment."""

    snapshot: LearnerState
    adapter: Adapter
    good: LearnerState | None
    served: LearnerState | None
    waiting: list[Trajectory]
    state: dict[str, Any]
    journal: int  # the number of its first file that holds what came later


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
        checkpoint_seconds: float = 60.0,
        update_trajectories: int | None = None,  # that an update takes from the buffer; None: the config's batch_size
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
        self._seconds = checkpoint_seconds
        self._update_trajectories = update_trajectories or config.batch_size
        self._journal: Journal | None = None
        self._versions: dict[int, LearnerState] = {}  # the trainer at each version that is loaded
        self._last_version = 0  # that was ever given out
        self._saving = threading.Lock()  # is taken before `_lock`
        self._changed = threading.Event()  # since the last checkpoint
        self._saver: threading.Thread | None = None
        self._alarms = alarms or Alarms()
        self._lock = threading.Lock()
        self._rewards: deque[float] = deque(maxlen=RECENT)
        self._deviations: deque[float] = deque(maxlen=RECENT)
        self._best_reward = -np.inf
        self._good: tuple[int | None, LearnerState] | None = None  # its version; None: it was before a restart
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
        self.trainer.kept_snapshots = KEPT_VERSIONS + 1
        self._check_memory()
        if device_kind() != "cpu":
            self._on_engine(self.trainer.warm_up)
        number, served = None, None
        if self.checkpoints is not None:
            self.checkpoints.tidy()
            self._journal = Journal(self.checkpoints.folder, self.checkpoints.last_journal())
            number, served = self._resume(resume)
        served = served or self._on_engine(self.trainer.snapshot)
        adapter = self._on_engine(lambda: self._adapter_of(served))
        self._publish(adapter, served, number)
        if serve:
            self.engine.adapters.serve([AdapterRoute(self.name, None, 1.0)])
        if self.checkpoints is not None:
            self.buffer.on_add = self._write_down
            self._saver = threading.Thread(target=self._save_after_changes, name=f"save-{self.name}", daemon=True)
            self._saver.start()

    def _resume(self, resume: bool) -> tuple[int | None, LearnerState | None]:
        """Goes on from the last checkpoint and from the journal: the version that was served, and what it was where
        the trainer had gone on without publishing."""
        assert self.checkpoints is not None
        assert self._journal is not None
        kept = self.checkpoints.latest() if resume else None
        self._last_version = self.checkpoints.last_version()
        before = [] if kept is None else kept.waiting()
        later = []
        for entry in self._journal.read(0 if kept is None else int(kept.state.get("journal", 0))):
            if "version" in entry:
                self._last_version = max(self._last_version, int(entry["version"]))
            elif "trajectory" in entry:
                later.append(entry["trajectory"])
        if resume:
            found = list(_readable([*before, *later]))
            self.buffer.restore(found, {} if kept is None else kept.state.get("counts", {}), len(later))
        if kept is None:
            return None, None
        self._restore(kept)
        self.totals.restore(kept.state.get("totals", {}))
        log.info(
            "%s goes on from checkpoint %s: %d updates, %d trajectories wait",
            self.name, kept.path.name, self.trainer.updates, len(self.buffer),
        )  # fmt: skip
        return kept.served_version, self._on_engine(lambda: self._part_of(kept, SERVED, "served_updates"))

    def _restore(self, kept: Checkpoint) -> None:
        """Trainer, alarms and the loop's own notes, as a checkpoint has them."""
        state = kept.state
        self._on_engine(lambda: self.trainer.load_state(kept.arrays, int(state["updates"])))
        good = self._on_engine(lambda: self._part_of(kept, GOOD, "good_updates"))
        self._good = None if good is None else (None, good)
        self.extra = dict(state.get("extra", {}))
        best = state.get("best_reward")
        self._best_reward = -np.inf if best is None else float(best)
        self._rewards.extend(state.get("recent_rewards", ()))
        self._deviations.extend(state.get("recent_deviations", ()))

    def _write_down(self, trajectories: Sequence[Trajectory]) -> None:
        """Into the journal, before anybody is told that they were taken."""
        assert self._journal is not None
        try:
            self._journal.append(*({"trajectory": one} for one in trajectories))
        except OSError as error:
            raise UnavailableError(f"trajectories can't be kept: {error}") from error
        self._changed.set()

    def _save_after_changes(self) -> None:
        """Writes a checkpoint a while after each change."""
        while not self._closed:
            self._changed.wait()
            deadline = time.monotonic() + self._seconds
            while not self._closed and (time.monotonic() < deadline or not self._seconds):
                time.sleep(0.2)
            if not self._closed:
                try:
                    self._try_save(LATEST)
                except UnavailableError:
                    return

    def follow_buffer(self, update_frequency: int) -> None:
        """Updates whenever so many trajectories are ready, on a thread of its own."""

        def run() -> None:
            while not self._closed:
                if self.buffer.wait(update_frequency, 0.5) and not self._closed:
                    try:
                        self.update(at_most=update_frequency)
                    except UnavailableError:
                        return
                    except Exception:  # the next may do better
                        log.exception("an update of %s has failed", self.name)
                        time.sleep(FAILURE_SECONDS)

        self._thread = threading.Thread(target=run, name=f"train-{self.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends what runs, and writes a checkpoint where something has changed. The engine must still run."""
        self._closed = True
        self.buffer.wake()
        if self._thread is not None:
            self._thread.join(60)
        if self.checkpoints is not None and self._changed.is_set():
            try:
                self._try_save(LATEST)
            except UnavailableError as error:
                log.error("%s: the state at the end can't be written: %s", self.name, error.message)
        self._changed.set()  # for the saver to end
        if self._saver is not None:
            self._saver.join(60)
        if self._journal is not None:
            self._journal.close()

    @property
    def version(self) -> int:
        """What the name means now."""
        return self.engine.adapters.find(self.name).number

    @property
    def last_version(self) -> int:
        """The newest that was ever published."""
        return self._last_version

    # Updates.

    def update(
        self,
        trajectories: Sequence[Trajectory] | None = None,
        *,
        publish: bool = True,
        checkpoint_name: str | None = None,
        at_most: int | None = None,
        durable: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> Report:
        """One update now, from these or from the buffer.

        `durable`: what it did is in a checkpoint before this returns. `extra`: is kept with it, in the next checkpoint.
        """
        if checkpoint_name is not None:
            check_name(checkpoint_name)
            if self.checkpoints is None:
                raise InvalidRequestError("this server keeps no checkpoints", param="checkpoint_name")
        with self._lock:
            taken = None
            if trajectories is None:
                trajectories = taken = self.buffer.take(at_most or self._update_trajectories, self.version)
            if not trajectories:
                raise InvalidRequestError(
                    "there are no trajectories to learn from: groups need at least two answers", param="trajectories"
                )
            try:
                report = self._update(trajectories, publish)
            except BaseException:
                if taken:
                    self.buffer.put_back(taken)
                raise
            if taken is None:
                self.buffer.count(collected=len(trajectories))
            if extra is not None:
                self.extra = dict(extra)
            self._changed.set()
        self._keep(report, checkpoint_name, durable)
        return report

    def _update(self, trajectories: Sequence[Trajectory], publish: bool) -> Report:
        before = self.version, self._on_engine(self.trainer.snapshot)
        self._good = self._good or before
        ages = [before[0] - one.version for one in trajectories if one.spans]
        outcome = self.engine.work(self.trainer.update(trajectories, self.engine.is_serving)).result()
        outcome.metrics["staleness"] = float(np.mean(ages)) if ages else 0.0
        report = Report(before[0], outcome)
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
        self._count(report, len(trajectories))
        return report

    def begin_with(self, adapter: Adapter) -> int:
        """Another adapter than a new one, before the first update: its version."""

        def take() -> tuple[Adapter, LearnerState]:
            trainer = self.trainer
            trainer.learner.set_parameters(trainer.tree.parameters_of(adapter))
            return trainer.adapter(), trainer.snapshot()

        with self._lock:
            number = self._publish(*self._on_engine(take))
            self._changed.set()
            return number

    def checkpoint(self, name: str | None = None) -> str:
        """Writes one now."""
        if self.checkpoints is None:
            raise InvalidRequestError("this server keeps no checkpoints")
        return self._save(name or f"step-{self.trainer.updates:08d}")

    def rollback(self, version: int | None) -> tuple[str, int]:
        """Goes back to an earlier version, the trainer too: the next update comes from there. None: the one before.

        Where that version is no longer loaded, a checkpoint of it is looked for; what was done, and the version that
        the name means now.
        """
        with self._lock:
            known = {one.number for one in self.engine.adapters.versions(self.name)}
            if version is None:
                version = max((number for number in known if number < self.version), default=None)
                if version is None:
                    raise InvalidRequestError(
                        f"adapter {self.name!r} has no version before {self.version}", param="version"
                    )
            if version in known:
                number = self.engine.adapters.rollback(self.name, version).number
                snapshot = self._versions[number]
                self._on_engine(lambda: self.trainer.go_back(snapshot))
                self._begin_anew()
                return (
                    f"{self.name}@{number} is what {self.name!r} means now, and what its training goes on from",
                    number,
                )
        return self.restore(None, version)

    def restore(self, name: str | None, version: int | None) -> tuple[str, int]:
        """Goes on from a checkpoint, by its name or by the version it was written of, as a new version."""
        if self.checkpoints is None:
            raise InvalidRequestError("this server keeps no checkpoints", param="checkpoint")
        with self._lock:
            kept = self.checkpoints.load(name) if name is not None else self.checkpoints.of_version(version)
            self._on_engine(lambda: self.trainer.load_state(kept.arrays, int(kept.state["updates"])))
            self.extra = dict(kept.state.get("extra", {}))
            self._begin_anew()
            number = self._publish(*self._on_engine(lambda: (self.trainer.adapter(), self.trainer.snapshot())))
        self._try_save(LATEST)  # what a restart goes on from
        return f"{self.name!r} goes on from checkpoint {kept.path.name}, as version {number}", number

    def _begin_anew(self) -> None:
        """After somebody has taken the policy elsewhere: what was seen of the one before says nothing of it."""
        self._good = None
        self._rewards.clear()
        self._deviations.clear()
        self._best_reward = -np.inf
        self._changed.set()

    def _count(self, report: Report, given: int) -> None:
        totals, outcome = self.totals, report.outcome
        totals.metrics = {**outcome.metrics, "update_seconds": outcome.seconds}
        if "kl" in outcome.metrics:
            totals.kl, totals.kl_update = outcome.metrics["kl"], self.trainer.updates
        totals.used += outcome.used
        totals.skipped += outcome.skipped
        totals.off_policy += int(outcome.metrics.get("off_policy", 0))
        self.buffer.count(flat=outcome.skipped)
        if outcome.adapter is None:
            totals.refused += 1
            totals.last_reason = outcome.reason
            log.warning("an update of %s was refused: %s", self.name, outcome.reason)
        shown = ("loss", "reward_mean", "kl", "entropy", "clip_fraction", "mismatch_kl", "staleness")
        totals.history.append(
            {
                "time": time.time(),
                "updates": self.trainer.updates,
                "policy_version": report.version,
                "published": report.published,
                "refused": outcome.reason or None,
                "rolled_back": report.rolled_back or None,
                "trajectories": given,
                "seconds": outcome.seconds,
            }
            | {name: outcome.metrics[name] for name in shown if name in outcome.metrics}
        )

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

    def _publish_or_undo(self, adapter: Adapter, before: LearnerState) -> int:
        try:
            return self._publish(adapter, self._on_engine(self.trainer.snapshot))
        except BaseException:
            self._on_engine(lambda: self.trainer.go_back(before))
            raise

    def _back_to(self, version: int | None) -> int:
        try:
            if version is not None:
                return self.engine.adapters.rollback(self.name, version).number
        except ParallmError:  # it is no longer kept: its weights are
            pass
        return self._publish(*self._on_engine(lambda: (self.trainer.adapter(), self.trainer.snapshot())))

    def _publish(self, adapter: Adapter, snapshot: LearnerState, number: int | None = None) -> int:
        """Serves these parameters as a new version, or as one that they were before a restart."""
        number = self._new_number() if number is None else number
        config = {"fine_tune_type": "dora" if adapter.dora else "lora", "lora_parameters": {"scale": self.lora.scale}}
        self.engine.adapters.publish(self.name, adapter, "training", number, config)
        self._versions[number] = snapshot
        loaded = {version.number for version in self.engine.adapters.versions(self.name)}
        self._versions = {one: kept for one, kept in self._versions.items() if one in loaded}
        return number

    def _new_number(self) -> int:
        """One that nothing was ever called by, nor will be: it is on the disk before it is used."""
        number = self._last_version + 1
        if self._journal is not None:
            try:
                self._journal.append({"version": number}, durable=True)
            except OSError as error:
                raise UnavailableError(
                    f"version {number} can't be written down, so it is not published: {error}"
                ) from error
        self._last_version = number
        return number

    def _adapter_of(self, snapshot: LearnerState) -> Adapter:
        now = self.trainer.snapshot()
        self.trainer.go_back(snapshot)
        try:
            return self.trainer.adapter()
        finally:
            self.trainer.go_back(now)

    def _keep(self, report: Report, name: str | None, durable: bool) -> None:
        """Checkpoints: those asked for, those that are due, and the best."""
        if name is not None:
            report.checkpoint = self._save(name)
            report.saved = True
        elif report.rolled_back or (durable and report.outcome.adapter is not None):
            # After a rollback a restart must not bring the other one back.
            report.saved = self._try_save(LATEST) is not None
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
        assert self._journal is not None
        with self._saving:
            with self._lock:
                self._changed.clear()
                captured = self._capture()
            try:
                arrays = self._on_engine(lambda: self._arrays(captured))
                source = self.engine.model.source
                files = adapter_files(captured.adapter, self.lora.scale, self.lora.rank, source)
                files[BUFFER] = b"".join(orjson.dumps(one) + b"\n" for one in captured.waiting)
                saved = self.checkpoints.save(name, files, arrays, captured.state).name
            except BaseException:
                self._changed.set()
                raise
            self._journal.drop_before(captured.journal)
            return saved

    def _capture(self) -> _Captured:
        """All of it at one moment, by reference: arrays stay as they are."""
        assert self._journal is not None
        snapshot, adapter = self._on_engine(lambda: (self.trainer.snapshot(), self.trainer.adapter()))
        waiting, counts, journal = self.buffer.freeze(self._journal.rotate)
        good = self._good[1] if self._good is not None else None
        if good is not None and good.parameters is snapshot.parameters:  # after a rollback: it is the one that is kept
            good = None
        version = self.version
        served = self._versions.get(version)
        if served is not None and served.parameters is snapshot.parameters:
            served = None
        state = {
            "updates": snapshot.updates,
            "good_updates": None if good is None else good.updates,
            "adapter": self.name,
            "policy_version": version if served is None else None,  # what these parameters are called
            "served_version": version,
            "served_updates": None if served is None else served.updates,
            "last_version": self._last_version,
            "journal": journal,
            "best_reward": None if self._best_reward == -np.inf else self._best_reward,
            "recent_rewards": list(self._rewards),
            "recent_deviations": list(self._deviations),
            "totals": self.totals.state(),
            "counts": counts,
            "seed": self.config.seed,
            "metrics": self.totals.metrics,
            "extra": self.extra,
        }
        return _Captured(snapshot, adapter, good, served, waiting, state, journal)

    def _arrays(self, captured: _Captured) -> dict[str, Any]:
        found = self.trainer.state(captured.snapshot)
        for prefix, snapshot in ((GOOD, captured.good), (SERVED, captured.served)):
            earlier = {} if snapshot is None else self.trainer.state(snapshot)
            found |= {f"{prefix}{name}": array for name, array in earlier.items()}
        return found

    def _part_of(self, kept: Checkpoint, prefix: str, updates: str) -> LearnerState | None:
        """An earlier state of the trainer that the checkpoint holds, where it is another than its own."""
        arrays = {name.removeprefix(prefix): array for name, array in kept.arrays.items() if name.startswith(prefix)}
        if not arrays or kept.state.get(updates) is None:
            return None
        return self.trainer.snapshot_of(arrays, int(kept.state[updates]))

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
            "kl": totals.kl,
            "kl_measured_at_update": totals.kl_update,
            "updates_per_second": totals.updates_per_second,
            "metrics": totals.metrics,
            "history": list(totals.history),
            "available_checkpoints": [] if self.checkpoints is None else self.checkpoints.names(),
        }


def _readable(entries: Sequence[Mapping[str, Any]]) -> Iterator[Trajectory]:
    for entry in entries:
        try:
            yield Trajectory.of_json(dict(entry))
        except (ParallmError, KeyError, TypeError, ValueError) as error:
            log.warning("a trajectory from before can't be read: %s", error)


def once(work: Callable[[], T]) -> Generator[None, None, T]:
    """One step that gives a result."""
    yield from ()
    return work()
