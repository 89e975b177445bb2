"""Parameters that learn, and their optimiser: gradients, clipped steps, undo, and the arrays of a checkpoint.

The trainers of a policy, of SFT and DPO, and of a reward model have one each. An update is two calls, which may also
come apart: `forward_backward` adds a batch's gradient to what is accumulated, a micro-batch at a time, and `optim_step`
makes a step of it. Arrays of one shape are kept as one stack, so that a step takes a few operations and not a few for
each array. AdamW has its bias corrected: a step is that of torch's. Engine thread only, but for the config.
"""

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlx_parallm.config.training import OptimizerConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.host import to_numpy
from mlx_parallm.training.trainable_model import Stacks

Parameters = dict[str, mx.array]
Values = dict[str, mx.array]  # what a loss tells beside itself, by name
Micro = TypeVar("Micro")  # a micro-batch
Loss = Callable[[Parameters, Micro], tuple[mx.array, Values]]


class Refused(Exception):
    """This update must not stand."""


@dataclass(frozen=True, slots=True)
class LearnerState:
    """A learner as it was."""

    parameters: Parameters
    stacks: Parameters  # the same
    optimizer: Any
    updates: int


@dataclass(slots=True)
class Accumulated:
    """The gradient and the loss of the micro-batches since the last step."""

    gradient: Parameters = field(default_factory=dict)  # by stack; empty: there was none
    loss: float = 0.0


class Learner:
    """`put` is handed the parameters, in float32 and by name, whenever they change."""

    def __init__(
        self,
        parameters: Parameters,
        config: OptimizerConfig,
        put: Callable[[Parameters], None],
        *,
        counts_updates: bool = False,  # the schedule's steps are updates, each of which may take several of ours
    ) -> None:
        self.config = config
        self._put = put
        self.updates = 0  # that stand, by the count of whoever owns this
        learning = {name: array.astype(mx.float32) for name, array in parameters.items()}
        self.by_shape = Stacks(learning)
        rate = schedule(config)
        if callable(rate) and counts_updates:
            of_update = rate
            rate = lambda _: of_update(mx.array(self.updates))  # noqa: E731
        self.optimizer = optim.AdamW(
            rate, betas=[0.9, 0.999], eps=1e-8, weight_decay=config.weight_decay, bias_correction=True
        )
        self.accumulated = Accumulated()
        self.stacks: Parameters = {}
        self.parameters: Parameters = {}
        self._set(self.by_shape.join(learning))
        self.optimizer.init(self.stacks)
        mx.eval(self.optimizer.state)

    @property
    def nbytes(self) -> int:
        """The bytes of parameters and the optimiser's state."""
        arrays = [*self.stacks.values(), *(array for _, array in tree_flatten(self.optimizer.state))]
        return sum(array.nbytes for array in arrays)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last step."""
        return number(self.optimizer.learning_rate)

    # An update: gradients, then a step.

    def forward_backward(
        self,
        micros: Iterable[Micro],
        loss: Loss[Micro],
        read: Callable[[Micro, Values], None] = lambda micro, values: None,
        run: Callable[[Micro, Callable[[], None]], object] = lambda micro, work: work(),
    ) -> Generator[None, None, None]:
        """Adds the gradient of these micro-batches' losses to what is accumulated; yields after each.

        `loss`: of a micro-batch, its part of the batch's; `read` is handed what else it tells, computed. `run` does the
        work of a micro-batch: for those who measure it.
        """
        gradient = mx.value_and_grad(loss)

        def work(micro: Micro) -> None:
            (part, values), gradients = gradient(self.parameters, micro)
            self.accumulate(gradients)
            mx.eval(self.accumulated.gradient, part, values)
            self.accumulated.loss += number(part)
            read(micro, values)
            self.restore()

        for micro in micros:
            run(micro, partial(work, micro))
            yield

    def accumulate(self, gradients: Parameters) -> None:
        """Gradients by name. Nothing is computed yet."""
        stacks = self.by_shape.join(gradients)
        total = self.accumulated.gradient
        self.accumulated.gradient = {name: stacks[name] + total[name] for name in total} if total else stacks

    def clear_gradient(self) -> None:
        self.accumulated = Accumulated()

    def optim_step(self) -> float:
        """One step of the optimiser by what is accumulated, which is gone then; the gradient's norm before clipping."""
        accumulated = self.accumulated
        self.accumulated = Accumulated()
        if not accumulated.gradient:
            raise Refused("there is no gradient to make a step of")
        if not math.isfinite(accumulated.loss):
            raise Refused(f"the loss is {accumulated.loss}")
        clipped, norm = optim.clip_grad_norm(accumulated.gradient, self.config.max_grad_norm)
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

    def halve_step(self, before: LearnerState) -> None:
        """Goes half of the way back to earlier parameters; the optimiser stays as it is."""
        self._set({name: (array + before.stacks[name]) / 2 for name, array in self.stacks.items()})

    def restore(self) -> None:
        """Puts the parameters back where a loss has put others."""
        self._put(self.parameters)

    def _set(self, stacks: Parameters) -> None:
        self.stacks, self.parameters = stacks, self.by_shape.split(stacks)
        mx.eval(stacks, self.parameters)
        self._put(self.parameters)

    # Undo.

    @contextlib.contextmanager
    def undo_on_failure(self) -> Iterator[LearnerState]:
        """Whatever fails within leaves nothing behind: out of memory, a refused step, or an engine that stops. Gives
        the state from before."""
        before = self.snapshot()
        try:
            yield before
        except BaseException:
            self.go_back(before)
            raise

    def snapshot(self) -> LearnerState:
        """Copies nothing: arrays are never changed in place."""
        optimizer = tree_map(lambda leaf: leaf, self.optimizer.state)
        return LearnerState(self.parameters, self.stacks, optimizer, self.updates)

    def go_back(self, snapshot: LearnerState) -> None:
        """Parameters, optimiser and count as they were; an accumulated gradient is gone."""
        self.clear_gradient()
        self.parameters = snapshot.parameters
        self.stacks = snapshot.stacks
        self.updates = snapshot.updates
        self.optimizer.state = tree_map(lambda leaf: leaf, snapshot.optimizer)
        self._put(self.parameters)

    # Checkpoints.

    def state(self, snapshot: LearnerState | None = None) -> dict[str, Any]:
        """Arrays by name, on the host: waits for them. As it is now, or was."""
        kept = snapshot or self.snapshot()
        split = self.by_shape.split({name: to_numpy(stack) for name, stack in kept.stacks.items()})
        arrays = {f"parameters.{name}": array for name, array in split.items()}
        for path, stack in tree_flatten(kept.optimizer):
            arrays |= {f"optimizer.{name}": one for name, one in self.by_shape.unstack(path, to_numpy(stack)).items()}
        return arrays

    def snapshot_of(self, arrays: dict[str, Any], updates: int) -> LearnerState:
        """A state to go back to, from the arrays that `state` returned."""
        parameters = {name: mx.array(array) for name, array in _below("parameters.", arrays).items()}
        _check_shapes(_shapes(parameters), _shapes(self.parameters))
        kept = _below("optimizer.", arrays)
        paths = [path for path, _ in tree_flatten(self.optimizer.state)]
        if {name for path in paths for name in self.by_shape.paths(path)} != kept.keys():
            raise ConfigError("the checkpoint's optimiser is another than this one")
        optimizer = tree_unflatten([(path, mx.array(self.by_shape.together(path, kept))) for path in paths])
        if self.config.schedule == "constant" and not self.config.warmup_steps:
            optimizer["learning_rate"] = mx.array(self.config.learning_rate)  # what is asked for now, not then
        stacks = self.by_shape.join(parameters)
        mx.eval(stacks, optimizer)
        return LearnerState(self.by_shape.split(stacks), stacks, optimizer, updates)


def _shapes(parameters: Parameters) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in parameters.items()}


def _check_shapes(kept: dict[str, tuple[int, ...]], own: dict[str, tuple[int, ...]]) -> None:
    """ConfigError where a checkpoint is of another adapter than the one that learns."""
    for name in sorted(own.keys() & kept.keys()):
        if kept[name] != own[name]:
            raise ConfigError(f"{name} has another rank or size there: {kept[name]}, and {own[name]} learns here")
    if other := sorted(kept.keys() - own.keys()):
        raise ConfigError(f"it has {len(other)} arrays that do not learn here, such as {other[0]} {kept[other[0]]}")
    if missing := sorted(own.keys() - kept.keys()):
        raise ConfigError(f"it lacks {len(missing)} arrays that learn here, such as {missing[0]} {own[missing[0]]}")


def number(value: mx.array) -> float:
    return float(to_numpy(value))


def schedule(config: OptimizerConfig) -> Any:
    """The learning rate, or a function of the number of steps so far."""
    rate = config.learning_rate
    steps = config.total_steps - config.warmup_steps
    main: Any = rate
    if config.schedule == "linear":
        main = optim.linear_schedule(rate, 0.0, max(1, steps))
    elif config.schedule == "cosine":
        main = optim.cosine_decay(rate, max(1, steps))
    if not config.warmup_steps:
        return main
    warmup = optim.linear_schedule(0.0, rate, config.warmup_steps)
    rest = main if callable(main) else (lambda _: mx.array(rate))
    return optim.join_schedules([warmup, rest], [config.warmup_steps])


def _below(prefix: str, arrays: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
