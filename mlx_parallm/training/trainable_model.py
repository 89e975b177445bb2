"""A module tree for gradients, over the very arrays that serve, with LoRA parameters of its own.

The served module has layers of our own (kernels without gradients, hooks for adapters) and must not be frozen, put into
training mode or checkpointed. So the trainer builds the model's classes anew and gives them the same arrays: nothing of
the base is copied. Only the LoRA parameters are new, in float32. Engine thread only.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import _get_classes

from mlx_parallm.config.reading import nearest
from mlx_parallm.config.training import ALL_LINEAR, LoRAConfig
from mlx_parallm.devices.device import this_device
from mlx_parallm.errors import ConfigError, ModelLoadError
from mlx_parallm.host import to_numpy
from mlx_parallm.lora.adapter import Adapter, Part
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.training.rl.batches import PaddedPrompts

HEAD = "lm_head"  # the output layer, where it is one of its own


def shared_tree(model: LanguageModel) -> nn.Module:
    """The model's classes anew, with the same arrays."""
    if model.vision is not None:
        raise ConfigError(f"{model.name} reads images, and such models can be served here, not trained")
    module = model.module
    config = dict(model.config)
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


class PromptCache:
    """A layer's keys and values of prompts, computed once for all completions; gradients flow through it.

    `behind`: each completion's prompt (n,); None: there is but one. `lengths`: of each completion's prompt (n,), where
    they are padded at their ends; what the padding has left is hidden, and positions go on from the prompt's own end.
    """

    def __init__(self, behind: mx.array | None = None, lengths: mx.array | None = None) -> None:
        self.behind = behind
        self.lengths = lengths
        self.offset: int | mx.array = 0
        self.kept: tuple[mx.array, mx.array] | None = None

    def keep(self, keys: mx.array, values: mx.array) -> None:
        self.kept = keys, values
        self.offset = keys.shape[2] if self.lengths is None else self.lengths

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.kept is None:
            self.keep(keys, values)
            return keys, values
        rows = keys.shape[0]
        before = (
            mx.broadcast_to(one, (rows, *one.shape[1:])) if self.behind is None else one[self.behind]
            for one in self.kept
        )
        joined = [mx.concatenate(list(pair), axis=2) for pair in zip(before, (keys, values), strict=True)]
        return joined[0], joined[1]

    def make_mask(self, length: int, *, return_array: bool = False, window_size: int | None = None) -> Any:
        padded = self.lengths is not None and self.kept is not None
        if not padded and not return_array and window_size is None:
            return "causal" if length > 1 else None
        width = 0 if self.kept is None else self.kept[0].shape[2]
        gap = width - self.lengths[:, None, None, None] if padded else 0  # type: ignore[index]
        keys = mx.arange(width + length)
        queries = keys[width:, None]
        mask = (queries >= keys) & ((keys < width - gap) | (keys >= width))  # (C, P + C), or (n, 1, C, P + C)
        if window_size is None:
            return mask
        return mask & (queries - gap < mx.where(keys < width, keys, keys - gap) + window_size)


class PackedCache:
    """A cache for rows that hold several texts, one after another: none sees another's. `texts` (n, T): the number of
    the text that a token is of. Positions go on from one text to the next, which attention by distances does not
    see."""

    def __init__(self, texts: mx.array) -> None:
        self.offset = 0
        self._texts = texts

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(self, length: int, *, return_array: bool = False, window_size: int | None = None) -> mx.array:
        places = mx.arange(length)
        mask = (places[:, None] >= places) & (self._texts[:, None, :, None] == self._texts[:, None, None, :])
        return mask if window_size is None else mask & (places[:, None] < places + window_size)  # (n, 1, T, T)


def can_pack(module: nn.Module, vocab_size: int) -> bool:
    """Returns whether texts in one row are computed as if each were alone, by the look of it and by trying."""
    if not all(type(cache) is KVCache for cache in make_prompt_cache(module)):
        return False
    texts = [[(7 * place + length) % vocab_size for place in range(length)] for length in (5, 3)]
    numbers = mx.array([[0] * 5 + [1] * 3])
    try:
        packed = module(mx.array([texts[0] + texts[1]]), cache=[PackedCache(numbers) for _ in module.layers])
    except (ValueError, TypeError, AttributeError, RuntimeError):
        return False
    expected = mx.concatenate([module(mx.array([text]))[0] for text in texts]).astype(mx.float32)
    return bool((mx.linalg.norm(packed[0].astype(mx.float32) - expected) <= 0.02 * mx.linalg.norm(expected)).item())


def completion_logits(module: nn.Module, prompts: PaddedPrompts, completions: mx.array, shared: bool) -> mx.array:
    """(n, C) -> (n, C, V): what the model says before each token of each completion.

    `shared`: prompts go through the model once, and the completions behind them; else they must have one length.
    """
    tokens = mx.array(prompts.tokens)
    behind = mx.array(prompts.behind)
    lengths = prompts.lengths
    last = tokens.shape[1] - 1
    full = bool((lengths == tokens.shape[1]).all())
    if not shared or not last:
        assert full
        whole: mx.array = module(mx.concatenate([tokens[behind], completions], axis=1)[:, :-1])
        return whole[:, last:]
    ends = mx.array((lengths - 1)[prompts.behind], mx.int32)  # (n,)
    one = full and len(lengths) == 1
    caches = [PromptCache(None if one else behind, None if full else ends) for _ in module.layers]
    module(tokens[:, :-1], cache=caches)  # its logits are never computed
    logits: mx.array = module(
        mx.concatenate([tokens[behind, ends][:, None], completions[:, :-1]], axis=1), cache=caches
    )
    return logits


def can_share_prompts(module: nn.Module, vocab_size: int, lengths: Sequence[int]) -> bool:
    """Whether a model's completions may be computed behind prompts of such lengths: all its state is keys and values,
    by the look of it and by trying."""
    if not all(type(cache) is KVCache for cache in make_prompt_cache(module)):
        return False
    texts = [[(7 * place + length) % vocab_size for place in range(length)] for length in lengths]
    completions = mx.array([[9, 2, 6], [5, 3, 5]]) % vocab_size
    each = [PaddedPrompts.of([text], [len(completions)]) for text in texts]
    try:
        together = PaddedPrompts.of(texts, [len(completions)] * len(texts))
        shared = completion_logits(module, together, mx.concatenate([completions] * len(texts)), True).astype(
            mx.float32
        )
    except (ValueError, TypeError, AttributeError, RuntimeError):
        return False
    expected = mx.concatenate([completion_logits(module, prompt, completions, False) for prompt in each]).astype(
        mx.float32
    )
    return bool((mx.linalg.norm(shared - expected) <= 0.02 * mx.linalg.norm(expected)).item())


def checkpoint_layers(module: nn.Module) -> None:
    """Has each block of this tree computed again when gradients are, instead of keeping what is within.

    Each gets a class of its own, made from its class, which stays as it is.
    """
    checkpointed: dict[type, type] = {}
    for layer in module.layers:
        kind = type(layer)
        if kind not in checkpointed:
            checkpointed[kind] = type(f"Checkpointed{kind.__name__}", (kind,), {"__call__": _checkpointed(kind)})
        layer.__class__ = checkpointed[kind]


def _checkpointed(kind: type) -> Callable[..., mx.array]:
    def call(self: nn.Module, x: mx.array, *args: Any, cache: Any = None, **kwargs: Any) -> mx.array:
        places = [place for place, arg in enumerate(args) if isinstance(arg, PromptCache)]
        given = [cache, *(args[place] for place in places)]
        own: PromptCache | None = next((one for one in given if isinstance(one, PromptCache)), None)
        before = own.kept if own is not None else None

        def inner(parameters: Any, x: mx.array, kept: Sequence[mx.array]) -> tuple[mx.array, ...]:
            self.update(parameters)
            inside = PromptCache() if own is None else PromptCache(own.behind, own.lengths)
            if kept:
                inside.keep(kept[0], kept[1])
            passed = [inside if place in places else arg for place, arg in enumerate(args)]
            more = kwargs if cache is None else {**kwargs, "cache": inside if cache is own else cache}
            output = kind.__call__(self, x, *passed, **more)
            return (output, *inside.kept) if own is not None and inside.kept is not None and not kept else (output,)

        parameters = self.trainable_parameters()
        outputs = mx.checkpoint(inner)(parameters, x, list(before or ()))
        self.update(parameters)
        if own is not None and before is None and len(outputs) == 3:
            own.keep(outputs[1], outputs[2])
        return outputs[0]

    return call


SCORES = 3  # arrays of attention's scores that a block's backward pass holds, beside one for each block in between


class TrainableModel:
    """A shared tree whose chosen layers have LoRA parameters."""

    def __init__(self, model: LanguageModel, lora: LoRAConfig, *, checkpointing: bool | None = False) -> None:
        """`checkpointing`: whether blocks are computed again in a backward pass; None: as the device has it."""
        self.lora = lora
        if checkpointing is None:
            checkpointing = this_device().recomputes and not lora.dropout
        heads = int(model.config.get("num_attention_heads") or 0)
        layers = 1 if checkpointing else len(model.module.layers)
        # Bytes that a token and one that it attends to take in a backward pass; 0 where no scores are kept.
        self.score_bytes = 0 if this_device().fused_gradient else (layers + SCORES) * heads * 4
        self.module = shared_tree(model)
        self.dtype = _dtype(self.module)
        self.shares_prompts = can_share_prompts(self.module, model.vocab_size, [5])
        self.mixes_prompts = self.shares_prompts and can_share_prompts(self.module, model.vocab_size, [3, 5])
        add_lora(self.module, lora, model.name)
        self.module.eval()
        if checkpointing:
            checkpoint_layers(self.module)

    @contextlib.contextmanager
    def dropping_out(self, drops: bool = True) -> Iterator[None]:
        """Has passes within it leave inputs of the adapter out, where it has a dropout."""
        if not (drops and self.lora.dropout):
            yield
            return
        self.module.train()
        try:
            yield
        finally:
            self.module.eval()

    def parameters(self) -> dict[str, mx.array]:
        """Returns what learns, by name."""
        return dict(tree_flatten(self.module.trainable_parameters()))

    def set_parameters(self, parameters: dict[str, mx.array]) -> None:
        self.module.update(tree_unflatten(list(parameters.items())))

    def parameters_of(self, adapter: Adapter) -> dict[str, mx.array]:
        """An adapter's, to go on from: it must have the very layers and the rank that learn here."""
        own = self.parameters()
        theirs = dict[str, mx.array]()
        for path, part in adapter.parts.items():
            arrays = {"lora_a": part.a.T, "lora_b": part.b.T / self.lora.scale, "m": part.m}
            theirs |= {f"{path}.{name}": mx.array(one) for name, one in arrays.items() if one is not None}
        missing = sorted(own.keys() - theirs.keys())
        other = sorted(theirs.keys() - own.keys())
        if missing or other:
            raise ConfigError(
                f"the adapter to go on from has other layers: {missing[0]} is missing"
                if missing
                else f"the adapter to go on from has {other[0]}, which does not learn: give the same "
                "--lora-target-modules, --lora-layers and --lora-dora"
            )
        wrong = next((name for name in own if own[name].shape != theirs[name].shape), None)
        if wrong is not None:
            raise ConfigError(
                f"the adapter to go on from has {wrong} of shape {theirs[wrong].shape}, and {own[wrong].shape} learns: "
                f"give --lora-rank {adapter.rank}"
            )
        return {name: theirs[name].astype(mx.float32) for name in own}

    def adapter(self) -> Adapter:
        """The parameters as they are now, to be published. Waits for them."""
        learning = {
            path: layer
            for path, layer in self.module.named_modules()
            if isinstance(layer, (LoRALinear, DoRALinear, LoRAEmbedding, DoRAEmbedding))
        }
        arrays = {
            f"{path}.{name}": layer[name].astype(mx.float32)
            for path, layer in learning.items()
            for name in ("lora_a", "lora_b", "m")
            if name in layer
        }
        stacks = Stacks(arrays)  # brought over together: each on its own would wait for the device
        host_arrays = stacks.split({name: to_numpy(stack) for name, stack in stacks.join(arrays).items()})
        parts = {}
        for path, layer in learning.items():
            a = host_arrays[f"{path}.lora_a"]
            b = host_arrays[f"{path}.lora_b"]
            m = host_arrays.get(f"{path}.m")
            if isinstance(layer, (LoRAEmbedding, DoRAEmbedding)):
                parts[path] = Part(np.ascontiguousarray(b), np.ascontiguousarray(self.lora.scale * a), m)
            else:
                parts[path] = Part(np.ascontiguousarray(a.T), np.ascontiguousarray(self.lora.scale * b.T), m)
        return Adapter(parts)


class Stacks:
    """Arrays of one shape as one: what an update does to every one of them takes a few operations, not a few each."""

    def __init__(self, arrays: Mapping[str, mx.array]) -> None:
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, array in arrays.items():
            by_shape.setdefault(array.shape, []).append(name)
        self.members = {f"stack{number}": names for number, names in enumerate(by_shape.values())}

    def join(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {stack: mx.stack([arrays[name] for name in names]) for stack, names in self.members.items()}

    def split(self, stacks: Mapping[str, Any]) -> dict[str, Any]:
        """MLX's or NumPy's: nothing is copied."""
        return {name: stacks[stack][i] for stack, names in self.members.items() for i, name in enumerate(names)}

    def paths(self, path: str) -> list[str]:
        """Returns the paths of what somebody keeps for a stack (its name, a dot, a word), by members; else the path."""
        stack, _, word = path.partition(".")
        return [f"{name}.{word}" for name in self.members.get(stack, ())] or [path]

    def unstack(self, path: str, array: Any) -> dict[str, Any]:
        """Such a thing, by the paths of the members."""
        paths = self.paths(path)
        return {path: array} if paths == [path] else dict(zip(paths, array, strict=True))

    def together(self, path: str, arrays: Mapping[str, Any]) -> Any:
        """NumPy's, the other way."""
        paths = self.paths(path)
        return arrays[path] if paths == [path] else np.stack([arrays[one] for one in paths])


def _dtype(module: nn.Module) -> mx.Dtype:
    """Returns the precision a model computes in: that of its norms, or else of anything that is no packed integer."""
    arrays = [array for _, array in tree_flatten(module.parameters()) if mx.issubdtype(array.dtype, mx.floating)]
    dtype: mx.Dtype = min(arrays, key=lambda array: array.ndim).dtype
    return dtype


def add_lora(module: nn.Module, lora: LoRAConfig, model: str) -> None:
    """Gives the layers that the config names parameters of their own. `model`: its name, for errors."""
    within = {path for block in module.layers for path, layer in block.named_modules() if _is_linear(layer)}
    names = {path.rsplit(".", 1)[-1] for path in within}
    head = _is_linear(module.get(HEAD))
    known = [*sorted(names), *([HEAD] if head else []), ALL_LINEAR]
    for target in lora.target_modules:
        if target not in known:
            tied = f", and its output head is its embedding, so there is no {HEAD}" if target == HEAD else ""
            raise ModelLoadError(
                f"{model} has no layer called {target}{tied}: --lora-target-modules may name {', '.join(known)}"
                + nearest(target, known)
            )
    everything = ALL_LINEAR in lora.target_modules
    keys = {path for path in within if everything or path.rsplit(".", 1)[-1] in lora.target_modules}
    if keys:
        parameters = {"rank": lora.rank, "scale": lora.scale, "dropout": lora.dropout, "keys": keys}
        count = min(lora.layers or len(module.layers), len(module.layers))
        linear_to_lora_layers(module, count, parameters, use_dora=lora.dora)
    if HEAD in lora.target_modules:
        kind = DoRALinear if lora.dora else LoRALinear
        module[HEAD] = kind.from_base(module[HEAD], r=lora.rank, scale=lora.scale, dropout=lora.dropout)


def _is_linear(layer: object) -> bool:
    return isinstance(layer, (nn.Linear, nn.QuantizedLinear))
