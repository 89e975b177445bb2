"""Models by the names that Ollama's clients have for them, and how long they stay in memory."""

import asyncio

from starlette.requests import Request

from mlx_parallm.errors import PermissionDeniedError
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.request_state import state_of
from mlx_parallm.server.model_table import DEFAULT, GENERATING, adapter_names
from mlx_parallm.types import ModelStatus

LATEST = ":latest"


class ModelNames:
    def __init__(self, context: ServerContext) -> None:
        self._models = context.models
        self._pool = context.runtime.pool

    def own(self, name: str) -> str:
        """The name by which the server knows a model: its own, or that without `:latest`."""
        return name if self._is_known(name) else name.removesuffix(LATEST)

    def _is_known(self, name: str) -> bool:
        return name in self._models.visible_statuses() or any(
            name in adapter_names(served.adapters) for served in self._models.visible().values()
        )

    def status(self, name: str) -> ModelStatus:
        """Returns the status of the model of this name, or of the one that the adapter of this name belongs to."""
        own = self.own(name)
        statuses = self._models.visible_statuses()
        if own == DEFAULT:
            own = next((one.name for one in statuses.values() if one.kind in GENERATING), own)
        return statuses[own] if own in statuses else statuses[self._models.find(own).name]

    def keep_alive(self, model: str, seconds: float | None, request: Request) -> None:
        """How long the model stays after this request. It is others' model too: where there are keys, an admin says."""
        if seconds is not None and state_of(request.scope).is_admin:
            self._pool.keep_alive(model, seconds)

    async def unload(self, model: str, request: Request) -> None:
        """Has the model leave memory once nobody uses it."""
        if not state_of(request.scope).is_admin:
            raise PermissionDeniedError("unloading a model needs an admin key: --admin-key sets one")
        await asyncio.to_thread(self._pool.keep_alive, model, 0.0)


def shown(name: str) -> str:
    """Returns a name as Ollama lists it, always with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST
