"""`MediaLoader`: from the URL in a message to the pixels of an image, off the event loop."""

import asyncio
import base64
import binascii
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.runtime.client import ImageReader
from mlx_parallm.server.call import ImageSource
from mlx_parallm.server.media.decode import decode
from mlx_parallm.server.media.fetch import Fetcher
from mlx_parallm.types import ImageInput

MAX_IMAGES = 32  # of one request
DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?P<more>(?:;[^;,]*)*),", re.IGNORECASE)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MediaLoader:
    fetcher: Fetcher
    local_path: Path | None  # the folder that file URLs may point into; None: they may not
    threads: ThreadPoolExecutor

    @classmethod
    def of(cls, allowed_hosts: Sequence[str] = (), local_path: str | None = None) -> "MediaLoader":
        folder = None if local_path is None else Path(local_path).expanduser().resolve()
        return cls(Fetcher(allowed_hosts), folder, ThreadPoolExecutor(2, thread_name_prefix="media"))

    async def read(self, sources: Sequence[ImageSource], reader: ImageReader) -> list[ImageInput]:
        """All images of a request as its model takes them; what is wrong with one is said of its place in the body."""
        if len(sources) > MAX_IMAGES:
            param = sources[MAX_IMAGES].param
            raise InvalidRequestError(f"{len(sources)} images, and at most {MAX_IMAGES} are taken", param=param)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._read_safely(source, reader)) for source in sources]
        found = [task.result() for task in tasks]
        for one in found:
            if isinstance(one, InvalidRequestError):
                raise one
        return [one for one in found if isinstance(one, ImageInput)]

    async def _read_safely(self, source: ImageSource, reader: ImageReader) -> ImageInput | InvalidRequestError:
        try:
            data = await self._bytes(source.url)
            return await self._run(lambda: reader.read(decode(data)))
        except InvalidRequestError as error:
            return InvalidRequestError(f"{source.param}: {error.message}", param=source.param, code="invalid_image")

    async def _bytes(self, url: str) -> bytes:
        scheme = url[:20].partition(":")[0].strip().lower()
        if scheme == "data":
            return await self._run(lambda: data_of(url))
        if scheme == "file":
            return await self._run(lambda: self._file(url))
        return await self.fetcher.fetch(url)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def _file(self, url: str) -> bytes:
        if self.local_path is None:
            raise InvalidRequestError("file URLs are not served here (--allowed-local-media-path allows a folder)")
        parts = urlsplit(url)
        refusal = InvalidRequestError("there is no such file in the folder that file URLs may point into")
        if parts.netloc not in ("", "localhost"):
            raise refusal
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            if not path.is_relative_to(self.local_path) or not path.is_file():
                raise refusal
            with path.open("rb") as file:
                data = file.read(self.fetcher.max_bytes + 1)
        except (OSError, RuntimeError, ValueError) as error:  # no such file, links in a circle, a zero byte
            raise refusal from error
        if len(data) > self.fetcher.max_bytes:
            raise InvalidRequestError(f"the image has more than {self.fetcher.max_bytes:,} bytes")
        return data


def data_of(url: str) -> bytes:
    head = DATA_URL.match(url[:200])
    if head is None:
        raise InvalidRequestError("the data URL is wrong: expected data:image/png;base64,…")
    kind = head["type"].strip().lower()
    if not kind.startswith("image/"):
        raise InvalidRequestError(f"the data URL is of type {kind[:50] or 'text/plain'}, which is no image")
    if ";base64" not in head["more"].lower():
        raise InvalidRequestError("the data URL is not base64: expected data:image/png;base64,…")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"the data URL's base64 is wrong: {error}") from error
