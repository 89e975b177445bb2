"""Reward models: a scalar head and LoRA parameters over the very arrays that serve, learnt from pairs of texts.

`RewardModel` owns the head and the LoRA parameters and scores texts; `RewardTrainer` teaches it which of two texts is
the better one (Bradley-Terry); `read_pairs` reads such texts from a file. Whoever trains or scores runs the generators
through `engine.work`: they yield between pieces of a bounded number of tokens. Engine thread only, but for `Packed`,
`read_pairs` and `rendered`.
"""

import json
import math
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelLoadError, ParallmError
from mlx_parallm.host import to_numpy
from mlx_parallm.models.forward import BACKBONES, WRAPPERS
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.text.prompts import Conversation, Message, Prompts
from mlx_parallm.training.checkpoints import Checkpoints, adapter_files
from mlx_parallm.training.learner import Learner, OptimizerConfig, Parameters, Refused
from mlx_parallm.training.model import LoRAConfig, PromptCache, TrainableModel
from mlx_parallm.validation import check_ids

T = TypeVar("T")
Tokens = Sequence[int]
Where = Checkpoints | Path | str

WEIGHT, BIAS = "head.weight", "head.bias"
KIND, NAME = "reward_model", "reward-model"
PIECE = 256  # tokens
LEAST_SHARED = 8  # tokens of a beginning that is worth a pass of its own


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts as tokens, the better one first."""

    chosen: list[int]
    rejected: list[int]


@dataclass(frozen=True, slots=True)
class RewardModelFiles:
    """A reward model on the host, to be written. Any thread."""

    files: dict[str, bytes]
    arrays: dict[str, Any]
    state: dict[str, Any]

    def save(self, where: Where, name: str = NAME) -> Path:
        """As a checkpoint of this name, or as this folder."""
        checkpoints, name = _place(where, name)
        return checkpoints.save(name, self.files, self.arrays, self.state)


class RewardModel:
    def __init__(
        self, model: LanguageModel, lora: LoRAConfig, seed: int = 0, *, microbatch_tokens: int = PIECE
    ) -> None:
        """Before it has learnt anything, every text has the score 0."""
        self.lora = lora
        self.updates = 0  # optimiser steps that stand
        self.microbatch_tokens = microbatch_tokens
        self._source = model.source
        self._limits = model.vocab_size, model.context_length
        mx.random.seed(seed)
        self.tree = TrainableModel(model, lora)
        self._backbone = _backbone(self.tree.module, model.name)
        learnt = {name: array.astype(mx.float32) for name, array in self.tree.parameters().items()}
        self.parameters: Parameters = learnt | {WEIGHT: mx.zeros(self._width(model.name)), BIAS: mx.zeros(())}
        mx.eval(self.parameters)
        self._put(self.parameters)

    def scores(self, texts: Sequence[Tokens]) -> list[float]:
        return _run(self.score_steps(texts))

    def score_steps(self, texts: Sequence[Tokens]) -> Generator[None, None, list[float]]:
        """All by the parameters of the first step, whatever is learnt between the others."""
        self.check(texts)
        parameters, found, rows = self.parameters, [0.0] * len(texts), [list(text) for text in texts]
        for places in self.pieces([[row] for row in rows], self.microbatch_tokens):
            scores = self.forward(parameters, [rows[place] for place in places])
            for place, score in zip(places, to_numpy(scores).tolist(), strict=True):
                found[place] = score
            yield
        return found

    def pieces(self, items: Sequence[Sequence[list[int]]], budget: int) -> list[list[int]]:
        """Places of items, each some texts that stay together, in pieces within a number of tokens; one item may have
        more. Together go texts of like lengths, or those that begin alike, whichever is less to compute."""
        shares = self.tree.shares_prompts
        orders = [sorted(range(len(items)), key=lambda place: max(map(len, items[place])))]
        if shares:
            orders.append(sorted(range(len(items)), key=lambda place: items[place][0]))
        cuts = [_cut(items, order, budget, shares) for order in orders]
        return min(cuts, key=lambda cut: sum(_cost(_rows(items, places), shares) for places in cut))

    def forward(self, parameters: Parameters, texts: Sequence[list[int]]) -> mx.array:
        """Scores (B,), not computed yet; gradients flow to the parameters, the bias apart: pairs say nothing of it.

        What all texts begin with goes through the model once.
        """
        shared = _shared(texts) if self.tree.shares_prompts else 0
        tokens, last = _padded([text[shared:] for text in texts])
        caches = [PromptCache() for _ in self.tree.module.layers] if shared else None
        try:
            self._put(parameters)
            if shared:
                self._backbone(mx.array([texts[0][:shared]]), cache=caches)
            hidden = self._backbone(tokens, cache=caches)  # (B, T, D)
        finally:
            self._put(self.parameters)
        ends = mx.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0].astype(mx.float32)
        scores: mx.array = ends @ parameters[WEIGHT] + mx.stop_gradient(parameters[BIAS])
        return scores

    def set_parameters(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._put(parameters)

    def check(self, texts: Sequence[Tokens]) -> None:
        """Whether they are texts for this model."""
        vocab_size, context_length = self._limits
        for text in texts:
            if not text:
                raise InvalidRequestError("a text without tokens has no score")
            if len(text) > context_length:
                raise ContextLengthError(f"a text has {len(text)} tokens, and the model takes {context_length}")
            check_ids(text, vocab_size, "input")

    def _put(self, parameters: Parameters) -> None:
        self.tree.set_parameters({name: array for name, array in parameters.items() if name not in (WEIGHT, BIAS)})

    def _width(self, name: str) -> int:
        """Of the hidden states: looks at the shape of some, which are never computed."""
        try:
            hidden = self._backbone(mx.zeros((1, 2), mx.int32), cache=None)
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelLoadError(f"{name} can't be a reward model: {error}") from error
        if not isinstance(hidden, mx.array) or hidden.ndim != 3 or hidden.shape[:2] != (1, 2):
            raise ModelLoadError(f"{name} can't be a reward model: it has no hidden states under its head")
        return int(hidden.shape[-1])

    # What is kept on disk.

    def save(self, where: Where, name: str = NAME) -> Path:
        return self.pack().save(where, name)

    def load(self, where: Where, name: str = NAME) -> None:
        """Takes what was saved, which must have the same layers and the same rank."""
        arrays, state = _kept(where, name)
        self.load_state(arrays, int(state.get("updates", 0)))

    def pack(self) -> RewardModelFiles:
        """As it is now. Waits for it."""
        files = adapter_files(self.tree.adapter(), self.lora.scale, self.lora.rank, self._source)
        state = {"kind": KIND, "updates": self.updates, "model": self._source, "lora": asdict(self.lora)}
        return RewardModelFiles(files, self.state(), state)

    def state(self) -> dict[str, Any]:
        """Arrays by name, on the host: waits for them."""
        return {name: to_numpy(array) for name, array in self.parameters.items()}

    def load_state(self, arrays: Mapping[str, Any], updates: int) -> None:
        if {name: tuple(array.shape) for name, array in arrays.items()} != {
            name: tuple(array.shape) for name, array in self.parameters.items()
        }:
            raise ConfigError("the reward model was saved with other layers, another rank or another model")
        parameters = {name: mx.array(arrays[name]) for name in self.parameters}
        mx.eval(parameters)
        self.set_parameters(parameters)
        self.updates = updates


def open_reward_model(model: LanguageModel, where: Where, name: str = NAME) -> RewardModel:
    """One that was saved, with the layers and the rank it had then. Engine thread."""
    arrays, state = _kept(where, name)
    try:
        lora = LoRAConfig(**{**state["lora"], "target_modules": tuple(state["lora"]["target_modules"])})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{where} does not say what its reward model is like: {error}") from error
    found = RewardModel(model, lora)
    found.load_state(arrays, int(state.get("updates", 0)))
    return found


@dataclass(slots=True)
class _Sums:
    """Over the pairs of an epoch."""

    pairs: int = 0
    loss: float = 0.0
    right: float = 0.0
    margin: float = 0.0
    score: float = 0.0  # of both texts

    def add(self, loss: float, chosen: Any, rejected: Any) -> None:
        margin = chosen - rejected
        self.pairs += len(margin)
        self.loss += loss
        self.right += float((margin > 0).sum())
        self.margin += float(margin.sum())
        self.score += float((chosen + rejected).sum())

    def metrics(self) -> dict[str, float]:
        return {"loss": self.loss / self.pairs, "accuracy": self.right / self.pairs, "margin": self.margin / self.pairs}


class RewardTrainer:
    def __init__(
        self,
        reward_model: RewardModel,
        *,
        learning_rate: float = 2e-4,
        epochs: int = 1,
        batch_size: int = 16,
        microbatch_tokens: int = PIECE,
        max_grad_norm: float = 1.0,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Any thread. `batch_size`: pairs of a step. `microbatch_tokens`: padded ones; a pair may have more."""
        for name, least in (("epochs", epochs), ("batch_size", batch_size), ("microbatch_tokens", microbatch_tokens)):
            if least < 1:
                raise ConfigError(f"{name} must be at least 1, not {least}")
        if not learning_rate > 0:
            raise ConfigError(f"learning_rate must be above 0, and is {learning_rate}")
        self.reward_model = reward_model
        self._epochs, self._batch_size, self._budget = epochs, batch_size, microbatch_tokens
        self._seed = seed
        self._optimizer = OptimizerConfig(
            learning_rate=learning_rate, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )
        self._learner: Learner | None = None
        self._gradient = mx.value_and_grad(self._loss)

    def train(self, pairs: Sequence[Pair]) -> Generator[None, None, dict[str, float]]:
        """Metrics of the last epoch, each pair's from before it was learnt from. Failing undoes all of it."""
        if not pairs:
            raise InvalidRequestError("there are no pairs to learn from")
        model, begun = self.reward_model, time.perf_counter()
        model.check([text for pair in pairs for text in (pair.chosen, pair.rejected)])
        learner = self._learner = self._learner or Learner(model.parameters, self._optimizer, model.set_parameters)
        learner.set_parameters(model.parameters)  # somebody may have loaded others
        before, updates = learner.snapshot(), model.updates
        random = np.random.default_rng(self._seed)
        sums, norms = _Sums(), [0.0]
        try:
            for _ in range(self._epochs):
                sums, norms, order = _Sums(), [], random.permutation(len(pairs)).tolist()
                for start in range(0, len(order), self._batch_size):
                    batch = [pairs[place] for place in order[start : start + self._batch_size]]
                    norms.append((yield from self._step(learner, batch, sums)))
        except Exception:
            learner.go_back(before)
            model.updates = updates
            raise
        self._centre(sums)
        found = {"grad_norm": float(np.mean(norms)), "pairs": float(len(pairs)), "updates": float(model.updates)}
        return sums.metrics() | found | {"seconds": time.perf_counter() - begun}

    def _step(self, learner: Learner, batch: Sequence[Pair], sums: _Sums) -> Generator[None, None, float]:
        """One step of the optimiser: the same however the batch is cut. The norm of its gradient."""
        model = self.reward_model
        total: Parameters = {}
        for places in model.pieces([[pair.chosen, pair.rejected] for pair in batch], self._budget):
            (loss, scores), gradients = self._gradient(model.parameters, [batch[place] for place in places], len(batch))
            total = learner.add(total, gradients)
            mx.eval(total, loss, scores)
            sums.add(float(to_numpy(loss)) * len(batch), *to_numpy(scores))
            yield
        if not math.isfinite(sums.loss):
            raise ParallmError(f"the reward model can't learn from these pairs: the loss is {sums.loss}")
        try:
            norm = learner.step(total)
        except Refused as error:
            raise ParallmError(f"the reward model can't learn from these pairs: {error}") from None
        model.updates += 1
        yield
        return norm

    def _loss(self, parameters: Parameters, pairs: Sequence[Pair], of: int) -> tuple[mx.array, mx.array]:
        texts = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        scores = self.reward_model.forward(parameters, texts).reshape(2, -1)
        loss = mx.sum(nn.softplus(scores[1] - scores[0])) / of
        return loss, mx.stop_gradient(scores)

    def _centre(self, sums: _Sums) -> None:
        """Pairs leave the bias open: it is set so that the texts of the last epoch have 0 on average."""
        model = self.reward_model
        bias = model.parameters[BIAS] - sums.score / (2 * sums.pairs)
        mx.eval(bias)
        model.set_parameters({**model.parameters, BIAS: bias})


# Pairs from a file.


def read_pairs(path: Path | str, prompts: Prompts) -> list[Pair]:
    """JSON lines: `prompt`, `chosen` and `rejected`, or the last two alone as whole conversations.

    A prompt and its answers are strings or lists of messages.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_pair(line, prompts))
            except (ValueError, TypeError, InvalidRequestError) as error:
                raise ConfigError(f"line {number} of {path} is no pair: {error}") from error
    if not found:
        raise ConfigError(f"{path} has no pairs in it")
    return found


def rendered(prompts: Prompts, messages: Sequence[Message]) -> list[int]:
    """A whole conversation as a reward model sees it."""
    return prompts.chat(Conversation(list(messages), add_generation_prompt=False)).tokens


def _pair(line: str, prompts: Prompts) -> Pair:
    entry = json.loads(line)
    if not isinstance(entry, dict):
        raise ValueError("it is not an object")
    before = _messages(entry, "prompt", "user") if "prompt" in entry else []
    chosen, rejected = (
        rendered(prompts, before + _messages(entry, name, "assistant" if before else None))
        for name in ("chosen", "rejected")
    )
    return Pair(chosen, rejected)


def _messages(entry: Mapping[str, Any], name: str, role: str | None) -> list[Message]:
    """`role`: of a message that is only a string."""
    if name not in entry:
        raise ValueError(f"it has no {name!r}")
    value = entry[name]
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        wanted = "messages" if role is None else "a string or messages"
        raise ValueError(f"{name!r} must be {wanted}{' where there is no prompt' if role is None else ''}")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"a message in {name!r} has no role or no content, as strings")
    return value


# Parts.


def _backbone(module: nn.Module, name: str) -> Any:
    """The model under its head: tokens (B, T) -> hidden states (B, T, D), after the last norm."""
    for part in WRAPPERS:
        if isinstance(module.get(part), nn.Module):
            return _backbone(module[part], name)
    for part in BACKBONES:
        if isinstance(module.get(part), nn.Module):
            return module[part]
    raise ModelLoadError(f"{name} can't be a reward model: the part under its head is not called {BACKBONES}")


def _cut(items: Sequence[Sequence[list[int]]], order: Sequence[int], budget: int, shares: bool) -> list[list[int]]:
    found: list[list[int]] = []
    for place in order:
        if found and _cost(_rows(items, [*found[-1], place]), shares) <= budget:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def _rows(items: Sequence[Sequence[list[int]]], places: Sequence[int]) -> list[list[int]]:
    return [row for place in places for row in items[place]]


def _cost(rows: Sequence[list[int]], shares: bool) -> int:
    """Tokens that go through the model."""
    shared = _shared(rows) if shares else 0
    return shared + len(rows) * (max(map(len, rows)) - shared)


def _shared(rows: Sequence[list[int]]) -> int:
    """How many tokens all begin with, each having at least one behind them."""
    if len(rows) < 2:
        return 0
    low, high, most = min(rows), max(rows), min(map(len, rows)) - 1
    alike = next((place for place in range(most) if low[place] != high[place]), most)
    return alike if alike >= LEAST_SHARED else 0


def _padded(texts: Sequence[list[int]]) -> tuple[mx.array, mx.array]:
    """(B, T), and where each one ends: what stands behind that is never seen."""
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for line, text in enumerate(texts):
        tokens[line, : len(text)] = text
    return mx.array(tokens), mx.array([len(text) - 1 for text in texts])


def _place(where: Where, name: str) -> tuple[Checkpoints, str]:
    if isinstance(where, Checkpoints):
        return where, name
    folder = Path(where).expanduser().resolve()
    return Checkpoints(folder.parent, sys.maxsize), folder.name  # its neighbours are none of our business


def _kept(where: Where, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    checkpoints, name = _place(where, name)
    found = checkpoints.load(name)
    if found.state.get("kind") != KIND:
        raise ConfigError(f"{found.path} is no reward model")
    return found.arrays, found.state


def _run(steps: Generator[None, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found
