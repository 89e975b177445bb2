"""Models that predict, as routes use them: found by name and kind, held while they are in use, left when the client is.

async with context.predictors.use(body.model, "embedding") as model:
    vectors = await model.predict(inputs, request)
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import InvalidRequestError, ModelNotFoundError
from mlx_parallm.runtime.client import PredictorClient, RuntimeClient
from mlx_parallm.server.errors import ClientLeft
from mlx_parallm.server.responses import client_left
from mlx_parallm.types import PredictorInfo


@dataclass(frozen=True, slots=True)
class ServedPredictor:
    name: str
    client: PredictorClient
    timeout: float | None

    @property
    def info(self) -> PredictorInfo:
        return self.client.info

    @property
    def tokenizer(self) -> Any:
        return self.client.tokenizer

    async def predict(self, inputs: Sequence[Any], request: Request) -> list[Any]:
        """An output for each input; what waits is taken back when the client leaves. The body must have been read."""
        answer = asyncio.wrap_future(self.client.predict(inputs, self.timeout))
        watcher = asyncio.ensure_future(client_left(request.receive))
        try:
            await asyncio.wait((answer, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientLeft
            return await answer
        finally:
            watcher.cancel()
            answer.cancel()


class PredictorTable:
    def __init__(self, runtime: RuntimeClient, config: ServeConfig) -> None:
        self._runtime = runtime
        self._timeout = config.batch.request_timeout_seconds or None

    @asynccontextmanager
    async def use(self, name: str | None, *kinds: str, param: str = "model") -> AsyncIterator[ServedPredictor]:
        """The model of this name, or the first of these kinds where no name is given; it stays loaded meanwhile.

        ModelNotFoundError; InvalidRequestError where the model is of another kind.
        """
        yield self._find(name, kinds, param)

    def _find(self, name: str | None, kinds: Sequence[str], param: str) -> ServedPredictor:
        predictors, wanted = self._runtime.predictors, " or ".join(kinds)
        fitting = [name for name, client in predictors.items() if client.info.kind in kinds]
        if name is None or (name == "default" and fitting):
            if not fitting:
                raise ModelNotFoundError(f"no {wanted} model is served here; start one with --model-path", param=param)
            name = fitting[0]
        if name in fitting:
            return ServedPredictor(name, predictors[name], self._timeout)
        found = predictors[name].info.kind if name in predictors else "chat" if name in self._runtime.models else None
        if found is not None:
            known = f"; there is {', '.join(fitting)}" if fitting else ""
            raise InvalidRequestError(
                f"{name!r} is a {found} model, and this route takes a {wanted} model{known}", param=param
            )
        known = f"; there is {', '.join(fitting)}" if fitting else ""
        raise ModelNotFoundError(f"there is no {wanted} model {name!r} here{known}", param=param)
