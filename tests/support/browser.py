"""A real Chromium for tests: the one that is installed, driven by Playwright. It notes what pages complain about."""

import os
import shutil
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
SIZES = {1280: 800, 390: 844}  # width and height of a window, in pixels


def chromium_path() -> str | None:
    """CHROMIUM_PATH names another one than those that are looked for."""
    given = os.environ.get("CHROMIUM_PATH")
    found = given or next((path for name in NAMES if (path := shutil.which(name))), None)
    return found or (MAC if os.path.exists(MAC) else None)


@dataclass
class Complaints:
    """What a page did that it should not have done."""

    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)  # addresses on other servers

    def watch(self, page: Any, host: str) -> None:
        page.on("console", lambda message: self._console(message.type, message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self._request(request.url, host))

    def _console(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.errors.append(text)

    def _request(self, url: str, host: str) -> None:
        if urlsplit(url).netloc != host and urlsplit(url).scheme not in ("data", "blob"):
            self.foreign.append(url)
