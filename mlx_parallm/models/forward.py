"""A model's forward pass with the output head run only where a token is sampled.

mlx-lm's models compute logits for every position. `Forward` calls the same model through a shallow copy whose
backbone keeps one position per row, so that the head (and whatever a model does to its logits after it) sees
just those. Made once per model by the runner; the shared module tree is never changed.
"""

import copy
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

WRAPPERS = ("language_model",)
BACKBONES = ("model", "backbone", "transformer")


class _CutBackbone:
    """Stands in for a backbone: the same hidden states, cut to one position per row where `index` names it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.index: mx.array | None = None  # (B,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.inner(*args, **kwargs)  # (B, T, D)
        if self.index is None:
            return hidden
        return mx.take_along_axis(hidden, self.index[:, None, None], axis=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class AdapterState(Protocol):
    """What the model's layers read beside their inputs: which adapter each row has."""

    row_adapters: Any


class Forward:
    def __init__(self, module: nn.Module, adapters: AdapterState | None = None) -> None:
        self._module = module
        self._adapters = adapters
        self._base = None if adapters is None else adapters.row_adapters
        self._backbone: _CutBackbone | None = None
        self._cut = self._copy_with_cut_backbone(module)

    def __call__(self, tokens: mx.array, caches: list[Any], row_adapters: Any = None) -> mx.array:
        """Logits of every position: (B, T) -> (B, T, V), with the rows' adapters; None: without any."""
        self._activate(row_adapters)
        logits: mx.array = self._module(tokens, cache=caches)
        return logits

    def at(self, tokens: mx.array, caches: list[Any], index: mx.array, row_adapters: Any = None) -> mx.array:
        """Logits of one position per row: (B, T), (B,) -> (B, V)."""
        self._activate(row_adapters)
        if self._cut is None or self._backbone is None:
            logits = self(tokens, caches, row_adapters)
            return mx.take_along_axis(logits, index[:, None, None], axis=1)[:, 0]
        self._backbone.index = index
        try:
            cut: mx.array = self._cut(tokens, cache=caches)
        finally:
            self._backbone.index = None
        return cut[:, 0]

    def forget(self) -> None:
        """Lets go of the adapters of the last pass."""
        self._activate(None)

    def _activate(self, row_adapters: Any) -> None:
        if self._adapters is not None:
            self._adapters.row_adapters = self._base if row_adapters is None else row_adapters

    def _copy_with_cut_backbone(self, module: nn.Module) -> nn.Module | None:
        clone = copy.copy(module)
        for name in WRAPPERS:
            if isinstance(module.get(name), nn.Module):
                inner = self._copy_with_cut_backbone(module[name])
                if inner is None:
                    return None
                clone[name] = inner
                return clone
        for name in BACKBONES:
            if isinstance(module.get(name), nn.Module):
                self._backbone = _CutBackbone(clone.pop(name))
                object.__setattr__(clone, name, self._backbone)
                return clone
        return None
