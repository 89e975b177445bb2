"""The page's own files, read once, with the headers that keep a browser from loading or running anything else."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.errors import NotFoundError
from mlx_parallm.sampling_params import ADJUSTABLE, INT64, PARAMETERS

PAGE = "index.html"
PARAMETERS_FILE = "sampling.js"  # no file of the package: it is made of the declared parameters
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
        self._files: Mapping[str, PageFile] = {
            **dict(_read(files(__package__).joinpath("static"), "")),
            PARAMETERS_FILE: _file(sampling_script().encode(), TYPES[".js"]),
        }

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
            yield f"{prefix}{entry.name}", _file(entry.read_bytes(), kind)


def _file(content: bytes, media_type: str) -> PageFile:
    return PageFile(content, media_type, f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"')


def sampling_script() -> str:
    """A module of the page with the numbers that people set for sampling, their bounds and meanings."""
    described = []
    for name in ADJUSTABLE:
        one = PARAMETERS[name]
        assert one.bounds is not None
        step = 1 if one.whole else 0.01
        limits = {"min": one.bounds.low + step if one.bounds.above else max(one.bounds.low, -1), "step": step}
        if one.bounds.high < INT64:
            limits["max"] = one.bounds.high - step if one.bounds.below else one.bounds.high
        described.append({"name": name, "meaning": one.meaning, "initial": one.default, "limits": limits})
    return f"// What the server declares in sampling_params.py.\nexport const PARAMETERS = {json.dumps(described)};\n"
