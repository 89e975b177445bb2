"""Values of tool arguments that a model has written as plain text: what they mean, by the tool's JSON schema."""

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mlx_parallm.text.parsers.calls import Tool, ToolCall, json_text

Schema = Mapping[str, Any]
TEXT = frozenset({"string"})
ANY: frozenset[str] = frozenset()


def parameters_of(tools: Sequence[Tool], name: str) -> Schema:
    """The schemas of a tool's parameters, by name; empty for a tool that is not known."""
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def typed(text: str, schema: object, undeclared: frozenset[str]) -> object:
    """The value that the text stands for; of a parameter without a schema, one of the types `undeclared`."""
    types = undeclared if schema is None else types_of(schema)
    if types == TEXT:
        return text
    value = literal(text)
    if isinstance(value, float) and "integer" in types and "number" not in types and value.is_integer():
        return int(value)
    return value if not types or types & _types_of_value(value) else text


def types_of(schema: object) -> frozenset[str]:
    """The JSON types that a schema names; none: any type."""
    if not isinstance(schema, Mapping):
        return ANY
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types = set(declared)
    if not types and isinstance(schema.get("enum"), list):
        types = {next(iter(sorted(_types_of_value(value)))) for value in schema["enum"]}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            types.update(*(types_of(choice) for choice in schema[key]))
    return frozenset(types)


def _types_of_value(value: object) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    names = ((float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return frozenset(name for kind, name in names if isinstance(value, kind))


def literal(text: str) -> object:
    """A value in JSON, or as Python writes it; else the text itself."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        pass
    value = parse_python(text.strip())
    try:
        return text if value is None else python_value(value)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def parse_python(text: str) -> ast.expr | None:
    """An expression, or None where the text is none."""
    with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
        try:
            return ast.parse(text, mode="eval").body
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None


_NAMES = {"true": True, "false": False, "null": None}  # JSON's, in what is Python otherwise


def python_value(node: ast.expr) -> object:
    """The value of a literal. Raises ValueError for what JSON can't hold, or what would have to be computed."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool | int | float | str)):
        return _finite(repr(node.value)) if isinstance(node.value, float) else node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): python_value(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = python_value(node.operand)
        if isinstance(value, int | float):
            return -value
    raise ValueError(f"{type(node).__name__} is no literal")


def _key(node: ast.expr | None) -> str:
    key = python_value(node) if node is not None else None
    if not isinstance(key, str):
        raise ValueError("a key is a string")
    return key


def tool_call(name: str, arguments: Mapping[str, object], *, complete: bool = True) -> ToolCall:
    """A call with these arguments. The JSON text of incomplete ones is left open, so that it can't pass for all."""
    text = json_text(arguments)
    return ToolCall(name, text if complete else text[:-1])


_STRING_PART = re.compile(r"""\\.|["']""", re.DOTALL)


def string_end(text: str, at: int, quote: str) -> int:
    """The place after the closing quote of a string that is open at `at`; the end of the text where it has none."""
    while part := _STRING_PART.search(text, at):
        at = part.end()
        if part[0] == quote:
            return at
    return len(text)
