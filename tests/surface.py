"""What users see, as lines of text: commands and flags, options, routes with their fields, metrics.

`tests/golden/surface/` holds them, so that whoever changes a name, a default or a bound sees it. After a change that is
meant, write them anew: WRITE_SURFACE=1 .venv/bin/python -m pytest tests/unit/test_surface.py tests/e2e/test_surface.py
"""

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.config.options import options_of
from mlx_parallm.sampling_params import INT64, PARAMETERS, Bounds

FOLDER = Path(__file__).parent / "golden" / "surface"
GUIDE = Path(__file__).parents[1] / "docs" / "GUIDE.md"
OWN_FIELDS = ("grammar", "processed_logprobs")  # of SamplingParams: clients ask for these by fields of their own
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength", "maxLength")
BOUNDS += ("minItems", "maxItems")


def check(name: str, lines: Iterable[str], more: bool = False) -> None:
    """Compares lines with those of a golden file, or writes that. `more`: there may be others."""
    file, found = FOLDER / f"{name}.txt", list(lines)
    if os.environ.get("WRITE_SURFACE"):
        FOLDER.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(found) + "\n")
    known = file.read_text().splitlines()
    gone = [line for line in known if line not in found]
    new = [line for line in found if line not in known and not more]
    assert (gone, new) == ([], []), f"{file}: see tests/surface.py for how to write it anew"


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    """A line for each argument of a command and of those within it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner, command in action.choices.items():
                yield from commands(command, f"{name} {inner}")
        elif not isinstance(action, argparse._HelpAction | argparse._VersionAction):
            flags = "/".join(action.option_strings) or action.dest
            kind = type(action).__name__.strip("_").removesuffix("Action").lower()
            choices = "" if action.choices is None else f" of {list(action.choices)}"
            need = " required" if action.required else ""
            yield f"{name} {flags}: {kind} {action.dest} nargs={action.nargs} default={action.default!r}{choices}{need}"


def options(kind: type) -> Iterator[str]:
    for one in options_of(kind):
        keys = ", ".join([f"{one.section}.{one.key}", *one.other_keys])
        parse = getattr(one.parse, "__name__", type(one.parse).__name__)
        choices = "" if one.choices is None else f" of {list(one.choices)}"
        yield f"{one.flag} [{keys}] {list(one.aliases)}: {parse} default={one.default!r}{choices}"


def routes(document: Mapping[str, Any]) -> Iterator[str]:
    """A line for each parameter and each field of a body or an answer."""
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            answers = [f"{code} {sorted(answer.get('content', {}))}" for code, answer in route["responses"].items()]
            body = sorted(route.get("requestBody", {}).get("content", {}))
            yield f"{method.upper()} {path} {route['tags']} {body} -> {', '.join(answers)}"
            for one in route.get("parameters", ()):
                yield f"{method.upper()} {path} {one['in']} {one['name']}: {_shape(one['schema'])}"
    for name, schema in document["components"]["schemas"].items():
        for field, inner in schema.get("properties", {}).items():
            need = "" if field not in schema.get("required", ()) else " required"
            yield f"{name}.{field}: {_shape(inner)}{need}"
        if "properties" not in schema:
            yield f"{name}: {_shape(schema)}"


def _shape(schema: Mapping[str, Any]) -> str:
    """A type with its bounds."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " | ".join(map(_shape, schema[several])) + _default(schema)
    found = str(schema.get("type", "any"))
    for name in ("enum", "const"):
        found += f" {schema[name]}" if name in schema else ""
    found += "".join(f" {name}={schema[name]}" for name in BOUNDS if name in schema)
    if isinstance(schema.get("items"), Mapping):
        found += f" of ({_shape(schema['items'])})"
    if isinstance(schema.get("additionalProperties"), Mapping):
        found += f" to ({_shape(schema['additionalProperties'])})"
    return found + _default(schema)


def _default(schema: Mapping[str, Any]) -> str:
    return f" default={schema['default']!r}" if "default" in schema else ""


def sampling_parameters() -> Iterator[str]:
    """The lines of a table for docs/GUIDE.md."""
    yield "| parameter | default | allowed | meaning |"
    yield "|---|---|---|---|"
    for name, one in PARAMETERS.items():
        if name not in OWN_FIELDS:
            default = "none" if one.default in (None, (), {}) else str(one.default).lower()
            yield f"| `{name}` | {default} | {_allowed(one.bounds)} | {one.meaning} |"


def _allowed(bounds: Bounds | None) -> str:
    if bounds is None or abs(bounds.low) >= INT64:
        return ""
    return f"{bounds.low:g} or more" if bounds.high == INT64 else str(bounds)


def check_table(file: Path, marker: str, lines: Iterable[str]) -> None:
    """Compares a table with the one behind a marker in a file, or writes that."""
    before, mark, rest = file.read_text().partition(f"<!-- {marker}")
    comment, _, behind = rest.partition("\n")
    known, found = behind.lstrip("\n").partition("\n\n")[0], "\n".join(lines)
    if os.environ.get("WRITE_SURFACE"):
        after = behind.lstrip("\n").removeprefix(known if known.startswith("|") else "")
        file.write_text(f"{before}{mark}{comment}\n\n{found}\n\n{after.lstrip()}")
        return
    assert known == found, f"{file}: see tests/surface.py for how to write it anew"


def metrics(exposed: str) -> Iterator[str]:
    """Names, kinds and meanings."""
    yield from (line for line in exposed.splitlines() if line.startswith("# "))
