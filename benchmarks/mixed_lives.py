"""The server of mixed_load.py, killed and started anew, and what must have survived; not a script.

What clients were told counts: responses that were stored, rewards that were taken, updates that were published. Each is
looked for after every start. What a client waits for at the moment of a kill is cut off, and counted as such.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import servers

KEPT_RESPONSES = 64  # the newest: older ones may have left the store, which is small


@dataclass(slots=True)
class Told:
    """What the server has acknowledged, over all of its lives."""

    responses: dict[str, str] = field(default_factory=dict)  # text by id
    rewards: int = 0
    version: int = 0  # the newest policy

    def stored(self, identity: str, text: str) -> None:
        self.responses[identity] = text
        while len(self.responses) > KEPT_RESPONSES:
            del self.responses[next(iter(self.responses))]


class Lives:
    """Starts a server, kills it when told to, and starts it again on the same port with the same files."""

    def __init__(self, start: Callable[[], servers.ServerProcess]) -> None:
        self._start = start
        self.server = start()
        self.kills = 0
        self.up = asyncio.Event()
        self.lost: list[str] = []

    @contextlib.contextmanager
    def running(self) -> Iterator["Lives"]:
        try:
            self.server.wait_ready(300)
            self.up.set()
            yield self
            if self.server.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.server.process.returncode}:\n{self.server.tail()}")
        finally:
            self.server.stop()

    async def kill_at(
        self, moments: list[float], http: httpx.AsyncClient, told: Told, again: Callable[[], object]
    ) -> None:
        """SIGKILL at these seconds from now; `again` is awaited after each start, before clients go on."""
        begun = asyncio.get_running_loop().time()
        for moment in sorted(moments):
            await asyncio.sleep(begun + moment - asyncio.get_running_loop().time())
            self.up.clear()
            self.kills += 1
            self.server.process.kill()
            await asyncio.to_thread(self.server.process.wait)
            self.server = await asyncio.to_thread(self._start)
            await asyncio.to_thread(self.server.wait_ready, 300)
            await self._check(http, told)
            await again()  # type: ignore[misc]
            self.up.set()

    async def _check(self, http: httpx.AsyncClient, told: Told) -> None:
        for identity, text in told.responses.items():
            answer = await http.get(f"/v1/responses/{identity}")
            if answer.status_code != 200 or output_text(answer.json()) != text:
                self.lost.append(f"response {identity}: {answer.status_code} {answer.text:.200}")
        status = (await http.get("/v1/training/status")).json()
        if status["trajectories_collected"] < told.rewards:
            self.lost.append(f"{told.rewards} rewards were taken, {status['trajectories_collected']} are known")
        if status["policy_version"] < told.version:
            self.lost.append(f"version {told.version} was published, {status['policy_version']} is the newest")


def output_text(response: dict[str, object]) -> str:
    parts = [part for item in response["output"] for part in item.get("content", ())]  # type: ignore[attr-defined]
    return "".join(part.get("text", "") for part in parts)


def moments(count: int, seconds: float, chance: random.Random) -> list[float]:
    """In the first sixth, so that stores which a start empties are full again before memory is watched."""
    return [chance.uniform(0.02, 0.16) * seconds for _ in range(count)]
