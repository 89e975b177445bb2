"""What every dialect is given: the models, the service, and what runs behind them."""

from dataclasses import dataclass

from mlx_parallm.config import ServeConfig
from mlx_parallm.runtime.client import RuntimeClient
from mlx_parallm.server.access import AccessControl
from mlx_parallm.server.models import ModelTable
from mlx_parallm.server.predictors import PredictorTable
from mlx_parallm.server.service import GenerationService
from mlx_parallm.server.state import ServerState
from mlx_parallm.server.tokenizers import TokenizerPool


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
