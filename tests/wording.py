"""Counts docstrings that are no sentences: those that begin with a preposition, as a sign that a verb is missing.

.venv/bin/python -m tests.wording   lists them
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mlx_parallm"
FRAGMENT = frozenset(
    "Of For With In As At By On From To Behind Until Without Among Between Over Under After Before Beside Where While "
    "Once Then Through Within Like".split()
)


def fragments() -> Iterator[tuple[str, str, str]]:
    """File, name and first sentence of functions and classes whose docstring begins with one of those words and is
    over before a comma."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = re.split(r"(?<=[.?!:;])\s", " ".join((ast.get_docstring(node) or "").split()))[0]
                if first.split(" ")[0].strip("`,.") in FRAGMENT:
                    yield str(path.relative_to(PACKAGE)), node.name, first


if __name__ == "__main__":
    for found in fragments():
        print(*found, sep=": ")  # noqa: T201
