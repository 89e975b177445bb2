"""Qwen3-Coder's calls: <function=name> with a <parameter=key> for each argument."""

import re

from mlx_parallm.text.parsers.notation import Notation
from mlx_parallm.text.parsers.tags import NAME, tags
from mlx_parallm.text.parsers.values import TEXT, typed


def lines(raw: str, tag: "re.Match[str]", schema: object) -> object:
    """A value on lines of its own; text unless the schema says otherwise."""
    return typed(raw.removeprefix("\n").removesuffix("\n"), schema, TEXT)


QWEN = tags(
    rf"<function=\s{{0,8}}(?P<name>{NAME})(?:\s{{0,8}}>|\n)",
    r"<parameter=\s{0,8}(?P<key>[^\s<>]{1,256})\s{0,8}>",
    "</function>",
    "</parameter>",
    lines,
)
NOTATIONS = {"qwen3_coder": Notation(read=QWEN.read)}
