"""`mlx_parallm_train`: reads its options and runs what they ask for (`training.runs`), in a server or without one."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlx_parallm.config import TrainConfig, add_train_flags, load_train_config

if TYPE_CHECKING:
    from mlx_parallm.training.manager import TrainingManager

add_flags = add_train_flags


def run(args: argparse.Namespace) -> int:
    config = load_train_config({name: value for name, value in vars(args).items() if name != "run"})
    from mlx_parallm.cluster.parallel.rank_process import serve_rank
    from mlx_parallm.training.report import chosen_boards
    from mlx_parallm.training.runs import fine_tune, train_policy, train_reward_model

    chosen_boards(config.run.report_to)  # what is not installed is said before a model is loaded
    work = {"rl": train_policy, "rm": train_reward_model, "sft": fine_tune, "dpo": fine_tune}[config.mode]
    if config.learns_apart or (config.mode != "rl" and not config.run.keep_serving):
        return _run_alone(config, work)

    def companion(manager: "TrainingManager") -> int | None:
        work(manager, config)
        return None if config.run.keep_serving else 0

    return serve_rank(config, companion)


def _run_alone(config: TrainConfig, work: "Callable[[TrainingManager, TrainConfig], None]") -> int:
    """Does the work on an engine that nobody else uses: no port, no requests."""
    from mlx_parallm.progress import progress
    from mlx_parallm.runtime.startup import start
    from mlx_parallm.server.http import logs

    logs.set_up(config.http)
    learns = config.mode == "rl"  # other modes make a trainer of their own
    runtime = start(config, lambda events: None, learn=learns, progress=progress)
    try:
        work(runtime.manager, config)
    finally:
        runtime.close()
    return 0
