"""Training over HTTP: updates, status, feedback, checkpoints and rollouts.

What blocks runs on threads, never on the event loop: others, that resume or stop the server, must never wait for one.
Updates, rollouts, feedback and checkpoints have threads of their own each, so that feedback, which takes milliseconds,
never waits behind updates, which take seconds.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
    QueueFullError,
    UnavailableError,
)
from mlx_parallm.policy_spans import as_lists
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.server.api.training.bodies import (
    ALL_DEFAULT,
    CheckpointBody,
    FeedbackBody,
    RolloutBody,
    UpdateBody,
)
from mlx_parallm.server.api.training.response_types import (
    CheckpointWritten,
    FeedbackTaken,
    Rollout,
    RolloutGroup,
    TrainingInternals,
    TrainingStatus,
    Updated,
)
from mlx_parallm.server.auth.caller import Caller, current_caller
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.generation.chat_messages import conversation
from mlx_parallm.server.generation.limits import completion_length
from mlx_parallm.server.http.disconnect import unless_left, when_left
from mlx_parallm.server.http.http_errors import ClientLeft, JSONResponse
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import router_of
from mlx_parallm.server.model_table import ServedModel, adapter_names
from mlx_parallm.types import RolloutCall, RolloutSample
from mlx_parallm.validation import check_ids

# threads; updates of one adapter come one after another anyway
UPDATES = 4
ROLLOUTS = 16
FEEDBACK = 8
CHECKPOINTS = 2
MAX_WAITING = 64  # feedback requests of one key that wait for responses that are being given; more are a 429
WAIT_SECONDS = 10.0  # for which each does
# seconds between two looks at whether the response is there
FIRST_LOOK = 0.02
LAST_LOOK = 0.5

T = TypeVar("T")


class TrainingRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._training = context.runtime.training
        self._models = context.models
        self._tokenizers = context.tokenizers
        self._max_rows = context.config.batch.max_batch_size
        self._timeout = context.config.batch.request_timeout_seconds or None
        self._updates = ThreadPoolExecutor(UPDATES, thread_name_prefix="update")
        self._rollouts = ThreadPoolExecutor(ROLLOUTS, thread_name_prefix="rollout")
        self._feedback = ThreadPoolExecutor(FEEDBACK, thread_name_prefix="feedback")
        self._checkpoints = ThreadPoolExecutor(CHECKPOINTS, thread_name_prefix="checkpoint")
        self._waiting: Counter[str] = Counter()  # feedback requests, by the key's name

    @property
    def _served(self) -> ServedModel:
        return self._models.default

    async def update(self, body: UpdateBody) -> Response:
        """Makes an update from the trajectories in the body, or those in the buffer. It is published unless it is
        refused: not finite, no change, or too far from the policy before."""
        self._check_adapter(body.adapter)
        given = None if body.trajectories is None else [one.trajectory() for one in body.trajectories]
        work = partial(
            self._training.update,
            given,
            adapter=body.adapter,
            publish=body.update_inference,
            checkpoint_name=body.checkpoint_name,
        )
        report = await _run(self._updates, work)
        return JSONResponse(
            Updated(
                policy_version=report.policy_version,
                published=report.published,
                loss=report.metrics.get("loss"),
                trajectories_used=report.used,
                trajectories_skipped=report.skipped,
                rolled_back=report.rolled_back,
                checkpoint=report.checkpoint,
                saved=report.saved,
                metrics=report.metrics,
            )
        )

    async def status(self, adapter: str | None = None) -> Response:
        """Returns the status of the first adapter that learns, or of the one that is named."""
        self._check_adapter(adapter)
        found = self._training.status(adapter)
        if "adapters" in found:
            found = {**found, "adapters": list(filter(current_caller.get().may_use_adapter, found["adapters"]))}
        return JSONResponse(found)

    async def debug(self, adapter: str | None = None) -> Response:
        """Settings, counters and memory."""
        self._check_adapter(adapter)
        return JSONResponse(self._training.debug(adapter))

    async def feedback(self, body: FeedbackBody, request: Request) -> Response:
        """The server has kept the response's tokens and their log-probabilities: with this reward it is learnt from."""
        if body.adapter is not None:
            self._check_adapter(body.adapter)
        owner = current_caller.get().rewards_answers_of
        await self._answer_given(body, owner, request)
        report = await _run(
            self._feedback,
            partial(
                self._training.feedback,
                body.request_id,
                body.reward,
                index=body.index,
                group_id=body.group_id,
                adapter=body.adapter,
                owner=owner,
                wait=False,
            ),
        )
        return JSONResponse(
            FeedbackTaken(
                status="success",
                request_id=body.request_id,
                adapter=report.adapter,
                trajectories_buffered=report.buffered,
                trajectories_ready=report.ready,
            )
        )

    async def _answer_given(self, body: FeedbackBody, owner: str | None, request: Request) -> None:
        """Waits while the response is being given, on no thread: others' feedback does not wait behind it."""
        pending = partial(self._training.is_pending, body.request_id, body.index, owner)
        if not await _run(self._feedback, pending):
            return
        key = current_caller.get().owner
        if self._waiting[key] >= MAX_WAITING:
            raise QueueFullError(
                f"{MAX_WAITING} feedback requests already wait for responses that are being given: send it again when "
                "the response has ended"
            )
        self._waiting[key] += 1
        try:
            await unless_left(request.receive, self._no_longer(pending))
        finally:
            self._waiting[key] -= 1

    async def _no_longer(self, pending: Callable[[], bool]) -> None:
        seconds = FIRST_LOOK
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            await asyncio.sleep(seconds)
            if not await _run(self._feedback, pending):
                return
            seconds = min(2 * seconds, LAST_LOOK)

    async def checkpoint(self, body: CheckpointBody = ALL_DEFAULT) -> Response:
        """Adapter, optimiser and counters, in a folder that is there whole or not at all."""
        self._check_adapter(body.adapter)
        name, path = await _run(self._checkpoints, partial(self._training.checkpoint, body.adapter, body.name))
        return JSONResponse(CheckpointWritten(status="success", checkpoint=name, path=path))

    async def rollout(self, body: RolloutBody, request: Request) -> Response:
        """Responses of the current policy, scored; with `submit` they are learnt from. They wait in a queue of their
        own, leave room for other requests, and end with their client."""
        if body.submit and body.scoring_function is None:
            raise InvalidRequestError("submit needs a scoring_function", param="submit")
        if body.n > self._max_rows:
            raise InvalidRequestError(f"n must be at most {self._max_rows}", param="n")
        label = await self._models.checkpoint(body.model)
        adapter = self._adapter(body.model) if label is None else label.rpartition("@")[0]
        prompts = await self._prompts(body)
        caller = current_caller.get()
        call = RolloutCall(
            prompts=prompts,
            sampling=SamplingParams(
                n=body.n,
                max_tokens=body.max_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                stop_token_ids=tuple(body.stop_token_ids),
            ),
            adapter=adapter,
            seed=body.seed,
            scoring_function=body.scoring_function,
            metadata=body.metadata,
            submit=body.submit,
            cache_salt=caller.cache_salt(body.cache_salt),
            owner=caller.owner,
            timeout=self._timeout,
        )
        groups = await self._rolled_out(call, caller, request)
        return JSONResponse(Rollout(groups=[_group(group) for group in groups]))

    async def _rolled_out(
        self, call: RolloutCall, caller: Caller, request: Request
    ) -> Sequence[Sequence[RolloutSample]]:
        """Charges its tokens; all that it may have where it is cut off, since nobody knows how many there were."""
        prompt_tokens = sum(map(len, call.prompts))
        caller.charge_prompt(prompt_tokens)
        reserved = used = 0
        left: Future[None] = Future()
        try:
            most = len(call.prompts) * call.sampling.n * (call.sampling.max_tokens or 0)
            used = reserved = caller.reserve_output(most)
            with when_left(request.receive, lambda: left.set_result(None)):
                groups = await _run(self._rollouts, partial(self._training.rollout, call, left))
            used = sum(len(sample.completion_ids) for group in groups for sample in group)
        except (QueueFullError, InvalidRequestError, NotFoundError):  # before any was sampled
            used = 0
            caller.refund_prompt(prompt_tokens)
            raise
        except UnavailableError:
            if left.done():
                raise ClientLeft from None
            raise
        finally:
            caller.release_output(reserved)
            caller.charge_output(used)
        return groups

    def _check_adapter(self, name: str | None) -> None:
        """Whether the key may use the adapter that learns: the first, where none is named."""
        named = name if name is not None else next(iter(self._training.adapters), None)
        if named is not None and not current_caller.get().may_use_adapter(named):
            raise ModelNotFoundError(f"there is no adapter {named!r} here", param="adapter")

    async def _prompts(self, body: RolloutBody) -> list[list[int]]:
        prompts = [await self._tokens(prompt) for prompt in body.prompts]
        self._check_ids(prompts)
        for prompt in prompts:
            completion_length(
                self._served, len(prompt), asked=body.max_tokens, default=None, prompt="prompts", param="max_tokens"
            )
        return prompts

    def _check_ids(self, prompts: Sequence[list[int]]) -> None:
        for index, prompt in enumerate(prompts):
            param = "prompt" if len(prompts) == 1 else f"prompt.{index}"
            check_ids(prompt, self._served.model.vocab_size, param)

    def _adapter(self, model: str) -> str | None:
        adapters = self._served.adapters
        if model in adapter_names(adapters):
            return model
        if model not in ("default", self._served.name):
            raise ModelNotFoundError(f"there is no model {model!r} to roll out", param="model")
        version = adapters.route()
        if version is not None:
            self._check_adapter(version.name)
        return None if version is None else version.name

    async def _tokens(self, prompt: Any) -> list[int]:
        if not prompt:
            raise InvalidRequestError("a prompt is empty", param="prompts")
        if isinstance(prompt, str):
            return await self._tokenizers.encode(self._served, prompt, True)
        if isinstance(prompt[0], int):
            return list(prompt)
        rendered = conversation(
            prompt, (), add_generation_prompt=None, continue_final_message=False, template_kwargs={}
        )
        return (await self._tokenizers.render(self._served, rendered, False)).tokens


async def _run(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def _group(group: Sequence[RolloutSample]) -> RolloutGroup:
    return {
        "prompt_ids": group[0].prompt_ids,
        "samples": [
            {
                "request_id": sample.request_id,
                "index": sample.index,
                "completion_ids": sample.completion_ids,
                "text": sample.text,
                "logprobs": sample.logprobs,
                "reward": sample.reward,
                "finish_reason": sample.finish_reason,
                "policy_version": sample.policy_spans[-1].version if sample.policy_spans else 0,
                "policy_spans": as_lists(sample.policy_spans),
            }
            for sample in group
        ],
    }


ROUTES = (
    Route("/v1/training/update", "POST", TrainingRoutes.update, Updated, "One update now", role="trainer"),
    Route("/v1/training/status", "GET", TrainingRoutes.status, TrainingStatus, "How training goes"),
    Route(
        "/v1/training/feedback",
        "POST",
        TrainingRoutes.feedback,
        FeedbackTaken,
        "Reward an earlier response",
        audited=True,
    ),
    Route(
        "/training/checkpoint",
        "POST",
        TrainingRoutes.checkpoint,
        CheckpointWritten,
        "Write a checkpoint",
        role="trainer",
    ),
    Route("/debug/training", "GET", TrainingRoutes.debug, TrainingInternals, "The trainer's internals", role="trainer"),
    Route("/v1/rl/rollout", "POST", TrainingRoutes.rollout, Rollout, "Sample, score, and perhaps learn", audited=True),
)


def router(context: ServerContext) -> APIRouter:
    return router_of("Training", ROUTES, TrainingRoutes(context))
