"""The socket that the server listens on, and the certificate that it shows there."""

import errno
import socket
import ssl
from pathlib import Path
from typing import Any

from mlx_parallm.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Port 0 lets the system choose."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if port and _somebody_answers(family, address):
            raise OSError(errno.EADDRINUSE, "another server answers there already; --port chooses another")
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def _somebody_answers(family: int, address: Any) -> bool:
    """A Mac lets us listen on 127.0.0.1 beside somebody who listens on all addresses: one of us would get nothing."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address[0], address[0])
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, *address[1:])) == 0


def check_certificate(cert: str, key: str) -> None:
    """ConfigError where the files can't be read, are no certificate and key, or do not fit each other."""
    for name, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}: {path} can't be read: {error.strerror}") from None
    try:
        # A key with a password would ask for it on the terminal.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(Path(cert).expanduser(), Path(key).expanduser(), password=lambda: "")
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_cert and tls_key: {cert} and {key} are no PEM certificate and its key without a password: "
            f"{error.reason or error}"
        ) from None
