"""The examples of README.md and docs/*.md: finds them, and compares what they print with what the page says.

A fenced block in bash or python is an example. A block that begins with `# NAME.yaml` or `# NAME.py` is a file of that
name, which other examples use. A json or text block is what the example before it prints: `…` stands for any text,
numbers stand for any number, a list of numbers for any such list (sampled answers may end early), and an object may
have more keys than are shown. Blocks without a language are prose.

A comment directly before a block says that it is different: `<!-- not run: REASON -->`, `<!-- slow: REASON -->`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
LANGUAGES = {"sh": "bash", "bash": "bash", "python": "python", "yaml": "yaml", "json": "json", "text": "text"}
FENCE = re.compile(r"^\s*```(\w*)\s*$")
HEADING = re.compile(r"^#{1,6} (.+)$")
MARKER = re.compile(r"^\s*<!--\s*(not run|slow)\b:?\s*(.*?)\s*-->\s*$")
FILE_NAME = re.compile(r"# ([\w.-]+\.(?:py|yaml))")
SERVE = re.compile(r"(\w+=\S+ )*(make serve\b|(\.venv/bin/)?(mlx_parallm_serve|parallm serve)\b)")


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int  # of its first fence
    language: str
    text: str
    marker: str = ""  # "not run" or "slow"
    reason: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file_name(self) -> str | None:
        found = FILE_NAME.fullmatch(self.text.partition("\n")[0])
        return found[1] if found else None

    @property
    def serves(self) -> bool:
        return self.language == "bash" and SERVE.match(self.command) is not None and self.marker != "not run"

    @property
    def command(self) -> str:
        """Without lines that are only comments."""
        return "\n".join(line for line in self.text.splitlines() if not line.startswith("#")).strip()

    @property
    def is_output(self) -> bool:
        return self.language in ("json", "text")

    @property
    def runs(self) -> bool:
        return not self.is_output and self.file_name is None and self.marker != "not run"


@dataclass(slots=True)
class Section:
    """What stands under one heading, with the server that an earlier section of the page has started."""

    page: str
    title: str
    server: Block | None
    blocks: list[Block] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return any(block.runs for block in self.blocks)

    @property
    def is_slow(self) -> bool:
        return any(block.marker == "slow" for block in self.blocks)


def sections(page: str) -> list[Section]:
    found = [Section(page, "", None)]
    for item in _items(page, (ROOT / page).read_text().splitlines()):
        if isinstance(item, str):
            started = [block for block in found[-1].blocks if block.serves]
            found.append(Section(page, item, started[-1] if started else found[-1].server))
        else:
            found[-1].blocks.append(item)
    return found


def _items(page: str, lines: list[str]) -> Iterator[str | Block]:
    """Headings and blocks, in order."""
    number = 0
    while number < len(lines):
        if (fence := FENCE.match(lines[number])) is not None:
            end = next(other for other in range(number + 1, len(lines)) if FENCE.match(lines[other]))
            if fence[1] in LANGUAGES:
                yield _block(page, lines, number, end, LANGUAGES[fence[1]])
            number = end
        elif (heading := HEADING.match(lines[number])) is not None:
            yield heading[1]
        number += 1


def _block(page: str, lines: list[str], begin: int, end: int, language: str) -> Block:
    marker = MARKER.match(lines[begin - 1]) if begin else None
    kind, reason = (marker[1], marker[2]) if marker else ("", "")
    return Block(page, begin + 1, language, "\n".join(lines[begin + 1 : end]), kind, reason)


def difference(expected: Block, output: str) -> str:
    """What an example printed otherwise than its page says; empty: nothing."""
    if expected.language == "json":
        found = list(_documents(output))
        return _unlike(json.loads(expected.text), found[-1], "") if found else "it printed no JSON"
    missing = [line for line in expected.text.splitlines() if not re.search(_pattern(line), output)]
    return f"it did not print {missing[0]!r}" if missing else ""


def _documents(output: str) -> Iterator[Any]:
    """Objects and lists that were printed, one behind another or among other lines."""
    decoder, place = json.JSONDecoder(), 0
    while (begin := re.compile(r"[{\[]").search(output, place)) is not None:
        try:
            value, place = decoder.raw_decode(output, begin.start())
            yield value
        except ValueError:
            place = begin.start() + 1


def _unlike(expected: Any, found: Any, path: str) -> str:
    match expected:
        case "…":
            return ""
        case dict():
            if not isinstance(found, dict) or not expected.keys() <= found.keys():
                return f"{path or 'the answer'}: expected the keys {list(expected)}, found {found!r}"
            several = (_unlike(value, found[key], f"{path}.{key}") for key, value in expected.items())
        case list() if expected and all(map(_is_number, expected)):
            same = isinstance(found, list) and found and all(map(_is_number, found))
            return "" if same else f"{path}: expected a list of numbers, found {found!r}"
        case list():
            if not isinstance(found, list) or len(found) < len(expected):
                return f"{path}: expected {expected!r}, found {found!r}"
            several = (_unlike(one, found[place], f"{path}[{place}]") for place, one in enumerate(expected))
        case str():
            same = isinstance(found, str) and re.fullmatch(_pattern(expected), found, re.DOTALL)
            return "" if same else f"{path}: expected {expected!r}, found {found!r}"
        case bool() | None:
            return "" if found is expected else f"{path}: expected {expected!r}, found {found!r}"
        case _:
            return "" if _is_number(found) else f"{path}: expected a number, found {found!r}"
    return next(filter(None, several), "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _pattern(text: str) -> str:
    return ".*".join(map(re.escape, text.split("…")))
