"""Reward models: a scalar head and LoRA parameters over the very arrays that serve.

`RewardModel` owns the head and the LoRA parameters and scores texts; `reward_trainer` teaches it. Callers run
`score_steps` through `engine.work`: it yields between micro-batches of a bounded number of tokens. Engine thread only,
but for `RewardModelFiles`.
"""

import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.config.training import LoRAConfig
from mlx_parallm.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelLoadError
from mlx_parallm.host import to_numpy
from mlx_parallm.models.forward import BACKBONES, WRAPPERS
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.steps import run_through
from mlx_parallm.training.learner import Parameters
from mlx_parallm.training.storage.checkpoints import Checkpoint, Checkpoints, adapter_files
from mlx_parallm.training.trainable_model import PromptCache, TrainableModel
from mlx_parallm.validation import check_ids

Tokens = Sequence[int]
Where = Checkpoints | Path | str

WEIGHT = "head.weight"
BIAS = "head.bias"
KIND = "reward_model"
NAME = "reward-model"
MICRO_TOKENS = 256  # of a micro-batch
LEAST_SHARED = 8  # tokens of a prefix that is worth a pass of its own


@dataclass(frozen=True, slots=True)
class RewardModelFiles:
    """A reward model on the host, to be written. Any thread."""

    files: dict[str, bytes]
    arrays: dict[str, Any]
    state: dict[str, Any]

    def save(self, where: Where, name: str = NAME) -> Path:
        """Saves the files as a checkpoint of this name, or as this folder."""
        checkpoints, name = _place(where, name)
        return checkpoints.save(name, self.files, self.arrays, self.state)


class RewardModel:
    def __init__(
        self, model: LanguageModel, lora: LoRAConfig, seed: int = 0, *, microbatch_tokens: int = MICRO_TOKENS
    ) -> None:
        """Gives every text the score 0 until something has been learnt."""
        self.lora = lora
        self.updates = 0  # optimiser steps that stand
        self.microbatch_tokens = microbatch_tokens
        self._source = model.source
        self._vocab_size = model.vocab_size
        self._context_length = model.context_length
        mx.random.seed(seed)
        self.tree = TrainableModel(model, lora)
        self._backbone = _backbone(self.tree.module, model.name)
        lora_parameters = {name: array.astype(mx.float32) for name, array in self.tree.parameters().items()}
        self.parameters: Parameters = lora_parameters | {WEIGHT: mx.zeros(self._width(model.name)), BIAS: mx.zeros(())}
        mx.eval(self.parameters)
        self._put(self.parameters)

    def scores(self, texts: Sequence[Tokens]) -> list[float]:
        return run_through(self.score_steps(texts))

    def score_steps(self, texts: Sequence[Tokens]) -> Generator[None, None, list[float]]:
        """All by the parameters of the first step, whatever is learnt between the others."""
        self.check(texts)
        parameters = self.parameters
        scores = [0.0] * len(texts)
        rows = [list(text) for text in texts]
        for places in self.micro_batches([[row] for row in rows], self.microbatch_tokens):
            some = self.forward(parameters, [rows[place] for place in places])
            for place, score in zip(places, to_numpy(some).tolist(), strict=True):
                scores[place] = score
            yield
        return scores

    def micro_batches(self, items: Sequence[Sequence[list[int]]], budget: int) -> list[list[int]]:
        """Places of items, each some texts that stay together, cut within a number of tokens; one item may have
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
        for text in texts:
            if not text:
                raise InvalidRequestError("a text without tokens has no score")
            if len(text) > self._context_length:
                raise ContextLengthError(f"a text has {len(text)} tokens, and the model takes {self._context_length}")
            check_ids(text, self._vocab_size, "input")

    def _put(self, parameters: Parameters) -> None:
        self.tree.set_parameters({name: array for name, array in parameters.items() if name not in (WEIGHT, BIAS)})

    def _width(self, name: str) -> int:
        """Returns the width of the hidden states, by the shape of some that are never computed."""
        try:
            hidden = self._backbone(mx.zeros((1, 2), mx.int32), cache=None)
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelLoadError(f"{name} can't be a reward model: {error}") from error
        if not isinstance(hidden, mx.array) or hidden.ndim != 3 or hidden.shape[:2] != (1, 2):
            raise ModelLoadError(f"{name} can't be a reward model: it has no hidden states under its head")
        return int(hidden.shape[-1])

    # Files.

    def save(self, where: Where, name: str = NAME) -> Path:
        return self.pack().save(where, name)

    def load(self, where: Where, name: str = NAME) -> None:
        """Takes what was saved, which must have the same layers and the same rank."""
        kept = _load(where, name)
        self.load_state(kept.arrays, int(kept.state.get("updates", 0)))

    def pack(self) -> RewardModelFiles:
        """Packs the reward model as it is now. Waits for it."""
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
    kept = _load(where, name)
    try:
        fields = kept.state["lora"]
        lora = LoRAConfig(**{**fields, "target_modules": tuple(fields["target_modules"])})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{where} does not say what its reward model is like: {error}") from error
    reward_model = RewardModel(model, lora)
    reward_model.load_state(kept.arrays, int(kept.state.get("updates", 0)))
    return reward_model


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
    cuts: list[list[int]] = []
    for place in order:
        if cuts and _cost(_rows(items, [*cuts[-1], place]), shares) <= budget:
            cuts[-1].append(place)
        else:
            cuts.append([place])
    return cuts


def _rows(items: Sequence[Sequence[list[int]]], places: Sequence[int]) -> list[list[int]]:
    return [row for place in places for row in items[place]]


def _cost(rows: Sequence[list[int]], shares: bool) -> int:
    """Tokens that go through the model."""
    shared = _shared(rows) if shares else 0
    return shared + len(rows) * (max(map(len, rows)) - shared)


def _shared(rows: Sequence[list[int]]) -> int:
    """Returns how many tokens all begin with, each having at least one behind them."""
    if len(rows) < 2:
        return 0
    low = min(rows)
    high = max(rows)
    most = min(map(len, rows)) - 1
    alike = next((place for place in range(most) if low[place] != high[place]), most)
    return alike if alike >= LEAST_SHARED else 0


def _padded(texts: Sequence[list[int]]) -> tuple[mx.array, mx.array]:
    """(B, T), and where each one ends: what stands behind that is never seen."""
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return mx.array(tokens), mx.array([len(text) - 1 for text in texts])


def _place(where: Where, name: str) -> tuple[Checkpoints, str]:
    if isinstance(where, Checkpoints):
        return where, name
    folder = Path(where).expanduser().resolve()
    return Checkpoints(folder.parent, sys.maxsize), folder.name  # its neighbours are none of our business


def _load(where: Where, name: str) -> Checkpoint:
    checkpoints, name = _place(where, name)
    kept = checkpoints.load(name)
    if kept.state.get("kind") != KIND:
        raise ConfigError(f"{kept.path} is no reward model")
    return kept
