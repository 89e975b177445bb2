"""Watches what others notice of a request: the pauses of running streams, /health, memory and threads of the server."""

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support.servers import ServerProcess

POLL_SECONDS = 0.02


@dataclass
class Watch:
    """A context: streams run and /health is polled from its beginning to its end."""

    server: ServerProcess
    headers: dict[str, str] = field(default_factory=dict)
    streams: int = 8
    gaps: list[float] = field(default_factory=list)  # seconds between two events of a stream
    health: list[float] = field(default_factory=list)  # seconds for each answer
    errors: list[str] = field(default_factory=list)

    def __enter__(self) -> "Watch":
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._poll, daemon=True)]
        self._threads += [threading.Thread(target=self._stream, args=(n,), daemon=True) for n in range(self.streams)]
        for thread in self._threads:
            thread.start()
        time.sleep(1.0)
        self.normal_gap = max(self.gaps, default=0.0)
        self.memory_before = self.server.memory()
        self.gaps.clear()
        self.health.clear()
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.5)
        self.memory_growth = self.server.memory() - self.memory_before
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _poll(self) -> None:
        with httpx.Client(base_url=self.server.url, timeout=60) as client:
            while not self._stop.is_set():
                begun = time.monotonic()
                answer = client.get("/health")
                self.health.append(time.monotonic() - begun)
                if answer.status_code != 200:
                    self.errors.append(answer.text)
                self._stop.wait(max(0.0, POLL_SECONDS - (time.monotonic() - begun)))

    def _stream(self, number: int) -> None:
        body = {"prompt": [5, 6, 7 + number], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self.server.url, headers=self.headers, timeout=60) as client:
            while not self._stop.is_set():
                self._read(client, body)

    def _read(self, client: httpx.Client, body: dict[str, object]) -> None:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                self.errors.append(answer.text)
                self._stop.wait(0.1)
                return
            last = None
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if "error" in json.loads(line[6:]):
                    self.errors.append(line)
                now = time.monotonic()
                if last is not None:
                    self.gaps.append(now - last)
                last = now
                if self._stop.is_set():
                    return


def threads(server: ServerProcess) -> int:
    """Of the server's process; 0 where the system does not tell."""
    tasks = Path(f"/proc/{server.process.pid}/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0
