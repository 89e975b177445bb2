"""SFT and DPO of one adapter, in pieces that the engine runs between its steps. Engine thread only, but for the config.

`step` and `evaluate` are generators that yield after every piece of a bounded number of tokens; however a batch is cut,
what comes out is the same. How they depart from the papers:

- SFT: the mean over all learnt tokens of a batch, as TRL's. Packed, several examples stand in one row and none sees
  another's: the update is that of the same examples unpacked, in less padding.
- DPO: the reference is the policy as training found it (the model, or the adapter that it goes on from). What it says
  of a pair is computed with the pair's first step and kept.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.host import to_numpy
from mlx_parallm.lora.weights import Adapter
from mlx_parallm.models.device import device_kind
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.memory import available_memory
from mlx_parallm.training.batches import ROUND_TOKENS, round_up
from mlx_parallm.training.datasets import Example, Preference
from mlx_parallm.training.learner import Budget, Learner, OptimizerConfig, Parameters, Refused
from mlx_parallm.training.model import LoRAConfig, PackedCache, TrainableModel, can_pack
from mlx_parallm.training.objectives import Floats, Integers, chosen_logprobs

Item = TypeVar("Item", Example, Preference)
Metrics = dict[str, float]
PACKED_WIDTH = 512  # tokens of a packed row, or as many as the longest example has


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedConfig:
    optimizer: OptimizerConfig
    packing: bool = False  # SFT
    beta: float = 0.1  # DPO
    microstep_seconds: float = 0.5  # about how long a piece takes …
    microbatch_tokens: int = 0  # … unless it has always this many tokens
    gradient_checkpointing: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"beta of DPO must be above 0, and is {self.beta}")


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Rows of tokens (n, T). Of pairs, the chosen texts come first, then the rejected ones."""

    places: list[int]  # of its items in the batch
    tokens: Integers
    mask: Floats  # (n, T): what is learnt
    texts: Integers | None  # (n, T): which text of its row a token is of, where they are packed

    @property
    def size(self) -> int:
        return self.tokens.size


class Supervised(ABC, Generic[Item]):
    """`memory`: bytes that parameters, optimiser and a piece may take together; None: what is there."""

    def __init__(
        self, model: LanguageModel, lora: LoRAConfig, config: SupervisedConfig, memory: int | None = None
    ) -> None:
        self.config = config
        self.lora = lora
        self._memory = memory
        self._source = model.source
        mx.random.seed(config.seed)
        self.tree = TrainableModel(model, lora, checkpointing=config.gradient_checkpointing)
        self.learner = Learner(self.tree.parameters(), config.optimizer, self.tree.set_parameters)
        self.packs = config.packing and can_pack(self.tree.module, model.vocab_size)
        self.rounded = device_kind() == "cuda"  # where each new shape costs as much as thousands of tokens
        self.budget = Budget(config.microstep_seconds, config.microbatch_tokens, at_hand=self._at_hand)
        self._gradient: Callable[..., Any] = mx.value_and_grad(self._loss)

    def start_from(self, adapter: Adapter) -> None:
        """Goes on from an adapter; before the first step."""
        self.learner.set_parameters(self.tree.parameters_of(adapter))

    def adapter(self) -> Adapter:
        """As it is now. Waits for it."""
        return self.tree.adapter()

    def step(self, items: Sequence[Item], busy: Callable[[], bool] = lambda: False) -> Generator[None, None, Metrics]:
        """One step of the optimiser; metrics of the batch from before it. What fails leaves nothing behind."""
        total: Parameters = {}
        sums: list[Any] = []

        def work(piece: TokenRows) -> None:
            nonlocal total
            (_, values), found = self._gradient(self.learner.parameters, piece, items)
            total = self.learner.add(total, found)
            mx.eval(total, values)
            sums.append(self._read(to_numpy(values), piece, items))
            self.learner.restore()

        before = self.learner.snapshot()
        try:
            for piece in self._pieces(items, lambda: self.budget.tokens(busy())):
                self.budget.run(piece.size, partial(work, piece))
                yield
            metrics = self._metrics(np.sum(sums, axis=0), items)
            if not math.isfinite(metrics["loss"]):
                raise Refused(f"the loss is {metrics['loss']}")
            norm = self.learner.step(total)
        except BaseException as error:
            self.learner.go_back(before)
            if isinstance(error, Refused):
                raise ParallmError(f"training can't go on from this batch: {error}") from None
            raise
        self.learner.updates += 1
        yield
        return metrics | {"grad_norm": norm, "learning_rate": self.learner.learning_rate}

    def evaluate(
        self, items: Sequence[Item], busy: Callable[[], bool] = lambda: False
    ) -> Generator[None, None, Metrics]:
        sums: list[Any] = []

        def work(piece: TokenRows) -> None:
            _, values = self._loss(self.learner.parameters, piece, items)
            mx.eval(values)
            sums.append(self._read(to_numpy(values), piece, items))
            self.learner.restore()

        for piece in self._pieces(items, lambda: self.budget.tokens(busy())):
            work(piece)
            yield
        return self._metrics(np.sum(sums, axis=0), items)

    # What differs.

    @abstractmethod
    def _rows(self, item: Item) -> list[Example]: ...

    @abstractmethod
    def _loss(self, parameters: Parameters, piece: TokenRows, items: Sequence[Item]) -> tuple[mx.array, mx.array]:
        """Its part of the batch's loss, and what is told of it."""

    @abstractmethod
    def _metrics(self, sums: Any, items: Sequence[Item]) -> Metrics: ...

    def _read(self, values: Any, piece: TokenRows, items: Sequence[Item]) -> Any:
        """Of what is told of a piece, that which adds up."""
        return values

    # Pieces.

    def _pieces(self, items: Sequence[Item], budget: Callable[[], int]) -> Iterator[TokenRows]:
        width = {place: max(len(row.tokens) for row in self._rows(item)) for place, item in enumerate(items)}
        rows = deque(sorted(self._packed(width), key=lambda row: sum(width[place] for place in row)))
        while rows:
            limit, taken = budget(), [rows.popleft()]
            each = len(self._rows(items[taken[0][0]]))
            while rows and each * (len(taken) + 1) * sum(width[place] for place in rows[0]) <= limit:
                taken.append(rows.popleft())
            yield self._piece(items, taken)

    def _packed(self, width: dict[int, int]) -> list[list[int]]:
        """Rows of items: each by itself, or the longest first into the first row with room."""
        if not self.packs:
            return [[place] for place in width]
        size = max(PACKED_WIDTH, *width.values())
        rows: list[list[int]] = []
        left: list[int] = []
        for place in sorted(width, key=lambda place: -width[place]):
            row = next((number for number, room in enumerate(left) if room >= width[place]), len(rows))
            if row == len(rows):
                rows.append([])
                left.append(size)
            rows[row].append(place)
            left[row] -= width[place]
        return rows

    def _piece(self, items: Sequence[Item], rows: Sequence[Sequence[int]]) -> TokenRows:
        each = [[self._rows(items[place]) for place in row] for row in rows]
        lines = [[parts[side] for parts in row] for side in range(len(each[0][0])) for row in each]
        length = max(sum(len(one.tokens) for one in line) for line in lines)
        length = round_up(length, ROUND_TOKENS) if self.rounded else length
        tokens, mask = np.zeros((len(lines), length), np.int64), np.zeros((len(lines), length), np.float32)
        texts = np.full((len(lines), length), -1, np.int64)
        for number, line in enumerate(lines):
            begin = 0
            for text, one in enumerate(line):
                end = begin + len(one.tokens)
                tokens[number, begin:end], mask[number, begin:end], texts[number, begin:end] = (
                    one.tokens,
                    one.mask,
                    text,
                )
                mask[number, begin] = 0.0  # nothing before it says what it is
                begin = end
        places = [place for row in rows for place in row]
        return TokenRows(places, tokens, mask, texts if self.packs else None)

    def _logprobs(self, parameters: Parameters, piece: TokenRows) -> mx.array:
        """(n, T - 1): of each token after the first, where it is learnt; else 0."""
        self.tree.set_parameters({name: array.astype(self.tree.dtype) for name, array in parameters.items()})
        module, tokens = self.tree.module, mx.array(piece.tokens)
        caches = None
        if piece.texts is not None:
            texts = mx.array(piece.texts[:, :-1])
            caches = [PackedCache(texts) for _ in module.layers]
        logits = module(tokens[:, :-1], cache=caches)
        return chosen_logprobs(logits, tokens[:, 1:]) * mx.array(piece.mask[:, 1:])

    def _at_hand(self) -> int:
        if self._memory is None:
            return available_memory() // 2
        held = 2 * self.learner.nbytes + sum(array.nbytes for array in self.learner.stacks.values())
        return self._memory - held


class SFT(Supervised[Example]):
    def _rows(self, item: Example) -> list[Example]:
        return [item]

    def _loss(self, parameters: Parameters, piece: TokenRows, items: Sequence[Example]) -> tuple[mx.array, mx.array]:
        loss = -mx.sum(self._logprobs(parameters, piece)) / sum(item.learnt for item in items)
        return loss, mx.stop_gradient(loss)[None]

    def _metrics(self, sums: Any, items: Sequence[Example]) -> Metrics:
        return {"loss": float(sums[0]), "tokens": float(sum(item.learnt for item in items))}


class DPO(Supervised[Preference]):
    def __init__(
        self, model: LanguageModel, lora: LoRAConfig, config: SupervisedConfig, memory: int | None = None
    ) -> None:
        super().__init__(model, lora, config, memory)
        self._start = self.learner.parameters
        # By the identity of a pair, with the pair itself: as long as it is here, no other has its identity.
        self._references: dict[int, tuple[Preference, float, float]] = {}

    def start_from(self, adapter: Adapter) -> None:
        super().start_from(adapter)
        self._start = self.learner.parameters
        self._references.clear()

    def _rows(self, item: Preference) -> list[Example]:
        return [item.chosen, item.rejected]

    def _loss(self, parameters: Parameters, piece: TokenRows, items: Sequence[Preference]) -> tuple[mx.array, mx.array]:
        reference = self._reference(piece, items)  # (2, k)
        logprobs = mx.sum(self._logprobs(parameters, piece), axis=1).reshape(2, -1)
        chosen, rejected = self.config.beta * (logprobs - reference)
        loss = mx.sum(nn.softplus(rejected - chosen)) / len(items)
        told = [loss, mx.sum(chosen > rejected), mx.sum(chosen), mx.sum(rejected)]
        values = mx.concatenate([mx.stack([one.astype(mx.float32) for one in told]), reference.reshape(-1)])
        return loss, mx.stop_gradient(values)

    def _reference(self, piece: TokenRows, items: Sequence[Preference]) -> mx.array:
        known = [self._references.get(id(items[place])) for place in piece.places]
        if all(known):
            return mx.array(np.array([one[1:] for one in known if one is not None], np.float32).T)
        return mx.stop_gradient(mx.sum(self._logprobs(self._start, piece), axis=1).reshape(2, -1))

    def _read(self, values: Any, piece: TokenRows, items: Sequence[Preference]) -> Any:
        references = values[4:].reshape(2, -1).T.tolist()
        for place, (chosen, rejected) in zip(piece.places, references, strict=True):
            self._references[id(items[place])] = items[place], chosen, rejected
        return values[:4]

    def _metrics(self, sums: Any, items: Sequence[Preference]) -> Metrics:
        loss, right, chosen, rejected = (float(value) for value in sums)
        count = len(items)
        return {
            "loss": loss,
            "accuracy": right / count,
            "margin": (chosen - rejected) / count,
            "chosen_reward": chosen / count,
            "rejected_reward": rejected / count,
        }
