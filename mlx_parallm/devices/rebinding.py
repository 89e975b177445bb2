"""Subclasses of mlx-lm's and mlx-vlm's layers in which names that they call stand for other functions.

One of them is attention that asks the cache first. `compute.patch` gives these classes to a loaded model's layers.
"""

import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention as mlx_attention

MLX_VLM = "mlx_vlm.models.base"
Binding = tuple[Callable[..., Any], Callable[..., Any]]  # what a name stands for in mlx-lm, and what it shall stand for


def rebound_class(original: type, bindings: Mapping[str, Binding]) -> type | None:
    """A subclass with the same `__call__`, in which some global names stand for other functions.

    None when it uses none of them.
    """
    call = vars(original).get("__call__")
    if not isinstance(call, types.FunctionType):
        return None
    bound = {name: new for name, (old, new) in bindings.items() if _uses(call, name, old)}
    if not bound:
        return None
    rebound = types.FunctionType(
        call.__code__, {**call.__globals__, **bound}, call.__name__, call.__defaults__, call.__closure__
    )
    rebound.__kwdefaults__ = call.__kwdefaults__
    return type(original.__name__, (original,), {"__call__": rebound})


def _uses(call: types.FunctionType, name: str, function: Callable[..., Any]) -> bool:
    """mlx-vlm, where it is loaded, has a function of its own for each, which does the same with our caches."""
    if name not in call.__code__.co_names:
        return False
    found = call.__globals__.get(name)
    return found is function or (found is not None and found is getattr(sys.modules.get(MLX_VLM), name, None))


@functools.cache
def cache_first_class(original: type) -> type | None:
    """Returns a subclass of an attention layer's class that asks a cache that has `attend` first."""
    return rebound_class(original, {"scaled_dot_product_attention": (mlx_attention, _attend_by_cache_first)})


def attend_by_cache(queries: mx.array, cache: Any, scale: float, mask: Any, sinks: mx.array | None) -> mx.array | None:
    """Returns what the cache computes itself; None where it can't, or not for this pass."""
    if sinks is not None or not hasattr(cache, "attend"):
        return None
    attended: mx.array | None = cache.attend(queries, scale, mask)
    return attended


def _attend_by_cache_first(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    attended = attend_by_cache(queries, cache, scale, mask, sinks)
    if attended is not None:
        return attended
    return mlx_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
