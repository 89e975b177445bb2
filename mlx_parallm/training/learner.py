"""Parameters that learn, and their optimiser: a step from gradients, a way back, and what a checkpoint keeps.

The trainer of a policy, that of a reward model, SFT and DPO have one each. Arrays of one shape are kept as one stack,
so that a step takes a few operations and not a few for each array. AdamW has its bias corrected: a step is that of
torch's. Engine thread only, but for the configs.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from mlx_parallm.errors import ConfigError
from mlx_parallm.host import to_numpy
from mlx_parallm.models.memory import available_memory
from mlx_parallm.training.model import Stacks

Parameters = dict[str, mx.array]
Schedule = Literal["constant", "linear", "cosine"]
MIN_MICRO, MAX_MICRO = 32, 8192  # tokens
TOO_LONG = 0.67  # of the time that a piece should take, over the time it took


ALONE = 4  # times longer may a piece take while nobody is served


class Refused(Exception):
    """This step must not stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    learning_rate: float
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int = 1000  # after which linear and cosine have come to nothing
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ConfigError(f"schedule must be constant, linear or cosine, not {self.schedule!r}")
        if self.total_steps < 1:
            raise ConfigError(f"total_steps must be at least 1, not {self.total_steps}")
        for name in ("learning_rate", "warmup_steps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, and is {getattr(self, name)}")
        if not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be above 0, and is {self.max_grad_norm}")


@dataclass(frozen=True, slots=True)
class LearnerState:
    """A learner as it was."""

    parameters: Parameters
    stacks: Parameters  # the same
    optimizer: Any
    updates: int


@dataclass(slots=True)
class Pace:
    """How many tokens make a piece of the wanted length."""

    seconds: float
    fixed: int
    least: int = MIN_MICRO
    tokens: int = 2 * MIN_MICRO

    def budget(self, room: int = MAX_MICRO) -> int:
        """`room`: for so many there is memory."""
        return self.fixed or min(self.tokens, room)

    def note(self, tokens: int, seconds: float) -> None:
        """A piece that took far too long makes the next smaller; one that was full and quick, larger: twice at most."""
        factor = self.seconds / max(seconds, 1e-6)
        if factor < TOO_LONG or (factor > 1 and 2 * tokens >= self.tokens):
            self.tokens = int(min(MAX_MICRO, max(self.least, self.tokens * min(2.0, max(0.5, factor)))))


class Budget:
    """How many tokens the next piece of a step may have: by how long the last ones took, and by the memory at hand."""

    def __init__(
        self, seconds: float, fixed: int = 0, *, least: int = MIN_MICRO, at_hand: Callable[[], int] | None = None
    ) -> None:
        """`seconds` that a piece should take while somebody waits; `fixed`: it has always so many tokens; `at_hand`:
        bytes that it may take."""
        self._at_hand = at_hand or (lambda: available_memory() // 2)
        self._paces = {
            busy: Pace(times * seconds, fixed, least, 2 * times * least) for busy, times in ((True, 1), (False, ALONE))
        }
        self._pace = self._paces[True]
        self.largest = 0, 0  # the most memory that a piece has taken, and its tokens

    def tokens(self, busy: bool) -> int:
        """`busy`: somebody waits meanwhile."""
        self._pace = self._paces[busy]
        taken, tokens = self.largest
        return self._pace.budget(MAX_MICRO if taken <= 0 else max(1, int(self._at_hand() * tokens / taken)))

    def run(self, tokens: int, work: Callable[[], None], timed: bool = True) -> int:
        """Does a piece of so many tokens, and learns from it; the memory that it took. `timed`: its time tells how many
        tokens to take next."""
        begun, held = time.perf_counter(), mx.get_active_memory()
        mx.reset_peak_memory()
        work()
        taken = int(mx.get_peak_memory()) - held
        self.largest = max(self.largest, (taken, tokens))
        if timed:
            self._pace.note(tokens, time.perf_counter() - begun)
        return taken


class Learner:
    """`put` is handed the parameters, in float32 and by name, whenever they change."""

    def __init__(self, parameters: Parameters, config: OptimizerConfig, put: Callable[[Parameters], None]) -> None:
        self.config = config
        self._put = put
        self.updates = 0  # that stand, by the count of whoever owns this
        learning = {name: array.astype(mx.float32) for name, array in parameters.items()}
        self.by_shape = Stacks(learning)
        self.optimizer = optim.AdamW(
            schedule(config), betas=[0.9, 0.999], eps=1e-8, weight_decay=config.weight_decay, bias_correction=True
        )
        self.stacks: Parameters = {}
        self.parameters: Parameters = {}
        self._set(self.by_shape.join(learning))
        self.optimizer.init(self.stacks)
        mx.eval(self.optimizer.state)

    @property
    def nbytes(self) -> int:
        """Of parameters and the optimiser's memory of them."""
        arrays = [*self.stacks.values(), *(array for _, array in tree_flatten(self.optimizer.state))]
        return sum(array.nbytes for array in arrays)

    @property
    def learning_rate(self) -> float:
        """Of the last step."""
        return number(self.optimizer.learning_rate)

    def add(self, total: Parameters, gradients: Parameters) -> Parameters:
        """Gradients by name, put upon a total by stack; an empty one is the first. Nothing is computed yet."""
        stacks = self.by_shape.join(gradients)
        return {name: stacks[name] + total[name] for name in total} if total else stacks

    def step(self, total: Parameters) -> float:
        """One step of the optimiser; the norm of its gradient, before that is clipped."""
        clipped, norm = optim.clip_grad_norm(total, self.config.max_grad_norm)
        length = number(norm)
        if not math.isfinite(length):
            raise Refused(f"the gradient's norm is {length}")
        stacks = self.optimizer.apply_gradients(clipped, self.stacks)
        mx.eval(stacks, self.optimizer.state)
        self._set(stacks)
        return length

    def set_parameters(self, parameters: Parameters) -> None:
        """Others of the same names and shapes; the optimiser stays as it is."""
        self._set(self.by_shape.join(parameters))

    def restore(self) -> None:
        """Puts the parameters back where a loss has put others."""
        self._put(self.parameters)

    def _set(self, stacks: Parameters) -> None:
        self.stacks, self.parameters = stacks, self.by_shape.split(stacks)
        mx.eval(stacks, self.parameters)
        self._put(self.parameters)

    # To go back to.

    def snapshot(self) -> LearnerState:
        """Copies nothing: arrays stay as they are."""
        optimizer = tree_map(lambda leaf: leaf, self.optimizer.state)
        return LearnerState(self.parameters, self.stacks, optimizer, self.updates)

    def go_back(self, snapshot: LearnerState) -> None:
        self.parameters, self.stacks, self.updates = snapshot.parameters, snapshot.stacks, snapshot.updates
        self.optimizer.state = tree_map(lambda leaf: leaf, snapshot.optimizer)
        self._put(self.parameters)

    # What a checkpoint keeps.

    def state(self, snapshot: LearnerState | None = None) -> dict[str, Any]:
        """Arrays by name, on the host: waits for them. As it is now, or was."""
        kept = snapshot or self.snapshot()
        split = self.by_shape.split({name: to_numpy(stack) for name, stack in kept.stacks.items()})
        arrays = {f"parameters.{name}": array for name, array in split.items()}
        for path, stack in tree_flatten(kept.optimizer):
            arrays |= {f"optimizer.{name}": one for name, one in self.by_shape.unstack(path, to_numpy(stack)).items()}
        return arrays

    def snapshot_of(self, arrays: dict[str, Any], updates: int) -> LearnerState:
        """What `state` has written, to go back to."""
        parameters = {name: mx.array(array) for name, array in _below("parameters.", arrays).items()}
        if {name: array.shape for name, array in parameters.items()} != {
            name: array.shape for name, array in self.parameters.items()
        }:
            raise ConfigError("the checkpoint is of an adapter with other layers or another rank")
        kept = _below("optimizer.", arrays)
        paths = [path for path, _ in tree_flatten(self.optimizer.state)]
        if {name for path in paths for name in self.by_shape.paths(path)} != kept.keys():
            raise ConfigError("the checkpoint's optimiser is another than this one")
        leaves = iter([mx.array(self.by_shape.together(path, kept)) for path in paths])
        optimizer = tree_map(lambda _: next(leaves), self.optimizer.state)
        if self.config.schedule == "constant" and not self.config.warmup_steps:
            optimizer["learning_rate"] = mx.array(self.config.learning_rate)  # what is asked for now, not then
        stacks = self.by_shape.join(parameters)
        mx.eval(stacks, optimizer)
        return LearnerState(self.by_shape.split(stacks), stacks, optimizer, updates)


def number(value: mx.array) -> float:
    return float(to_numpy(value))


def schedule(config: OptimizerConfig) -> Any:
    """The learning rate, or a function of the steps that were made."""
    rate, steps = config.learning_rate, config.total_steps - config.warmup_steps
    main: Any = rate
    if config.schedule == "linear":
        main = optim.linear_schedule(rate, 0.0, max(1, steps))
    elif config.schedule == "cosine":
        main = optim.cosine_decay(rate, max(1, steps))
    if not config.warmup_steps:
        return main
    warmup = optim.linear_schedule(rate / config.warmup_steps, rate, config.warmup_steps)
    rest = main if callable(main) else (lambda _: mx.array(rate))
    return optim.join_schedules([warmup, rest], [config.warmup_steps])


def _below(prefix: str, arrays: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
