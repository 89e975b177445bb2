"""The versions of one adapter that learns: their numbers, their publication, and the learner as it was at each.

A version number names one set of weights, for ever: it is on the disk before anybody can see it, and never given out
again. Updates that are not published have none. The learner's state at each version that is still loaded is kept, so
that a rollback takes training back too. A session owns one; any thread but the engine's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mlx_parallm.config.training import LoRAConfig
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.lora.adapter import Adapter
from mlx_parallm.training.learner import LearnerState


@dataclass(frozen=True, slots=True)
class Policy:
    """An adapter, and the learner at the moment when it was taken."""

    adapter: Adapter
    state: LearnerState


@dataclass(frozen=True, slots=True)
class GoodVersion:
    """A version whose completions have given no alarm. `number`: None where it is from before a restart."""

    number: int | None
    state: LearnerState


@dataclass(frozen=True, slots=True)
class Restored:
    """What a rollback has done, in a sentence, and the version that the name means now."""

    message: str
    version: int


class Publisher(Protocol):
    """Publishes versions beside this process. Blocks until they are served; what it raises undoes the change here."""

    def publish(self, name: str, adapter: Adapter, number: int) -> None: ...
    def roll_back(self, name: str, number: int) -> None: ...


class PolicyVersions:
    def __init__(self, engine: Engine, name: str, lora: LoRAConfig) -> None:
        self._engine = engine
        self._name = name
        self._scale = lora.scale
        self._states: dict[int, LearnerState] = {}  # of the versions that are loaded
        self.last = 0  # that was ever given out
        self.abandoned: set[int] = set()  # versions that a rollback has left: no ancestors of what the name means now
        self.publisher: Publisher | None = None
        self.record: Callable[[int], None] = lambda number: None  # writes a number down before it is used; may raise

    @property
    def current(self) -> int:
        """What the name means now."""
        return self._engine.adapters.find(self._name).number

    @property
    def loaded(self) -> set[int]:
        return {version.number for version in self._engine.adapters.versions(self._name)}

    def before(self, current: int) -> int:
        """The newest that is loaded and older than this one."""
        older = [number for number in self.loaded if number < current]
        if not older:
            raise InvalidRequestError(f"adapter {self._name!r} has no version before {current}", param="version")
        return max(older)

    def state_of(self, number: int) -> LearnerState | None:
        return self._states.get(number)

    def publish(self, policy: Policy, number: int | None = None) -> int:
        """Serves a policy as a new version, or as the one that it was before a restart."""
        number = self._new_number() if number is None else number
        if self.publisher is not None:
            self.publisher.publish(self._name, policy.adapter, number)
        kind = "dora" if policy.adapter.dora else "lora"
        config = {"fine_tune_type": kind, "lora_parameters": {"scale": self._scale}}
        self._engine.adapters.publish(self._name, policy.adapter, "training", number, config)
        self._states[number] = policy.state
        loaded = self.loaded
        self._states = {one: state for one, state in self._states.items() if one in loaded}
        return number

    def roll_back(self, number: int) -> LearnerState:
        """Has the name mean an earlier version that is loaded; the learner as it was then."""
        return self._states[self.serve_again(number)]

    def serve_again(self, number: int) -> int:
        """The same; its number. Raises where the version is no longer loaded."""
        if self.publisher is not None:
            self.publisher.roll_back(self._name, number)
        served = self._engine.adapters.rollback(self._name, number).number
        self.abandon_after(served)
        return served

    def abandon_after(self, number: int) -> None:
        """Training goes on from this version: those that came after it are no ancestors of the next."""
        self.abandoned |= set(range(number + 1, self.last + 1))
        self.abandoned.discard(number)

    def _new_number(self) -> int:
        number = self.last + 1
        self.record(number)
        self.last = number
        return number
