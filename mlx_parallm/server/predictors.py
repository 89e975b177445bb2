"""Models that predict, as routes use them: found by name and kind, held while they are in use, left when the client is.

async with context.predictors.use(body.model, "embedding") as model:
    vectors = await model.predict(inputs, request)
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import InvalidRequestError, ModelNotFoundError, UnprocessableError
from mlx_parallm.runtime.client import PredictorClient, RuntimeClient
from mlx_parallm.server.auth.caller import current_caller
from mlx_parallm.server.http.disconnect import unless_left
from mlx_parallm.server.load_on_request import acquire
from mlx_parallm.server.model_table import DEFAULT, GENERATING
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
        await asyncio.sleep(0)  # requests that have come in together reach the queue together, and share a batch
        answer = asyncio.wrap_future(self.client.predict(inputs, self.timeout))
        return _finite(await unless_left(request.receive, answer))


def _finite(outputs: list[Any]) -> list[Any]:
    """Vectors and logits; the tensors of networks have a check of their own. JSON would say null."""
    for place, one in enumerate(outputs):
        if isinstance(one, np.ndarray) and one.dtype.kind == "f" and not np.isfinite(one).all():
            raise UnprocessableError(
                f"what the model makes of input {place} is not finite: its weights may be damaged", code="not_finite"
            )
    return outputs


class PredictorTable:
    def __init__(self, runtime: RuntimeClient, config: ServeConfig) -> None:
        self._runtime = runtime
        self._timeout = config.batch.request_timeout_seconds or None

    @asynccontextmanager
    async def use(
        self, name: str | None, *kinds: str, request: Request, param: str = "model"
    ) -> AsyncIterator[ServedPredictor]:
        """The model of this name, or the first of these kinds where no name is given; it stays loaded meanwhile.

        One that is not loaded is loaded now, and the request waits for it. ModelNotFoundError; InvalidRequestError
        where the model is of another kind.
        """
        pool = self._runtime.pool
        found = self._find(name, kinds, param)
        hold = await acquire(pool, found, request, self._timeout)
        try:
            client = self._runtime.predictors[found]
            if client.info.kind not in kinds:  # known for certain now that it is loaded
                raise _wrong_kind(found, client.info.kind, kinds, (), param)
            yield ServedPredictor(found, client, self._timeout)
        finally:
            pool.release(hold)

    def _find(self, name: str | None, kinds: Sequence[str], param: str) -> str:
        caller = current_caller.get()
        client = None if name is None or not caller.may_use_model(name) else self._runtime.predictors.get(name)
        if name is not None and client is not None and client.info.kind in kinds:
            return name
        known = {one.name: one for one in self._runtime.pool.statuses() if caller.may_use_model(one.name)}
        fitting = [one.name for one in known.values() if one.kind in kinds]
        if name in fitting:
            return str(name)
        if name is None or name == DEFAULT:
            if not fitting:
                wanted = " or ".join(kinds)
                raise ModelNotFoundError(f"no {wanted} model is served here; name one with --model-path", param=param)
            return next((one for one in fitting if known[one].status == "ready"), fitting[0])
        if name in known:
            status = known[name].status
            if status == "failed" or (status != "ready" and known[name].kind not in GENERATING):
                return name  # its kind is certain only when it is loaded; why it can't be, the pool says
            raise _wrong_kind(name, known[name].kind, kinds, fitting, param)
        if name in self._runtime.models and caller.may_use_model(name):
            raise _wrong_kind(name, "chat", kinds, fitting, param)
        there = f"; there is {', '.join(fitting)}" if fitting else ""
        raise ModelNotFoundError(f"there is no {' or '.join(kinds)} model {name!r} here{there}", param=param)


def _wrong_kind(name: str, found: str, kinds: Sequence[str], fitting: Sequence[str], param: str) -> InvalidRequestError:
    there = f"; there is {', '.join(fitting)}" if fitting else ""
    return InvalidRequestError(
        f"{name!r} is of the kind {found}, and this route takes {' or '.join(kinds)} models{there}", param=param
    )
