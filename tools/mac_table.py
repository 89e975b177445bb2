"""Writes the table of docs/MACS.md from the files that `parallm doctor --selftest` wrote on Macs.

python tools/mac_table.py [FILE.json ...]       # default: all in docs/macs/
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "MACS.md"
FILES = PAGE.parent / "macs"
BEGIN, END = "<!-- table: tools/mac_table.py writes it -->\n", "<!-- end of table -->\n"
HEAD = "| machine | memory | macOS | MLX | 1 row | 8 rows | 32 rows | prefill | wrong |\n" + "|---" * 9 + "|\n"
SPEEDS = ("speed 1", "speed 8", "speed 32", "speed prefill")
FORMAT = 1


def row(report: Mapping[str, Any]) -> str:
    """Returns a machine's line of the table."""
    if report.get("selftest") != FORMAT:
        raise SystemExit("a file was not written by this version's parallm doctor --selftest")
    found = {finding["name"]: finding for finding in report["findings"]}
    system = found["platform"]["found"].split(",")[0]
    memory = found["memory"]["numbers"]["total"] / (1 << 30)
    busy = " (busy)" if {"quiet", "still quiet"} & set(report["slow"]) else ""
    speeds = [_speed(found.get(name, {}).get("numbers", {})) for name in SPEEDS]
    wrong = ", ".join(report["wrong"])
    cells = [
        found["chip"]["found"] + busy,
        f"{memory:.0f} GiB",
        system.removeprefix("macOS "),
        found["versions"]["numbers"]["mlx"],
        *speeds,
        wrong,
    ]
    return "| " + " | ".join(cells) + " |\n"


def _speed(numbers: Mapping[str, float]) -> str:
    return f"{numbers['rate']:,.0f} tok/s, {numbers['ratio']:.2f}×" if "ratio" in numbers else ""


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    return HEAD + ("".join(sorted(map(row, reports))) or "| none yet" + " |" * 9 + "\n")


def with_table(page: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """Returns the page with the table of these reports."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table(reports) + END + after


def reports_of(paths: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    for path in map(Path, paths) if paths else sorted(FILES.glob("*.json")):
        yield json.loads(path.read_text())


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), list(reports_of(sys.argv[1:]))))
