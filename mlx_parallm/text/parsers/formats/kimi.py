"""Kimi's calls: K2 writes JSON behind a head with the name and a number, K3 tags with declared types."""

import re

from mlx_parallm.text.parsers.call_blocks import JSON_HEAD, Head
from mlx_parallm.text.parsers.notation import Notation
from mlx_parallm.text.parsers.tags import tags
from mlx_parallm.text.parsers.values import literal


def declared_value(raw: str, tag: "re.Match[str]", schema: object) -> object:
    """The tag says whether the value is a string; a tag without a key holds all arguments as JSON."""
    declared = _TYPE.search(tag[0])
    return raw if tag["key"] and (declared is None or declared[1] == "string") else literal(raw)


_TYPE = re.compile(r'\btype="(\w{1,32})"')


KIMI_K3 = tags(
    r'<\|open\|>call\b[^<>]{0,256}?\btool="(?P<name>[^"<>]{1,128})"[^<>]{0,256}<\|sep\|>',
    r'<\|open\|>(?:argument\b[^<>]{0,256}?\bkey="(?P<key>[^"<>]{1,256})"|json\b)[^<>]{0,256}<\|sep\|>',
    "<|close|>call<|sep|>",
    r"<\|close\|>(?:argument|json)<\|sep\|>",
    declared_value,
)
NOTATIONS = {
    "kimi_k2": Notation(
        heads=(
            JSON_HEAD,
            Head(r"(?P<id>(?:functions\.)?(?P<name>[\w./-]{1,128}):\d{1,9})\s{0,32}<\|tool_call_argument_begin\|>"),
        ),
        fillers=("<|tool_call_begin|>", "<|tool_call_end|>"),
    ),
    "kimi_k3": Notation(read=KIMI_K3.read),
}
