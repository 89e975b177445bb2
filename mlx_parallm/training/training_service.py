"""What clients ask of training: updates, feedback, rollouts, scores, and how it goes, in types that cross processes.

`runtime` hands one to the server as its `TrainingClient`. The sessions, rewards and records behind it are the
manager's. Its calls block; the server makes them on threads of its own.
"""

import logging
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from mlx_parallm.errors import (
    ConflictError,
    ContextLengthError,
    InvalidRequestError,
    ParallmError,
    UnavailableError,
)
from mlx_parallm.metrics import TrainingMetrics
from mlx_parallm.policy_spans import PolicySpan
from mlx_parallm.training.manager import NOT_ENABLED, TrainingManager
from mlx_parallm.training.rl.records import ChoiceKey, Record, RewardedRecord
from mlx_parallm.training.rl.rollouts import RolloutClient
from mlx_parallm.training.rl.session import Session
from mlx_parallm.training.rl.trajectories import Trajectory, joined_masks, prompt_group
from mlx_parallm.training.tasks.scorers import Item
from mlx_parallm.types import (
    Collection,
    FeedbackReport,
    RecentGroup,
    RolloutCall,
    RolloutSample,
    TrajectoryInput,
    UpdateReport,
)
from mlx_parallm.validation import check_ids

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScoredRecord:
    """A completion of a rollout; `reward`: None where it has none."""

    record: Record
    reward: float | None


class TrainingService:
    def __init__(self) -> None:
        self._bound: TrainingManager | None = None
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="score")
        self._lock = threading.Lock()
        self._collecting = 0  # calls whose completions are being scored

    def bind(self, manager: TrainingManager | None) -> None:
        """The manager of the default model; None while no model generates."""
        self._bound = manager

    @property
    def _manager(self) -> TrainingManager:
        if self._bound is None:
            raise UnavailableError("no model that generates text is loaded", code="model_not_loaded")
        return self._bound

    def stop_loops(self) -> None:
        """Tells a loop that trains by itself to end its step."""
        if self._bound is not None:
            self._bound.on_close()

    def close(self) -> None:
        """Writes the state of training and ends it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._bound is not None:
            self._bound.close()

    @property
    def adapters(self) -> Sequence[str]:
        """Those that learn, the first first; empty where this server does not train."""
        return [] if self._bound is None else list(self._bound.sessions)

    @property
    def sessions(self) -> Mapping[str, Session]:
        return {} if self._bound is None else self._bound.sessions

    # Updates.

    def update(
        self,
        trajectories: Sequence[TrajectoryInput] | None,
        *,
        adapter: str | None = None,
        publish: bool = True,
        checkpoint_name: str | None = None,
    ) -> UpdateReport:
        """One update, from these trajectories or from those in the buffer; what is refused is a ConflictError."""
        session = self._manager.session(adapter)
        taken = None
        if trajectories is not None:
            self._manager.await_records([one.request_id for one in trajectories if one.request_id is not None])
            taken = [self._numbered(one, session, number) for number, one in enumerate(trajectories)]
            _check_distinct(taken)
        report = session.update(taken, publish=publish, checkpoint_name=checkpoint_name, durable=True)
        outcome = report.outcome
        if outcome.adapter is None and not report.rolled_back:
            raise ConflictError(
                f"the update was refused: {outcome.reason}; version {report.version} goes on serving",
                param="trajectories",
                code="update_refused",
            )
        return UpdateReport(
            policy_version=report.version,
            published=report.published,
            used=outcome.used,
            skipped=outcome.skipped,
            rolled_back=report.rolled_back or None,
            checkpoint=report.checkpoint,
            saved=report.saved,
            metrics=outcome.metrics,
        )

    def _numbered(self, sent: TrajectoryInput, session: Session, number: int) -> Trajectory:
        """Errors say which trajectory and which of its fields is wrong."""
        try:
            return session.trainer.checked_length(self._trajectory(sent, session))
        except ParallmError as error:
            error.message = f"trajectory {number}: {error.message}"
            error.param = f"trajectories.{number}" + (f".{error.param}" if error.param else "")
            raise

    def _trajectory(self, sent: TrajectoryInput, session: Session) -> Trajectory:
        if sent.policy_version is not None and sent.policy_version > session.last_version:
            raise InvalidRequestError(
                f"version {sent.policy_version} of {session.name!r} does not exist yet: the newest is "
                f"{session.last_version}",
                param="policy_version",
            )
        if sent.prompt_ids is None or sent.completion_ids is None:
            return self._recorded_trajectory(sent, session)
        self._check_tokens(sent.prompt_ids, sent.completion_ids)
        length, version = len(sent.completion_ids), sent.policy_version
        trajectory = Trajectory(
            prompt_ids=sent.prompt_ids,
            completion_ids=sent.completion_ids,
            reward=sent.reward,
            group_id=sent.group_id,
            logprobs=sent.logprobs,
            temperature=sent.temperature,
            spans=() if version is None else (PolicySpan(first=0, end=length, version=version),),
            mask=sent.mask,
            advantage=sent.advantage,
            request_id=sent.request_id,
            metadata=dict(sent.metadata),
        )
        self._manager.ledger.check(trajectory)
        return trajectory

    def _recorded_trajectory(self, sent: TrajectoryInput, session: Session) -> Trajectory:
        assert sent.request_id is not None
        record = self._manager.ledger.find(sent.request_id, sent.index)
        trajectory = Trajectory.recorded(record, sent.reward, sent.group_id)
        trajectory.off_policy = record.policy != session.name
        trajectory.mask, trajectory.advantage = sent.mask, sent.advantage
        trajectory.__post_init__()  # their lengths
        trajectory.mask = joined_masks(record.mask, sent.mask)
        return trajectory

    def _check_tokens(self, prompt_ids: list[int], completion_ids: list[int]) -> None:
        model = self._manager.engine.model
        for name, ids in (("prompt_ids", prompt_ids), ("completion_ids", completion_ids)):
            check_ids(ids, model.vocab_size, name)
        if len(prompt_ids) + len(completion_ids) > model.context_length:
            raise ContextLengthError(
                f"{len(prompt_ids)} tokens of the prompt and {len(completion_ids)} of the completion are more than the "
                f"context of {model.context_length}",
                param="completion_ids",
            )

    def checkpoint(self, adapter: str | None, name: str | None) -> tuple[str, str]:
        """Writes one; its name and its folder."""
        session = self._manager.session(adapter)
        written = session.checkpoint(name)
        assert session.checkpoints is not None
        return written, str(session.checkpoints.folder / written)

    # Rewards for what was answered.

    def scorer_for(self, metadata: Mapping[str, Any]) -> str | None:
        """The scoring function of --environment, for requests that name none and bring what it needs."""
        manager = self._bound
        return None if manager is None else manager.default_scorer(metadata)

    def check_collects(
        self, model: str, adapter: str | None, scoring_function: str | None, metadata: Mapping[str, Any]
    ) -> None:
        """Raises unless the completions of this model with this adapter can be scored so, and learnt from."""
        manager = self._manager
        if model != manager.engine.model.name or not manager.enabled:
            raise InvalidRequestError(NOT_ENABLED, param="collect_trajectory", code="training_disabled")
        manager.check_trained(adapter)
        if scoring_function is not None:
            manager.rewards.check(scoring_function, metadata)

    def collect(self, collection: Collection) -> "Future[dict[int, float]]":
        """Scores and buffers an ended call, elsewhere: rewards by choices' numbers; what can't be scored is missing."""
        with self._lock:
            self._collecting += 1
        return self._pool.submit(self._score, collection)

    def _score(self, collection: Collection) -> dict[int, float]:
        try:
            found = self._manager.find_record
            records = [found(request, index).cut(tokens) for request, index, tokens in collection.choices]
            items = [self._item(record, collection.metadata) for record in records]
            scores = self._manager.rewards.score(collection.scoring_function, items)
            rewarded = [
                RewardedRecord(record, score, _group(records, record, collection.metadata))
                for record, score in zip(records, scores, strict=True)
                if score is not None
            ]
            self._manager.submit(rewarded)
            return {one.record.index: one.reward for one in rewarded}
        except ParallmError as error:
            log.warning("a completion can't be learnt from: %s", error.message)
            raise
        finally:
            with self._lock:
                self._collecting -= 1

    def _item(self, record: Record, metadata: Mapping[str, Any]) -> Item:
        decode = self._manager.vocabulary.decode
        return Item(
            prompt=decode(record.prompt_ids),
            completion=decode(record.completion_ids, skip_special=True),
            metadata={**metadata, "finish_reason": record.finish_reason},
            tokens=record.prompt_ids + record.completion_ids,
        )

    def feedback(
        self,
        request_id: str,
        reward: float,
        index: int | None = None,
        group_id: str | None = None,
        adapter: str | None = None,
        owner: str | None = None,
        wait: bool = True,
    ) -> FeedbackReport:
        """A reward for an earlier completion, for the adapter that gave it, or for another that is to learn from it."""
        session, record = self._manager.feedback(request_id, reward, index, group_id, adapter, owner, wait)
        if session is None:
            return FeedbackReport(record.policy or "base", 0, 0)
        return FeedbackReport(session.name, len(session.buffer), session.buffer.ready())

    def is_pending(self, request_id: str, index: int | None, owner: str | None) -> bool:
        return self._manager.is_pending(request_id, index, owner)

    # Rollouts and scores.

    def rollout(self, call: RolloutCall, left: "Future[None] | None" = None) -> list[list[RolloutSample]]:
        """A group of completions to each prompt. `left`: done when their client has gone, which ends them."""
        manager = self._manager
        if call.scoring_function is not None:
            manager.rewards.check(call.scoring_function, *(call.metadata or [{}]))
        if call.submit:
            manager.check_trained(call.adapter)
        sampled = manager.rollouts.sample(
            call.prompts,
            call.sampling,
            adapter=call.adapter,
            seed=call.seed,
            salt=call.cache_salt,
            label=f"rollout-{uuid.uuid4().hex[:12]}",
            resample=False,
            client=RolloutClient(call.owner, call.timeout, left),
        )
        groups = self._scored(sampled, call)
        if call.submit:
            manager.submit(
                [
                    RewardedRecord(one.record, one.reward, one.record.names.client)
                    for group in groups
                    for one in group
                    if one.reward is not None
                ]
            )
        return [[self._sample(one) for one in group] for group in groups]

    def _scored(self, sampled: Sequence[Sequence[Record]], call: RolloutCall) -> list[list[ScoredRecord]]:
        if call.scoring_function is None:
            return [[ScoredRecord(record, None) for record in records] for records in sampled]
        facts = call.metadata or [{} for _ in sampled]
        items = [
            self._item(record, metadata) for records, metadata in zip(sampled, facts, strict=True) for record in records
        ]
        scores = iter(self._manager.rewards.score(call.scoring_function, items))
        return [[ScoredRecord(record, next(scores)) for record in records] for records in sampled]

    def _sample(self, scored: ScoredRecord) -> RolloutSample:
        record = scored.record
        return RolloutSample(
            request_id=record.id,
            index=record.index,
            prompt_ids=record.prompt_ids,
            completion_ids=record.completion_ids,
            text=self._manager.vocabulary.decode(record.completion_ids, skip_special=True),
            logprobs=record.logprobs,
            reward=scored.reward,
            finish_reason=record.finish_reason,
            policy_spans=record.spans,
        )

    def reward_model_name(self, name: str | None) -> str:
        """The reward model of this name; the first without one."""
        return self._manager.reward_model_name(name)

    def score(self, name: str, texts: Sequence[list[int]]) -> list[float]:
        """What a reward model gives each text."""
        manager = self._manager
        reward_model = manager.reward_models[manager.reward_model_name(name)]
        return manager.engine.work(reward_model.score_steps(texts)).result()

    # How it goes.

    def status(self, adapter: str | None = None) -> dict[str, Any]:
        if self._bound is None:
            return {"training_enabled": False, "policy_version": 0}
        return self._bound.status(adapter)

    def debug(self, adapter: str | None = None) -> dict[str, Any]:
        """Settings, counters and memory."""
        manager = self._manager
        session = self._manager.session(adapter)
        trainer = session.trainer
        return {
            "adapter": session.name,
            "lora": asdict(session.lora),
            "config": asdict(session.config),
            "updates": trainer.updates,
            "trainer_bytes": trainer.nbytes,
            "activation_bytes": trainer.activation_bytes,
            "shares_prompts": trainer.tree.shares_prompts,
            "parameters": {name: list(array.shape) for name, array in trainer.parameters.items()},
            "buffer": asdict(session.buffer.counts) | {"buffered": len(session.buffer)},
            "ledger": len(manager.ledger),
            "collecting": self._collecting,
            "background": asdict(manager.engine.metrics.background),
            "status": manager.status(adapter),
        }

    def recent(self, adapter: str | None, count: int) -> list[RecentGroup]:
        """The groups of completions that came in last, the newest first."""
        return self._manager.session(adapter).buffer.recent.latest(count)

    def metrics(self) -> dict[str, TrainingMetrics]:
        """Returns the metrics of each adapter that learns."""
        return {name: _metrics(session) for name, session in list(self.sessions.items())}


def _metrics(session: Session) -> TrainingMetrics:
    totals, counts = session.totals, session.buffer.counts
    return TrainingMetrics(
        loss=totals.metrics.get("loss", 0.0),
        reward_mean=totals.metrics.get("reward_mean", 0.0),
        kl=totals.kl or 0.0,
        updates_per_second=totals.updates_per_second,
        buffered=len(session.buffer),
        collected=counts.collected,
        used=totals.used,
        flat=counts.flat,
        stale=counts.stale,
        dropped=counts.dropped,
        updates=totals.updates,
        refused=totals.refused,
        rollbacks=totals.rollbacks,
        checkpoint_saves=session.checkpoints.saves if session.checkpoints else 0,
    )


def _check_distinct(trajectories: Sequence[Trajectory]) -> None:
    """A completion has one reward in an update."""
    seen: dict[ChoiceKey, int] = {}
    for number, one in enumerate(trajectories):
        if one.source is not None and (first := seen.setdefault(one.source, number)) != number:
            raise InvalidRequestError(
                f"trajectory {number}: this is the same completion as trajectory {first}, {one.request_id!r}",
                param=f"trajectories.{number}.request_id",
            )


def _group(records: Sequence[Record], record: Record, metadata: Mapping[str, Any]) -> str:
    """Completions of one call are a group, where several are to one prompt; a lone one is compared by its prompt."""
    named = metadata.get("group_id")
    if named is not None:
        return str(named)
    several = sum(other.prompt_ids == record.prompt_ids for other in records) > 1
    return record.request if several else prompt_group(record.prompt_ids)
