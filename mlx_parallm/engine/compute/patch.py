"""Changes a loaded model's layers: all of their classes change here, in one order. Called once, by the engine thread.

Layers get subclasses that `models` and `lora` define, or objects that compute in their stead. Only the given model's
layers change: mlx-lm's classes stay as they are, and so does a training tree built from them.
"""

import copy
from collections.abc import Callable
from typing import Any

import mlx.nn as nn

from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.native.classes import native_class
from mlx_parallm.devices.native.products import adapted_products, has_lane_products, low_rank_adder
from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.devices.rebinding import cache_first_class
from mlx_parallm.lora.fused_blocks import FusedAttention, FusedBlock, FusedMLP, fused_block, fused_class, fused_part
from mlx_parallm.lora.hooks import AdapterKernels, hooked_class
from mlx_parallm.lora.joint_products import BY_OPERATIONS, joint_kernels
from mlx_parallm.lora.kernel_check import checked_kernels
from mlx_parallm.lora.layout import Layout
from mlx_parallm.lora.split import Split


def patch_layers(module: nn.Module, profile: DeviceProfile, split: Split | None = None) -> Layout:
    """All changes, in their order; returns what packs adapters for the model.

    `split`: the module is a rank's part, whose layers exchange results within a pass: none of them is computed together
    with others.
    """
    # First what computes the same faster: hooks and fused blocks call these layers, and the functions bound in them.
    if split is None or not has_lane_products():
        use_device_kernels(module, profile)
    return attach_adapters(module, profile, split)


def use_device_kernels(module: nn.Module, profile: DeviceProfile) -> None:
    """Gives a model without adapters the device's kernels. Does nothing to one that has them already."""
    if this_device().native and not profile.compiled:  # C kernels can't be traced
        use_native_kernels(module)
    else:
        let_caches_attend(module)


def let_caches_attend(module: nn.Module) -> None:
    """Attention asks the cache first: one that has `attend` may know a faster way over what it holds, several tokens of
    a row, or rows that belong to nobody."""
    replace_layers(module, cache_first_class)


def use_native_kernels(module: nn.Module) -> None:
    replace_layers(module, native_class)


def attach_adapters(module: nn.Module, profile: DeviceProfile, split: Split | None = None) -> Layout:
    """Gives a model's layers room for adapters, which are added in the way that is fastest here."""
    assert not any(hasattr(layer, "hook") for _, layer in module.named_modules()), "the layers have hooks already"
    layout = Layout(module, traced=profile.compiled, split=split)
    layout.active.kernels = AdapterKernels() if split is not None else _adapter_kernels(layout, profile)
    # Hooks before blocks: a block takes the layers that have hooks, and their kernels from there.
    add_hooks(layout)
    fuse_blocks(module, layout.active.kernels)
    return layout


def add_hooks(layout: Layout) -> None:
    for layer, hook in layout.hooks():
        _change_class(layer, hooked_class)
        layer.hook = hook


def fuse_blocks(module: nn.Module, kernels: AdapterKernels) -> None:
    """Has attention, MLP and blocks compute their layers together. Without `kernels` there is nothing to gain: MLX's
    operations add each layer's adapters."""
    if not kernels:
        return
    # Attention and MLP before the blocks around them, which hand them the residual only where both can take it.
    for _, layer in module.named_modules():
        _compute_by(layer, fused_part(layer))
    if kernels.joint is not None:
        for _, layer in module.named_modules():
            _compute_by(layer, fused_block(layer))


def _compute_by(layer: nn.Module, fused: FusedAttention | FusedMLP | FusedBlock | None) -> None:
    if fused is not None:
        _change_class(layer, fused_class)
        layer.fused = fused


def _change_class(layer: nn.Module, subclass_of: Callable[[Any], type]) -> None:
    original: Any = type(layer)
    layer.__class__ = subclass_of(original)


def _adapter_kernels(layout: Layout, profile: DeviceProfile) -> AdapterKernels:
    if not profile.compiled:
        return AdapterKernels(add=low_rank_adder(), multiply=adapted_products())
    if this_device().metal:
        sizes = [(group.size, group.out_features) for group in layout.groups if group.kind == "linear"]
        return joint_kernels([(size, out) for size, out in sizes if size == sizes[0][0]][:2], layout.dtype)
    return checked_kernels(layout.dtype) if this_device().cuda else BY_OPERATIONS


def replace_layers(module: nn.Module, subclass_of: Callable[[type], type | None]) -> None:
    """Gives each layer below the subclass for its class, where there is one."""
    for name, child in module.items():
        module[name] = _replaced(child, subclass_of)


def _replaced(value: Any, subclass_of: Callable[[type], type | None]) -> Any:
    """The same tree with other layers. They are copies: some of mlx-lm's are shared between models."""
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, subclass_of) for item in value)
    if not isinstance(value, nn.Module):
        return value
    for name, child in value.items():
        value[name] = _replaced(child, subclass_of)
    subclass = subclass_of(type(value))
    if subclass is None:
        return value
    layer = copy.copy(value)
    layer.__class__ = subclass
    return layer
