"""`MediaLoader`: from the URL in a message to the pixels of an image, off the event loop."""

import asyncio
import base64
import binascii
import re
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from mlx_parallm.errors import ContextLengthError, InvalidRequestError, QueueFullError
from mlx_parallm.runtime.client import ImageReader
from mlx_parallm.server.generation.call import ImageSource
from mlx_parallm.server.media.decode import decode
from mlx_parallm.server.media.fetch import Fetcher
from mlx_parallm.types import ImageInput

MAX_IMAGES = 32  # of one request
HELD_BYTES = 2 << 30  # of all requests that wait or run
DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?P<more>(?:;[^;,]*)*),", re.IGNORECASE)

T = TypeVar("T")


class HeldBytes:
    """How much memory the images of all requests hold, from when they are read until their requests end."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._total = 0

    def hold(self, image: ImageInput) -> ImageInput:
        size = sum(array.nbytes for array in image.arrays.values())
        with self._lock:
            if self._total and self._total + size > self.limit:
                raise QueueFullError(
                    f"the images of other requests hold {self._total:,} bytes already: try again later"
                )
            self._total += size
        weakref.finalize(image, self._release, size)
        return image

    def _release(self, size: int) -> None:
        with self._lock:
            self._total -= size


@dataclass(frozen=True, slots=True)
class MediaLoader:
    fetcher: Fetcher
    local_path: Path | None  # the folder that file URLs may point into; None: they may not
    threads: ThreadPoolExecutor
    held: HeldBytes

    @classmethod
    def of(
        cls, allowed_hosts: Sequence[str] = (), local_path: str | None = None, held_bytes: int = HELD_BYTES
    ) -> "MediaLoader":
        folder = None if local_path is None else Path(local_path).expanduser().resolve()
        threads = ThreadPoolExecutor(2, thread_name_prefix="media")
        return cls(Fetcher(allowed_hosts), folder, threads, HeldBytes(held_bytes))

    async def read(self, sources: Sequence[ImageSource], reader: ImageReader, context: int) -> list[ImageInput]:
        """All images of a request as its model takes them, unless they alone have more tokens than its context.

        What is wrong with an image is said of its place in the body.
        """
        if len(sources) > MAX_IMAGES:
            param = sources[MAX_IMAGES].param
            raise InvalidRequestError(
                f"{len(sources)} images, and at most {MAX_IMAGES} are taken", param=param, code="invalid_value"
            )
        found: dict[int, ImageInput] = {}

        async def read_one(number: int) -> None:
            data = await self._in_place(sources[number], self._bytes(sources[number].url))

            def work() -> ImageInput:
                _check_length(found.values(), context)  # before more of them are decoded in vain
                return self.held.hold(reader.read(decode(data)))

            found[number] = await self._in_place(sources[number], self._run(work))

        tasks = [asyncio.ensure_future(read_one(number)) for number in range(len(sources))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        _check_length(found.values(), context)
        return [found[number] for number in range(len(sources))]

    async def _in_place(self, source: ImageSource, work: Awaitable[T]) -> T:
        try:
            return await work
        except (ContextLengthError, QueueFullError):
            raise
        except InvalidRequestError as error:
            message = f"{source.param}: {error.message}"
            raise InvalidRequestError(message, param=source.param, code="invalid_image") from error

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


def _check_length(images: Iterable[ImageInput], context: int) -> None:
    tokens = sum(len(image.tokens) for image in list(images))
    if tokens >= context:
        raise ContextLengthError.of(context, tokens, at_least=True, param="messages")
