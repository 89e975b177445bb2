"""SFT and DPO of one adapter, in micro-batches that the engine runs between its steps. Engine thread only, but for the
config. `finetune` calls it.

`step` and `evaluate` are generators that yield after every micro-batch of a bounded number of tokens; however a batch
is cut, the result is the same. How they depart from the papers:

- SFT: the mean over all learnt tokens of a batch, as TRL's. Packed, several examples stand in one row and none sees
  another's: the update is that of the same examples unpacked, in less padding.
- DPO: the reference is the policy as training found it (the model, or the adapter that it goes on from). What it says
  of a pair is computed with the pair's first step and kept.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.config.training import LoRAConfig, UpdateConfig
from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.machine_memory import room_at_hand
from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.host import to_numpy
from mlx_parallm.lora.adapter import Adapter
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.training.budget import Budget
from mlx_parallm.training.learner import Learner, Parameters, Refused, Values, number
from mlx_parallm.training.rl.batches import ROUND_TOKENS, round_up
from mlx_parallm.training.rl.objectives import Floats, Integers, chosen_logprobs
from mlx_parallm.training.supervised.datasets import Example, Preference
from mlx_parallm.training.trainable_model import PackedCache, TrainableModel, can_pack

Item = TypeVar("Item", Example, Preference)
Metrics = dict[str, float]
REFERENCE = "reference"  # among the values of DPO's loss: not summed
PACKED_WIDTH = 512  # tokens of a packed row, or as many as the longest example has


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(UpdateConfig):
    packing: bool = False  # SFT
    beta: float = 0.1  # DPO

    def __post_init__(self) -> None:
        UpdateConfig.__post_init__(self)
        if not self.beta > 0:
            raise ConfigError(f"beta of DPO must be above 0, and is {self.beta}")

    @classmethod
    def of(cls, update: UpdateConfig, **changes: Any) -> "SupervisedConfig":
        """Makes a config from another kind of update's, but for some fields."""
        shared = {item.name: getattr(update, item.name) for item in fields(UpdateConfig)}
        return cls(**{**shared, **changes})


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


@dataclass(slots=True)
class BatchSums:
    """Values of micro-batches, summed up by name."""

    sums: dict[str, float] = field(default_factory=dict)

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.sums[name] = float(np.float32(self.sums.get(name, 0.0)) + np.float32(value))  # in their own precision


class Supervised(ABC, Generic[Item]):
    """`memory`: bytes that parameters, optimiser and a micro-batch may take together; None: what is there."""

    def __init__(
        self, model: LanguageModel, lora: LoRAConfig, config: SupervisedConfig, memory: int | None = None
    ) -> None:
        self.config = config
        self.lora = lora
        self._memory = memory
        self._source = model.source
        self._start: Parameters | None = None  # what learning is measured from, where it is
        self._learning = False  # whether what is computed is for a gradient
        mx.random.seed(config.seed)
        self.tree = TrainableModel(model, lora, checkpointing=config.gradient_checkpointing)
        self.learner = Learner(self.tree.parameters(), config, self.tree.set_parameters)
        self.packs = config.packing and can_pack(self.tree.module, model.vocab_size)
        self.rounded = this_device().plans_shapes  # where each new shape costs as much as thousands of tokens
        self.budget = Budget(
            config.microstep_seconds, config.microbatch_tokens, at_hand=self._at_hand, score_bytes=self.tree.score_bytes
        )

    def start_from(self, adapter: Adapter) -> None:
        """Goes on from an adapter; before the first step."""
        self.learner.set_parameters(self.tree.parameters_of(adapter))

    def adapter(self) -> Adapter:
        """Returns the adapter as it is now. Waits for it."""
        return self.tree.adapter()

    def check_lengths(self, items: Sequence[Item]) -> None:
        """Raises where a text is too long to learn from: the memory for attention grows with its square."""
        longest = self.budget.longest_text()
        length = max((len(row.tokens) for item in items for row in self._rows(item)), default=0)
        if longest is not None and length > longest:
            raise ConfigError(
                f"a text of {length} tokens is too long to learn from: attention's backward pass keeps its scores on "
                f"this device, and there is memory for {longest} tokens; give --max-length {longest}, or a larger "
                "--memory-limit"
            )

    def step(self, items: Sequence[Item], busy: Callable[[], bool] = lambda: False) -> Generator[None, None, Metrics]:
        """One step of the optimiser; metrics of the batch from before it. What fails leaves nothing behind."""
        try:
            with self.learner.undo_on_failure():
                self.learner.clear_gradient()
                metrics = yield from self.forward_backward(items, busy)
                norm = self.learner.optim_step()
        except Refused as error:
            raise ParallmError(f"training can't go on from this batch: {error}") from None
        self.learner.updates += 1
        yield
        return metrics | {"grad_norm": norm, "learning_rate": self.learner.learning_rate}

    def forward_backward(
        self, items: Sequence[Item], busy: Callable[[], bool] = lambda: False
    ) -> Generator[None, None, Metrics]:
        """Adds a batch's gradient to what the learner has accumulated."""
        totals = BatchSums()

        def loss(parameters: Parameters, micro: TokenRows) -> tuple[mx.array, Values]:
            self._learning = True
            try:
                return self._loss(parameters, micro, items)
            finally:
                self._learning = False

        yield from self.learner.forward_backward(
            self._micros(items, lambda: self.budget.tokens(busy())),
            loss,
            lambda micro, values: totals.add(self._read(values, micro, items)),
            lambda micro, work: self.budget.run(micro.size, work),
        )
        return self._metrics(totals.sums, items)

    def evaluate(
        self, items: Sequence[Item], busy: Callable[[], bool] = lambda: False
    ) -> Generator[None, None, Metrics]:
        """The metrics of a step, without one."""
        totals = BatchSums()
        for micro in self._micros(items, lambda: self.budget.tokens(busy())):
            _, values = self._loss(self.learner.parameters, micro, items)
            mx.eval(values)
            totals.add(self._read(values, micro, items))
            self.learner.restore()
            yield
        return self._metrics(totals.sums, items)

    # What differs.

    @abstractmethod
    def _rows(self, item: Item) -> list[Example]: ...

    @abstractmethod
    def _loss(self, parameters: Parameters, micro: TokenRows, items: Sequence[Item]) -> tuple[mx.array, Values]:
        """The micro-batch's part of the batch's loss, and what `_read` needs."""

    @abstractmethod
    def _metrics(self, sums: Mapping[str, float], items: Sequence[Item]) -> Metrics: ...

    def _read(self, values: Values, micro: TokenRows, items: Sequence[Item]) -> dict[str, float]:
        """Returns those of a micro-batch's values that are summed over the batch."""
        return {name: number(value) for name, value in values.items()}

    # Micro-batches.

    def _micros(self, items: Sequence[Item], budget: Callable[[], int]) -> Iterator[TokenRows]:
        width = {place: max(len(row.tokens) for row in self._rows(item)) for place, item in enumerate(items)}
        rows = deque(sorted(self._packed(width), key=lambda row: sum(width[place] for place in row)))
        while rows:
            taken = [rows.popleft()]
            limit = min(budget(), self.budget.room(sum(width[place] for place in taken[0])))
            each = len(self._rows(items[taken[0][0]]))
            while rows and each * (len(taken) + 1) * sum(width[place] for place in rows[0]) <= limit:
                taken.append(rows.popleft())
            yield self._micro(items, taken)

    def _packed(self, width: dict[int, int]) -> list[list[int]]:
        """Rows of items: each by itself, or the longest first into the first row with room."""
        if not self.packs:
            return [[place] for place in width]
        size = max(PACKED_WIDTH, *width.values())
        rows: list[list[int]] = []
        left: list[int] = []
        for place in sorted(width, key=lambda place: -width[place]):
            row = next((row for row, room in enumerate(left) if room >= width[place]), len(rows))
            if row == len(rows):
                rows.append([])
                left.append(size)
            rows[row].append(place)
            left[row] -= width[place]
        return rows

    def _micro(self, items: Sequence[Item], rows: Sequence[Sequence[int]]) -> TokenRows:
        each = [[self._rows(items[place]) for place in row] for row in rows]
        lines = [[parts[side] for parts in row] for side in range(len(each[0][0])) for row in each]
        length = max(sum(len(one.tokens) for one in line) for line in lines)
        length = round_up(length, ROUND_TOKENS) if self.rounded else length
        tokens = np.zeros((len(lines), length), np.int64)
        mask = np.zeros((len(lines), length), np.float32)
        texts = np.full((len(lines), length), -1, np.int64)
        for row, line in enumerate(lines):
            begin = 0
            for text, one in enumerate(line):
                end = begin + len(one.tokens)
                tokens[row, begin:end] = one.tokens
                mask[row, begin:end] = one.mask
                texts[row, begin:end] = text
                mask[row, begin] = 0.0  # nothing before it says what it is
                begin = end
        places = [place for taken in rows for place in taken]
        return TokenRows(places, tokens, mask, texts if self.packs else None)

    def _logprobs(self, parameters: Parameters, micro: TokenRows) -> mx.array:
        """(n, T - 1): of each token after the first, where it is learnt; else 0."""
        drops = self._learning and parameters is not self._start
        self.tree.set_parameters({name: array.astype(self.tree.dtype) for name, array in parameters.items()})
        module = self.tree.module
        tokens = mx.array(micro.tokens)
        caches = None
        if micro.texts is not None:
            texts = mx.array(micro.texts[:, :-1])
            caches = [PackedCache(texts) for _ in module.layers]
        with self.tree.dropping_out(drops):
            logits = module(tokens[:, :-1], cache=caches)
        return chosen_logprobs(logits, tokens[:, 1:]) * mx.array(micro.mask[:, 1:])

    def _at_hand(self) -> int:
        if self._memory is None:
            return room_at_hand()
        held = 2 * self.learner.nbytes + sum(array.nbytes for array in self.learner.stacks.values())
        return self._memory - held


class SFT(Supervised[Example]):
    def _rows(self, item: Example) -> list[Example]:
        return [item]

    def _loss(self, parameters: Parameters, micro: TokenRows, items: Sequence[Example]) -> tuple[mx.array, Values]:
        loss = -mx.sum(self._logprobs(parameters, micro)) / sum(item.learnt for item in items)
        return loss, {"loss": mx.stop_gradient(loss)}

    def _metrics(self, sums: Mapping[str, float], items: Sequence[Example]) -> Metrics:
        return {"loss": sums["loss"], "tokens": float(sum(item.learnt for item in items))}


@dataclass(frozen=True, slots=True)
class PairReference:
    """What the reference says of a pair: the log-probability of each completion. Holds the pair itself: as long as it
    is here, no other has its identity."""

    pair: Preference
    chosen: float
    rejected: float


class DPO(Supervised[Preference]):
    def __init__(
        self, model: LanguageModel, lora: LoRAConfig, config: SupervisedConfig, memory: int | None = None
    ) -> None:
        super().__init__(model, lora, config, memory)
        self._start = dict(self.learner.parameters)
        self._references: dict[int, PairReference] = {}  # by the identity of a pair

    def start_from(self, adapter: Adapter) -> None:
        super().start_from(adapter)
        self._start = dict(self.learner.parameters)
        self._references.clear()

    def _rows(self, item: Preference) -> list[Example]:
        return [item.chosen, item.rejected]

    def _loss(self, parameters: Parameters, micro: TokenRows, items: Sequence[Preference]) -> tuple[mx.array, Values]:
        reference = self._reference(micro, items)  # (2, k)
        logprobs = mx.sum(self._logprobs(parameters, micro), axis=1).reshape(2, -1)
        chosen, rejected = self.config.beta * (logprobs - reference)
        loss = mx.sum(nn.softplus(rejected - chosen)) / len(items)
        values = {
            "loss": loss,
            "right": mx.sum(chosen > rejected),
            "chosen": mx.sum(chosen),
            "rejected": mx.sum(rejected),
            REFERENCE: reference,
        }
        return loss, {name: mx.stop_gradient(value.astype(mx.float32)) for name, value in values.items()}

    def _reference(self, micro: TokenRows, items: Sequence[Preference]) -> mx.array:
        known = [self._references.get(id(items[place])) for place in micro.places]
        if all(known):
            pairs = [(one.chosen, one.rejected) for one in known if one is not None]
            return mx.array(np.array(pairs, np.float32).T)
        assert self._start is not None
        return mx.stop_gradient(mx.sum(self._logprobs(self._start, micro), axis=1).reshape(2, -1))

    def _read(self, values: Values, micro: TokenRows, items: Sequence[Preference]) -> dict[str, float]:
        reference = to_numpy(values[REFERENCE]).T.tolist()
        for place, (chosen, rejected) in zip(micro.places, reference, strict=True):
            self._references[id(items[place])] = PairReference(items[place], chosen, rejected)
        return {name: number(value) for name, value in values.items() if name != REFERENCE}

    def _metrics(self, sums: Mapping[str, float], items: Sequence[Preference]) -> Metrics:
        count = len(items)
        return {
            "loss": sums["loss"],
            "accuracy": sums["right"] / count,
            "margin": (sums["chosen"] - sums["rejected"]) / count,
            "chosen_reward": sums["chosen"] / count,
            "rejected_reward": sums["rejected"] / count,
        }
