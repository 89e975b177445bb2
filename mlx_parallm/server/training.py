"""Training over HTTP: updates, status, feedback, checkpoints, and `/v1/rl/rollout`. The work is `TrainingManager`'s.

What blocks (an update, a rollout) runs on threads, never on the event loop.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, TypeVar

from fastapi import APIRouter
from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from mlx_parallm.engine.admission import check_ids
from mlx_parallm.errors import (
    ConflictError,
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    ParallmError,
)
from mlx_parallm.server import answers, params
from mlx_parallm.server.errors import JSONResponse
from mlx_parallm.server.models import ServedModel
from mlx_parallm.server.openai import TokenizerPool
from mlx_parallm.server.routing import JSONRoute, add_routes
from mlx_parallm.server.schemas import MAX_TOKENS, Body, ChatMessage
from mlx_parallm.training.manager import TrainingManager
from mlx_parallm.training.session import Report, Session
from mlx_parallm.training.trajectories import Record, Trajectory
from mlx_parallm.types import SamplingParams

MAX_TRAJECTORIES = 4096
MAX_PROMPTS = 256
THREADS = 16

T = TypeVar("T")


class TrajectoryBody(Body):
    """An answer with its reward. With a `request_id` that this server answered, ids and log-probabilities may be left
    out."""

    group_id: str | int | None = Field(None, description="Those of one group are compared; default: by their prompt")
    prompt_ids: list[int] | None = Field(None, min_length=1, max_length=MAX_TOKENS)
    completion_ids: list[int] | None = Field(None, min_length=1, max_length=MAX_TOKENS)
    logprobs: list[float] | None = Field(None, description="As they were drawn; without, it counts as off-policy")
    reward: float
    policy_version: int | None = Field(None, ge=0)
    request_id: str | None = None
    index: int | None = Field(
        None, ge=0, description="Which of the request's choices; may be left out where it has one"
    )
    temperature: float = Field(1.0, gt=0, description="At which it was drawn")
    mask: list[bool] | None = Field(None, description="Tokens of the answer to learn from; default: all")
    advantage: float | None = Field(None, description="Instead of the one by its group")
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _complete(self) -> "TrajectoryBody":
        if self.request_id is None and (self.prompt_ids is None or self.completion_ids is None):
            raise PydanticCustomError("trajectory", "It needs prompt_ids and completion_ids, or a request_id")
        return self


class UpdateBody(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "trajectories": [
                    {"group_id": "g1", "request_id": "r-1", "reward": 1.0},
                    {"group_id": "g1", "request_id": "r-2", "reward": 0.0},
                ],
                "update_inference": True,
            }
        }
    )
    trajectories: list[TrajectoryBody] | None = Field(
        None, min_length=1, max_length=MAX_TRAJECTORIES, description="Default: those in the buffer"
    )
    update_inference: bool = Field(True, description="False: the new parameters are kept, and not served yet")
    checkpoint_name: str | None = Field(None, min_length=1, max_length=100, description="Write a checkpoint after it")
    adapter: str | None = Field(None, description="Which of the adapters that learn; default: the first")


class FeedbackBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"request_id": "chatcmpl-1f3a", "reward": 1.0}})
    request_id: str = Field(min_length=1, max_length=300, description="An answer's id, X-Request-Id, or one's own")
    reward: float
    index: int | None = Field(None, ge=0, description="Which of its choices; may be left out where it has one")
    group_id: str | None = Field(None, max_length=300, description="Default: answers to one prompt are a group")
    adapter: str | None = Field(None, description="Which adapter learns from it; default: the one that answered")


class CheckpointBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"name": "before-the-weekend"}})
    name: str | None = Field(None, min_length=1, max_length=100, description="Default: by the number of updates")
    adapter: str | None = None


ALL_DEFAULT = CheckpointBody.model_validate({})


class RolloutBody(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {"prompts": ["2 + 2 ="], "n": 4, "max_tokens": 8, "scoring_function": "length", "submit": True}
        }
    )
    model: str = Field("default", description="The model, or an adapter of it")
    prompts: list[str | list[int] | list[ChatMessage]] = Field(min_length=1, max_length=MAX_PROMPTS)
    n: int = Field(1, ge=1)
    max_tokens: int = Field(128, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=1 << 62)
    stop_token_ids: list[int] = Field(default_factory=list, max_length=64)
    scoring_function: str | None = None
    metadata: list[dict[str, Any]] | None = Field(None, description="One for each prompt, for the scoring function")
    submit: bool = Field(False, description="Put them into the buffer to learn from")

    @field_validator("metadata")
    @classmethod
    def _one_each(cls, value: Any, info: Any) -> Any:
        if value is not None and len(value) != len(info.data.get("prompts", value)):
            raise PydanticCustomError("metadata", "Expected one for each prompt")
        return value


class ScoreBody(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "input": [
                    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
                    "any text",
                ]
            }
        }
    )
    model: str = Field("default", description="A reward model; default: the first")
    task: Literal["reward"] = Field("reward", description="For /pooling")
    input: str | list[str | list[int] | list[ChatMessage]] | None = Field(None, description="Texts or conversations")
    messages: list[ChatMessage] | None = Field(None, description="One conversation instead")

    @model_validator(mode="after")
    def _something(self) -> "ScoreBody":
        if (self.input is None) == (self.messages is None) or self.input == []:
            raise PydanticCustomError("input", "Expected input or messages, and something in it")
        return self

    @property
    def texts(self) -> list[Any]:
        if self.messages is not None:
            return [self.messages]
        return [self.input] if isinstance(self.input, str) else list(self.input or ())


def _check_distinct(trajectories: Sequence[Trajectory]) -> None:
    """An answer has one reward in an update."""
    seen: dict[tuple[str, int], int] = {}
    for number, one in enumerate(trajectories):
        if one.source is not None and (first := seen.setdefault(one.source, number)) != number:
            raise InvalidRequestError(
                f"trajectory {number}: this is the same answer as trajectory {first}, {one.request_id!r}",
                param=f"trajectories.{number}.request_id",
            )


class TrainingRoutes:
    def __init__(self, training: TrainingManager, served: ServedModel, workers: TokenizerPool) -> None:
        self._training = training
        self._served = served
        self._workers = workers
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="training")

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JSONRoute, tags=["Training"])
        add_routes(
            router,
            ("/v1/training/update", "POST", self.update, answers.Updated, "One update now"),
            ("/v1/training/status", "GET", self.status, answers.TrainingStatus, "How training goes"),
            ("/v1/training/feedback", "POST", self.feedback, answers.FeedbackTaken, "Reward an earlier answer"),
            ("/training/checkpoint", "POST", self.checkpoint, answers.CheckpointWritten, "Write a checkpoint"),
            ("/debug/training", "GET", self.debug, answers.TrainingInternals, "The trainer's internals"),
            ("/v1/rl/rollout", "POST", self.rollout, answers.Rollout, "Sample, score, and perhaps learn"),
            ("/v1/rewards/score", "POST", self.score, answers.Scored, "Score texts with a reward model"),
            ("/v1/score", "POST", self.score, answers.Scored, "Score texts with a reward model"),
            ("/pooling", "POST", self.score, answers.Scored, "Score texts with a reward model, as vLLM"),
        )
        return router

    async def update(self, body: UpdateBody) -> Response:
        """From the trajectories in the body, or those in the buffer. It is published unless it is refused: not finite,
        no change, or too far from the policy before."""
        session = self._training.session(body.adapter)

        def work() -> Report:
            trajectories = None
            if body.trajectories is not None:
                trajectories = [self._numbered(one, session, number) for number, one in enumerate(body.trajectories)]
                _check_distinct(trajectories)
            return session.update(
                trajectories, publish=body.update_inference, checkpoint_name=body.checkpoint_name, durable=True
            )

        report = await self._run(work)
        outcome = report.outcome
        if outcome.adapter is None and not report.rolled_back:
            raise ConflictError(
                f"the update was refused: {outcome.reason}; version {report.version} goes on serving",
                param="trajectories",
                code="update_refused",
            )
        return JSONResponse(
            {
                "policy_version": report.version,
                "published": report.published,
                "loss": outcome.metrics.get("loss"),
                "trajectories_used": outcome.used,
                "trajectories_skipped": outcome.skipped,
                "rolled_back": report.rolled_back or None,
                "checkpoint": report.checkpoint,
                "saved": report.saved,
                "metrics": outcome.metrics,
            }
        )

    async def _run(self, work: Callable[[], T]) -> T:
        """On threads of its own: others, that resume or stop the server, must never wait for one."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _numbered(self, body: TrajectoryBody, session: Session, number: int) -> Trajectory:
        """Errors say which trajectory and which of its fields is wrong."""
        try:
            return self._trajectory(body, session)
        except ParallmError as error:
            error.message = f"trajectory {number}: {error.message}"
            error.param = f"trajectories.{number}" + (f".{error.param}" if error.param else "")
            raise

    def _trajectory(self, body: TrajectoryBody, session: Session) -> Trajectory:
        ledger = self._training.ledger
        if body.policy_version is not None and body.policy_version > session.last_version:
            raise InvalidRequestError(
                f"version {body.policy_version} of {session.name!r} does not exist yet: the newest is "
                f"{session.last_version}",
                param="policy_version",
            )
        group = "" if body.group_id is None else str(body.group_id)
        if body.prompt_ids is None or body.completion_ids is None:
            assert body.request_id is not None
            record = ledger.find(body.request_id, body.index)
            found = Trajectory.recorded(record, body.reward, group)
            found.off_policy = record.policy != session.name
            found.mask, found.advantage = body.mask, body.advantage
            found.__post_init__()
            return found
        for name, ids in (("prompt_ids", body.prompt_ids), ("completion_ids", body.completion_ids)):
            check_ids(ids, self._served.model.vocab_size, name)
        if len(body.prompt_ids) + len(body.completion_ids) > self._served.context_length:
            raise ContextLengthError(
                f"{len(body.prompt_ids)} tokens of the prompt and {len(body.completion_ids)} of the answer are more "
                f"than the context of {self._served.context_length}",
                param="completion_ids",
            )
        length, version = len(body.completion_ids), body.policy_version
        found = Trajectory(
            body.prompt_ids,
            body.completion_ids,
            body.reward,
            group,
            body.logprobs,
            body.temperature,
            () if version is None else ((0, length, version),),
            body.mask,
            body.advantage,
            body.request_id,
            metadata=body.metadata or {},
        )
        ledger.check(found)
        return found

    async def status(self, adapter: str | None = None) -> Response:
        """Of the first adapter that learns, or of the one that is named."""
        return JSONResponse(self._training.status(adapter))

    async def feedback(self, body: FeedbackBody) -> Response:
        """The server has kept the answer's tokens and their log-probabilities: with this reward it is learnt from."""
        session = await self._run(
            partial(self._training.feedback, body.request_id, body.reward, body.index, body.group_id, body.adapter)
        )
        return JSONResponse(
            {
                "status": "success",
                "request_id": body.request_id,
                "adapter": session.name,
                "trajectories_buffered": len(session.buffer),
                "trajectories_ready": session.buffer.ready(),
            }
        )

    async def checkpoint(self, body: CheckpointBody = ALL_DEFAULT) -> Response:
        """Adapter, optimiser and counters, in a folder that is there whole or not at all."""
        session = self._training.session(body.adapter)
        name = await self._run(partial(session.checkpoint, body.name))
        assert session.checkpoints is not None
        return JSONResponse({"status": "success", "checkpoint": name, "path": str(session.checkpoints.folder / name)})

    async def debug(self, adapter: str | None = None) -> Response:
        """Settings, counters and memory."""
        session, training = self._training.session(adapter), self._training
        trainer = session.trainer
        return JSONResponse(
            {
                "adapter": session.name,
                "lora": asdict(session.lora),
                "config": asdict(session.config),
                "updates": trainer.updates,
                "trainer_bytes": trainer.nbytes,
                "activation_bytes": trainer.activation_bytes,
                "shares_prompts": trainer.tree.shares_prompts,
                "parameters": {name: list(array.shape) for name, array in trainer.parameters.items()},
                "buffer": asdict(session.buffer.counts) | {"buffered": len(session.buffer)},
                "ledger": len(training.ledger),
                "collecting": training.collecting,
                "background": asdict(training.engine.metrics.background),
                "status": training.status(adapter),
            }
        )

    async def rollout(self, body: RolloutBody) -> Response:
        """Answers of the current policy, scored; with `submit` they are learnt from."""
        training = self._training
        if body.scoring_function is not None:
            training.rewards.check(body.scoring_function)
        if body.submit and body.scoring_function is None:
            raise InvalidRequestError("submit needs a scoring_function", param="submit")
        if body.n > training.config.max_batch_size:
            raise InvalidRequestError(f"n must be at most {training.config.max_batch_size}", param="n")
        adapter = self._adapter(body.model)
        if body.submit:
            training.check_trained(adapter)
        prompts = [await self._tokens(prompt) for prompt in body.prompts]
        params.check_prompt_ids(prompts, self._served.model.vocab_size)
        for prompt in prompts:
            params.completion_length(
                self._served, len(prompt), asked=body.max_tokens, default=None, prompt="prompts", param="max_tokens"
            )
        sampling = SamplingParams(
            n=body.n,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            stop_token_ids=tuple(body.stop_token_ids),
        )

        def work() -> list[list[tuple[Record, float | None]]]:
            label = f"rollout-{uuid.uuid4().hex[:12]}"
            drawn = training.rollouts.draw(
                prompts, sampling, adapter=adapter, seed=body.seed, label=label, redraw=False
            )
            return self._scored(drawn, body)

        groups = await self._run(work)
        if body.submit:
            scored = [
                (record, reward, record.label) for group in groups for record, reward in group if reward is not None
            ]
            await self._run(partial(training.submit, scored))
        shown = await self._run(lambda: [self._group(group) for group in groups])
        return JSONResponse({"groups": shown})

    async def score(self, body: ScoreBody) -> Response:
        """A number for each text or conversation: how good the reward model thinks it is."""
        name, model = self._training.reward_model(body.model)
        texts = [await self._tokens(text, whole=True) for text in body.texts]
        params.check_prompt_ids(texts, self._served.model.vocab_size)
        if any(len(text) > self._served.context_length for text in texts):
            raise ContextLengthError(f"the context holds {self._served.context_length} tokens", param="input")
        scores = await asyncio.wrap_future(self._training.engine.work(model.score_steps(texts)))
        count = sum(map(len, texts))
        return JSONResponse(
            {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": name,
                "data": [{"index": place, "object": "reward", "score": value} for place, value in enumerate(scores)],
                "usage": {"prompt_tokens": count, "total_tokens": count},
            }
        )

    def _adapter(self, model: str) -> str | None:
        registry = self._served.engine.adapters
        if model in registry:
            return model
        if model not in ("default", self._served.name):
            raise ModelNotFoundError(f"there is no model {model!r} to roll out", param="model")
        version = registry.route()
        return None if version is None else version.name

    async def _tokens(self, prompt: Any, whole: bool = False) -> list[int]:
        """`whole`: a conversation that nobody is to continue."""
        if not prompt:
            raise InvalidRequestError("a prompt is empty", param="prompts")
        if isinstance(prompt, str):
            return await self._workers.encode(self._served, prompt, True)
        if isinstance(prompt[0], int):
            return list(prompt)
        conversation = params.conversation(
            prompt, (), add_generation_prompt=False if whole else None, continue_final_message=False, template_kwargs={}
        )
        return (await self._workers.render(self._served, conversation, False)).tokens

    def _scored(self, drawn: Sequence[Sequence[Record]], body: RolloutBody) -> list[list[tuple[Record, float | None]]]:
        if body.scoring_function is None:
            return [[(record, None) for record in records] for records in drawn]
        facts = body.metadata or [{} for _ in drawn]
        items = [
            self._training.item(record, metadata)
            for records, metadata in zip(drawn, facts, strict=True)
            for record in records
        ]
        scores = iter(self._training.rewards.score(body.scoring_function, items))
        return [[(record, next(scores)) for record in records] for records in drawn]

    def _group(self, group: Sequence[tuple[Record, float | None]]) -> dict[str, Any]:
        return {
            "prompt_ids": group[0][0].prompt_ids,
            "samples": [
                {
                    "request_id": record.id,
                    "index": record.index,
                    "completion_ids": record.completion_ids,
                    "text": self._training.vocabulary.decode(record.completion_ids, skip_special=True),
                    "logprobs": record.logprobs,
                    "reward": reward,
                    "finish_reason": record.finish_reason,
                    "policy_version": record.spans[-1][2] if record.spans else 0,
                    "policy_spans": record.spans,
                }
                for record, reward in group
            ],
        }
