"""Who makes the request that is being answered: what it may use, what it is charged, which cached prompts it shares.

`access.Authentication` sets `current_caller` for the time of a request. The tables of models ask it, so that no
dialect has to: a model or an adapter that a key may not use is not there for it.
"""

import json
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.errors import PermissionDeniedError
from mlx_parallm.server.auth.keys import Key
from mlx_parallm.server.auth.rates import KeyUsage


@dataclass(frozen=True, slots=True, eq=False)
class Caller:
    key: Key | None = None  # None: anybody
    usage: KeyUsage | None = None  # None: nothing is limited

    def may_use_model(self, name: str) -> bool:
        return self.key is None or self.key.models is None or name in self.key.models

    def may_use_adapter(self, name: str) -> bool:
        """A checkpoint's name has that of its adapter before it."""
        if self.key is None or self.key.adapters is None:
            return True
        return name in self.key.adapters or name.rpartition("/")[0] in self.key.adapters

    def check_changes_adapter(self, name: str) -> None:
        """Checks that the caller may change an adapter, which need not be there yet."""
        if not self.may_use_adapter(name):
            raise PermissionDeniedError(f"this key may not change the adapter {name!r}", param="name")

    @property
    def tenant(self) -> str | None:
        """Whose cached prompts and sessions are their own; None: they are everybody's."""
        return None if self.key is None or self.key.shared_cache else self.key.name

    @property
    def owner(self) -> str:
        """Whose responses these are; empty: anybody's."""
        return "" if self.key is None else self.key.name or ""

    @property
    def rewards_answers_of(self) -> str | None:
        """Whose answers it may give rewards to; None: all. A key that is bound to adapters rewards its own."""
        bound = self.key is not None and (self.key.role == "user" or self.key.adapters is not None)
        return self.owner if bound else None

    def visible_source(self, source: str) -> str:
        """Returns where a model or adapter came from, as this caller may know it: users see no paths of the server."""
        is_path = source.startswith(("/", "~", "."))
        return Path(source).name if is_path and self.key is not None and self.key.role == "user" else source

    def visible_error(self, error: str) -> str:
        """Returns why something has failed, which may name a path."""
        hidden = self.key is not None and self.key.role == "user" and "/" in error
        return "it can't be loaded; the server's log says why" if hidden else error

    def cache_salt(self, asked: str) -> str:
        """The salt of a request's cached prompts, from the one that it asks for: no request can ask for a tenant's."""
        if self.tenant is not None:
            return "key:" + json.dumps([self.tenant, asked])
        return f"request:{asked}" if asked else ""

    def own_name(self, name: str) -> str:
        """A name that is this tenant's alone."""
        return name if self.tenant is None else f"{name} key:{json.dumps(self.tenant)}"

    def admit(self) -> None:
        """Counts a request that begins. RateLimitError; otherwise `leave` when it has ended."""
        if self.usage is not None and self.key is not None:
            self.usage.admit(self.key.limits)

    def leave(self) -> None:
        if self.usage is not None:
            self.usage.running -= 1

    def charge_prompt(self, tokens: int) -> None:
        """Charges a prompt's tokens before they are computed; raises RateLimitError."""
        if self.usage is not None and self.key is not None:
            self.usage.charge_prompt(tokens, self.key.limits)

    def refund_prompt(self, tokens: int) -> None:
        """Gives back the tokens of a prompt that was charged and then not taken."""
        if self.usage is not None:
            self.usage.tokens.take_back(tokens)

    def expect_output(self, tokens: int, stated: bool) -> int:
        """Reserves what responses may have at most, and returns what `release_output` is to be told when they have
        ended. `stated`: their client has said so. RateLimitError where answers being generated may use up the limit."""
        return 0 if self.usage is None or self.key is None else self.usage.expect(tokens, stated, self.key.limits)

    def reserve_output(self, tokens: int) -> int:
        """The same for responses whose tokens must all fit within the limit."""
        return 0 if self.usage is None or self.key is None else self.usage.reserve(tokens, self.key.limits)

    def release_output(self, expected: int) -> None:
        if self.usage is not None:
            self.usage.expected -= expected

    def charge_output(self, tokens: int) -> None:
        """Charges generated tokens once they are known, whether they fit or not."""
        if self.usage is not None:
            self.usage.tokens.add(tokens)

    def headers(self) -> dict[str, str]:
        return {} if self.usage is None or self.key is None else self.usage.headers(self.key.limits)


ANYBODY = Caller()
current_caller: ContextVar[Caller] = ContextVar("current_caller", default=ANYBODY)
