"""Gives a loaded model's layers subclasses, so that they compute the same in another way. Called by `models.loader`.

Only the given model's layers change: mlx-lm's classes stay as they are, and so does a training tree built from them.
"""

import copy
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention as mlx_attention

Binding = tuple[Callable[..., Any], Callable[..., Any]]  # what a name stands for in mlx-lm, and what it shall stand for


def let_caches_attend(module: nn.Module) -> None:
    """Attention asks the cache first: one that has `attend` may know a faster way over what it holds."""
    replace_layers(module, _asking_class)


def replace_layers(module: nn.Module, faster: Callable[[type], type | None]) -> None:
    for name, child in module.items():
        module[name] = _replaced(child, faster)


def rebound(original: type, bindings: Mapping[str, Binding]) -> type | None:
    """A subclass with the same `__call__`, in which some global names stand for other functions.

    None when it uses none of them.
    """
    call = vars(original).get("__call__")
    if not isinstance(call, types.FunctionType):
        return None
    bound = {name: new for name, (old, new) in bindings.items() if _uses(call, name, old)}
    if not bound:
        return None
    again = types.FunctionType(
        call.__code__, {**call.__globals__, **bound}, call.__name__, call.__defaults__, call.__closure__
    )
    again.__kwdefaults__ = call.__kwdefaults__
    return type(original.__name__, (original,), {"__call__": again})


def _replaced(value: Any, faster: Callable[[type], type | None]) -> Any:
    """The same tree with other layers. They are copies: some of mlx-lm's are shared between models."""
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, faster) for item in value)
    if not isinstance(value, nn.Module):
        return value
    for name, child in value.items():
        value[name] = _replaced(child, faster)
    other = faster(type(value))
    if other is None:
        return value
    layer = copy.copy(value)
    layer.__class__ = other
    return layer


def _uses(call: types.FunctionType, name: str, function: Callable[..., Any]) -> bool:
    return name in call.__code__.co_names and call.__globals__.get(name) is function


@functools.cache
def _asking_class(original: type) -> type | None:
    return rebound(original, {"scaled_dot_product_attention": (mlx_attention, _asking)})


def _asking(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    if sinks is None and hasattr(cache, "attend"):
        attended: mx.array | None = cache.attend(queries, scale, mask)
        if attended is not None:
            return attended
    return mlx_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
