"""The HTTP application: routes, middleware, error handlers and the OpenAPI document. `server.run` serves it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from mlx_parallm import __version__
from mlx_parallm.config import ServeConfig
from mlx_parallm.server import errors
from mlx_parallm.server.access import Authentication, OriginGuard, is_loopback, keys_of
from mlx_parallm.server.adapters import Adapters
from mlx_parallm.server.control import Control
from mlx_parallm.server.generate import Generate
from mlx_parallm.server.middleware import BodyLimit, RequestLog
from mlx_parallm.server.models import ModelTable, ServedModel
from mlx_parallm.server.openai import OpenAI, TokenizerPool
from mlx_parallm.server.ops import Operations
from mlx_parallm.server.state import Dispatcher, ServerState
from mlx_parallm.server.tokens import ModelRoutes
from mlx_parallm.server.training import TrainingRoutes
from mlx_parallm.server.trl import Trl
from mlx_parallm.training.manager import TrainingManager

DESCRIPTION = """An LLM server for Apple Silicon with continuous batching, behind OpenAI's API.

Every error is `{"error": {"message", "type", "param", "code"}}`; every response carries `X-Request-Id`."""


def create_app(
    models: Mapping[str, ServedModel],
    config: ServeConfig,
    dispatcher: Dispatcher,
    state: ServerState | None = None,
    training: TrainingManager | None = None,
) -> FastAPI:
    """`models` have started engines whose news come through `dispatcher`; the first is the default."""
    workers = TokenizerPool(ThreadPoolExecutor(2, thread_name_prefix="tokenise"))
    table = ModelTable(models)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        dispatcher.bind(asyncio.get_running_loop())
        yield
        workers.pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPIOffline(
        title="MLX ParaLLM",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        middleware=_middleware(config),
        redoc_url=None,
    )
    errors.add_handlers(app)
    openai = OpenAI(table, config, workers, training)
    app.include_router(openai.router())
    app.include_router(Generate(openai).router())
    app.include_router(ModelRoutes(table, workers).router())
    app.include_router(Adapters(table, config, training).router())
    app.include_router(Control(table, config).router())
    if training is not None:
        app.include_router(TrainingRoutes(training, table.default, workers).router())
    operations = Operations(table, config, state or ServerState(), training)
    app.include_router(operations.router())
    app.include_router(Trl(openai, table, operations).router())
    return app


def _hosts(config: ServeConfig) -> list[str] | None:
    """The names that the server answers to beside loopback's; None: any."""
    if not config.allowed_host and not is_loopback(config.host):
        return None
    return [config.host, *config.allowed_host]


def _middleware(config: ServeConfig) -> list[Middleware]:
    """From the outside in."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(config.cors_allow_origin),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )
    return [
        Middleware(RequestLog),
        *([cors] if config.cors_allow_origin else []),
        Middleware(OriginGuard, hosts=_hosts(config), origins=config.cors_allow_origin),
        Middleware(Authentication, keys=keys_of(config)),
        # In base64 an adapter grows by a third.
        Middleware(BodyLimit, limit=config.max_body_size, upload_limit=config.max_lora_bytes * 4 // 3 + (1 << 20)),
    ]
