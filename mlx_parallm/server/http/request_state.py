"""What is known of a request on its way through the server: one object in its ASGI scope.

Whoever meets the request first makes it (`enter`); guards, routes and logs read and write it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from starlette.types import Scope

from mlx_parallm.errors import ParallmError
from mlx_parallm.server.auth.caller import ANYBODY, Caller
from mlx_parallm.server.http.route_table import UNKNOWN, Route, RouteTable

KEY = "parallm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSummary:
    """What is known of a request that was handed to a model."""

    model: str
    adapter: str | None  # name@version
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_at: float | None  # by time.perf_counter; None: nobody has looked


@dataclass(slots=True, kw_only=True)
class RequestState:
    route: Route
    id: str = ""
    caller: Caller = ANYBODY
    is_admin: bool = False  # whether the caller may do what changes the server for everybody
    media_type_error: ParallmError | None = None  # to be said if the body is no JSON
    sent_fields: Collection[str] = ()  # of the body, those of sampling options in an object of their own too
    warning: str | None = None  # of fields that nobody knows
    adapter: str | None = None  # that answers
    summary: Callable[[], ResponseSummary] | None = None  # of what was handed to a model
    outcome: str | None = None  # of a stream that did not end well
    held_models: list[Callable[[], None]] = field(default_factory=list)  # called when the request has ended
    runs_on: bool = False  # in the background, after its response

    @property
    def key_name(self) -> str | None:
        return None if self.caller.key is None else self.caller.key.name


def enter(scope: Scope, routes: RouteTable) -> RequestState:
    state: RequestState | None = scope.get(KEY)
    if state is None:
        state = scope[KEY] = RequestState(route=routes.find(scope["method"], scope["path"]))
    return state


def state_of(scope: Scope) -> RequestState:
    """Returns the state of a request that has entered."""
    state: RequestState = scope[KEY]
    return state


def known_state(scope: Scope) -> RequestState | None:
    """None: it has been refused before it entered."""
    state: RequestState | None = scope.get(KEY)
    return state


def route_name(scope: Scope) -> str:
    """Returns what logs call a request's path."""
    state = known_state(scope)
    return str(scope["path"]) if state is None else state.route.name or UNKNOWN
