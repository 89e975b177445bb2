"""TCP between rank 0 and each other rank, beside MLX's own: what to do next goes one way, signs of life both ways.

A message is a JSON header with the bytes of arrays behind it; nothing in it is executed. MLX's collectives may wait
forever for a rank that has died; a connection ends with its process, and a machine that is gone sends no signs of life.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 3.5  # after which a rank counts as gone while rank 0 serves …
PATIENT_SECONDS = 60.0  # … and while it loads; rank 0 itself always: the others lose nothing by waiting
CONNECT_SECONDS = 30.0
PIECE = 1 << 20
MAX_MESSAGE = 1 << 36
SIZES = struct.Struct("!IQ")

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Message:
    name: str
    values: tuple[Any, ...]  # plain ones, as JSON has them
    arrays: tuple[Array, ...] = ()

    def encode(self) -> bytes:
        shapes = [(array.dtype.str, array.shape) for array in self.arrays]
        header = json.dumps((self.name, self.values, shapes), separators=(",", ":")).encode()
        body = b"".join(np.ascontiguousarray(array).tobytes() for array in self.arrays)
        return SIZES.pack(len(header), len(body)) + header + body


BEAT = Message("beat", ()).encode()


class Channel:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(PATIENT_SECONDS)
        self._socket = connection
        self._sending = threading.Lock()
        self._closed = threading.Event()

    def send(self, encoded: bytes) -> None:
        with self._sending:
            for start in range(0, len(encoded), PIECE):  # each in its own time: an adapter is large
                self._socket.sendall(encoded[start : start + PIECE])

    def receive(self, limit: int = MAX_MESSAGE) -> Message:
        """The next message that is not just a sign of life. OSError when the other side has gone, or is silent.

        `limit`: bytes that it may have.
        """
        while True:
            message = self._read(limit)
            if message.name != "beat":
                return message

    def beat(self) -> None:
        """Starts to send signs of life, on a thread."""
        threading.Thread(target=self._send_beats, name="signs of life", daemon=True).start()

    def set_patience(self, seconds: float) -> None:
        """Sets how many seconds of silence, from what comes next on, mean that the other side is gone."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._closed.set()
        self._socket.close()

    def _send_beats(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self.send(BEAT)
            except OSError:
                return  # whoever receives learns of it

    def _read(self, limit: int) -> Message:
        header_size, body_size = SIZES.unpack(self._read_bytes(SIZES.size))
        if header_size + body_size > limit:
            raise ConnectionError("what came is no message of a rank")
        name, values, shapes = json.loads(bytes(self._read_bytes(header_size)))
        body = self._read_bytes(body_size)
        arrays = []
        start = 0
        for dtype, shape in shapes:
            count = int(np.prod(shape))
            arrays.append(np.frombuffer(body, dtype, count, start).reshape(shape))
            start += arrays[-1].nbytes
        return Message(name, tuple(values), tuple(arrays))

    def _read_bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise ConnectionError("the connection was closed")
            view = view[received:]
        return data


def connect(address: tuple[str, int]) -> Channel:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return Channel(socket.create_connection(address, timeout=SILENCE_SECONDS))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def on_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread
