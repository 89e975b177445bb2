"""A module tree for gradients, over the very arrays that serve, with LoRA parameters of its own.

The served module has layers of our own (kernels without gradients, seats for adapters) and must not be frozen, put into
training mode or checkpointed. So the trainer builds the model's classes anew and gives them the same arrays: nothing of
the base is copied. Only the LoRA parameters are new, in float32. Engine thread only.
"""

from collections.abc import Collection
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import _get_classes

from mlx_parallm.adapters.weights import Adapter, Part
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.language import LanguageModel


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Which layers learn, and how finely."""

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ("q_proj", "v_proj")  # by the last part of their names
    dora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def shared_tree(model: LanguageModel) -> nn.Module:
    """The model's classes anew, with the same arrays."""
    module, config = model.module, dict(model.config)
    model_class, args_class = _get_classes(config)
    tree: nn.Module = model_class(args_class.from_dict(config))
    quantised = {path: layer for path, layer in module.named_modules() if "scales" in layer}
    if quantised:

        def as_served(path: str, layer: nn.Module) -> bool | dict[str, object]:
            served = quantised.get(path)
            if served is None:
                return False
            return {"group_size": served.group_size, "bits": served.bits, "mode": getattr(served, "mode", "affine")}

        nn.quantize(tree, class_predicate=as_served)
    tree.load_weights(tree_flatten(module.parameters()))
    tree.freeze()
    return tree


class LearningTree:
    """A shared tree whose chosen layers have LoRA parameters."""

    def __init__(self, model: LanguageModel, lora: LoRAConfig) -> None:
        self.lora = lora
        self.module = shared_tree(model)
        keys = _keys(self.module, lora.target_modules)
        if not keys:
            raise ModelLoadError(f"{model.name} has no layer called {' or '.join(lora.target_modules)}")
        parameters = {"rank": lora.rank, "scale": lora.scale, "dropout": 0.0, "keys": keys}
        linear_to_lora_layers(self.module, len(self.module.layers), parameters, use_dora=lora.dora)

    def parameters(self) -> dict[str, mx.array]:
        """What learns, by name."""
        return dict(tree_flatten(self.module.trainable_parameters()))

    def set_parameters(self, parameters: dict[str, mx.array]) -> None:
        self.module.update(tree_unflatten(list(parameters.items())))

    def adapter(self) -> Adapter:
        """The parameters as they are now, to be published. Waits for them."""
        parts = {}
        for path, layer in self.module.named_modules():
            if not isinstance(layer, (LoRALinear, DoRALinear, LoRAEmbedding, DoRAEmbedding)):
                continue
            a, b = (np.array(layer[f"lora_{side}"].astype(mx.float32)) for side in "ab")
            m = np.array(layer["m"].astype(mx.float32)) if "m" in layer else None
            if isinstance(layer, (LoRAEmbedding, DoRAEmbedding)):
                parts[path] = Part(np.ascontiguousarray(b), np.ascontiguousarray(self.lora.scale * a), m)
            else:
                parts[path] = Part(np.ascontiguousarray(a.T), np.ascontiguousarray(self.lora.scale * b.T), m)
        return Adapter(parts)


def _keys(module: nn.Module, targets: Collection[str]) -> set[str]:
    """Names of layers within a block, as mlx-lm wants them."""
    return {
        path
        for block in module.layers
        for path, layer in block.named_modules()
        if path.rsplit(".", 1)[-1] in targets and isinstance(layer, (nn.Linear, nn.QuantizedLinear))
    }
