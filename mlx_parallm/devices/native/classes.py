"""Which of a model's layers have a subclass that calls the C kernels. `engine.compute.patch` gives it to them, on
the CPU."""

import functools
from typing import Any

import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.models.activations import swiglu as mlx_swiglu
from mlx_lm.models.base import scaled_dot_product_attention as mlx_attention

from mlx_parallm.devices.native import kernels
from mlx_parallm.devices.native.functions import attention, swiglu
from mlx_parallm.devices.native.llama_blocks import NativeBlock
from mlx_parallm.devices.native.native_layers import Embedding, Linear, RMSNorm, Rope
from mlx_parallm.devices.native.products import has_lane_products
from mlx_parallm.devices.rebinding import rebound_class


def native_class(original: type) -> type | None:
    """None where there are no kernels, or none for such layers."""
    library = kernels()
    return None if library is None else _class_with(library, original)


@functools.cache
def _class_with(library: Any, original: type) -> type | None:
    native = _layer_classes().get(original)
    if native is not None:
        return type(native.__name__, (native,), {"kernels": library})
    return rebound_class(
        original,
        {
            "scaled_dot_product_attention": (mlx_attention, functools.partial(attention, library)),
            "swiglu": (mlx_swiglu, functools.partial(swiglu, library)),
        },
    )


def _layer_classes() -> dict[Any, Any]:
    always = {nn.RoPE: Rope, nn.RMSNorm: RMSNorm}
    with_products = {nn.Linear: Linear, nn.Embedding: Embedding, llama.TransformerBlock: NativeBlock}
    return always | with_products if has_lane_products() else always
