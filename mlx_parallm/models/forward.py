"""A model's forward pass with the output head run only where a token is sampled.

mlx-lm's models compute logits for every position. `Forward` calls the same model through a shallow copy whose
backbone keeps one position per row, so that the head (and whatever a model does to its logits after it) sees
just those. Made once per model by the runner; the shared module tree is never changed. What a pass depends on beside
tokens and caches is set before it: the rows' adapters, and in models that read images a `RowInputs`.
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

WRAPPERS = ("language_model",)
BACKBONES = ("model", "backbone", "transformer")
HEAD = "lm_head"  # of models whose layers are not in a backbone of their own


@dataclass(frozen=True, slots=True)
class RowInputs:
    """What the rows of a pass have where some of them have images. For slots it is a `kv.batch.Traceable`."""

    adapters: Any = None
    shifts: mx.array | None = None  # (B,): what is added to a token's number to get its position
    positions: mx.array | None = None  # (3, B, T): of each token, where they are not just shifted
    features: mx.array | None = None  # (B, T, D), or several D wide: of images
    replaced: mx.array | None = None  # (B, T, 1): tokens whose embeddings those replace

    @property
    def form(self) -> Hashable:
        return "shifted", None if self.adapters is None else self.adapters.form

    def row(self, number: int) -> "RowInputs":
        adapters = None if self.adapters is None else self.adapters.row(number)
        return RowInputs(adapters, None if self.shifts is None else self.shifts[number : number + 1])

    def arrays(self) -> list[mx.array]:
        """Returns the arrays of a decode step, which of the images' inputs has shifts alone."""
        assert self.shifts is not None
        return [self.shifts, *([] if self.adapters is None else self.adapters.arrays())]

    def maker(self) -> "Callable[[Sequence[mx.array]], RowInputs]":
        make = None if self.adapters is None else self.adapters.maker()
        return lambda arrays: RowInputs(make and make(arrays[1:]), arrays[0])


class PassState:
    """The place where a model that reads images finds what the rows of the pass have; its copies share it."""

    inputs: RowInputs | None = None


class _CutBackbone:
    """Stands in for a backbone: the same hidden states, cut to one position per row where `index` names it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.index: mx.array | None = None  # (B,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cut(self.inner(*args, **kwargs))  # (B, T, D)

    def cut(self, hidden: mx.array) -> mx.array:
        return hidden if self.index is None else mx.take_along_axis(hidden, self.index[:, None, None], axis=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _CutHead(_CutBackbone):
    """The same in front of an output head."""

    def __call__(self, hidden: mx.array) -> Any:
        return self.inner(self.cut(hidden))


class AdapterState(Protocol):
    """What the model's layers read beside their inputs: which adapter each row has."""

    row_adapters: Any


class Forward:
    def __init__(self, module: nn.Module, adapters: AdapterState | None = None, in_order: bool = False) -> None:
        """`in_order`: passes are computed in the order in which they are asked for, as ranks that share them must."""
        self.module = module
        self.in_order = in_order
        self.adapters = adapters
        self._base = None if adapters is None else adapters.row_adapters
        self._state: PassState | None = getattr(module, "state_of_pass", None)
        self._backbone: _CutBackbone | None = None
        self._cut = self._copy_with_cut_backbone(module)

    @property
    def cuts(self) -> bool:
        """Whether `at` computes the head for its positions alone."""
        return self._cut is not None and self._backbone is not None

    def __call__(self, tokens: mx.array, caches: list[Any], context: Any = None) -> mx.array:
        """Logits of every position: (B, T) -> (B, T, V), with the rows' adapters or `RowInputs`; None: without any."""
        self._activate(context)
        logits: mx.array = self.module(tokens, cache=caches)
        return self._started(logits)

    def at(self, tokens: mx.array, caches: list[Any], index: mx.array, context: Any = None) -> mx.array:
        """Logits of one position per row: (B, T), (B,) -> (B, V)."""
        self._activate(context)
        if self._cut is None or self._backbone is None:
            logits = self(tokens, caches, context)
            return mx.take_along_axis(logits, index[:, None, None], axis=1)[:, 0]
        self._backbone.index = index
        try:
            cut: mx.array = self._cut(tokens, cache=caches)
        finally:
            self._backbone.index = None
        return self._started(cut[:, 0])

    def _started(self, logits: mx.array) -> mx.array:
        if self.in_order:
            mx.async_eval(logits)
        return logits

    def forget(self) -> None:
        """Lets go of the adapters of the last pass."""
        self._activate(None)

    def _activate(self, context: Any) -> None:
        if self._state is not None:
            self._state.inputs = context if isinstance(context, RowInputs) else None
            context = context.adapters if isinstance(context, RowInputs) else context
        if self.adapters is not None:
            self.adapters.row_adapters = self._base if context is None else context

    def _copy_with_cut_backbone(self, module: nn.Module) -> nn.Module | None:
        clone = copy.copy(module)
        for name in WRAPPERS:
            if isinstance(module.get(name), nn.Module):
                inner = self._copy_with_cut_backbone(module[name])
                if inner is None:
                    return None
                clone[name] = inner
                return clone
        for name in (*BACKBONES, HEAD):
            if isinstance(module.get(name), nn.Module):
                self._backbone = (_CutHead if name == HEAD else _CutBackbone)(clone.pop(name))
                object.__setattr__(clone, name, self._backbone)
                return clone
        return None
