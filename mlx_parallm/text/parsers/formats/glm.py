"""GLM's calls: a name, then pairs of <arg_key> and <arg_value>. Longcat has the same tags under names of its own."""

import re

from mlx_parallm.text.parsers.notation import Notation
from mlx_parallm.text.parsers.tags import NAME, Tags, tags
from mlx_parallm.text.parsers.values import ANY, typed


def stripped_value(raw: str, tag: "re.Match[str]", schema: object) -> object:
    """Reads a stripped value by its schema; without one, as whatever the text reads as."""
    return typed(raw.strip(), schema, ANY)


def argument_pairs(prefix: str) -> Tags:
    """The name stands alone before the pairs."""
    return tags(
        rf"\A\s{{0,64}}(?P<name>{NAME})\s{{0,64}}(?=<{prefix}arg_key>|\Z)",
        rf"<{prefix}arg_key>(?P<key>[^<]{{1,256}})</{prefix}arg_key>(?:\\n|\s){{0,64}}<{prefix}arg_value>",
        "",
        f"</{prefix}arg_value>",
        stripped_value,
        several=False,
    )


GLM = argument_pairs("")
LONGCAT = argument_pairs("longcat_")
NOTATIONS = {"glm47": Notation(read=GLM.read), "longcat": Notation(read=LONGCAT.read)}
