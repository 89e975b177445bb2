"""Mistral's calls: [TOOL_CALLS] with a list of JSON objects, or name[ARGS]{…}."""

from mlx_parallm.text.parsers.call_blocks import JSON_HEAD, NAME, Head
from mlx_parallm.text.parsers.notation import Notation

NOTATIONS = {
    "mistral": Notation(
        heads=(JSON_HEAD, Head(rf"{NAME}(?:\[CALL_ID\](?P<id>\w{{1,64}}))?\s{{0,32}}\[ARGS\]")),
        fillers=("[TOOL_CALLS]",),
    ),
}
