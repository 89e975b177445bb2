"""An HTTP server that answers as it is told and keeps what it was sent, for tests of commands and clients."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Sent:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class RecordingServer:
    url: str
    answers: dict[str, Any] = field(default_factory=dict)  # by "METHOD /path": JSON, or (status, JSON or text)
    sent: list[Sent] = field(default_factory=list)

    @property
    def last(self) -> Sent:
        return self.sent[-1]


@contextlib.contextmanager
def recording_server(**answers: Any) -> Iterator[RecordingServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            headers = {name.lower(): value for name, value in self.headers.items()}
            server.sent.append(Sent(self.command, self.path, headers, body))
            found = server.answers.get(f"{self.command} {path}", (404, {"error": {"message": f"nothing at {path}"}}))
            status, content = found if isinstance(found, tuple) else (200, found)
            kind = "text/event-stream" if isinstance(content, str) and content.startswith("data:") else "text/plain"
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind if isinstance(content, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = RecordingServer(f"http://127.0.0.1:{http.server_address[1]}", dict(answers))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
