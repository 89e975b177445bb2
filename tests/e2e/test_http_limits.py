"""What httptools alone would take: headers without an end. And errors of the protocol, in the shape of all others."""

import json
import socket
import threading
import time

import httpx
import pytest

from tests.support.servers import ServerProcess


def send(server: ServerProcess, *pieces: bytes) -> bytes:
    """What comes back before the connection is closed."""
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80), timeout=20) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except OSError:  # it is closed already; what was said can still be read
            pass
        answer = b""
        try:
            while data := connection.recv(65536):
                answer += data
        except ConnectionResetError:
            pass
        return answer


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: "


@pytest.mark.parametrize("begin", [GET, CHUNKED])
@pytest.mark.parametrize("piece", [b"a" * 16_000, b"b\r\nX: " * 2000])
def test_headers_have_an_end(tiny_server: ServerProcess, begin: bytes, piece: bytes) -> None:
    waits: list[float] = []
    done = threading.Event()

    def probe() -> None:
        while not done.is_set():
            begun = time.perf_counter()
            assert httpx.get(f"{tiny_server.url}/health", timeout=30).status_code == 200
            waits.append(time.perf_counter() - begun)

    prober = threading.Thread(target=probe)
    prober.start()
    answer = send(tiny_server, begin, *[piece] * 2000)
    done.set()
    prober.join()
    assert not answer or b"HTTP/1.1 431 " in answer or begin == CHUNKED, answer[:200]
    assert waits


def test_a_large_body_comes_with_its_headers(tiny_server: ServerProcess) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 2, "note": "x" * 1_000_000}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: {'h' * 60_000}\r\nContent-Type: application/json\r\n"
    )
    head += f"Content-Length: {len(body)}\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = send(tiny_server, head.encode() + body + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 2, answer[:300]


@pytest.mark.parametrize(
    "wrong",
    [
        b"nonsense\r\n\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    ],
)
def test_what_is_no_http_is_an_error_in_json(tiny_server: ServerProcess, wrong: bytes) -> None:
    head, _, body = send(tiny_server, wrong).partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400 Bad Request\r\n", b"HTTP/1.1 431 "))
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
