"""Calls written as a Python list of calls: `[f(a=1), g(b="x")]`."""

import ast
import re
from collections.abc import Sequence

from mlx_parallm.text.parsers.call_blocks import PYTHON_QUOTES
from mlx_parallm.text.parsers.calls import Tool, ToolCall
from mlx_parallm.text.parsers.notation import Notation
from mlx_parallm.text.parsers.values import parse_python, python_value, string_end, tool_call


def read_python(text: str, cut_off: bool, tools: Sequence[Tool]) -> list[ToolCall] | None:
    """`[f(a=1), g(b="x")]`, or a single call without the list; `f.call(…)` calls `f`, as Llama's built-in tools do."""
    text = text.strip()
    if not text.startswith("["):
        text = f"[{text}]" if not cut_off else f"[{text}"
    unfinished = False
    if cut_off:
        text, unfinished = _closed(text)
    parsed = parse_python(text)
    if not isinstance(parsed, ast.List) or not parsed.elts:
        return None
    names = {tool["function"]["name"] for tool in tools}
    try:
        found = [_python_call(node, names) for node in parsed.elts]
    except (ValueError, RecursionError):
        return None
    last = len(found) - 1
    return [
        tool_call(name, arguments, complete=not unfinished or index < last)
        for index, (name, arguments) in enumerate(found)
    ]


_PUNCTUATION = re.compile(r"""["'()\[\]{},]""")


def _closed(text: str) -> tuple[str, bool]:
    """A list that is cut off, closed after its last complete argument, and whether that leaves a call unfinished."""
    keep = 0
    depth = 0
    at = 0
    while mark := _PUNCTUATION.search(text, at):
        at = mark.end()
        if mark[0] in "\"'":
            at = string_end(text, at, mark[0])
            continue
        depth += (mark[0] in "([{") - (mark[0] in ")]}")
        if depth == 0:
            return text[:at], False
        if (mark[0] == "(" and depth == 2) or (mark[0] == ")" and depth == 1):
            keep = at
        elif mark[0] == "," and depth == 2:
            keep = mark.start()
    unfinished = depth > 1
    return f"{text[:keep]}{')' if unfinished else ''}]", unfinished


def _python_call(node: ast.expr, names: set[str]) -> tuple[str, dict[str, object]]:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("a call has a name, and so have its arguments")
    name = ast.unparse(node.func)
    base = name.removesuffix(".call")
    if name not in names and base in names:
        name = base
    arguments: dict[str, object] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments have names")
        arguments[keyword.arg] = python_value(keyword.value)
    return name, arguments


NOTATIONS = {"pythonic": Notation(read=read_python, quoting=PYTHON_QUOTES)}
