"""Updates of a policy's adapter, in micro-batches that the engine runs between its steps. Engine thread only.

`update` is a generator: it yields after every micro-batch, after the optimiser's step and after the check of the
result, and returns the outcome. A result that is not finite, changes nothing, or moves the policy too far is undone:
the parameters and the optimiser are then what they were. Its two halves, `forward_backward` and `optim_step`, may be
run apart. Sessions call it.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.config.training import LoRAConfig, RLConfig
from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.machine_memory import room_at_hand
from mlx_parallm.errors import ConfigError, ContextLengthError
from mlx_parallm.host import to_numpy
from mlx_parallm.lora.adapter import Adapter
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.memory import size_flag, size_text
from mlx_parallm.training.budget import MAX_MICRO, MIN_MICRO, Budget
from mlx_parallm.training.learner import (
    Learner,
    LearnerState,
    Parameters,
    Refused,
    Values,
    number,
)
from mlx_parallm.training.rl.batches import Batch, BatchRules, Micro
from mlx_parallm.training.rl.objectives import Floats, divergence
from mlx_parallm.training.rl.policy_loss import LOGPROBS, LossTotals, PolicyLoss
from mlx_parallm.training.rl.trajectories import Trajectory
from mlx_parallm.training.rl.update_check import CheckSample, UpdateCheck
from mlx_parallm.training.trainable_model import TrainableModel, shared_tree

log = logging.getLogger(__name__)

MIN_ROUNDED = 1024  # where shapes are rounded: smaller micro-batches would take no less time


@dataclass(slots=True)
class Outcome:
    """The outcome of one update. `adapter` is None where it was refused; `reason` says why."""

    metrics: dict[str, float]
    used: int
    skipped: int
    adapter: Adapter | None = None
    reason: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class BatchLoss:
    """The result of a forward and backward pass over a batch."""

    totals: LossTotals
    samples: list[CheckSample]


class Trainer:
    def __init__(self, model: LanguageModel, lora: LoRAConfig, config: RLConfig, memory: int | None = None) -> None:
        """`memory`: bytes that parameters, optimiser and a micro-batch may take together; None: what is there."""
        self.config = config
        self._memory = memory
        self.lora = lora
        mx.random.seed(config.seed)
        self.tree = TrainableModel(model, lora, checkpointing=config.gradient_checkpointing)
        base = shared_tree(model)
        self.learner = Learner(self.tree.parameters(), config, self.tree.set_parameters, counts_updates=True)
        self.loss = PolicyLoss(self.tree, base, config)
        self.check = UpdateCheck(self.tree, self.learner, self.loss, config)
        self.kept_snapshots = 0  # that somebody holds beside it
        self.activation_bytes = 0  # most that a micro-batch has taken
        self._shapes: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()  # that have occurred, where they are rounded
        self._busy: Callable[[], bool] = lambda: True
        # CUDA plans attention anew for every shape, forwards and back: that takes longer than to compute some padding.
        self.rounded = this_device().plans_shapes and self.tree.mixes_prompts
        least = MIN_ROUNDED if self.rounded else MIN_MICRO
        self.budget = Budget(
            config.microstep_seconds,
            config.microbatch_tokens,
            least=least,
            at_hand=self._at_hand,
            score_bytes=self.tree.score_bytes,
        )

    @property
    def parameters(self) -> Parameters:
        return self.learner.parameters

    @property
    def updates(self) -> int:
        """That stand."""
        return self.learner.updates

    @property
    def nbytes(self) -> int:
        """The bytes of parameters and the optimiser's state."""
        return self.learner.nbytes

    @property
    def working_bytes(self) -> int:
        """The bytes of what an update holds beside activations: parameters and optimiser, gradients, all of it as it
        was before, and the parameters of the reference, where it has some."""
        held = [*self.learner.stacks.values(), *(self.loss.initial or {}).values()]
        return (2 + self.kept_snapshots) * self.nbytes + sum(array.nbytes for array in held)

    def check_memory(self, name: str, limit: int) -> None:
        """Whether learning fits into its memory, which is a part of this limit; `name`: of the adapter."""
        needed = self.working_bytes * 5 // 4
        if self._memory is not None and self._memory < needed:
            enough = limit + 4 * (needed - self._memory)
            raise ConfigError(
                f"training {name!r} takes at least {size_text(needed)} and there is {size_text(self._memory)} for it: "
                f"give --memory-limit {size_flag(enough)}, a smaller --lora-rank or fewer --lora-layers"
            )

    def adapter(self) -> Adapter:
        return self.tree.adapter()

    @property
    def reference(self) -> Parameters | None:
        """What the divergence is measured to, in place of the model without an adapter."""
        return self.loss.initial

    def begin_with(self, adapter: Adapter) -> None:
        """Goes on from an adapter of the same layers and rank, before the first update."""
        self.learner.set_parameters(self.tree.parameters_of(adapter))
        self.measure_to(self.parameters)

    def measure_to(self, parameters: Parameters) -> None:
        """Has the divergence measured to these parameters, unless the config says: to the model alone."""
        self.loss.initial = parameters if self.config.reference == "initial" else None

    # An update.

    def update(
        self, trajectories: Sequence[Trajectory], busy: Callable[[], bool] = lambda: True
    ) -> Generator[None, None, Outcome]:
        """`busy`: whether anybody waits meanwhile; while nobody does, micro-batches are larger."""
        self._busy = busy
        begun = time.perf_counter()
        trajectories = self._fitting(trajectories)
        if self.lora.dropout:  # a run that goes on after a restart leaves out what it would have
            mx.random.seed(self.config.seed + self.updates)
        facts = _facts(trajectories)
        rewarded: Sequence[Trajectory] = trajectories
        if self.config.beta and self.config.kl_in_reward:
            rewarded, facts["kl"] = yield from self._with_divergence(trajectories)
        batches = self.batches(rewarded)
        used = sum(len(batch.trajectories) for batch in batches)
        facts["flat_trajectories"] = float(sum(batch.flat for batch in batches))
        outcome = Outcome(facts, used=used, skipped=len(trajectories) - used)
        if not used:
            outcome.reason = "no group has answers with different rewards, of which something is to be learnt"
            return outcome
        try:
            with self.learner.undo_on_failure() as before:
                yield from self._learn([batch for batch in batches if batch.trajectories], before, outcome.metrics)
        except Refused as error:
            outcome.reason = str(error)
            outcome.seconds = time.perf_counter() - begun
            return outcome
        self.learner.updates += 1
        outcome.seconds = time.perf_counter() - begun
        outcome.metrics["learning_rate"] = self.learner.learning_rate
        tokens = outcome.metrics["tokens"] * self.config.epochs
        outcome.metrics["tokens_per_second"] = tokens / max(outcome.seconds, 1e-6)
        outcome.adapter = self.adapter()
        return outcome

    def checked_length(self, trajectory: Trajectory) -> Trajectory:
        """Returns it, unless it is too long to learn from: the memory for attention grows with its square."""
        tokens = len(trajectory.prompt_ids) + len(trajectory.completion_ids)
        longest = self.budget.longest_text()
        if longest is not None and tokens > longest:
            raise ContextLengthError(
                f"a text of {tokens} tokens is too long to learn from: attention's backward pass keeps its scores on "
                f"this device, and there is memory for {longest} tokens; give --gradient-checkpointing, a larger "
                "--memory-limit or shorter texts"
            )
        return trajectory

    def _fitting(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Leaves out those that are too long to learn from."""
        fitting = []
        for one in trajectories:
            try:
                fitting.append(self.checked_length(one))
            except ContextLengthError as error:
                log.warning("a trajectory is left out: %s", error.message)
        return fitting

    def _learn(
        self, batches: Sequence[Batch], before: LearnerState, metrics: dict[str, float]
    ) -> Generator[None, None, None]:
        """All epochs, a step for each batch, and the check of the result; metrics are those of the first epoch."""
        samples: list[CheckSample] = []
        totals = LossTotals()
        norms = list[float]()
        if self.config.importance_cap and len(batches) * self.config.epochs > 1:
            for batch in batches:
                yield from self._keep_proximal(batch)
        for epoch in range(self.config.epochs):
            for batch in batches:
                self.learner.clear_gradient()
                computed = yield from self.forward_backward(batch)
                norm = yield from self.optim_step()
                if epoch == 0:
                    totals.add(computed.totals)
                    norms.append(norm)
                    samples = samples or computed.samples  # those of the first step: none had been made before it
        metrics |= totals.metrics() | {"grad_norm": float(np.mean(norms)), "optimizer_steps": float(len(norms))}
        metrics["loss"] /= len(batches)
        if self.config.divergence_in_loss:
            metrics["kl"] = totals.reference / max(totals.tokens, 1.0)
        metrics |= yield from self.check.run(samples, before)

    def batches(self, trajectories: Sequence[Trajectory]) -> list[Batch]:
        """The steps of an update, of about `batch_size` trajectories each."""
        return Batch.all_of(trajectories, self._rules, self.config.batch_size)

    def batch(self, trajectories: Sequence[Trajectory]) -> Batch:
        """All of them in one step."""
        return Batch.all_of(trajectories, self._rules, len(trajectories))[0]

    @property
    def _rules(self) -> BatchRules:
        """Completions without an advantage are computed only for their divergence to the reference, or their
        entropy."""
        config = self.config
        return BatchRules(
            algorithm=config.algorithm,
            scaling=config.reward_scaling,
            max_length=config.max_length,
            keep_flat=config.divergence_in_loss or config.entropy_bonus > 0,
            mask_truncated=config.mask_truncated,
        )

    def _keep_proximal(self, batch: Batch) -> Generator[None, None, None]:
        """Notes the log-probabilities of a batch's answers before the first step."""
        found: dict[int, Floats] = {}
        for micro in self._micros(batch):
            logprobs = to_numpy(self.check.new_logprobs(micro).astype(mx.float32))
            self.learner.restore()
            for row, place in enumerate(micro.places.tolist()):
                if place >= 0:
                    found[place] = logprobs[row, : len(batch.trajectories[place].completion_ids)]
            yield
        batch.proximal = found

    def _with_divergence(
        self, trajectories: Sequence[Trajectory]
    ) -> Generator[None, None, tuple[list[Trajectory], float]]:
        """Completions with rewards that are less by the weight of their divergence; the mean of that, in nats a token.

        Measured from the policy that sampled them, or the current one where nobody knows that.
        """
        rules = replace(self._rules, keep_flat=True, mask_truncated=False)
        [batch] = Batch.all_of(trajectories, rules, len(trajectories))
        rewarded = list(trajectories)
        total = 0.0
        tokens = 0
        for micro in self._micros(batch):
            reference = self.loss.reference_logprobs(micro)
            sampled = mx.where(mx.array(micro.known) > 0, mx.array(micro.old), self.check.new_logprobs(micro))
            apart = divergence(sampled, reference, self.config.kl_estimator) * mx.array(micro.mask)
            for place, kl in zip(micro.places.tolist(), to_numpy(mx.sum(apart, axis=1)).tolist(), strict=True):
                if place >= 0:
                    one = trajectories[place]
                    rewarded[place] = replace(one, reward=one.reward - self.config.beta * kl)
            total = total + number(mx.sum(apart))
            tokens = tokens + micro.learnt
            self.learner.restore()
            yield
        return rewarded, total / max(1, tokens)

    def forward_backward(self, batch: Batch) -> Generator[None, None, BatchLoss]:
        """Adds the gradient of a batch, which must not be empty, to what the learner has accumulated."""
        totals = LossTotals()
        samples = list[CheckSample]()

        def read(micro: Micro, values: Values) -> None:
            totals.add(LossTotals.read(values))
            wanted = self.config.max_kl_tokens - sum(sample.micro.learnt for sample in samples)
            if wanted > 0:
                some = micro if self.rounded else micro.first_tokens(wanted)  # a shape that is known, or few
                samples.append(
                    CheckSample(some, self._without_dropout(some, values[LOGPROBS][: len(some.completions)]))
                )
                mx.eval(samples[-1].logprobs)

        yield from self.learner.forward_backward(self._micros(batch), self.loss, read, self._measured)
        return BatchLoss(totals, samples)

    def _without_dropout(self, micro: Micro, logprobs: mx.array) -> mx.array:
        """Returns log-probabilities without dropout: these, or computed anew where there is a dropout."""
        return logprobs if not self.lora.dropout else self.check.new_logprobs(micro)

    def optim_step(self) -> Generator[None, None, float]:
        """One step by the gradient that was accumulated; its norm."""
        norm = self.learner.optim_step()
        if norm == 0.0:
            raise Refused("the gradient is zero")
        yield
        return norm

    def _micros(self, batch: Batch, budget: Callable[[], int] | None = None) -> Iterator[Micro]:
        budget = budget or (lambda: self.budget.tokens(self._busy()))
        return batch.micros(budget, self.tree.mixes_prompts, self.rounded, self.budget.room)

    def _measured(self, micro: Micro, work: Callable[[], None]) -> None:
        nbytes = self.budget.run(micro.tokens, work, self._is_known(micro))
        self.activation_bytes = max(self.activation_bytes, nbytes)

    def _is_known(self, micro: Micro) -> bool:
        """Returns whether the time that it took tells how many tokens to take: a new shape's was for its plans, too."""
        shape = micro.prompts.tokens.shape, micro.completions.shape
        known = not self.rounded or shape in self._shapes
        self._shapes.add(shape)
        return known

    def _at_hand(self) -> int:
        """Bytes for a micro-batch."""
        return room_at_hand() if self._memory is None else self._memory - self.working_bytes

    def warm_up(self) -> None:
        """Updates that are forgotten: where kernels are built at their first use, nobody should wait for that later."""
        tokens = range(3, 27)
        for lengths in ((24, 24), (20, 24)):
            trajectories = [
                Trajectory([*tokens[:length]], [*tokens[place : place + 16]], float(place), str(group))
                for group, length in enumerate(lengths)
                for place in range(4)
            ]
            before = self.snapshot()
            for _ in self.update(trajectories):
                continue
            for micro in self._micros(self.batch(trajectories), lambda: MAX_MICRO):
                mx.eval(mx.value_and_grad(self.loss)(self.parameters, micro))
            self.go_back(before)
        self.activation_bytes = 0

    # Undo and checkpoints.

    def snapshot(self) -> LearnerState:
        """Copies nothing: arrays are never changed in place."""
        return self.learner.snapshot()

    def go_back(self, snapshot: LearnerState) -> None:
        self.learner.go_back(snapshot)

    def state(self, snapshot: LearnerState | None = None) -> dict[str, Any]:
        """Arrays by name, on the host: waits for them. As it is now, or was."""
        return self.learner.state(snapshot)

    def snapshot_of(self, arrays: dict[str, Any], updates: int) -> LearnerState:
        """A state to go back to, from the arrays that `state` returned."""
        return self.learner.snapshot_of(arrays, updates)

    def load_state(self, arrays: dict[str, Any], updates: int) -> None:
        self.go_back(self.snapshot_of(arrays, updates))


def _facts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics that are known before anything is computed."""
    rewards = np.array([one.reward for one in trajectories], np.float32)
    return {
        "reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "off_policy": float(sum(one.off_policy for one in trajectories)),
    }
