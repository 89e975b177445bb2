"""`serve(config)`: one process that loads models and serves them over HTTP. The `serve` and `train` commands call it.

The port is taken before a model is loaded, so that one in use is known at once.
"""

import gc
from collections.abc import Callable
from functools import partial

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.ranks import Ranks
from mlx_parallm.platforms import raise_open_files
from mlx_parallm.progress import progress, unknown
from mlx_parallm.runtime.startup import start
from mlx_parallm.server.auth.access import check_access
from mlx_parallm.server.http import logs
from mlx_parallm.server.http.server_process import HttpServer
from mlx_parallm.server.http.sockets import listen
from mlx_parallm.server.http.state import Dispatcher
from mlx_parallm.training.manager import TrainingManager

REPORT_SECONDS = 10.0  # for which /health says which rank is gone, before the process ends


def serve(
    config: ServeConfig,
    companion: Callable[[TrainingManager], int | None] | None = None,
    ranks: Ranks | None = None,
) -> int:
    """Serves until a signal or, if so configured, the death of an engine; returns the exit code.

    `companion` works beside it, on a thread, once it serves; the server stops when that returns a code. `ranks` have
    the other parts of the model.
    """
    logs.set_up(config.http)
    check_access(config)
    raise_open_files()
    listener = listen(config.http.host, config.http.port)
    dispatcher = Dispatcher()
    runtime = start(config, dispatcher, progress=progress, ranks=ranks)
    linger = 0.0 if ranks is None else REPORT_SECONDS
    with progress("preparing the routes", unknown):
        gc.collect()
        gc.freeze()  # what the models brought along will not be garbage
        beside = None if companion is None else partial(companion, runtime.manager)
        server = HttpServer(runtime, config, dispatcher, listener, beside, linger)
    return server.run_until_stopped()
