"""Sessions of people who have signed in with a key from a browser: tokens that are signed, and valid until they expire.

Nothing is kept but which tokens were ended before their time, so that any process that has the secret knows a session.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_parallm.server.auth.keys import Key, KeyRing

COOKIE = "parallm_session"
SECONDS = 12 * 3600
MAX_TOKEN = 4096  # characters


@dataclass(slots=True)
class Logins:
    """A session ends when it expires, at logout, when its key is gone or another, and with the secret: by default,
    when the process ends."""

    ring: KeyRing
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    seconds: float = SECONDS
    clock: Callable[[], float] = time.time
    _ended: dict[bytes, float] = field(default_factory=dict)  # digests of tokens, and when they would have expired

    def begin(self, key: Key) -> str:
        """The token of a new session: when it ends, random bytes, the key's name, and the signature of all."""
        expires = self.clock() + self.seconds
        claims = f"{expires:.0f}.{secrets.token_urlsafe(16)}.{_encode(key.name.encode())}"
        return f"{claims}.{self._signature(claims, key)}"

    def find(self, token: str) -> Key | None:
        """The key that the session was begun with, as it is now."""
        claims, _, signature = token[:MAX_TOKEN].rpartition(".")
        try:
            expires, _, name = claims.split(".")
            owner = base64.urlsafe_b64decode(name).decode()
            if float(expires) <= self.clock():
                return None
        except (ValueError, binascii.Error):
            return None
        for key in self.ring.keys:
            if key.name == owner and hmac.compare_digest(
                self._signature(claims, key).encode(), signature.encode(errors="surrogateescape")
            ):
                return None if _digest(token) in self._ended else key
        return None

    def end(self, token: str) -> None:
        if self.find(token) is not None:
            now = self.clock()
            self._ended = {digest: expires for digest, expires in self._ended.items() if expires > now}
            self._ended[_digest(token)] = now + self.seconds

    def _signature(self, claims: str, key: Key) -> str:
        """The key's digest is part of it: a key of the same name with another secret has other sessions."""
        return _encode(hmac.digest(self.secret, key.digest + claims.encode(errors="surrogateescape"), "sha256"))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
