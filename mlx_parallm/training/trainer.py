"""Updates of one adapter, in pieces that the engine runs between its steps. Engine thread only.

`update` is a generator: it yields after every micro-batch, after the optimiser's step and after the check of what came
out, and returns the outcome. A result that is not finite, changes nothing, or moves the policy too far is undone: the
parameters and the optimiser are then what they were.
"""

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.errors import ConfigError
from mlx_parallm.host import to_numpy
from mlx_parallm.lora.weights import Adapter
from mlx_parallm.models.device import device_kind
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.memory import available_memory
from mlx_parallm.training.batches import Batch, Micro
from mlx_parallm.training.learner import (
    MAX_MICRO,
    MIN_MICRO,
    Budget,
    Learner,
    LearnerState,
    OptimizerConfig,
    Parameters,
    Refused,
    Schedule,
    number,
)
from mlx_parallm.training.model import LoRAConfig, TrainableModel, answer_logits, shared_tree
from mlx_parallm.training.objectives import (
    AGGREGATION,
    Algorithm,
    Objective,
    chosen_logprobs,
    divergence,
    losses,
)
from mlx_parallm.training.trajectories import Trajectory

__all__ = ["LearnerState", "Outcome", "RLConfig", "Trainer"]

MIN_ROUNDED = 1024  # where shapes are rounded: smaller pieces would take no less time
REFERENCE_EVERY = 4  # updates between looks at the divergence to the reference, where it is no part of the loss
CHECKED = 2  # answers by which an update is checked; where shapes are rounded, all of the first micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RLConfig:
    """How a policy learns."""

    algorithm: Algorithm = "grpo"
    learning_rate: float = 5e-4
    batch_size: int = 32  # trajectories of an update, about
    epochs: int = 1  # optimiser steps on one batch
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0  # of the KL divergence to the model without the adapter
    token_limit: float | None = None
    answer_limit: float | None = None
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int = 1000  # after which linear and cosine have come to nothing
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_length: int | None = None  # for Dr. GRPO's weights; None: the most tokens that answers of the update could have
    max_kl: float = 1.0  # nats a token by which one update may move the policy
    max_parameter_norm: float = 1e4
    microstep_seconds: float = 0.5  # about how long a piece of an update takes …
    microbatch_tokens: int = 0  # … unless it has always this many tokens
    gradient_checkpointing: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.algorithm not in AGGREGATION:
            raise ConfigError(f"algorithm must be one of {', '.join(AGGREGATION)}, not {self.algorithm!r}")
        for name in ("batch_size", "epochs", "max_length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        for name in ("clip_low", "clip_high", "beta", "microbatch_tokens"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, and is {getattr(self, name)}")
        for name in ("max_kl", "max_parameter_norm", "microstep_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, and is {getattr(self, name)}")
        _ = self.optimizer  # checks what is its own

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(
            learning_rate=self.learning_rate,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )

    @property
    def objective(self) -> Objective:
        return Objective(self.algorithm, self.clip_low, self.clip_high, self.beta, self.token_limit, self.answer_limit)


@dataclass(slots=True)
class LossTotals:
    """Over the tokens of an update."""

    loss: float = 0.0
    tokens: float = 0.0
    kept: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0  # by the drawn tokens' own log-probabilities
    mismatch: float = 0.0  # KL of the policy that learns to the one that drew
    reference: float = 0.0  # KL to the model without the adapter
    ratio: float = 0.0
    ratio_squared: float = 0.0
    largest_gap: float = 0.0

    def add(self, values: Sequence[float]) -> None:
        *sums, gap = values
        for name, value in zip(self.__slots__[:-1], sums, strict=True):
            setattr(self, name, getattr(self, name) + value)
        self.largest_gap = max(self.largest_gap, gap)

    def metrics(self) -> dict[str, float]:
        count = max(self.tokens, 1.0)
        return {
            "loss": self.loss,
            "tokens": self.tokens,
            "mismatch_kl": self.mismatch / count,
            "max_logprob_gap": self.largest_gap,
            "clip_fraction": self.clipped / count,
            "kept_fraction": self.kept / count,
            "entropy": self.entropy / count,
            "effective_sample_size": self.ratio**2 / max(self.ratio_squared, 1e-12) / count,
        }


@dataclass(slots=True)
class Outcome:
    """Of one update. `adapter` is None where it was refused; `reason` says why."""

    metrics: dict[str, float]
    used: int
    skipped: int
    adapter: Adapter | None = None
    reason: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class _Sample:
    """A few answers, and their log-probabilities before the update."""

    micro: Micro
    scores: mx.array


class Trainer:
    def __init__(self, model: LanguageModel, lora: LoRAConfig, config: RLConfig, memory: int | None = None) -> None:
        """`memory`: bytes that parameters, optimiser and a micro-batch may take together; None: what is there."""
        self.config = config
        self._memory = memory
        self.lora = lora
        mx.random.seed(config.seed)
        self.tree = TrainableModel(model, lora, checkpointing=config.gradient_checkpointing)
        self.learner = Learner(self.tree.parameters(), config.optimizer, self.tree.set_parameters)
        self._reference = shared_tree(model)
        self.kept_snapshots = 0  # that somebody holds beside it
        self.activation_bytes = 0  # most that a micro-batch has taken
        self._shapes: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()  # that have occurred, where they are rounded
        self._gradient = mx.value_and_grad(self._loss)
        self._busy: Callable[[], bool] = lambda: True
        # CUDA plans attention anew for every shape, forwards and back: that takes longer than to compute some padding.
        self.rounded = device_kind() == "cuda" and self.tree.mixes_prompts
        least = MIN_ROUNDED if self.rounded else MIN_MICRO
        self.budget = Budget(config.microstep_seconds, config.microbatch_tokens, least=least, at_hand=self._at_hand)

    @property
    def parameters(self) -> Parameters:
        return self.learner.parameters

    @property
    def updates(self) -> int:
        """That stand."""
        return self.learner.updates

    @property
    def nbytes(self) -> int:
        """Of parameters and the optimiser's memory of them."""
        return self.learner.nbytes

    @property
    def working_bytes(self) -> int:
        """Of what an update holds beside activations: those, their gradients, and all of it as it was before."""
        return (2 + self.kept_snapshots) * self.nbytes + sum(array.nbytes for array in self.learner.stacks.values())

    def adapter(self) -> Adapter:
        return self.tree.adapter()

    def update(
        self, trajectories: Sequence[Trajectory], busy: Callable[[], bool] = lambda: True
    ) -> Generator[None, None, Outcome]:
        """`busy`: whether anybody waits meanwhile; while nobody does, pieces are larger."""
        self._busy = busy
        begun = time.perf_counter()
        batch = self._batch(trajectories)
        rewards = np.array([one.reward for one in trajectories], np.float32)
        metrics = {
            "reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
            "reward_std": float(rewards.std()) if len(rewards) else 0.0,
            "off_policy": float(sum(one.off_policy for one in trajectories)),
            "flat_trajectories": float(batch.flat),
        }
        if not batch.trajectories:
            return Outcome(metrics, 0, len(trajectories), None, "no group has answers with different rewards")
        before, used = self.snapshot(), len(batch.trajectories)
        try:
            sample: _Sample | None = None
            for _ in range(self.config.epochs):
                sums, norm, first = yield from self._step(batch)
                if sample is None:
                    metrics |= sums.metrics() | {"grad_norm": norm}
                    if self.config.beta:
                        metrics["kl"] = sums.reference / max(sums.tokens, 1.0)
                    sample = first
            assert sample is not None
            metrics |= yield from self._checked(sample, before.stacks)
        except BaseException as error:  # out of memory, or the engine stops: whatever it is, nothing of it stays
            self.go_back(before)
            if not isinstance(error, Refused):
                raise
            seconds = time.perf_counter() - begun
            return Outcome(metrics, used, len(trajectories) - used, None, str(error), seconds)
        self.learner.updates += 1
        metrics["learning_rate"] = self.learner.learning_rate
        seconds = time.perf_counter() - begun
        metrics["tokens_per_second"] = metrics["tokens"] * self.config.epochs / max(seconds, 1e-6)
        return Outcome(metrics, used, len(trajectories) - used, self.adapter(), "", seconds)

    def warm_up(self) -> None:
        """Updates that are forgotten: where kernels are built at their first use, nobody should wait for that later."""
        tokens = range(3, 27)
        for lengths in ((24, 24), (20, 24)):
            made = [
                Trajectory([*tokens[:length]], [*tokens[place : place + 16]], float(place), str(group))
                for group, length in enumerate(lengths)
                for place in range(4)
            ]
            before = self.snapshot()
            for _ in self.update(made):
                continue
            for micro in self._batch(made).micros(lambda: MAX_MICRO, self.tree.mixes_prompts, self.rounded):
                mx.eval(self._gradient(self.parameters, micro))
            self.go_back(before)
        self.activation_bytes = 0

    def _batch(self, trajectories: Sequence[Trajectory]) -> Batch:
        """Answers without an advantage are computed only for their divergence to the reference."""
        config = self.config
        return Batch.of(trajectories, config.algorithm, config.max_length, keep_flat=config.beta > 0)

    def _step(self, batch: Batch) -> Generator[None, None, tuple[LossTotals, float, _Sample]]:
        sums = LossTotals()
        first: _Sample | None = None
        total: Parameters = {}

        def work(micro: Micro) -> None:
            nonlocal total, first
            (_, values, scores), found = self._gradient(self.parameters, micro)
            total = self.learner.add(total, found)
            if first is None:
                some = micro if self.rounded else micro.first(CHECKED)  # a shape that is known, or few
                first = _Sample(some, scores[: len(some.answers)])
            mx.eval(total, values, first.scores)
            sums.add(to_numpy(values).tolist())
            self.learner.restore()

        for micro in batch.micros(lambda: self.budget.tokens(self._busy()), self.tree.mixes_prompts, self.rounded):
            taken = self.budget.run(micro.tokens, partial(work, micro), self._is_known(micro))
            self.activation_bytes = max(self.activation_bytes, taken)
            yield
        if not math.isfinite(sums.loss):
            raise Refused(f"the loss is {sums.loss}")
        norm = self.learner.step(total)
        if norm == 0.0:
            raise Refused("the gradient is zero")
        yield
        assert first is not None
        return sums, norm, first

    def _at_hand(self) -> int:
        """Bytes for a micro-batch."""
        return available_memory() // 2 if self._memory is None else self._memory - self.working_bytes

    def _is_known(self, micro: Micro) -> bool:
        """Whether the time that it took tells how many tokens to take: a new shape's was for its plans, too."""
        shape = micro.prompts.tokens.shape, micro.answers.shape
        known = not self.rounded or shape in self._shapes
        self._shapes.add(shape)
        return known

    def _loss(self, parameters: Parameters, micro: Micro) -> tuple[mx.array, mx.array, mx.array]:
        self._compute_with(parameters)
        objective = self.config.objective
        answers, mask, known = mx.array(micro.answers), mx.array(micro.mask), mx.array(micro.known)
        temperature = _temperature(micro)
        logits = answer_logits(self.tree.module, micro.prompts, answers, self.tree.shares_prompts)
        new = chosen_logprobs(logits, answers, temperature)
        old = mx.where(known > 0, mx.array(micro.old), mx.stop_gradient(new))
        reference = None
        if objective.beta:
            plain = answer_logits(self._reference, micro.prompts, answers, self.tree.shares_prompts)
            reference = mx.stop_gradient(chosen_logprobs(plain, answers, temperature))
        found = losses(objective, new, old, mx.array(micro.advantage), mask, reference)
        weight = mx.array(micro.weight)[:, None]
        loss = mx.sum((found.policy + objective.beta * found.divergence) * weight)
        still = mx.stop_gradient(new)
        gap = (still - old) * mask
        ratio = mx.exp(gap) * mask
        values = [
            loss,
            mx.sum(mask),
            mx.sum(found.kept),
            mx.sum(found.clipped),
            -mx.sum(still * mask),
            mx.sum(divergence(old, still) * mask),
            mx.sum(found.divergence),
            mx.sum(ratio),
            mx.sum(ratio * ratio),
            mx.max(mx.abs(gap)),
        ]
        return loss, mx.stop_gradient(mx.stack([value.astype(mx.float32) for value in values])), still

    def _checked(self, sample: _Sample, before: Parameters) -> Generator[None, None, dict[str, float]]:
        """Whether the new parameters may be served: looks at them, and at what they make of some of the batch."""
        stacks = self.learner.stacks
        norms = [mx.linalg.norm(array) for array in stacks.values()]
        moved = [mx.max(mx.abs(array - before[name])) for name, array in stacks.items()]
        norm, step = (number(one) for one in (mx.linalg.norm(mx.stack(norms)), mx.max(mx.stack(moved))))
        if not math.isfinite(norm):
            raise Refused("the parameters are not finite")
        if step == 0.0 and self.config.learning_rate > 0:
            raise Refused("nothing has changed")
        if norm > self.config.max_parameter_norm:
            raise Refused(f"the parameters' norm is {norm:.3g}, over {self.config.max_parameter_norm:g}")
        prompts, temperature = sample.micro.prompts, _temperature(sample.micro)
        answers, mask = mx.array(sample.micro.answers), mx.array(sample.micro.mask)
        self.tree.set_parameters(
            self.learner.by_shape.split({name: a.astype(self.tree.dtype) for name, a in stacks.items()})
        )
        logits = answer_logits(self.tree.module, prompts, answers, self.tree.shares_prompts)
        after = chosen_logprobs(logits, answers, temperature)
        count = mx.maximum(mx.sum(mask), 1)
        found = {"parameter_norm": norm}
        if not self.config.beta and self.updates % REFERENCE_EVERY == 0:  # else it is known of all answers
            plain = answer_logits(self._reference, prompts, answers, self.tree.shares_prompts)
            reference = chosen_logprobs(plain, answers, temperature)
            found["kl"] = number(mx.sum(divergence(sample.scores, reference) * mask) / count)
        moved_by = mx.sum(divergence(sample.scores, after) * mask) / count  # of the old policy to the new: it drew them
        kl = number(moved_by)
        self.learner.restore()
        yield
        if not kl <= self.config.max_kl:
            raise Refused(f"it would move the policy by {kl:.3g} nats a token, over {self.config.max_kl:g}")
        return found | {"update_kl": kl}

    def _compute_with(self, parameters: Parameters) -> None:
        """In the model's own precision, as they are served; products of mixed precision are slow, too."""
        self.tree.set_parameters({name: array.astype(self.tree.dtype) for name, array in parameters.items()})

    # To go back to, and what a checkpoint keeps.

    def snapshot(self) -> LearnerState:
        """Copies nothing: arrays stay as they are."""
        return self.learner.snapshot()

    def go_back(self, snapshot: LearnerState) -> None:
        self.learner.go_back(snapshot)

    def state(self, snapshot: LearnerState | None = None) -> dict[str, Any]:
        """Arrays by name, on the host: waits for them. As it is now, or was."""
        return self.learner.state(snapshot)

    def snapshot_of(self, arrays: dict[str, Any], updates: int) -> LearnerState:
        """What `state` has written, to go back to."""
        return self.learner.snapshot_of(arrays, updates)

    def load_state(self, arrays: dict[str, Any], updates: int) -> None:
        self.go_back(self.snapshot_of(arrays, updates))


def _temperature(micro: Micro) -> mx.array | float:
    """A number where it is one for all: dividing all logits by 1 costs."""
    temperature = micro.temperature
    return float(temperature[0, 0, 0]) if (temperature == temperature[0]).all() else mx.array(temperature)
