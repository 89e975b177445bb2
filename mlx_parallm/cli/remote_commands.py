"""A running server, as the commands ask it: JSON in and out, and its own words where it refuses."""

import argparse
import os
from typing import Any

from mlx_parallm.errors import ConfigError, ParallmError, UnavailableError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "PARALLM_API_KEY"


def add_server_flags(parser: argparse.ArgumentParser, again: bool = False) -> None:
    """`again`: for an action of a command that has them already, so that they may stand behind it too."""
    default = argparse.SUPPRESS if again else DEFAULT_URL
    parser.add_argument("--url", default=default, help=f"a running server (default: {DEFAULT_URL})")
    key = argparse.SUPPRESS if again else None
    parser.add_argument("--api-key", default=key, help=f"its key, where it has one (default: ${KEY_VARIABLE})")


class Remote:
    """`timeout`: seconds to wait for a response."""

    def __init__(self, url: str, api_key: str | None, timeout: float = 30.0) -> None:
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1")
        self.key = api_key or os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"--url {url}: {error}") from None

    @classmethod
    def of(cls, args: argparse.Namespace, timeout: float = 30.0) -> "Remote":
        return cls(args.url, args.api_key, timeout)

    def get(self, path: str) -> Any:
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", path, body)

    def close(self) -> None:
        self._client.close()

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        import httpx

        try:
            answer = self._client.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise UnavailableError(
                f"no server answers at {self.url} ({error or type(error).__name__}); start one with "
                "mlx_parallm_serve, or name another with --url"
            ) from error
        if answer.is_success:
            return answer.json()
        raise ParallmError(f"{self.url}{path}: {_reason(answer)}")


def _reason(answer: Any) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}: {answer.text[:200]}"
