"""Small models with random weights for `doctor --selftest`, and what they should say, computed the plain way."""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.host import to_numpy
from mlx_parallm.lora.adapter import Adapter
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.loader import apply_precision

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
GROUP = 64


def random_module(bits: int | None, vocab_size: int) -> nn.Module:
    """Makes a module in bfloat16, or with linear layers of so many bits; the same on every device."""
    random = np.random.default_rng(5)
    module = llama.Model(llama.ModelArgs.from_dict(CONFIG | {"vocab_size": vocab_size}))

    def weight(path: str, array: mx.array) -> mx.array:
        noise = random.standard_normal(array.shape).astype(np.float32)
        if array.ndim == 1:
            return mx.array(1 + 0.1 * noise).astype(mx.bfloat16)
        # Large enough that attention matters, and that two tokens are hardly ever as likely.
        gain = 1.0 if "embed" in path else (3.0 if "lm_head" in path else 1.5) / array.shape[1] ** 0.5
        return mx.array(gain * noise).astype(mx.bfloat16)

    module.update(tree_map_with_path(weight, module.parameters()))
    if bits is not None:
        nn.quantize(module, group_size=GROUP, bits=bits, class_predicate=lambda _, layer: isinstance(layer, nn.Linear))
    mx.eval(module.parameters())
    module.eval()
    return module


def random_model(bits: int | None, tokenizer: TokenizerWrapper) -> LanguageModel:
    """Makes a model to serve, in the precision in which such a one is served here."""
    vocab_size = len(tokenizer)
    module = random_module(bits, vocab_size)
    precision = apply_precision(module, "auto")
    return LanguageModel(
        name="random",
        module=module,
        tokenizer=tokenizer,
        config=CONFIG | {"vocab_size": vocab_size},
        context_length=4096,
        vocab_size=vocab_size,
        eos_token_ids=frozenset(),
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(module.parameters())),
        precision=precision,
        source="random",
    )


class Reference:
    """A random model in float32, one text at a time, without caches: what the engine's answers are held against."""

    def __init__(self, bits: int | None, vocab_size: int) -> None:
        self._module = random_module(bits, vocab_size)
        for path, layer in self._module.named_modules():
            if isinstance(layer, nn.QuantizedLinear):
                expanded = nn.Linear(1, 1, bias=False)
                scales, biases = (layer[name].astype(mx.float32) for name in ("scales", "biases"))
                expanded.weight = mx.dequantize(layer["weight"], scales, biases, group_size=GROUP, bits=layer.bits)
                _replace(self._module, path, expanded)
        self._module.update(tree_map_with_path(lambda _, array: array.astype(mx.float32), self._module.parameters()))

    def with_adapter(self, adapter: Adapter) -> "Reference":
        """Returns the same model with an adapter's products added to its weights."""
        merged = copy.copy(self)
        merged._module = copy.deepcopy(self._module)
        layers = dict(merged._module.named_modules())
        for path, part in adapter.parts.items():
            layers[path].weight = layers[path].weight + mx.array(part.b @ part.a)
        return merged

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Returns the log-probability of each token of a completion."""
        logits = self._module(mx.array([[*prompt, *completion]]))[0, len(prompt) - 1 : -1]
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        found: list[float] = to_numpy(
            mx.take_along_axis(scores, mx.array(list(completion))[:, None], axis=-1)[:, 0]
        ).tolist()
        return found


def _replace(module: nn.Module, path: str, layer: nn.Module) -> None:
    *parents, name = path.split(".")
    holder: Any = module
    for parent in parents:
        holder = holder[int(parent)] if isinstance(holder, list) else holder[parent]
    assert isinstance(holder, nn.Module)
    holder[name] = layer
