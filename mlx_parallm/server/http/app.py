"""The HTTP application: routes, middleware, error handlers and the OpenAPI document. `server_process` serves it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from mlx_parallm import __version__
from mlx_parallm.config import ServeConfig
from mlx_parallm.runtime.client import RuntimeClient
from mlx_parallm.server.api import route_table, routers
from mlx_parallm.server.auth.access import AccessControl, Authentication, OriginGuard, answered_hosts
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.generation.preparation import GenerationService
from mlx_parallm.server.generation.tokenizers import TokenizerPool
from mlx_parallm.server.http import http_errors as errors
from mlx_parallm.server.http import unknown_fields
from mlx_parallm.server.http.exact_paths import ExactPaths
from mlx_parallm.server.http.middleware import BodyLimit, RequestLog
from mlx_parallm.server.http.state import Dispatcher, ServerState
from mlx_parallm.server.media.media_loader import MediaLoader
from mlx_parallm.server.model_table import ModelTable
from mlx_parallm.server.predictors import PredictorTable

DESCRIPTION = """An LLM server for Apple Silicon with continuous batching, behind OpenAI's API.

Every error is `{"error": {"message", "type", "param", "code"}}`, but for `/v1/messages` and `/api/…`, where it has
Anthropic's and Ollama's shape; every response carries `X-Request-Id`."""

RATE_HEADERS = [
    f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
]


def create_app(
    runtime: RuntimeClient,
    config: ServeConfig,
    dispatcher: Dispatcher,
    state: ServerState | None = None,
    login_secret: bytes | None = None,
) -> FastAPI:
    """Creates the application over models that have started; their deltas come through `dispatcher`. `login_secret`: of
    several such applications that are one to their clients."""
    access = AccessControl.of(config, login_secret)
    state = state or ServerState()
    middleware = _middleware(config, access, state)
    tokenizers = TokenizerPool(media=_media(config))
    models = ModelTable(runtime, config.batch.request_timeout_seconds or None)
    service = GenerationService(models, config, tokenizers, runtime.training)
    predictors = PredictorTable(runtime, config)
    context = ServerContext(runtime, config, state, models, tokenizers, service, predictors, access)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        dispatcher.bind(asyncio.get_running_loop())
        yield
        tokenizers.close()

    app = FastAPIOffline(
        title="MLX ParaLLM",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        middleware=middleware,
        redoc_url=None,
    )
    app.state.unknown_fields = config.http.unknown_fields
    if access.audit is not None:
        audit = access.audit
        runtime.adapters.on_decision = lambda model, decision: audit.write(
            event="split_decided", model=model, **decision.facts()
        )
    app.state.access = access  # what `run` has read anew on a signal
    errors.add_handlers(app)
    included = list(routers(context))
    for router in included:
        app.include_router(router)
    app.router.routes.insert(0, ExactPaths(route for router in included for route in router.routes))
    return app


def _media(config: ServeConfig) -> MediaLoader:
    return MediaLoader.of(config.http.allowed_media_host, config.http.allowed_local_media_path)


def _middleware(config: ServeConfig, access: AccessControl, state: ServerState) -> list[Middleware]:
    """Returns the middleware, from the outside in."""
    routes = route_table()
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(config.http.cors_allow_origin),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After", "X-Parallm-Adapter", unknown_fields.HEADER, *RATE_HEADERS],
    )
    return [
        Middleware(RequestLog, routes=routes, audit=access.audit, recent=state.recent),
        *([cors] if config.http.cors_allow_origin else []),
        Middleware(OriginGuard, hosts=answered_hosts(config), origins=config.http.cors_allow_origin, routes=routes),
        Middleware(Authentication, access=access, routes=routes),
        # In base64 an adapter grows by a third.
        Middleware(
            BodyLimit,
            limit=config.http.max_body_size,
            upload_limit=config.adapters.max_lora_bytes * 4 // 3 + (1 << 20),
            routes=routes,
        ),
    ]
