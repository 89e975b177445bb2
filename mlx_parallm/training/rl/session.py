"""One adapter that learns: its trainer, trajectories, versions and checkpoints. The manager has one for each of them.

An update runs on the engine, in micro-batches; its result is packed here, on the caller's thread, and published
between two steps. A version is good once the completions sampled from it have given no alarm (`alarms`); an alarm
brings the last good one back, parameters, optimiser and all. `versions` has the numbers of versions, `session_store`
what is on disk. Any thread but the engine's; one update at a time.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mlx_parallm.config.training import Alarms, LoRAConfig, RLConfig
from mlx_parallm.devices.device import this_device
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import InvalidRequestError, ParallmError
from mlx_parallm.lora.adapter import Adapter
from mlx_parallm.lora.registry import KEPT_VERSIONS
from mlx_parallm.training.learner import LearnerState
from mlx_parallm.training.rl.alarms import PolicyMonitor
from mlx_parallm.training.rl.buffer import Buffer
from mlx_parallm.training.rl.follower import BufferFollower
from mlx_parallm.training.rl.totals import Report, Totals
from mlx_parallm.training.rl.trainer import Trainer
from mlx_parallm.training.rl.trajectories import Trajectory
from mlx_parallm.training.rl.versions import GoodVersion, Policy, PolicyVersions, Publisher, Restored
from mlx_parallm.training.storage.checkpoints import BEST, LATEST, Checkpoint, Checkpoints, check_new_name
from mlx_parallm.training.storage.session_store import Captured, SessionState, SessionStore, captured
from mlx_parallm.types import AdapterRoute

log = logging.getLogger(__name__)

T = TypeVar("T")
NO_CHECKPOINTS = "this server keeps no checkpoints"


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """When a session saves and updates, and what it takes from its buffer."""

    checkpoint_interval: int = 500  # updates
    checkpoint_seconds: float = 60.0
    update_trajectories: int | None = None  # that an update takes from the buffer; None: the config's batch_size
    follows_buffer: bool = False  # updates whenever so many are ready, on a thread of its own
    buffer_size: int = 1000
    max_staleness: int | None = None
    alarms: Alarms = field(default_factory=Alarms)
    memory: int | None = None  # bytes that learning may take; None: what is there


class Session:
    def __init__(
        self,
        engine: Engine,
        name: str,
        lora: LoRAConfig,
        config: RLConfig,
        *,
        checkpoints: Checkpoints | None = None,
        options: SessionOptions | None = None,
    ) -> None:
        self._options = options = options or SessionOptions()
        self.engine = engine
        self.name = name
        self.lora = lora
        self.config = config
        self.checkpoints = checkpoints
        self.buffer = Buffer(options.buffer_size, options.max_staleness)
        self.totals = Totals()
        self.monitor = PolicyMonitor(options.alarms)
        self.versions = PolicyVersions(engine, name, lora)
        self.good: GoodVersion | None = None
        self.extra: dict[str, Any] = {}  # of whoever drives this, kept with checkpoints
        self.trainer: Trainer
        self.store: SessionStore | None = None
        self._update_trajectories = options.update_trajectories or config.batch_size
        self._follower: BufferFollower | None = None
        self._lock = threading.Lock()

    # Start and end.

    def start(self, *, resume: bool = True, serve: bool = True, initial: Adapter | None = None) -> None:
        """Makes the trainer, as its last checkpoint left it, and publishes; `serve`: as the model's own name too.

        `initial`: what it begins with where there is no checkpoint; None: an adapter that changes nothing.
        """
        self.trainer = self._on_engine(lambda: Trainer(self.engine.model, self.lora, self.config, self._options.memory))
        self.trainer.kept_snapshots = KEPT_VERSIONS + 1
        self.trainer.check_memory(self.name, self.engine.memory.limit)
        if this_device().builds_kernels:
            self._on_engine(self.trainer.warm_up)
        number = served = checkpoint = None
        if self.checkpoints is not None:
            self.store = SessionStore(
                self.engine,
                self.trainer,
                self.checkpoints,
                name=self.name,
                seconds=self._options.checkpoint_seconds,
                lock=self._lock,
                capture=self._capture,
            )
            self.versions.record = self.store.record_version
            checkpoint = self._recover(self.store, resume)
            if checkpoint is not None:
                number, served = checkpoint.served_version, self.store.served_state(checkpoint)
        if initial is not None and checkpoint is None:
            self._on_engine(lambda: self.trainer.begin_with(initial))
        served = served or self._on_engine(self.trainer.snapshot)
        adapter = self._on_engine(lambda: self._adapter_at(served))
        self.versions.publish(Policy(adapter, served), number)
        if serve:
            self.engine.adapters.serve([AdapterRoute(self.name, None, 1.0)])
        if self.store is not None:
            self.buffer.on_add = self.store.record_trajectories
            self.store.start()
        if self._options.follows_buffer:
            count = self._update_trajectories
            self._follower = BufferFollower(self.name, self.buffer, count, partial(self.update, at_most=count))
            self._follower.start()

    def _recover(self, store: SessionStore, resume: bool) -> Checkpoint | None:
        """Goes on from the last checkpoint and from the journal; the checkpoint."""
        recovered = store.recover(resume)
        self.versions.last = recovered.last_version
        checkpoint = recovered.checkpoint
        state = None if checkpoint is None else SessionState.of_json(checkpoint.state)
        if resume:
            self.buffer.restore(recovered.trajectories, {} if state is None else state.counts, recovered.later)
        if checkpoint is None or state is None:
            return None
        store.load(checkpoint)
        store.load_reference(checkpoint)
        good = store.good_state(checkpoint)
        self.good = None if good is None else GoodVersion(None, good)
        self.extra = dict(state.extra)
        self.versions.abandoned = set(state.abandoned)
        self.monitor.restore(state.best_reward, state.recent_rewards, state.recent_deviations)
        self.totals.restore(state.totals, self.trainer.updates)
        log.info(
            "%s goes on from checkpoint %s: %d updates, %d trajectories wait",
            self.name, checkpoint.path.name, self.trainer.updates, len(self.buffer),
        )  # fmt: skip
        return checkpoint

    def _adapter_at(self, state: LearnerState) -> Adapter:
        """Engine thread."""
        now = self.trainer.snapshot()
        self.trainer.go_back(state)
        try:
            return self.trainer.adapter()
        finally:
            self.trainer.go_back(now)

    def close(self) -> None:
        """Ends what runs, and writes a checkpoint where something has changed. The engine must still run."""
        self.buffer.wake()
        if self._follower is not None:
            self._follower.stop()
        if self.store is not None:
            self.store.close()

    @property
    def version(self) -> int:
        """What the name means now."""
        return self.versions.current

    @property
    def last_version(self) -> int:
        """The newest that was ever published."""
        return self.versions.last

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
        new_level: bool = False,
    ) -> Report:
        """One update now, from these or from the buffer.

        `durable`: what it did is in a checkpoint before this returns. `extra`: is kept with it, in the next checkpoint.
        `new_level`: what comes next is harder, so its rewards are not compared with those of before.
        """
        if checkpoint_name is not None:
            check_new_name(checkpoint_name)
            if self.store is None:
                raise InvalidRequestError(NO_CHECKPOINTS, param="checkpoint_name")
        with self._lock:
            if trajectories is None:
                report = self._update_from_buffer(at_most or self._update_trajectories, publish)
            else:
                report = self._update(self.buffer.without_abandoned(trajectories, self.versions.abandoned), publish)
                self.buffer.count(collected=len(trajectories))
            if extra is not None:
                self.extra = dict(extra)
            if new_level:
                self.monitor.reset()
            self._mark_changed()
        self._save_after_update(report, checkpoint_name, durable)
        return report

    def _update_from_buffer(self, at_most: int, publish: bool) -> Report:
        taken = self.buffer.take(at_most, self.version, self.versions.abandoned)
        try:
            return self._update(taken, publish)
        except BaseException:
            if taken:
                self.buffer.put_back(taken)
            raise

    def _update(self, trajectories: Sequence[Trajectory], publish: bool) -> Report:
        if not trajectories:
            raise InvalidRequestError(
                "there are no trajectories to learn from: groups need at least two completions", param="trajectories"
            )
        version = self.version
        before = GoodVersion(version, self._on_engine(self.trainer.snapshot))
        self.good = self.good or before
        ages = [max(0, version - one.version) for one in trajectories if one.spans and not one.foreign]
        outcome = self.engine.work(self.trainer.update(trajectories, self.engine.is_serving)).result()
        outcome.metrics["staleness"] = float(np.mean(ages)) if ages else 0.0
        report = Report(version, outcome)
        alarm = self.monitor.alarm(outcome.metrics)
        if alarm:
            self._roll_back_on(alarm, report)
        elif outcome.adapter is not None:
            self.good = before
            if publish:
                report.version, report.published = self._publish_or_undo(outcome.adapter, before.state), True
                self.totals.count_published()
        if outcome.adapter is None:
            log.warning("an update of %s was refused: %s", self.name, outcome.reason)
        self.totals.count(report, self.trainer.updates, len(trajectories))
        self.buffer.count(flat=outcome.skipped)
        self.buffer.recent.settle(trajectories, self.trainer.updates, learnt=outcome.adapter is not None)
        return report

    def _publish_or_undo(self, adapter: Adapter, before: LearnerState) -> int:
        try:
            return self.versions.publish(Policy(adapter, self._on_engine(self.trainer.snapshot)))
        except BaseException:
            self._on_engine(lambda: self.trainer.go_back(before))
            raise

    def _roll_back_on(self, alarm: str, report: Report) -> None:
        report.rolled_back = alarm
        self.totals.rollbacks += 1
        self.monitor.forget_rewards()
        assert self.good is not None
        good, alarming = self.good, self.version
        self._on_engine(lambda: self.trainer.go_back(good.state))
        self.versions.abandon_after(alarming - 1 if good.number is None else good.number)
        report.version = self._serve_again(good.number)
        self.buffer.drop_abandoned(self.versions.abandoned)
        log.error("%s: %s; back to version %d", self.name, alarm, report.version)

    def _serve_again(self, version: int | None) -> int:
        """An earlier version, or its weights as a new one where it is no longer loaded."""
        try:
            if version is not None:
                return self.versions.serve_again(version)
        except ParallmError:
            pass
        return self.versions.publish(self._on_engine(self._policy))

    def _policy(self) -> Policy:
        """Engine thread."""
        return Policy(self.trainer.adapter(), self.trainer.snapshot())

    def _save_after_update(self, report: Report, name: str | None, durable: bool) -> None:
        """Checkpoints: those asked for, those that are due, and the best."""
        store = self.store
        if store is not None and name is not None:
            report.checkpoint = store.save(name)
            report.saved = True
        elif store is not None and (report.rolled_back or (durable and report.outcome.adapter is not None)):
            # After a rollback a restart must not bring the other one back.
            report.saved = store.try_save(LATEST) is not None
        if not report.published:
            return
        improves = self.monitor.improves()
        if store is None:
            return
        if self.trainer.updates % self._options.checkpoint_interval == 0:
            saved = store.try_save(store.step_name)
            report.checkpoint = report.checkpoint or saved
        if improves:
            store.try_save(BEST)

    def begin_with(self, adapter: Adapter) -> int:
        """Another adapter than a new one, before the first update: its version."""
        with self._lock:
            self._on_engine(lambda: self.trainer.begin_with(adapter))
            number = self.versions.publish(self._on_engine(self._policy))
            self._mark_changed()
            return number

    def publish_to(self, publisher: Publisher, newest: int) -> int:
        """Has every version served elsewhere too, the parameters as they are now first. `newest`: its number there."""
        with self._lock:
            self.versions.publisher = publisher
            self.versions.last = max(self.versions.last, newest)
            number = self.versions.publish(self._on_engine(self._policy))
            self._mark_changed()
            return number

    # Checkpoints and rollbacks.

    def checkpoint(self, name: str | None = None) -> str:
        """Writes one now; its name."""
        if self.store is None:
            raise InvalidRequestError(NO_CHECKPOINTS)
        return self.store.save_now(name)

    def rollback(self, version: int | None) -> Restored:
        """Goes back to an earlier version, the trainer too: the next update comes from there. None: the one before.

        Where that version is no longer loaded, a checkpoint of it is looked for.
        """
        with self._lock:
            if version is None:
                version = self.versions.before(self.version)
            if version in self.versions.loaded:
                state = self.versions.roll_back(version)
                self._on_engine(lambda: self.trainer.go_back(state))
                self._begin_anew()
                message = f"{self.name}@{version} is what {self.name!r} means now, and what its training goes on from"
                return Restored(message, version)
        return self.restore(None, version)

    def restore(self, name: str | None, version: int | None) -> Restored:
        """Goes on from a checkpoint, by its name or by the version it was written of, as a new version."""
        if self.checkpoints is None or self.store is None:
            raise InvalidRequestError(NO_CHECKPOINTS, param="checkpoint")
        with self._lock:
            checkpoint = self.checkpoints.load(name) if name is not None else self.checkpoints.of_version(version)
            self.store.load(checkpoint)
            self.versions.abandon_after(checkpoint.served_version or 0)
            self.extra = dict(SessionState.of_json(checkpoint.state).extra)
            self._begin_anew()
            number = self.versions.publish(self._on_engine(self._policy))
        self.store.try_save(LATEST)  # what a restart goes on from
        return Restored(f"{self.name!r} goes on from checkpoint {checkpoint.path.name}, as version {number}", number)

    def _begin_anew(self) -> None:
        """Begins anew after somebody has taken the policy elsewhere: what was seen before says nothing of it."""
        self.good = None
        self.totals.stands = self.trainer.updates
        self.monitor.reset()
        self.buffer.drop_abandoned(self.versions.abandoned)
        self._mark_changed()

    def _mark_changed(self) -> None:
        if self.store is not None:
            self.store.mark_changed()

    def _capture(self) -> Captured:
        """All that a checkpoint holds at one moment, by reference: arrays are never changed in place."""
        assert self.store is not None
        policy = self._on_engine(self._policy)
        frozen = self.buffer.freeze(self.store.journal.rotate)
        return captured(
            policy,
            frozen,
            self.versions,
            self.good,
            self.monitor,
            self.totals,
            adapter=self.name,
            seed=self.config.seed,
            extra=self.extra,
        )

    def adapter(self) -> Adapter:
        """The parameters as they are now."""
        return self._on_engine(self.trainer.adapter)

    def _on_engine(self, work: Callable[[], T]) -> T:
        return self.engine.run(work)

    def status(self) -> dict[str, Any]:
        return {
            "current_lora": self.name,
            "policy_version": self.version,
            **self.totals.status(),
            **self.buffer.status(),
            "available_checkpoints": [] if self.checkpoints is None else self.checkpoints.names(),
        }
