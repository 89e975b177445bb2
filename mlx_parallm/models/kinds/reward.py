"""Reward models: a decoder with a head that gives a text or a conversation one number. `classifier` loads them."""

from typing import Any

from mlx_parallm.models.kinds.classifier import is_reward_model, load

__all__ = ["load", "recognises"]


def recognises(config: dict[str, Any]) -> bool:
    return is_reward_model(config)
