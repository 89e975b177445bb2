"""Whether what an update came to may be served: its parameters, and how far they move the policy.

The trainer runs one at the end of each update. Engine thread only.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.config.training import RLConfig
from mlx_parallm.training.learner import Learner, LearnerState, Parameters, Refused, number
from mlx_parallm.training.rl.batches import Micro
from mlx_parallm.training.rl.objectives import divergence
from mlx_parallm.training.rl.policy_loss import PolicyLoss
from mlx_parallm.training.trainable_model import TrainableModel

REFERENCE_EVERY = 4  # updates between looks at the divergence to the reference, where it is no part of the loss


@dataclass(slots=True)
class CheckSample:
    """Some completions by which an update is checked, and their log-probabilities before it."""

    micro: Micro
    logprobs: mx.array


class UpdateCheck:
    def __init__(self, tree: TrainableModel, learner: Learner, loss: PolicyLoss, config: RLConfig) -> None:
        self._tree = tree
        self._learner = learner
        self._loss = loss
        self._config = config

    def run(self, samples: Sequence[CheckSample], before: LearnerState) -> Generator[None, None, dict[str, float]]:
        """Looks at the new parameters, and at what they make of some of the batch. A step that goes too far is halved,
        a few times."""
        metrics: dict[str, float] = {}
        if (
            not self._config.beta and self._learner.updates % REFERENCE_EVERY == 0
        ):  # else it is known of all completions
            metrics["kl"] = yield from self._divergence(samples, self._loss.reference_logprobs)
        for halvings in range(self._config.max_kl_halvings + 1):
            metrics["parameter_norm"] = self._parameter_norm(before.stacks)
            # Of the old policy to the new: the old one sampled the completions.
            kl = yield from self._divergence(samples, self.new_logprobs)
            if kl <= self._config.max_kl:
                return metrics | {"update_kl": kl, "step_halvings": float(halvings)}
            if halvings < self._config.max_kl_halvings:
                self._learner.halve_step(before)
        raise Refused(
            f"it would move the policy by {kl:.3g} nats a token, over {self._config.max_kl:g}"
            + (f", though its step was halved {halvings} times" if halvings else "")
        )

    def new_logprobs(self, micro: Micro) -> mx.array:
        """Returns log-probabilities by the new parameters, in the precision in which they will serve."""
        stacks = {name: array.astype(self._tree.dtype) for name, array in self._learner.stacks.items()}
        self._tree.set_parameters(self._learner.by_shape.split(stacks))
        return self._loss.logprobs(micro)

    def _divergence(
        self, samples: Sequence[CheckSample], logprobs: Callable[[Micro], mx.array]
    ) -> Generator[None, None, float]:
        """KL of the policy that sampled some completions to another, in nats a token."""
        total = count = 0.0
        for sample in samples:
            mask = mx.array(sample.micro.mask)
            total += number(mx.sum(divergence(sample.logprobs, logprobs(sample.micro)) * mask))
            count += sample.micro.learnt
            self._learner.restore()
            yield
        return total / max(count, 1.0)

    def _parameter_norm(self, before: Parameters) -> float:
        """Their norm."""
        stacks = self._learner.stacks
        norms = [mx.linalg.norm(array) for array in stacks.values()]
        moved = [mx.max(mx.abs(array - before[name])) for name, array in stacks.items()]
        norm = number(mx.linalg.norm(mx.stack(norms)))
        step = number(mx.max(mx.stack(moved)))
        if not math.isfinite(norm):
            raise Refused("the parameters are not finite")
        if step == 0.0 and self._learner.learning_rate > 0:
            raise Refused("nothing has changed")
        if norm > self._config.max_parameter_norm:
            raise Refused(f"the parameters' norm is {norm:.3g}, over {self._config.max_parameter_norm:g}")
        return norm
