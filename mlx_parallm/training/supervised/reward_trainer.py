"""Teaches a reward model which of two texts is the better one (Bradley-Terry), in micro-batches of a bounded number of
tokens. Callers run `train` through `engine.work`. Engine thread only, but for the constructor.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.config.training import OptimizerConfig
from mlx_parallm.errors import ConfigError, InvalidRequestError, ParallmError
from mlx_parallm.host import to_numpy
from mlx_parallm.training.learner import Learner, Parameters, Refused, Values, number
from mlx_parallm.training.supervised.pairs import Pair
from mlx_parallm.training.supervised.reward_model import BIAS, MICRO_TOKENS, RewardModel

OPTIMIZER = OptimizerConfig(learning_rate=2e-4)  # unless another is given


@dataclass(slots=True)
class PairTotals:
    """The totals over the pairs of an epoch."""

    pairs: int = 0
    loss: float = 0.0
    right: float = 0.0
    margin: float = 0.0
    score: float = 0.0  # of both texts
    grad_norms: list[float] = field(default_factory=list)  # of each step

    def add(self, loss: float, chosen: Any, rejected: Any) -> None:
        """`chosen`, `rejected`: scores of the pairs' texts (n,)."""
        margin = chosen - rejected
        self.pairs += len(margin)
        self.loss += loss
        self.right += float((margin > 0).sum())
        self.margin += float(margin.sum())
        self.score += float((chosen + rejected).sum())

    def metrics(self) -> dict[str, float]:
        return {
            "loss": self.loss / self.pairs,
            "accuracy": self.right / self.pairs,
            "margin": self.margin / self.pairs,
            "grad_norm": float(np.mean(self.grad_norms)),
        }


class RewardTrainer:
    def __init__(
        self,
        reward_model: RewardModel,
        optimizer: OptimizerConfig = OPTIMIZER,
        *,
        epochs: int = 1,
        batch_size: int = 16,
        microbatch_tokens: int = MICRO_TOKENS,
        seed: int = 0,
    ) -> None:
        """Any thread. `batch_size`: pairs of a step. `microbatch_tokens`: padded ones; a pair may have more."""
        for name, value in (("epochs", epochs), ("batch_size", batch_size), ("microbatch_tokens", microbatch_tokens)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if not optimizer.learning_rate > 0:
            raise ConfigError(f"learning_rate must be above 0, and is {optimizer.learning_rate}")
        self.reward_model = reward_model
        self._epochs = epochs
        self._batch_size = batch_size
        self._budget = microbatch_tokens
        self._seed = seed
        self._optimizer = optimizer
        self._learner: Learner | None = None

    @property
    def learner(self) -> Learner:
        """Made at its first use, on the engine thread."""
        if self._learner is None:
            model = self.reward_model
            self._learner = Learner(model.parameters, self._optimizer, model.set_parameters)
        return self._learner

    def train(self, pairs: Sequence[Pair]) -> Generator[None, None, dict[str, float]]:
        """Metrics of the last epoch, each pair's from before it was learnt from. What fails leaves nothing behind."""
        if not pairs:
            raise InvalidRequestError("there are no pairs to learn from")
        model = self.reward_model
        begun = time.perf_counter()
        model.check([text for pair in pairs for text in (pair.chosen, pair.rejected)])
        learner = self.learner
        learner.set_parameters(model.parameters)  # somebody may have loaded others
        learner.updates = model.updates
        try:
            with learner.undo_on_failure():
                totals = yield from self._learn(pairs)
        except Refused as error:
            raise ParallmError(f"the reward model can't learn from these pairs: {error}") from None
        finally:
            model.updates = learner.updates
        self._centre(totals)
        return totals.metrics() | {
            "pairs": float(len(pairs)),
            "updates": float(model.updates),
            "seconds": time.perf_counter() - begun,
        }

    def _learn(self, pairs: Sequence[Pair]) -> Generator[None, None, PairTotals]:
        """All epochs; the totals of the last."""
        random = np.random.default_rng(self._seed)
        totals = PairTotals()
        for _ in range(self._epochs):
            totals = PairTotals()
            order = random.permutation(len(pairs)).tolist()
            for start in range(0, len(order), self._batch_size):
                batch = [pairs[place] for place in order[start : start + self._batch_size]]
                self.learner.clear_gradient()
                yield from self.forward_backward(batch, totals)
                totals.grad_norms.append(self.learner.optim_step())
                self.learner.updates += 1
                self.reward_model.updates = self.learner.updates
                yield
        return totals

    def forward_backward(self, batch: Sequence[Pair], totals: PairTotals) -> Generator[None, None, None]:
        """Adds a batch's gradient, the same however it is cut, to what the learner has accumulated."""

        def read(pairs: Sequence[Pair], values: Values) -> None:
            totals.add(number(values["loss"]) * len(batch), to_numpy(values["chosen"]), to_numpy(values["rejected"]))

        cuts = self.reward_model.micro_batches([[pair.chosen, pair.rejected] for pair in batch], self._budget)
        micros = ([batch[place] for place in places] for places in cuts)
        yield from self.learner.forward_backward(
            micros, lambda parameters, pairs: self._loss(parameters, pairs, len(batch)), read
        )

    def _loss(self, parameters: Parameters, pairs: Sequence[Pair], of: int) -> tuple[mx.array, Values]:
        """The part that some pairs have in the loss of so many."""
        texts = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        chosen, rejected = self.reward_model.forward(parameters, texts).reshape(2, -1)
        loss = mx.sum(nn.softplus(rejected - chosen)) / of
        values = {"loss": loss, "chosen": chosen, "rejected": rejected}
        return loss, {name: mx.stop_gradient(value) for name, value in values.items()}

    def _centre(self, totals: PairTotals) -> None:
        """Pairs leave the bias open: it is set so that the texts of the last epoch have 0 on average."""
        model = self.reward_model
        bias = model.parameters[BIAS] - totals.score / (2 * totals.pairs)
        mx.eval(bias)
        model.set_parameters({**model.parameters, BIAS: bias})
