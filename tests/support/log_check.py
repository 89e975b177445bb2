"""`pytest --check-logs FOLDER`: does any log of a server that tests start hold a key, a prompt or a path of a client's?

Servers then log all that they can (DEBUG), and each one's log is kept in the folder, with its audit log. All that this
process sends by httpx, which the Python clients use too, is written down: keys from headers, and texts and paths from
bodies and query strings. At the end of the run every log is searched for them; what is found fails the run. A path
that stands on the server's command line is the operator's own, and may be logged.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import httpx

MIN_KEY, MIN_TEXT = 6, 10  # characters; shorter ones are words that logs hold anyway
HEADERS = ("authorization", "x-api-key")


@dataclass
class LogCheck:
    folder: Path
    sent: dict[str, set[str]] = field(default_factory=lambda: {"key": set(), "prompt": set(), "path": set()})
    logs: list[tuple[Path, str]] = field(default_factory=list)  # each with its server's command line

    def note(self, request: httpx.Request) -> None:
        for name in HEADERS:
            self._add("key", request.headers.get(name, "").rpartition(" ")[2])
        for _, value in parse_qsl(request.url.query.decode(errors="replace")):
            self._add_text(value)
        with contextlib.suppress(httpx.RequestNotRead, ValueError):
            for text in strings(json.loads(request.content)):
                self._add_text(text)

    def _add_text(self, text: str) -> None:
        if re.fullmatch(r"(file://)?/[^\s]+", text):
            self._add("path", text)
        elif re.search(r"\S\s+\S", text):
            self._add("prompt", text)

    def _add(self, kind: str, text: str) -> None:
        if len(text) >= (MIN_KEY if kind == "key" else MIN_TEXT):
            self.sent[kind].add(text[:200])

    def keep(self, command: Sequence[str], log: str) -> None:
        """Called when a server has ended."""
        texts = {"server": log}
        for flag, value in pairwise(command):
            if flag == "--audit-log" and Path(value).is_file():
                texts["audit"] = Path(value).read_text(errors="replace")
        for kind, text in texts.items():
            file = self.folder / f"{len(self.logs):04}-{kind}.log"
            file.write_text(text)
            self.logs.append((file, "\n".join(command)))

    def findings(self) -> Iterator[str]:
        for file, command in self.logs:
            text = file.read_text()
            for kind, values in self.sent.items():
                for value in sorted(values):
                    # As it is, and as JSON writes it.
                    written = {value, json.dumps(value)[1:-1]}
                    own = kind == "path" and value in command
                    if not own and any(_within(text, one, kind) for one in written):
                        yield f"{file.name} has the {kind} {value[:100]!r}"

    def report(self) -> list[str]:
        """What was searched for, and what was found; both stand in findings.txt, too."""
        found = list(self.findings())
        counts = ", ".join(f"{len(values)} {kind}s" for kind, values in self.sent.items())
        summary = f"{len(self.logs)} logs of {self.lines()} lines were searched for {counts}: {len(found)} found"
        (self.folder / "findings.txt").write_text("\n".join([summary, *found]) + "\n")
        return [summary, *found]

    def lines(self) -> int:
        return sum(file.read_text().count("\n") for file, _ in self.logs)


def _within(text: str, value: str, kind: str) -> bool:
    if value not in text:
        return False
    return kind != "key" or re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def strings(value: Any) -> Iterator[str]:
    """All text in a JSON document but its keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from strings(one)


active: LogCheck | None = None  # set by conftest.py


def start(folder: Path) -> LogCheck:
    """From now on httpx notes what it sends, and `servers.py` hands over logs."""
    global active
    folder.mkdir(parents=True, exist_ok=True)
    check = active = LogCheck(folder)
    send, send_async = httpx.Client.send, httpx.AsyncClient.send

    def noting(client: httpx.Client, request: httpx.Request, **more: Any) -> httpx.Response:
        check.note(request)
        return send(client, request, **more)

    async def noting_async(client: httpx.AsyncClient, request: httpx.Request, **more: Any) -> httpx.Response:
        check.note(request)
        return await send_async(client, request, **more)

    httpx.Client.send, httpx.AsyncClient.send = noting, noting_async  # type: ignore[method-assign,assignment]
    return check
