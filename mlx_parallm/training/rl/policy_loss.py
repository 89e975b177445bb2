"""The loss of a policy: a micro-batch of completions through the trainable model and, for the divergence, the
reference.

The trainer calls it, for gradients and to look at what an update did. Engine thread only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.config.training import Objective
from mlx_parallm.host import to_numpy
from mlx_parallm.training.learner import Parameters, Values
from mlx_parallm.training.rl.batches import Micro
from mlx_parallm.training.rl.objectives import MAX_LOG_RATIO, chosen_logprobs, divergence, entropy, losses
from mlx_parallm.training.trainable_model import TrainableModel, completion_logits

LOGPROBS = "logprobs"  # among a loss's values; all others are summed up in `LossTotals`


@dataclass(slots=True)
class LossTotals:
    """The loss totals over the tokens of an update."""

    loss: float = 0.0
    tokens: float = 0.0
    kept: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0  # by the sampled tokens' own log-probabilities
    mismatch: float = 0.0  # KL of the policy that learns to the one that sampled
    reference: float = 0.0  # KL to the reference
    ratio: float = 0.0
    ratio_squared: float = 0.0
    largest_gap: float = 0.0

    def add(self, other: "LossTotals") -> None:
        for item in fields(self):
            mine = getattr(self, item.name)
            theirs = getattr(other, item.name)
            setattr(self, item.name, max(mine, theirs) if item.name == "largest_gap" else mine + theirs)

    @classmethod
    def read(cls, values: Mapping[str, mx.array]) -> "LossTotals":
        """Reads the totals of one micro-batch, which have been computed."""
        return cls(**{item.name: float(to_numpy(values[item.name])) for item in fields(cls)})

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


class PolicyLoss:
    def __init__(self, tree: TrainableModel, base: nn.Module, objective: Objective) -> None:
        """`base`: the model without the adapter."""
        self._tree = tree
        self._base = base
        self._objective = objective
        self.initial: Parameters | None = None  # what the divergence is measured to; None: the model without an adapter

    def __call__(self, parameters: Parameters, micro: Micro) -> tuple[mx.array, Values]:
        """The micro-batch's part of the loss, and what `LossTotals` and the check of an update need of it.

        Leaves the parameters in the model's own precision, as they are served: products of mixed precision are slow.
        """
        objective = self._objective
        reference = mx.stop_gradient(self.reference_logprobs(micro)) if objective.divergence_in_loss else None
        self._put(parameters)
        mask = mx.array(micro.mask)
        with self._tree.dropping_out():
            new, entropies = self._scored(micro)
        old = mx.where(mx.array(micro.known) > 0, mx.array(micro.old), mx.stop_gradient(new))
        proximal = None if micro.proximal is None else mx.array(micro.proximal)
        tokens = losses(objective, new, old, mx.array(micro.advantage), mask, reference, proximal)
        weight = mx.array(micro.weight)[:, None]
        each = tokens.policy + objective.beta * tokens.divergence
        if entropies is not None:
            each = each - objective.entropy_bonus * entropies * tokens.kept
        loss = mx.sum(each * weight)
        still = mx.stop_gradient(new)
        gap = mx.clip(still - old, -MAX_LOG_RATIO, MAX_LOG_RATIO) * mask
        ratio = mx.exp(gap) * mask
        values = {
            "loss": loss,
            "tokens": mx.sum(mask),
            "kept": mx.sum(tokens.kept),
            "clipped": mx.sum(tokens.clipped),
            "entropy": -mx.sum(still * mask),
            "mismatch": mx.sum(divergence(old, still) * mask),
            "reference": mx.array(0.0) if reference is None else mx.sum(divergence(still, reference) * tokens.kept),
            "ratio": mx.sum(ratio),
            "ratio_squared": mx.sum(ratio * ratio),
            "largest_gap": mx.max(mx.abs(still - old) * mask),
            LOGPROBS: still,
        }
        return loss, {name: mx.stop_gradient(value.astype(mx.float32)) for name, value in values.items()}

    def _scored(self, micro: Micro) -> tuple[mx.array, mx.array | None]:
        """(n, C): of the completions' tokens, the log-probabilities and, where they are asked for, the entropies."""
        completions = mx.array(micro.completions)
        temperature = _temperature(micro)
        logits = completion_logits(self._tree.module, micro.prompts, completions, self._tree.shares_prompts)
        entropies = entropy(logits.astype(mx.float32) / temperature) if self._objective.entropy_bonus else None
        return chosen_logprobs(logits, completions, temperature), entropies

    def logprobs(self, micro: Micro) -> mx.array:
        """(n, C): of the completions' tokens, by the parameters that the tree has now."""
        return self._logprobs(self._tree.module, micro)

    def reference_logprobs(self, micro: Micro) -> mx.array:
        """The same by the reference. Leaves its parameters in the tree, where it has some."""
        if self.initial is None:
            return self._logprobs(self._base, micro)
        self._put(self.initial)
        return self._logprobs(self._tree.module, micro)

    def _put(self, parameters: Parameters) -> None:
        """Puts parameters into the tree, in the model's own precision."""
        dtype = self._tree.dtype
        self._tree.set_parameters({name: array.astype(dtype) for name, array in parameters.items()})

    def _logprobs(self, module: nn.Module, micro: Micro) -> mx.array:
        completions = mx.array(micro.completions)
        logits = completion_logits(module, micro.prompts, completions, self._tree.shares_prompts)
        return chosen_logprobs(logits, completions, _temperature(micro))


def _temperature(micro: Micro) -> mx.array | float:
    """A number where it is one for all: dividing all logits by 1 costs."""
    temperature = micro.temperature
    return float(temperature[0, 0, 0]) if (temperature == temperature[0]).all() else mx.array(temperature)
