"""Muse Spark's calls: <atem:invoke name="…"> with an <atem:parameter name="…"> for each argument."""

import re

from mlx_parallm.text.parsers.notation import Notation
from mlx_parallm.text.parsers.tags import tags
from mlx_parallm.text.parsers.values import ANY, literal, typed


def json_value(raw: str, tag: "re.Match[str]", schema: object) -> object:
    """JSON where it is JSON, strings among it, else text."""
    value = literal(raw.strip())
    return value if isinstance(value, str) else typed(raw.strip(), schema, ANY)


MUSE = tags(
    r'<atem:invoke\b[^<>]{0,256}?\bname="(?P<name>[^"<>]{1,128})"[^<>]{0,256}>',
    r'<atem:parameter\b[^<>]{0,256}?\bname="(?P<key>[^"<>]{1,256})"[^<>]{0,256}>',
    "</atem:invoke>",
    "</atem:parameter>",
    json_value,
)
NOTATIONS = {"muse_spark": Notation(read=MUSE.read)}
