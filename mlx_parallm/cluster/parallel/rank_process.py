"""A process that `mlx.launch` may have started as one of several ranks: rank 0 serves, the others follow it."""

from collections.abc import Callable

from mlx_parallm.cluster.parallel.following import follow
from mlx_parallm.cluster.parallel.rank_group import Leader, end_at_once, group_config, join_group
from mlx_parallm.config import ServeConfig
from mlx_parallm.serve import serve
from mlx_parallm.server.http import logs
from mlx_parallm.training.manager import TrainingManager


def serve_rank(config: ServeConfig, companion: Callable[[TrainingManager], int | None] | None = None) -> int:
    """What this process does until it ends: it serves alone, unless it is one of several ranks."""
    logs.set_up(config.http, helper=True)
    member = join_group(config)
    if member is None:
        return serve(config, companion)
    config = group_config(config, member)
    if not isinstance(member, Leader):
        return follow(config, member)
    code = serve(config, companion, member)
    if member.lost is not None:
        end_at_once(code)  # the engine thread may wait for a rank that is gone
    return code
