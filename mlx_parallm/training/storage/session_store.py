"""What a kill must not lose of a session, on disk: its checkpoints, and the journal of what came after the last one.

The checkpoint `latest` is written a while after a change and at the end, on a thread of its own; others when asked.
Trajectories of updates that came after it are in the journal, and wait in the buffer again after a restart. A session
has one where it keeps checkpoints. Any thread but the engine's.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import mlx.core as mx
import orjson

from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ConfigError, ParallmError, UnavailableError
from mlx_parallm.host import to_numpy
from mlx_parallm.lora.adapter import Adapter
from mlx_parallm.training.learner import LearnerState
from mlx_parallm.training.rl.alarms import PolicyMonitor
from mlx_parallm.training.rl.buffer import FrozenBuffer
from mlx_parallm.training.rl.totals import Totals
from mlx_parallm.training.rl.trainer import Trainer
from mlx_parallm.training.rl.trajectories import Trajectory
from mlx_parallm.training.rl.versions import GoodVersion, Policy, PolicyVersions
from mlx_parallm.training.storage.checkpoints import (
    BUFFER,
    LATEST,
    Checkpoint,
    Checkpoints,
    adapter_files,
    check_new_name,
)
from mlx_parallm.training.storage.journal import Journal

log = logging.getLogger(__name__)

GOOD = "good."  # before the names of the last good version's arrays
REFERENCE = "reference."  # before those of the adapter that training began with, where KL is measured to it
SERVED = "served."  # before those of the version that is served, where the trainer has gone on without publishing
LOOK_SECONDS = 0.2  # how often the saver looks whether it is to stop
STOP_SECONDS = 60.0  # for the saver to end


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """A session in a checkpoint, beside its arrays and the trajectories that wait: what `state.json` holds."""

    updates: int
    adapter: str = ""
    good_updates: int | None = None  # None: the good version's arrays are the trainer's own
    policy_version: int | None = None  # what these parameters are called; None: they were never published
    served_version: int | None = None
    served_updates: int | None = None  # None: the served version's arrays are the trainer's own
    last_version: int = 0
    abandoned: list[int] = field(default_factory=list)  # versions that rollbacks have left
    journal: int = 0  # the number of its first file that holds what came later
    best_reward: float | None = None
    recent_rewards: list[float] = field(default_factory=list)
    recent_deviations: list[float] = field(default_factory=list)
    totals: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_json(cls, state: Mapping[str, Any]) -> "SessionState":
        """Reads the state as a checkpoint has it; an earlier release may have left fields out."""
        known = {item.name for item in fields(cls)}
        found = cls(**{name: value for name, value in state.items() if name in known})
        if not all(isinstance(number, int) for number in (found.updates, found.last_version, found.journal)):
            raise ValueError("its counters are no numbers")
        return found


@dataclass(frozen=True, slots=True)
class Captured:
    """All that a checkpoint holds, at one moment."""

    learner: LearnerState
    adapter: Adapter
    good: LearnerState | None
    served: LearnerState | None
    waiting: list[Trajectory]
    state: SessionState


def captured(
    policy: Policy,
    frozen: FrozenBuffer[int],
    versions: PolicyVersions,
    good_version: GoodVersion | None,
    monitor: PolicyMonitor,
    totals: Totals,
    *,
    adapter: str,
    seed: int,
    extra: Mapping[str, Any],
) -> Captured:
    """Returns what the parts of a session hold now. `frozen`: its buffer, with the number of the journal's new file."""
    version = versions.current
    good = _other(None if good_version is None else good_version.state, policy.state)
    served = _other(versions.state_of(version), policy.state)
    state = SessionState(
        updates=policy.state.updates,
        adapter=adapter,
        good_updates=None if good is None else good.updates,
        policy_version=version if served is None else None,
        served_version=version,
        served_updates=None if served is None else served.updates,
        last_version=versions.last,
        abandoned=sorted(versions.abandoned),
        journal=frozen.result,
        best_reward=None if monitor.best_reward == -math.inf else monitor.best_reward,
        recent_rewards=list(monitor.rewards),
        recent_deviations=list(monitor.deviations),
        totals=totals.state(),
        counts=frozen.counts,
        seed=seed,
        metrics=totals.metrics,
        extra=dict(extra),
    )
    return Captured(policy.state, policy.adapter, good, served, frozen.waiting, state)


def _other(state: LearnerState | None, current: LearnerState) -> LearnerState | None:
    """A state that is kept beside the current one; None where it is the same."""
    return None if state is None or state.parameters is current.parameters else state


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an earlier process has left."""

    checkpoint: Checkpoint | None
    trajectories: list[Trajectory]  # that waited
    later: int  # entries of the journal among them: the checkpoint has not counted those
    last_version: int  # that was ever given out


class SessionStore:
    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        checkpoints: Checkpoints,
        *,
        name: str,
        seconds: float,
        lock: threading.Lock,
        capture: Callable[[], Captured],
    ) -> None:
        """`seconds` from a change to the checkpoint. `lock` is the session's: `capture` is called with it held."""
        self._engine = engine
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._name = name
        self._seconds = seconds
        self._lock = lock
        self._capture = capture
        self._saving = threading.Lock()  # is taken before `_lock`
        self._changed = threading.Event()  # since the last checkpoint
        self._closed = False
        self._saver = threading.Thread(target=self._save_after_changes, name=f"save-{name}", daemon=True)
        checkpoints.tidy()
        self.journal = Journal(checkpoints.folder, checkpoints.last_journal())

    def start(self) -> None:
        self._saver.start()

    def close(self) -> None:
        """Writes a checkpoint where something has changed. The engine must still run, and nobody update any more."""
        self._closed = True
        if self._changed.is_set():
            try:
                self.try_save(LATEST)
            except UnavailableError as error:
                log.error("%s: the state at the end can't be written: %s", self._name, error.message)
        self._changed.set()  # for the saver to end
        if self._saver.is_alive():
            self._saver.join(STOP_SECONDS)
        self.journal.close()

    # The journal.

    def mark_changed(self) -> None:
        self._changed.set()

    def record_trajectories(self, trajectories: Sequence[Trajectory]) -> None:
        """Writes trajectories to the journal before `add` returns: what was acknowledged is on disk."""
        try:
            self.journal.append(*({"trajectory": one} for one in trajectories))
        except OSError as error:
            raise UnavailableError(f"trajectories can't be kept: {error}") from error
        self._changed.set()

    def record_version(self, number: int) -> None:
        """Writes a version's number to the journal before anybody can see the version."""
        try:
            self.journal.append({"version": number}, durable=True)
        except OSError as error:
            raise UnavailableError(
                f"version {number} can't be written down, so it is not published: {error}"
            ) from error

    # Reading.

    def recover(self, resume: bool) -> Recovered:
        """The last checkpoint and what the journal has of the time after it; without `resume` only the numbers."""
        checkpoint = self._checkpoints.latest(SessionState.of_json) if resume else None
        last_version = self._checkpoints.last_version()
        entries = [] if checkpoint is None else checkpoint.waiting()
        later = 0
        first = 0 if checkpoint is None else SessionState.of_json(checkpoint.state).journal
        for entry in self.journal.read(first):
            if isinstance(entry.get("version"), int):
                last_version = max(last_version, entry["version"])
            elif isinstance(entry.get("trajectory"), dict):
                entries.append(entry["trajectory"])
                later += 1
        return Recovered(checkpoint, list(_readable(entries)) if resume else [], later, last_version)

    def load(self, checkpoint: Checkpoint) -> None:
        """Takes the trainer to where it was."""
        updates = SessionState.of_json(checkpoint.state).updates
        try:
            self._engine.run(lambda: self._trainer.load_state(checkpoint.arrays, updates))
        except ConfigError as error:
            raise ConfigError(
                f"checkpoint {checkpoint.path} can't be gone on from: {error.message}. {_remedy(checkpoint)}"
            ) from None

    def load_reference(self, checkpoint: Checkpoint) -> None:
        """Has KL measured to what it was measured to then."""
        arrays = _below(REFERENCE, checkpoint)
        if arrays:
            self._engine.run(lambda: self._trainer.measure_to({name: mx.array(one) for name, one in arrays.items()}))

    def good_state(self, checkpoint: Checkpoint) -> LearnerState | None:
        """The last good version, where it is another than the trainer's own state."""
        return self._earlier_state(checkpoint, GOOD, SessionState.of_json(checkpoint.state).good_updates)

    def served_state(self, checkpoint: Checkpoint) -> LearnerState | None:
        """The served version, where it is another than the trainer's own state."""
        return self._earlier_state(checkpoint, SERVED, SessionState.of_json(checkpoint.state).served_updates)

    def _earlier_state(self, checkpoint: Checkpoint, prefix: str, updates: int | None) -> LearnerState | None:
        arrays = _below(prefix, checkpoint)
        if not arrays or updates is None:
            return None
        return self._engine.run(lambda: self._trainer.snapshot_of(arrays, updates))

    # Writing.

    @property
    def step_name(self) -> str:
        """What a checkpoint of the trainer as it is now is called."""
        return f"step-{self._trainer.updates:08d}"

    def save(self, name: str) -> str:
        """Writes a checkpoint of this name; its name."""
        with self._saving:
            with self._lock:
                self._changed.clear()
                captured = self._capture()
            try:
                saved = self._write(name, captured)
            except BaseException:
                self._changed.set()
                raise
            self.journal.drop_before(captured.state.journal)
            return saved

    def save_now(self, name: str | None) -> str:
        """Writes a checkpoint for a client, who may name it, and returns its name; UnavailableError on a full disk."""
        if name is not None:
            check_new_name(name)
        try:
            return self.save(name or self.step_name)
        except OSError as error:
            raise UnavailableError(f"the checkpoint can't be written: {error.strerror or error}") from error

    def try_save(self, name: str) -> str | None:
        """None where the disk is full or broken: that must not end the training."""
        try:
            return self.save(name)
        except OSError as error:
            log.error("checkpoint %s can't be written: %s", name, error)
            return None

    def _write(self, name: str, captured: Captured) -> str:
        arrays = self._engine.run(lambda: self._arrays(captured))
        lora = self._trainer.lora
        source = self._engine.model.source
        files = adapter_files(captured.adapter, lora.scale, lora.rank, source)
        files[BUFFER] = b"".join(orjson.dumps(one) + b"\n" for one in captured.waiting)
        return self._checkpoints.save(name, files, arrays, asdict(captured.state)).name

    def _arrays(self, captured: Captured) -> dict[str, Any]:
        arrays = self._trainer.state(captured.learner)
        for prefix, state in ((GOOD, captured.good), (SERVED, captured.served)):
            earlier = {} if state is None else self._trainer.state(state)
            arrays |= {f"{prefix}{name}": array for name, array in earlier.items()}
        reference = self._trainer.reference or {}
        return arrays | {f"{REFERENCE}{name}": to_numpy(array) for name, array in reference.items()}

    def _save_after_changes(self) -> None:
        """Writes a checkpoint a while after each change."""
        while not self._closed:
            self._changed.wait()
            deadline = time.monotonic() + self._seconds
            while not self._closed and (time.monotonic() < deadline or not self._seconds):
                time.sleep(LOOK_SECONDS)
            if not self._closed:
                try:
                    self.try_save(LATEST)
                except UnavailableError:
                    return


def _remedy(checkpoint: Checkpoint) -> str:
    ranks = [array.shape[1] for name, array in checkpoint.arrays.items() if name.endswith(".lora_a")]
    rank = f"--lora-rank {ranks[0]}" if ranks else "its --lora-rank"
    return (
        f"Give {rank} and the --lora-target-modules, --lora-layers and --lora-dora that it was trained with, or "
        "another --checkpoint-dir, or --no-resume to begin anew in this one"
    )


def _below(prefix: str, checkpoint: Checkpoint) -> dict[str, Any]:
    named = checkpoint.arrays.items()
    return {name.removeprefix(prefix): array for name, array in named if name.startswith(prefix)}


def _readable(entries: Sequence[Mapping[str, Any]]) -> Iterator[Trajectory]:
    for entry in entries:
        try:
            yield Trajectory.of_json(dict(entry))
        except (ParallmError, KeyError, TypeError, ValueError) as error:
            log.warning("a trajectory from before can't be read: %s", error)
