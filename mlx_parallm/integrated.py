"""`RLIntegratedServer`: serving and training from Python, over one model in one process.

    server = RLIntegratedServer(lora_config=LoRAConfig(rank=16, alpha=32), rl_config=RLConfig(learning_rate=5e-4))
    await asyncio.gather(server.run_inference(port=8000), server.run_training_loop())

The two coroutines may be run together or alone; the model is loaded once, by whichever comes first. The loop learns
from what the server is sent, or a task that is named.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mlx_parallm.config import ServeConfig
from mlx_parallm.config.train_config import LoopConfig
from mlx_parallm.config.training import LoRAConfig, RLConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.runtime.startup import Runtime, start
from mlx_parallm.server.http.server_process import HttpServer
from mlx_parallm.server.http.sockets import listen
from mlx_parallm.server.http.state import Dispatcher
from mlx_parallm.training.rl.request_loop import RequestLoop
from mlx_parallm.training.rl.session import Session
from mlx_parallm.training.rl.task_loop import Loop, StepReport
from mlx_parallm.training.tasks.built_in import Task
from mlx_parallm.training.tasks.environments import make_task_sampler
from mlx_parallm.training.tasks.find_task import find_task
from mlx_parallm.training.tasks.scorers import Score


class RLIntegratedServer:
    """`base_model` is a hub id, a folder or a .gguf file; None is the embedded one. Other options are the server's."""

    def __init__(
        self,
        base_model: str | None = None,
        *,
        lora_config: LoRAConfig | None = None,
        rl_config: RLConfig | None = None,
        adapter: str = "policy",
        scoring_functions: dict[str, Score] | None = None,
        **config: Any,
    ) -> None:
        paths = (base_model,) if base_model else ()
        fixed = {"update_frequency": 0, "enable_rl_training": True, "train_adapter": (adapter,)}
        settings = ServeConfig.of(model_path=paths, **{**fixed, **config})
        lora = lora_config or settings.training.lora
        rl = rl_config or settings.training.rl
        self.config = replace(settings, training=replace(settings.training, lora=lora, rl=rl))
        self._adapter = adapter
        self._scores = scoring_functions or {}
        self._dispatcher = Dispatcher()
        self._starting = asyncio.Lock()
        self._runtime: Runtime | None = None
        self._server: HttpServer | None = None

    @property
    def session(self) -> Session:
        """The adapter that learns; once either coroutine has begun."""
        if self._runtime is None:
            raise ConfigError("the model is not loaded yet: run_inference or run_training_loop does that")
        return self._runtime.manager.session(self._adapter)

    async def start(self) -> None:
        """Loads the model and makes the trainer."""
        await self._started()

    async def _started(self) -> Runtime:
        async with self._starting:
            if self._runtime is None:
                self._dispatcher.bind(asyncio.get_running_loop())
                come_up = partial(start, self.config, self._dispatcher)
                runtime = await asyncio.to_thread(come_up)
                for name, function in self._scores.items():
                    runtime.manager.rewards.add(name, function)
                self._runtime = runtime
            return self._runtime

    async def run_inference(self, port: int | None = None, host: str | None = None) -> int:
        """Serves until `stop`, or a signal; returns the exit code."""
        runtime = await self._started()
        self.config = self.config.but(
            port=self.config.http.port if port is None else port,
            host=self.config.http.host if host is None else host,
        )
        listener = listen(self.config.http.host, self.config.http.port)
        self._server = HttpServer(runtime, self.config, self._dispatcher, listener)
        return await self._server.run_in_loop()

    async def run_training_loop(
        self,
        task: str | Task | None = None,
        *,
        steps: int | None = None,
        prompts_per_step: int | None = None,
        group_size: int = 8,
        on_step: Callable[[StepReport], None] = lambda report: None,
        **options: Any,
    ) -> Sequence[StepReport]:
        """Learns a task, in 100 steps by default with about `rl_config.batch_size` answers each; without a task, from
        what the server is sent: an update for each so many completions with rewards, until `stop` or so many steps."""
        training = (await self._started()).manager
        if task is None:
            if options or prompts_per_step is not None:
                raise ConfigError(f"{', '.join(options) or 'prompts_per_step'} is for a task: name one")
            count = self.config.training.update_frequency or self.config.training.rl.batch_size
            follower = RequestLoop(self.session, count, steps, on_step)
            training.on_close = follower.stop
            return await asyncio.to_thread(follower.run)
        problems = find_task(task) if isinstance(task, str) else task
        sampler = make_task_sampler(training.engine, training.rollouts, training.rewards, problems)
        prompts = prompts_per_step or max(1, self.config.training.rl.batch_size // group_size)
        settings = LoopConfig(
            steps=100 if steps is None else steps,
            prompts_per_step=prompts,
            group_size=group_size,
            **{"seed": self.config.training.rl.seed, **options},
        )
        loop = Loop(self.session, sampler, settings, on_step)
        training.on_close = loop.stop
        return await asyncio.to_thread(loop.run)

    async def stop(self) -> None:
        """Ends what runs; the model is given back."""
        if self._server is not None:
            await self._server.stop()
        elif self._runtime is not None:
            await asyncio.to_thread(self._runtime.close)
