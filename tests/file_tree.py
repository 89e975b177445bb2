"""docs/FILES.md: every file of the package with the first sentence of its docstring.

WRITE_SURFACE=1 .venv/bin/python -m pytest tests/unit/test_structure.py   writes it anew
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mlx_parallm"
FILES = ROOT / "docs" / "FILES.md"
HEAD = """# Files

Made of the modules' docstrings by `tests/file_tree.py`; ARCHITECTURE.md says how they work together.
"""


def check() -> None:
    """Compares the page with the docstrings, or writes it."""
    found = f"{HEAD}\n" + "\n".join(lines()) + "\n"
    if os.environ.get("WRITE_SURFACE"):
        FILES.write_text(found)
    assert FILES.read_text() == found, f"{FILES}: see tests/file_tree.py for how to write it anew"


def lines() -> Iterator[str]:
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    for folder in folders:
        yield f"## {folder.relative_to(ROOT)}/"
        yield ""
        if about := _first_sentence(folder / "__init__.py"):
            yield about
            yield ""
        for path in sorted(folder.glob("*.py")):
            if path.name != "__init__.py":
                yield f"- `{path.name}`: {_first_sentence(path)}"
        yield ""


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) if path.exists() else None
    paragraph = " ".join((text or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.?!])\s+(?=[A-Z`])", paragraph, maxsplit=1)[0]
