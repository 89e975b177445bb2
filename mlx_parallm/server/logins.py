"""Sessions of people who have signed in with a key from a browser: random tokens, held in memory until they expire."""

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_parallm.server.keys import Key, KeyRing

COOKIE = "parallm_session"
SECONDS = 12 * 3600
MAX_LOGINS = 1024  # beyond it the oldest ends


@dataclass(frozen=True, slots=True)
class Login:
    name: str  # of its key
    digest: bytes
    expires: float


@dataclass(slots=True)
class Logins:
    """By the token's digest. One ends when it expires, at logout, and when its key is gone or another."""

    ring: KeyRing
    seconds: float = SECONDS
    clock: Callable[[], float] = time.monotonic
    _open: dict[bytes, Login] = field(default_factory=dict)

    def begin(self, key: Key) -> str:
        """The token of a new session."""
        now = self.clock()
        self._open = {digest: login for digest, login in self._open.items() if login.expires > now}
        while len(self._open) >= MAX_LOGINS:
            del self._open[next(iter(self._open))]
        token = secrets.token_urlsafe(32)
        self._open[_digest(token)] = Login(key.name, key.digest, now + self.seconds)
        return token

    def find(self, token: str) -> Key | None:
        """The key that the session was begun with, as it is now."""
        login = self._open.get(_digest(token))  # by a digest, so that the time of a look-up tells nothing
        if login is None or login.expires <= self.clock():
            return None
        return self.ring.current(login.name, login.digest)

    def end(self, token: str) -> None:
        self._open.pop(_digest(token), None)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
