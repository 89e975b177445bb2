"""Pairs of texts that a reward model learns from, read from a file. Any thread; no MLX."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.text.prompts import Conversation, Message, Prompts


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts as tokens, the better one first."""

    chosen: list[int]
    rejected: list[int]


def read_pairs(path: Path | str, prompts: Prompts) -> list[Pair]:
    """JSON lines: `prompt`, `chosen` and `rejected`, or the last two alone as whole conversations.

    A prompt and its completions are strings or lists of messages.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    pairs = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                pairs.append(_pair(line, prompts))
            except (ValueError, TypeError, InvalidRequestError) as error:
                raise ConfigError(f"line {number} of {path} is no pair: {error}") from error
    if not pairs:
        raise ConfigError(f"{path} has no pairs in it")
    return pairs


def rendered(prompts: Prompts, messages: Sequence[Message]) -> list[int]:
    """A whole conversation as a reward model sees it."""
    return prompts.chat(Conversation(list(messages), add_generation_prompt=False)).tokens


def _pair(line: str, prompts: Prompts) -> Pair:
    entry = json.loads(line)
    if not isinstance(entry, dict):
        raise ValueError("it is not an object")
    before = _messages(entry, "prompt", "user") if "prompt" in entry else []
    chosen, rejected = (
        rendered(prompts, before + _messages(entry, name, "assistant" if before else None))
        for name in ("chosen", "rejected")
    )
    return Pair(chosen=chosen, rejected=rejected)


def _messages(entry: Mapping[str, Any], name: str, role: str | None) -> list[Message]:
    """`role`: of a message that is only a string."""
    if name not in entry:
        raise ValueError(f"it has no {name!r}")
    value = entry[name]
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        wanted = "messages" if role is None else "a string or messages"
        raise ValueError(f"{name!r} must be {wanted}{' where there is no prompt' if role is None else ''}")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"a message in {name!r} has no role or no content, as strings")
    return value
