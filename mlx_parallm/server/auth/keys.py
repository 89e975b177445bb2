"""Keys: names, roles and limits, from flags, the environment and a file; `access` asks for them.

A file holds salted hashes, which `parallm keys` writes: a key has 256 random bits, so a fast hash is enough. The file
is read anew when it changes. No web framework here: the command starts at once.
"""

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from mlx_parallm.config import ServeConfig, nearest
from mlx_parallm.errors import ConfigError
from mlx_parallm.server.auth.key_files import FileVersion, read_document, version_of

log = logging.getLogger(__name__)

Role = Literal["user", "trainer", "admin"]  # each may do what those before it may
ROLES: tuple[Role, ...] = get_args(Role)
PREFIX = "sk-parallm-"  # of keys that are made here: scanners of repositories know them by it
LOOK_SECONDS = 1.0  # between two looks at the file
_HASH = re.compile(r"sha256:([0-9a-f]{32,}):([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may use within any 60 seconds, and at once. None: as much as there is."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, item.name) is not None for item in fields(self))


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    role: Role
    digest: bytes  # of salt and key; the key itself is not kept
    salt: bytes = b""
    limits: KeyLimits = KeyLimits()
    models: frozenset[str] | None = None  # None: all
    adapters: frozenset[str] | None = None
    shared_cache: bool = False  # cached prompts are shared with other keys that say so, and with requests without one
    created: str | None = None

    @classmethod
    def of(cls, name: str, role: Role, secret: str, salt: bytes = b"", **more: Any) -> "Key":
        return cls(name, role, _digest(salt, secret), salt, **more)

    def opens(self, secret: str) -> bool:
        return hmac.compare_digest(self.digest, _digest(self.salt, secret))

    @property
    def identity(self) -> str:
        """The same as long as the secret is; it can be written down, as the secret does not follow from it."""
        return hashlib.sha256(b"identity of " + self.digest).hexdigest()

    def may(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)

    @property
    def hash(self) -> str:
        """The hash as it stands in a file."""
        return f"sha256:{self.salt.hex()}:{self.digest.hex()}"


def _digest(salt: bytes, secret: str) -> bytes:
    return hashlib.sha256(salt + secret.encode(errors="surrogateescape")).digest()


def new_key(name: str, role: Role, **more: Any) -> tuple[str, Key]:
    """A random key, to be told once, and what is kept of it."""
    secret = PREFIX + secrets.token_urlsafe(32)
    return secret, Key.of(name, role, secret, secrets.token_bytes(16), **more)


def keys_of_flags(config: ServeConfig) -> list[Key]:
    given: list[tuple[str | None, Role]] = [(config.http.api_key, "user"), (config.http.admin_key, "admin")]
    keys = [Key.of(role, role, secret, shared_cache=True) for secret, role in given if secret is not None]
    return keys + [_named_key(entry) for entry in config.http.named_key]


def _named_key(entry: str) -> Key:
    """NAME=KEY or NAME:ROLE=KEY. No error repeats the key."""
    name, found, secret = entry.partition("=")
    name, colon, role = name.partition(":")
    if not found or not secret.strip():
        raise ConfigError("named_key: write NAME=KEY or NAME:ROLE=KEY, as in alice:trainer=SECRET")
    if colon and role not in ROLES:
        raise ConfigError(f"named_key: the role of {name!r} is {role!r}, and must be user, trainer or admin")
    _check_name(name, "named_key")
    return Key.of(name, next((one for one in ROLES if one == role), "user"), secret)


def keys_of(config: ServeConfig) -> list[Key]:
    """All keys that a configuration names, on its flags and in its file."""
    path = config.http.keys_file
    keys = keys_of_flags(config) + (read_keys(Path(path).expanduser()) if path is not None else [])
    names = [key.name for key in keys if not key.shared_cache]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two keys are called {double!r}; give each its own name")
    return keys


def read_keys(path: Path) -> list[Key]:
    """A file of names, each with its `hash` (or `key`), role and limits. ConfigError where there are none."""
    keys = parse_keys(read_document(path), f"keys file {path}")
    if not keys:
        raise ConfigError(f"keys file {path}: it holds no keys; 'parallm keys add NAME --file {path}' adds one")
    return keys


def parse_keys(document: Mapping[str, Any], where: str) -> list[Key]:
    return [_parse_key(str(name), entry, f"{where}: {name}") for name, entry in document.items()]


def _parse_key(name: str, entry: Any, where: str) -> Key:
    known = ("hash", "key", "role", "created", "shared_cache", *NUMBERS, *NAMES)
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected its key and role, as in '{name}: {{key: SECRET, role: user}}'")
    for given in entry:
        if given not in known:
            raise ConfigError(f"{where}: unknown field {given!r}{nearest(given, known)}")
    _check_name(name, where)
    role = entry.get("role", "user")
    shared = entry.get("shared_cache", False)
    if role not in ROLES:
        raise ConfigError(f"{where}: its role is {role!r}, and must be user, trainer or admin")
    if not isinstance(shared, bool):
        raise ConfigError(f"{where}: shared_cache is true or false, not {shared!r}")
    salt, digest = _hashed(entry, where)
    bounds = {item: _names(entry.get(item), f"{where}: {item}") for item in NAMES}
    if role == "admin" and any(names is not None for names in bounds.values()):
        raise ConfigError(f"{where}: models and adapters can't be bound for an admin, who may change all of them")
    limits = KeyLimits(**{item: _number(entry.get(item), f"{where}: {item}") for item in NUMBERS})
    created = entry.get("created")
    return Key(name, role, digest, salt, limits, **bounds, shared_cache=shared, created=created and str(created))


NUMBERS = tuple(item.name for item in fields(KeyLimits))
NAMES = ("models", "adapters")


def _hashed(entry: Mapping[str, Any], where: str) -> tuple[bytes, bytes]:
    """Salt and digest, of a hash or of the key itself."""
    secret = entry.get("key")
    written = entry.get("hash")
    if written is not None:
        found = _HASH.fullmatch(written) if isinstance(written, str) else None
        if found is None or secret is not None:
            problem = (
                "has both a key and a hash" if secret is not None else "has a hash that 'parallm keys' did not write"
            )
            raise ConfigError(f"{where}: it {problem}")
        return bytes.fromhex(found[1]), bytes.fromhex(found[2])
    if not isinstance(secret, str) or not secret.strip():
        raise ConfigError(f"{where}: its key is empty or no text; quote it if it looks like a number")
    return b"", _digest(b"", secret)


def _check_name(name: str, where: str) -> None:
    if not 1 <= len(name) <= 128 or not name.isprintable():
        raise ConfigError(f"{where}: a name has 1 to 128 printable characters")


def _number(value: Any, where: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 53):
        raise ConfigError(f"{where}: expected a whole number above 0, not {value!r}")
    return value


def _names(value: Any, where: str) -> frozenset[str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{where}: expected a list of names")
    return frozenset(value)


def entry_of(key: Key) -> dict[str, Any]:
    """A key as it stands in a file; what is left at its default is left out."""
    entry: dict[str, Any] = {"hash": key.hash, "role": key.role}
    entry |= {item: number for item in NUMBERS if (number := getattr(key.limits, item)) is not None}
    entry |= {item: sorted(names) for item in NAMES if (names := getattr(key, item)) is not None}
    return (
        entry | ({"shared_cache": True} if key.shared_cache else {}) | ({"created": key.created} if key.created else {})
    )


@dataclass(slots=True)
class KeyRing:
    """The keys that a server takes. Those of its file follow the file, at most a second behind it.

    A file that can't be read leaves the keys that were read before; one without keys lets nobody in.
    """

    fixed: Sequence[Key] = ()
    path: Path | None = None
    clock: Callable[[], float] = time.monotonic
    _from_file: list[Key] = field(default_factory=list)
    _version: FileVersion | None = None
    _looked: float = float("-inf")

    @classmethod
    def of(cls, config: ServeConfig) -> "KeyRing":
        keys_of(config)  # raises what is wrong with them
        path = config.http.keys_file
        ring = cls(keys_of_flags(config), None if path is None else Path(path).expanduser())
        if ring.path is not None:
            ring._version = version_of(ring.path)
            ring._looked = ring.clock()
            ring._from_file = read_keys(ring.path)
        return ring

    @property
    def keys(self) -> list[Key]:
        return [*self.fixed, *self._from_file]

    @property
    def plain_names(self) -> list[str]:
        """Whose keys stand in the file themselves."""
        return [key.name for key in self._from_file if not key.salt]

    def guards(self, role: Role) -> bool:
        """Returns whether routes of a role need a key. An admin's key alone, on a flag, leaves users' routes open."""
        if role == "user":
            return self.path is not None or any(key.role != "admin" for key in self.fixed)
        return self.path is not None or bool(self.fixed)

    def find(self, secret: str) -> Key | None:
        """Compares with every key, in the same time whichever it is. Of several, the one that may do most."""
        found = [key for key in self.keys if key.opens(secret)]
        return max(found, key=lambda key: ROLES.index(key.role), default=None)

    def current(self, name: str, digest: bytes) -> Key | None:
        """The key that was found once, as it is now."""
        return next((key for key in self.keys if key.name == name and key.digest == digest), None)

    def refresh(self) -> None:
        """Reads the file if it has changed."""
        if self.path is None or self.clock() - self._looked < LOOK_SECONDS:
            return
        self._looked = self.clock()
        if version_of(self.path) != self._version:
            self.reload()

    def reload(self) -> None:
        if self.path is None:
            return
        self._version = version_of(self.path)
        try:
            self._from_file = parse_keys(read_document(self.path), f"keys file {self.path}")
        except ConfigError as error:
            log.error("%s; the keys that were read before still hold", error.message)
        else:
            log.info("keys file %s was read anew: %d keys", self.path, len(self._from_file))
