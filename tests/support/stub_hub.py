"""A hub of one model, as a process of its own: the routes of the Hugging Face hub that `parallm pull` asks.

    python -m tests.support.stub_hub FOLDER

serves FOLDER as `owner/model` and prints its port. `POST /trouble` says what goes wrong from then on, `GET /trouble`
what was asked of it. Files of safetensors are large ones, with a SHA-256.
"""

import hashlib
import json
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODEL = "owner/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHUNK = 1 << 14


@dataclass
class Trouble:
    """Of large files. `cut_after`: bytes of an answer before its connection ends; `times`: how often; `how`: closed,
    reset, or stalled."""

    cut_after: int = 0
    times: int = 0
    how: str = "close"
    damage: bool = False  # another byte in the middle
    ranges: bool = True  # False: every answer is the whole file


class StubHub:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trouble = Trouble()
        self.asked: list[dict[str, str]] = []
        self.released = threading.Event()

    def files(self) -> list[str]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in files)

    def describe(self, name: str, digest_key: str) -> dict[str, Any]:
        data = (self.folder / name).read_bytes()
        found: dict[str, Any] = {"size": len(data)}
        if name.endswith(".safetensors"):
            found["lfs"] = {digest_key: hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return found

    def oid(self, name: str) -> str:
        data = (self.folder / name).read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StubHub

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.hub.trouble = Trouble(**body)
        self.hub.released.set()
        self.hub.released = threading.Event()
        self.hub.asked.clear()
        self._send(asdict(self.hub.trouble))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        if path == "/trouble":
            return self._send(hub.asked)
        wanted = {name.lower(): self.headers.get(name, "") for name in ("Range", "Accept-Encoding")}
        hub.asked.append({"method": self.command, "path": path, **wanted})
        if path.startswith(f"/api/models/{MODEL}/revision/"):
            files = [
                {"rfilename": name, "blobId": hub.oid(name), **hub.describe(name, "sha256")} for name in hub.files()
            ]
            return self._send({"id": MODEL, "modelId": MODEL, "sha": COMMIT, "siblings": files, "tags": []})
        if path.startswith(f"/api/models/{MODEL}/tree/"):
            return self._send(
                [
                    {"type": "file", "path": name, "oid": hub.oid(name), **hub.describe(name, "oid")}
                    for name in hub.files()
                ]
            )
        resolved = re.fullmatch(rf"/{MODEL}/resolve/(?:{COMMIT}|main)/(.+)", path)
        if resolved and resolved[1] in hub.files():
            return self._send_file(resolved[1])
        return self._send({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def _send(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_file(self, name: str) -> None:
        hub, data = self.hub, (self.hub.folder / name).read_bytes()
        lfs = hub.describe(name, "sha256").get("lfs")
        etag, large, total = (lfs["sha256"] if lfs else hub.oid(name)), bool(lfs), len(data)
        if large and hub.trouble.damage:
            middle = total // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        begin = int(asked[1]) if asked and hub.trouble.ranges else 0
        self.send_response(206 if asked and hub.trouble.ranges else 200)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Content-Length": str(total - begin)}
        if large:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(total)}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{total - 1}/{total}"
        for key, text in headers.items():
            self.send_header(key, text)
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(data[begin:], large)

    def _send_body(self, data: bytes, large: bool) -> None:
        trouble = self.hub.trouble
        cut = large and trouble.times > 0
        if not cut:
            self.wfile.write(data)
            return
        trouble.times -= 1
        self.wfile.write(data[: trouble.cut_after])
        self.wfile.flush()
        if trouble.how == "stall":
            self.hub.released.wait(60)
        if trouble.how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


@contextmanager
def running_hub(folder: Path) -> Iterator[str]:
    """Its URL."""
    command = [sys.executable, "-m", "tests.support.stub_hub", str(folder)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def main() -> None:
    Handler.hub = StubHub(Path(sys.argv[1]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
