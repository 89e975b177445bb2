"""Images from URLs: which addresses may be connected to, what a fetch and a decoder take, and what they refuse."""

import asyncio
import base64
import gc
import io
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.errors import ContextLengthError, InvalidRequestError, QueueFullError
from mlx_parallm.server.generation.call import ImageSource
from mlx_parallm.server.media.addresses import is_public
from mlx_parallm.server.media.decode import MAX_SIDE, decode
from mlx_parallm.server.media.fetch import Fetcher
from mlx_parallm.server.media.media_loader import MediaLoader, data_of
from mlx_parallm.types import ImageInput

Image = pytest.importorskip("PIL.Image")

NOISE = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
PIXELS = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)

INTERNAL = [
    "127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "100.127.255.254", "0.0.0.0", "0.1.2.3", "224.0.0.1", "239.1.1.1", "255.255.255.255", "240.0.0.1",
    "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1",
    "fd12:3456::1", "ff02::1", "fec0::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.1.2.3", "::ffff:a9fe:a9fe",
    "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::169.254.169.254", "64:ff9b:1::a00:1", "2002:7f00:1::", "2002:a00:1::1",
    "2001:0:4136:e378:8000:63bf:f5ff:fffe", "", "not an address", "1.2.3", "0x7f.0.0.1",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.215.14", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", INTERNAL)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)


def encoded(kind: str, pixels: Any = PIXELS, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


class Site(BaseHTTPRequestHandler):
    hosts: list[str] = []

    def do_GET(self) -> None:
        type(self).hosts.append(self.headers["Host"])
        name, _, argument = self.path[1:].partition("/")
        getattr(self, f"_{name}")(argument)

    def _png(self, _: str) -> None:
        self._send(200, encoded("PNG"))

    def _to(self, place: str) -> None:
        self._send(302, b"", Location=base64.urlsafe_b64decode(place).decode())

    def _round(self, number: str) -> None:
        self._send(302, b"", Location=f"/round/{int(number) + 1}")

    def _status(self, number: str) -> None:
        self._send(int(number), b"no")

    def _html(self, _: str) -> None:
        self._send(200, b"<html>hello</html>", **{"Content-Type": "text/html"})

    def _large(self, _: str) -> None:
        self._send(200, b"x" * 5000)

    def _endless(self, _: str) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(100):
                self.wfile.write(b"x" * 1000)
        except OSError:
            pass

    def _chunked(self, count: str) -> None:
        """So many chunks of 500 bytes, and nothing that says how many."""
        self.protocol_version = "HTTP/1.1"
        self.close_connection = True
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for _ in range(int(count)):
                self.wfile.write(b"1f4\r\n" + b"x" * 500 + b"\r\n")
                self.wfile.flush()
                time.sleep(0.01)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            pass

    def _slow(self, _: str) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(20):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            pass

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def fetch(url: str, allowed: tuple[str, ...] = (), **options: Any) -> bytes:
    return asyncio.run(Fetcher(allowed, **options).fetch(url))


def to(url: str) -> str:
    return f"to/{base64.urlsafe_b64encode(url.encode()).decode()}"


def test_an_allowed_host_is_fetched_and_a_redirect_within_it(port: int) -> None:
    site = f"http://127.0.0.1:{port}"
    for allowed in ("127.0.0.1", f"127.0.0.1:{port}"):
        assert fetch(f"{site}/png", (allowed,)) == encoded("PNG")
        assert fetch(f"{site}/{to('/png')}", (allowed,)) == encoded("PNG")
        assert fetch(f"{site}/{to(f'{site}/png')}", (allowed,)) == encoded("PNG")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "[::1]", "[::ffff:127.0.0.1]"])
def test_internal_addresses_are_refused_however_they_are_written(port: int, host: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"no public address|can't be fetched"):
        fetch(f"http://{host}:{port}/png")


def test_a_redirect_to_an_internal_address_is_refused(port: int) -> None:
    async def resolver(host: str, port: int) -> list[str]:
        return {"images.example": ["127.0.0.1"], "inside.example": ["10.0.0.7"]}.get(host, [host])

    start = f"http://images.example:{port}"
    allowed = ("images.example",)
    assert fetch(f"{start}/png", allowed, resolver=resolver) == encoded("PNG")
    assert Site.hosts[-1] == f"images.example:{port}", "the host stays the URL's own"
    for target in (f"http://127.0.0.1:{port}/png", "http://inside.example/", "http://169.254.169.254/latest/meta-data"):
        with pytest.raises(InvalidRequestError, match="no public address"):
            fetch(f"{start}/{to(target)}", allowed, resolver=resolver)
    for target in ("file:///etc/passwd", "ftp://example.com/x", "gopher://x/"):
        with pytest.raises(InvalidRequestError, match="http or https"):
            fetch(f"{start}/{to(target)}", allowed, resolver=resolver)


def test_names_with_internal_addresses_are_refused_and_resolved_once(port: int) -> None:
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["93.184.215.14"] if len(asked) > 1 else ["127.0.0.1"]

    with pytest.raises(InvalidRequestError, match=r"rebound.example has no public address"):
        fetch(f"http://rebound.example:{port}/png", resolver=rebinding)
    assert asked == ["rebound.example"]

    async def mixed(host: str, port: int) -> list[str]:
        return ["93.184.215.14", "::ffff:10.0.0.1"]

    with pytest.raises(InvalidRequestError, match="no public address"):
        fetch("http://mixed.example/png", resolver=mixed)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("round/0", "more than 3 redirects"),
        ("status/404", "status 404"),
        ("status/500", "status 500"),
        ("status/302", "without a location"),
        ("large", "more than 2,000 bytes"),
        ("endless", "more than 2,000 bytes"),
        ("chunked/5", "more than 2,000 bytes"),
        ("slow", "within 0.3 seconds"),
    ],
)
def test_limits_of_a_fetch(port: int, path: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        fetch(f"http://127.0.0.1:{port}/{path}", ("127.0.0.1",), max_bytes=2000, seconds=0.3)


def test_chunks_up_to_the_limit_are_taken_together(port: int) -> None:
    assert fetch(f"http://127.0.0.1:{port}/chunked/4", ("127.0.0.1",), max_bytes=2000) == b"x" * 2000


@pytest.mark.parametrize(
    "url",
    ["", "nothing", "http://", "http:///x", "http://a:b@example.com/", "http://h:99999/", "http://[::1", "ftp://x/"],
)
def test_urls_that_are_wrong(url: str) -> None:
    with pytest.raises(InvalidRequestError):
        fetch(url)


def test_a_name_that_is_not_known_and_a_closed_port() -> None:
    with pytest.raises(InvalidRequestError, match="can't be resolved"):
        fetch("http://name.invalid/x.png")
    with pytest.raises(InvalidRequestError, match="can't be fetched"):
        fetch("http://127.0.0.1:1/x.png", ("127.0.0.1",))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "GIF", "JPEG"])
def test_formats(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    pixels = decode(encoded(kind, **options))
    assert pixels.shape == (6, 4, 3)
    assert pixels.dtype == np.uint8
    if kind in ("PNG", "WEBP", "BMP"):
        assert (pixels == PIXELS).all()


def test_transparency_palettes_grey_and_sixteen_bits() -> None:
    for mode in ("RGBA", "LA", "L", "P", "1", "CMYK"):
        file = io.BytesIO()
        Image.fromarray(PIXELS).convert(mode).save(file, "JPEG" if mode == "CMYK" else "PNG")
        assert decode(file.getvalue()).shape == (6, 4, 3)


def test_an_image_is_turned_as_its_exif_data_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded("PNG", exif=exif)).shape == (4, 6, 3)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def test_a_side_may_be_as_long_as_it_may_be() -> None:
    longest = np.zeros((1, MAX_SIDE, 3), np.uint8)
    assert decode(encoded("PNG", longest)).shape == (1, MAX_SIDE, 3)
    with pytest.raises(InvalidRequestError, match=f"{MAX_SIDE:,} on a side"):
        decode(encoded("PNG", np.zeros((1, MAX_SIDE + 1, 3), np.uint8)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"hello", "no known format"),
        (b"<html></html>", "no known format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"<?xml version='1.0'?><svg/>", "SVG"),
        (b"%PDF-1.7", "no known format"),
        (encoded("PNG", NOISE)[:2000], "damaged"),
        (encoded("JPEG", NOISE)[:1500], "damaged"),
        (encoded("WEBP", NOISE)[:1000], "damaged"),
        (encoded("PNG")[:40] + b"\xff" * 40, "damaged"),
        (encoded("TIFF"), "no known format"),
        (encoded("ICO"), "no known format"),
        (bomb(60000, 60000), "pixels"),
        (bomb(100_000, 1), "pixels"),
        (bomb(8000, 8000), "pixels"),
        (bomb(2000, 2000), "damaged"),
        (bomb(0, 5), "damaged|pixels|no known format"),
    ],
)
def test_images_that_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        decode(data)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:", "wrong"),
        ("data:image/png;base64", "wrong"),
        ("data:text/plain;base64,aGVsbG8=", "text/plain"),
        ("data:,hello", "text/plain"),
        ("data:image/png,hello", "not base64"),
        ("data:image/png;base64,aGVsb", "base64 is wrong"),
        ("data:image/png;base64,!!!!", "base64 is wrong"),
        ("data:image/png;base64,aGVs\u00e9", "base64 is wrong"),
    ],
)
def test_data_urls_that_are_wrong(url: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        data_of(url)


def test_data_urls() -> None:
    assert data_of("data:image/png;base64,aGVsbG8=") == b"hello"
    assert data_of("DATA:image/PNG;charset=utf-8;BASE64,aGVsbG8=") == b"hello"


class PlainReader:
    """Takes any image as eight tokens."""

    def read(self, pixels: Any) -> ImageInput:
        return ImageInput(b"", {"pixels": pixels}, [0] * 8)

    def place(self, prompt: Any, images: Any) -> Any:
        raise NotImplementedError


def source(data: bytes, number: int = 0) -> ImageSource:
    return ImageSource(f"data:image/png;base64,{base64.b64encode(data).decode()}", f"messages.0.content.{number}")


def read(loader: MediaLoader, *images: bytes, context: int = 1000) -> list[ImageInput]:
    sources = [source(data, number) for number, data in enumerate(images)]
    return asyncio.run(loader.read(sources, PlainReader(), context))


def test_several_images_and_what_is_wrong_with_one() -> None:
    loader, good = MediaLoader.of(), encoded("PNG")
    assert [image.arrays["pixels"].tolist() for image in read(loader, good, good)] == [PIXELS.tolist()] * 2
    with pytest.raises(
        InvalidRequestError, match=r"messages\.0\.content\.1: the image is of no known format"
    ) as caught:
        read(loader, good, b"none", good)
    assert (caught.value.param, caught.value.code) == ("messages.0.content.1", "invalid_image")
    with pytest.raises(InvalidRequestError, match="at most 32"):
        read(loader, *[good] * 33)
    with pytest.raises(ContextLengthError):
        read(loader, *[good] * 20, context=15)
    loader.threads.shutdown()


def test_images_of_all_requests_together_are_limited() -> None:
    loader, good = MediaLoader.of(held_bytes=4 * PIXELS.nbytes), encoded("PNG")
    held = read(loader, good, good, good, good)
    with pytest.raises(QueueFullError, match="images of other requests"):
        read(loader, good)
    del held
    gc.collect()
    assert len(read(loader, good, good, good, good)) == 4
    loader.threads.shutdown()


def test_files_in_the_allowed_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "an image.png").write_bytes(encoded("PNG"))
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "loop").symlink_to(folder / "loop")
    loader, closed = MediaLoader.of(local_path=str(folder)), MediaLoader.of()
    assert asyncio.run(loader._bytes(f"file://{folder}/an%20image.png")) == encoded("PNG")
    assert asyncio.run(loader._bytes(f"file://localhost{folder}/an%20image.png")) == encoded("PNG")
    wrong = ["link.png", "../secret.png", "%2e%2e/secret.png", "loop", "none.png", "", "a%00b"]
    for url in [
        *(f"file://{folder}/{name}" for name in wrong),
        "file:///etc/passwd",
        f"file://host{folder}/x",
        "file:",
    ]:
        with pytest.raises(InvalidRequestError, match="no such file"):
            asyncio.run(loader._bytes(url))
        with pytest.raises(InvalidRequestError, match="not served"):
            asyncio.run(closed._bytes(url))
    for one in (loader, closed):
        one.threads.shutdown()


@pytest.mark.parametrize(
    "address",
    (
        "192.0.0.8 192.0.0.9 192.0.0.255 192.88.99.1 192.175.48.1 192.31.196.1 192.52.193.1 "
        "2001:1::1 2002:808:808::1 2620:4f:8000::1 3fff::1 5f00::1 100:0:0:1::1 64:ff9b::c000:8"
    ).split(),
)
def test_what_the_registries_of_special_addresses_list_is_not_public(address: str) -> None:
    assert not is_public(address)
