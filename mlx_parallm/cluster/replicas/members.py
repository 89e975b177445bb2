"""The replicas that serve now, what the router knows of them, and changes that all of them make or none.

The front owns one. A replica joins, is given the changes that it lacks, says that it is ready, and reports every
second. One that can't be reached, or says nothing, is not asked any more; it joins again, or Ray starts another. A
change is checked by all, then made by all; one that can't make what the others made has to start anew, so that no
replica serves a version that others will never have.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import aiohttp

from mlx_parallm.cluster.replicas.affinity import AffinityRouter
from mlx_parallm.cluster.replicas.changes import Change, SharedState
from mlx_parallm.cluster.replicas.links import OWN_PATHS, SILENT_SECONDS, read_error, secret_headers
from mlx_parallm.errors import ParallmError, UnavailableError

log = logging.getLogger(__name__)

CHECK_SECONDS = 120.0
APPLY_SECONDS = 900.0  # a model may take long to load


@dataclass(slots=True)
class Member:
    name: str
    url: str
    pid: int
    node: str
    ready: bool = False
    heard: float = field(default_factory=time.monotonic)


class Members:
    def __init__(self, secret: str, expected: int, session: Callable[[], aiohttp.ClientSession]) -> None:
        self.expected = expected
        self.state = SharedState()
        self.router = AffinityRouter()
        self.failure: str | None = None  # why the last one that failed did
        self._secret = secret
        self._session = session
        self._members: dict[str, Member] = {}
        self._changes = asyncio.Lock()
        self.changed = asyncio.Condition()  # when replicas come or go

    @property
    def ready(self) -> list[Member]:
        return [member for member in self._members.values() if member.ready]

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    # What replicas say.

    async def join(self, member: Member, position: int) -> list[Change] | None:
        """Returns what it has to make before it serves; None: it has to start anew."""
        async with self._changes:
            changes = self.state.since(position)
            if changes is not None:
                self._members[member.name] = member
            return changes

    async def make_ready(self, name: str, position: int, hashes: Sequence[int]) -> bool:
        """Returns whether it has all changes; if not, it has to start anew."""
        async with self._changes:
            if position != self.state.position or name not in self._members:
                return False
            self._members[name].ready = True
            self._members[name].heard = time.monotonic()
            if name not in self.router.names:
                self.router.add(name)
            self.router.hold(name, hashes)
        log.info("replica %s is ready", name)
        await self._tell()
        return True

    def heard(self, name: str, hashes: Sequence[int]) -> bool:
        """A report; False where the replica is not known."""
        member = self._members.get(name)
        if member is None:
            return False
        member.heard = time.monotonic()
        self.router.hold(name, hashes)
        return True

    async def remove(self, name: str, reason: str) -> None:
        member = self._members.pop(name, None)
        if member is None:
            return
        log.warning("replica %s does not serve: %s", name, reason)
        self.failure = reason
        if name in self.router.names:
            self.router.remove(name)
        await self._tell()

    async def remove_silent(self) -> None:
        now = time.monotonic()
        for member in list(self._members.values()):
            if member.ready and now - member.heard > SILENT_SECONDS:
                await self.remove(member.name, f"it has said nothing for {SILENT_SECONDS:g} s")

    async def wait_for(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.ready) >= count)

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # Changes.

    async def propose(self, change: Change) -> Change:
        """Has all replicas make a change; returns it as they made it, with its number."""
        async with self._changes:
            if not change.fields.get("asked"):
                change = self.state.numbered(change)
            members = self.ready
            if not members:
                raise UnavailableError("no replica is ready")
            await self._check(change, members)
            self.state.take_number(change)
            failed = await self._send(_after_check(change), members, "apply", APPLY_SECONDS)
            if failed:
                await self._settle(change, members, failed)
            self.state.add(change)
            if change.kind == "flush_cache":
                for member in members:
                    if member.name in self.router.names:
                        self.router.clear(member.name)
            return change

    async def _check(self, change: Change, members: list[Member]) -> None:
        if change.kind != "publish":
            return
        refused = await self._send(change, members, "check", CHECK_SECONDS)
        gone = [name for name, error in refused.items() if isinstance(error, UnreachableError)]
        for name in gone:
            await self.remove(name, refused.pop(name).message)
        members[:] = [member for member in members if member.name not in gone]
        if refused:
            name, error = next(iter(refused.items()))
            error.message = f"{error.message} (replica {', '.join(refused)}; no replica has changed)"
            raise error

    async def _settle(self, change: Change, members: Sequence[Member], failed: dict[str, ParallmError]) -> None:
        """Some have made a change and others have not: takes it back, or parts with those."""
        errors = {name: error for name, error in failed.items() if not isinstance(error, UnreachableError)}
        if errors and len(failed) == len(members):
            raise next(iter(errors.values()))
        undo = _opposite(change)
        if errors and undo is not None:
            made = [one for one in members if one.name not in failed]
            await self._send(undo, made, "apply", APPLY_SECONDS, self.state.position)
            name, error = next(iter(errors.items()))
            raise type(error)(f"replica {name}: {error.message}; the others are as before", param=error.param)
        for name, error in failed.items():
            await self.remove(name, f"it could not follow a change and has to start anew: {error.message}")
        if not self.ready:
            raise UnavailableError("no replica has made the change: all have gone")

    async def _send(
        self, change: Change, members: Sequence[Member], what: str, seconds: float, position: int | None = None
    ) -> dict[str, ParallmError]:
        """Those that fail, with their reasons. `position`: where those are that don't."""
        body = change.encode()
        after = self.state.position + 1 if position is None else position
        sent = [self._send_to(member, what, body, seconds, after) for member in members]
        errors = await asyncio.gather(*sent)
        return {member.name: error for member, error in zip(members, errors, strict=True) if error is not None}

    async def _send_to(
        self, member: Member, what: str, body: bytes, seconds: float, position: int
    ) -> ParallmError | None:
        headers = secret_headers(self._secret) | {"x-parallm-position": str(position)}
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            url = f"{member.url}{OWN_PATHS}{what}"
            async with self._session().post(url, data=body, headers=headers, timeout=timeout) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return UnreachableError(f"it can't be reached: {type(error).__name__}")
        return None if response.status == 200 else read_error(content)

    def describe(self) -> list[dict[str, object]]:
        known = self.router.names
        return [
            {
                "name": member.name,
                "node": member.node,
                "pid": member.pid,
                "ready": member.ready,
                "in_flight": self.router.load(member.name) if member.name in known else 0,
            }
            for member in self._members.values()
        ]


class UnreachableError(UnavailableError):
    """A replica has gone; Ray starts another, which gets the state anew."""


def _after_check(change: Change) -> Change:
    """The weights are where they were checked."""
    return replace(change, data=b"") if change.kind == "publish" else change


def _opposite(change: Change) -> Change | None:
    """Returns what takes a change back, where that leaves no trace."""
    if change.kind == "load_model":
        return Change("unload_model", change.model, fields={"timeout": 30.0})
    if change.kind == "pause":
        return Change("resume", change.model)
    return None
