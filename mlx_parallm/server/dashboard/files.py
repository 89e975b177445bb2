"""The page's own files, read once, with the headers that keep a browser from loading or running anything else."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.errors import NotFoundError

PAGE = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and answered with 304 while nothing has changed
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str
    tag: str


class PageFiles:
    def __init__(self) -> None:
        self._files: Mapping[str, PageFile] = dict(_read(files(__package__).joinpath("static"), ""))

    def respond(self, name: str, request: Request) -> Response:
        found = self._files.get(name)
        if found is None:
            raise NotFoundError(f"the dashboard has no file {name[:200]!r}")
        headers = {**HEADERS, "ETag": found.tag}
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        return Response(found.content, media_type=found.media_type, headers=headers)


def _read(folder: Traversable, prefix: str) -> Iterator[tuple[str, PageFile]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _read(entry, f"{prefix}{entry.name}/")
        elif kind := TYPES.get(entry.name[entry.name.rfind(".") :]):
            content = entry.read_bytes()
            tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
            yield f"{prefix}{entry.name}", PageFile(content, kind, tag)
