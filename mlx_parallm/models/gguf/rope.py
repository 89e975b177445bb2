"""Rotary position embedding of a GGUF file in mlx-lm's words: what is scaled, and by how much. Called by `convert`."""

import math
from typing import Any

from mlx_parallm.models.gguf.header import Header

LINEAR = "linear"
YARN = "yarn"
LLAMA3 = "llama3"
LONGROPE = "longrope"
# Scalings that llama.cpp stores as tensors of divisors
DIVISORS = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
TENSORS = {LLAMA3: (DIVISORS,), LONGROPE: (LONG, SHORT)}


def rope_scaling(header: Header, supported: tuple[str, ...]) -> dict[str, Any] | None:
    """config.json's rope_scaling. `supported`: the kinds that mlx-lm's class of this architecture knows."""
    if LLAMA3 in supported and DIVISORS in header.tensors:
        return _llama3(header)
    if LONGROPE in supported and LONG in header.tensors:
        return _longrope(header)
    kind = header.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in supported or kind in TENSORS:
        known = " and ".join(kind for kind in supported if kind not in TENSORS) or "none"
        raise header.error(
            f"rope scaling {kind!r} is not supported for {header.architecture}, only {known}: serve the model's "
            "folder from the Hugging Face hub instead"
        )
    scaling: dict[str, Any] = named(kind) | {"factor": header.number("rope.scaling.factor")}
    return scaling | _yarn(header) if kind == YARN else scaling


def named(kind: str) -> dict[str, str]:
    """mlx-lm reads the older name, its Phi-3 that one alone; transformers the newer."""
    return {"type": kind, "rope_type": kind}


def _yarn(header: Header) -> dict[str, Any]:
    keys = {
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
        "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    }
    values = {name: header.number(key, math.nan) for name, key in keys.items()}
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    return {"original_max_position_embeddings": header.get("rope.scaling.original_context_length")} | known


def _llama3(header: Header) -> dict[str, Any]:
    """Llama 3.1's scaling, which llama.cpp stores as divisors. All published models share three of its four
    numbers; the fourth is the largest divisor, and the rest must then follow."""
    stored = header.floats(DIVISORS)
    low = 1.0
    high = 4.0
    original = 8192
    factor = max(stored)
    base = header.get("rope.freq_base", 10000.0)
    for index, divisor in enumerate(stored):
        frequency = base ** (2 * index / header.head_dim)
        turns = original / (2 * math.pi * frequency)  # of this frequency over the old context
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(divisor, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-3):
            raise header.error(f"{DIVISORS} is not Llama 3's rope scaling, the only one supported that is stored so")
    return {
        **named(LLAMA3),
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _longrope(header: Header) -> dict[str, Any]:
    """Phi-3's: divisors for short and for long contexts, and a factor on queries and keys, which mlx-lm computes."""
    if SHORT not in header.tensors:
        raise header.error(f"the tensor {SHORT} is missing, though {LONG} is there")
    context = header.get("context_length")
    original = header.get("rope.scaling.original_context_length")
    expected = math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0
    stored = header.number("rope.scaling.attn_factor", expected)
    if not math.isclose(stored, expected, rel_tol=1e-3):
        raise header.error(
            f"rope.scaling.attn_factor is {stored}, and only longrope's own is supported: {expected:.7g} for a "
            f"context of {original} tokens that was extended to {context}"
        )
    return {
        **named(LONGROPE),
        "long_factor": header.floats(LONG),
        "short_factor": header.floats(SHORT),
        "original_max_position_embeddings": original,
    }
