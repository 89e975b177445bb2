"""What every dialect is given: the models, the service, and what runs behind them."""

from dataclasses import dataclass

from mlx_parallm.config import ServeConfig
from mlx_parallm.runtime.client import RuntimeClient
from mlx_parallm.server.auth.access import AccessControl
from mlx_parallm.server.generation.preparation import GenerationService
from mlx_parallm.server.generation.tokenizers import TokenizerPool
from mlx_parallm.server.http.state import ServerState
from mlx_parallm.server.model_table import ModelTable
from mlx_parallm.server.predictors import PredictorTable


@dataclass(frozen=True, slots=True)
class ServerContext:
    runtime: RuntimeClient
    config: ServeConfig
    state: ServerState
    models: ModelTable
    tokenizers: TokenizerPool
    service: GenerationService
    predictors: PredictorTable
    access: AccessControl
