"""How the front and its replicas speak: HTTP with a secret that only they have, and errors that keep their kind.

The secret is made anew at each start and reaches replicas through Ray. Nothing else is answered on their ports.
"""

import hashlib
import hmac
import secrets
from typing import Any

import orjson

from mlx_parallm import errors
from mlx_parallm.errors import ParallmError

SECRET_HEADER = b"x-parallm-secret"
PREFIX_HEADER = b"x-parallm-prefix"  # the hashes of a prompt, for the replica's own digest
OWN_PATHS = "/-replica/"  # of a replica's port, for the front
REPORT_SECONDS = 1.0
SILENT_SECONDS = 15.0  # after which a replica counts as gone


def new_secret() -> str:
    return secrets.token_urlsafe(32)


def secret_headers(secret: str) -> dict[str, str]:
    return {SECRET_HEADER.decode(): secret}


def knows_secret(headers: Any, secret: str) -> bool:
    """Returns whether ASGI's headers have the secret."""
    given = next((value for name, value in headers if name == SECRET_HEADER), b"")
    return hmac.compare_digest(given, secret.encode())


def pack_hashes(hashes: Any) -> str:
    return b"".join(hash_.to_bytes(8, "big") for hash_ in hashes).hex()


def unpack_hashes(text: str) -> list[int]:
    data = bytes.fromhex(text)
    return [int.from_bytes(data[place : place + 8], "big") for place in range(0, len(data), 8)]


def write_error(error: ParallmError) -> bytes:
    """Writes an error as JSON, with the nearest class that every process knows."""
    kind = next(one.__name__ for one in type(error).__mro__ if getattr(errors, one.__name__, None) is one)
    return orjson.dumps({"kind": kind, "message": error.message, "param": error.param, "code": error.code})


def read_error(body: bytes) -> ParallmError:
    try:
        fields = orjson.loads(body)
        kind = getattr(errors, fields["kind"])
        error: ParallmError = kind(fields["message"])
        error.param = fields["param"]
        error.code = fields["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return ParallmError(body.decode(errors="replace")[:500] or "no response")
    return error


def login_secret(secret: str) -> bytes:
    """Returns what replicas sign sessions of browsers with, so that one holds on all of them."""
    return hashlib.sha256(b"logins of " + secret.encode()).digest()
