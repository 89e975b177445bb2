"""Training beside serving, for one engine: the ledger, the scores, and a session for each adapter that learns.

`runtime.startup` makes one. Without training it still keeps a ledger of what is asked to be recorded, so that
rollouts work; with it, every completion is recorded, and may be rewarded later.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import (
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
    ParallmError,
    UnavailableError,
)
from mlx_parallm.lora.adapter import Adapter
from mlx_parallm.lora.adapter_files import read_adapter
from mlx_parallm.text.detokenize import Vocabulary
from mlx_parallm.training.integrations.atropos.atropos_client import AtroposClient, AtroposConfig
from mlx_parallm.training.integrations.atropos.process import AtroposProcess, EnvironmentConfig
from mlx_parallm.training.rl.records import ChoiceKey, Record, RewardedRecord
from mlx_parallm.training.rl.rollouts import Rollouts
from mlx_parallm.training.rl.session import Session, SessionOptions
from mlx_parallm.training.rl.totals import Report
from mlx_parallm.training.rl.trajectories import Trajectory, check_reward
from mlx_parallm.training.storage.checkpoints import Checkpoints
from mlx_parallm.training.storage.folder_lock import FolderLock
from mlx_parallm.training.storage.kept_completions import CompletionFile
from mlx_parallm.training.storage.ledger import MAX_KEPT_TOKENS, Ledger, is_called
from mlx_parallm.training.supervised.reward_model import RewardModel, open_reward_model
from mlx_parallm.training.tasks.built_in import SCORERS
from mlx_parallm.training.tasks.scorers import Rewards

log = logging.getLogger(__name__)

RECORD_SECONDS = 10.0  # for the ledger to hear of a completion that is being given
LOOK_SECONDS = 0.02
COUNTED = 100_000  # answers
NOT_ENABLED = "this server does not train: start it with --enable-rl-training"


class TrainingManager:
    def __init__(self, engine: Engine, config: ServeConfig) -> None:
        self._environment_config = EnvironmentConfig.of(config)  # its errors come before anything else is done
        self.engine = engine
        self.config = config
        self.ledger = Ledger()
        rewards = config.training.rewards
        self.rewards = Rewards.of(
            rewards.scoring_function, timeout=rewards.scoring_timeout, batch_size=rewards.scoring_batch_size
        )
        self.rollouts = Rollouts(engine, self.ledger, config.batch.max_batch_size)
        self.sessions: dict[str, Session] = {}
        self.reward_models: dict[str, RewardModel] = {}
        self.vocabulary = Vocabulary(engine.model.tokenizer)
        self.on_close: Callable[[], None] = lambda: None  # tells a loop to end
        self.atropos: AtroposClient | None = None
        self.environment: AtroposProcess | None = None
        self._stopped = threading.Event()
        self._answers: CompletionFile | None = None
        self._counted: dict[ChoiceKey, None] = {}  # completions whose first reward counted for their arm
        self._counting = threading.Lock()
        self._folder_lock: FolderLock | None = None
        engine.recorder = self.ledger

    def start(self) -> None:
        """Opens reward models, and starts a session for each adapter that the config names."""
        for name, path in self.config.training.rewards.named_reward_models().items():
            self.add_reward_model(name, partial(open_reward_model, self.engine.model, path))
        if not self.config.trains:
            return
        self.engine.records_all = True
        self._keep_completions()
        names = self.config.training.adapters
        for name in names:
            self.add(name, serve=name == names[0])
        if self.config.training.atropos_url is not None:
            self._follow_atropos(self.config.training.atropos_url)
        if self._environment_config is not None:
            self.environment = AtroposProcess(self._environment_config, self.engine.model.tokenizer.save_pretrained)
            self.environment.start()

    def _keep_completions(self) -> None:
        """Keeps completions on disk, too: feedback may come after a restart."""
        folder = Path(self.config.checkpoints.checkpoint_dir).expanduser()
        try:
            self._folder_lock = FolderLock(folder)
        except OSError as error:
            raise ConfigError(f"--checkpoint-dir {folder} can't be written: {error}") from error
        self._answers = CompletionFile(folder, MAX_KEPT_TOKENS, self.ledger.records)
        if self.config.checkpoints.resume:
            self.ledger.restore(self._answers.read())
        try:
            self._answers.start()
        except OSError as error:
            raise ConfigError(f"--checkpoint-dir {folder} can't be written: {error}") from error
        self.ledger.on_record = self._answers.put

    def _follow_atropos(self, url: str) -> None:
        """Learns from what an Atropos API hands out, on a thread of its own."""
        config = self.config
        session = self.session()
        self.atropos = AtroposClient(
            AtroposConfig(
                url,
                batch_size=config.training.rl.batch_size,
                max_token_len=self.engine.model.context_length,
                checkpoint_dir=config.checkpoints.checkpoint_dir,
                num_steps=config.training.rl.total_steps,
                save_checkpoint_interval=config.checkpoints.checkpoint_interval,
                starting_step=session.trainer.updates,
            )
        )
        thread = threading.Thread(target=self._learn_from_atropos, args=(session,), name="atropos", daemon=True)
        thread.start()

    def _learn_from_atropos(self, session: Session) -> None:
        assert self.atropos is not None

        def on_batch(trajectories: list[Trajectory]) -> None:
            try:
                self.learn(session, trajectories)
            except UnavailableError:
                self._stopped.set()
            except ParallmError as error:
                log.error("a batch of Atropos can't be learnt from: %s", error.message)

        self.atropos.run(on_batch, self._stopped)

    def learn(self, session: Session, trajectories: Sequence[Trajectory]) -> Report:
        """One update from outside: what this server did not sample is marked so."""
        size = self.engine.model.vocab_size
        for one in trajectories:
            if (
                max(max(one.prompt_ids), max(one.completion_ids)) >= size
                or min(*one.prompt_ids, *one.completion_ids) < 0
            ):
                raise InvalidRequestError(f"a trajectory has tokens outside the vocabulary of {size}")
            self.ledger.check(one)
        return session.update(trajectories)

    def add(self, name: str, *, serve: bool = False) -> Session:
        """Another adapter that learns, with a trainer of its own."""
        training = self.config.training
        kept = self.config.checkpoints
        session = Session(
            self.engine,
            name,
            training.lora,
            training.rl,
            checkpoints=Checkpoints(Path(kept.checkpoint_dir).expanduser() / name, kept.keep_n_checkpoints),
            options=SessionOptions(
                checkpoint_interval=kept.checkpoint_interval,
                checkpoint_seconds=kept.checkpoint_seconds,
                update_trajectories=training.update_frequency or None,
                follows_buffer=training.update_frequency > 0,
                buffer_size=training.trajectory_buffer_size,
                max_staleness=training.max_staleness,
                alarms=training.alarms,
                memory=self._memory_of_one(),
            ),
        )
        session.start(resume=kept.resume, serve=serve, initial=self._initial(name))
        self.sessions[name] = session
        return session

    def _initial(self, name: str) -> Adapter | None:
        """Returns what --lora-path has for an adapter that is trained."""
        path = self.config.named_adapters().get(name)
        return None if path is None else read_adapter(path, self.config.adapters.max_lora_bytes)[0]

    def _memory_of_one(self) -> int | None:
        """Bytes for each adapter that learns; None where the memory was not planned for it."""
        return self.engine.memory.training // max(1, len(self.config.training.adapters)) or None

    def add_reward_model(self, name: str, make: Callable[[], RewardModel]) -> RewardModel:
        """One that scores from now on; `make` runs on the engine."""
        reward_model = self.engine.run(make)
        self.reward_models[name] = reward_model
        self.rewards.add_model(name, lambda texts: self.engine.work(reward_model.score_steps(texts)).result())
        return reward_model

    def reward_model_name(self, name: str | None = None) -> str:
        """Returns the full name of the reward model of this name; of the first without one."""
        if not self.reward_models:
            raise InvalidRequestError("this server has no reward model: start it with --reward-model FOLDER")
        name = next(iter(self.reward_models)) if name in (None, "default") else name
        if name not in self.reward_models:
            raise ModelNotFoundError(
                f"there is no reward model {name!r}; there is {', '.join(self.reward_models)}", param="model"
            )
        return name

    def close(self) -> None:
        self.on_close()
        self._stopped.set()
        if self.environment is not None:
            self.environment.close()
        for session in self.sessions.values():
            session.close()
        if self._answers is not None:
            self._answers.close()
        if self._folder_lock is not None:
            self._folder_lock.release()

    @property
    def enabled(self) -> bool:
        return bool(self.sessions)

    def session(self, name: str | None = None) -> Session:
        """The one of this adapter; the first without a name."""
        if not self.sessions:
            raise InvalidRequestError(NOT_ENABLED, code="training_disabled")
        if name is None:
            return next(iter(self.sessions.values()))
        if name not in self.sessions:
            raise NotFoundError(f"{name!r} is not trained here; {', '.join(self.sessions)} is", param="adapter")
        return self.sessions[name]

    # Where trajectories come from.

    def default_scorer(self, metadata: Mapping[str, Any]) -> str | None:
        """Returns what --environment names, for completions whose metadata have what it needs."""
        name = self.config.training.built_in_scorer
        return name if name is not None and not SCORERS[name].lacks(metadata) else None

    def feedback(
        self,
        request_id: str,
        reward: float,
        index: int | None,
        group_id: str | None,
        adapter: str | None,
        owner: str | None,
        wait: bool = True,
    ) -> tuple[Session | None, Record]:
        """A reward for an earlier completion, for the adapter that gave it, or for another that is to learn from it; no
        session where nobody learns from it, and it only tells arms of the traffic apart."""
        check_reward(reward)
        compared = self.engine.adapters.traffic.compares
        if not compared:
            self.session()
        find = self.find_record if wait else self.ledger.find
        record = find(request_id, index, owner)
        learns = adapter is not None or record.policy in self.sessions
        session = None
        if learns or not compared:  # else it says no more than which arm is the better
            session = self.session(adapter) if adapter is not None else self.session_of(record)
            self._keep(session, [RewardedRecord(record, reward, group_id or "")])
        self._note_arms([RewardedRecord(record, reward, group_id or "")])
        return session, record

    def _note_arms(self, rewarded: Sequence[RewardedRecord]) -> None:
        for one in rewarded:
            if not self._is_first(one.record.key):  # what is sent again says no more of an arm
                continue
            version = one.record.spans[-1].version if one.record.spans else 0
            self.engine.adapters.note_reward(one.record.policy, version, one.reward)

    def _is_first(self, key: ChoiceKey) -> bool:
        """Returns whether this completion has no reward yet that counted for its arm."""
        with self._counting:
            if key in self._counted:
                return False
            self._counted[key] = None
            if len(self._counted) > COUNTED:
                del self._counted[next(iter(self._counted))]
            return True

    def is_pending(self, request_id: str, index: int | None, owner: str | None) -> bool:
        """Whether a completion of this owner by that name is being given, and its record will come."""
        try:
            self.ledger.find(request_id, index, owner)
        except NotFoundError:
            live = self.engine.live_requests()
            return any(is_called(request, request_id) and owner in (None, request.owner) for request in live)
        return False

    def find_record(self, request_id: str, index: int | None = None, owner: str | None = None) -> Record:
        """A completion by a name of its request. One that is being given, or was ended by its text a moment ago, is
        waited for."""
        try:
            return self.ledger.find(request_id, index, owner)
        except NotFoundError:
            self._await_end([request_id])
        return self.ledger.find(request_id, index, owner)

    def await_records(self, request_ids: Sequence[str]) -> None:
        """Waits for the records of those requests that this server is answering; the others are known, or unknown."""
        missing = self.ledger.missing(request_ids)
        if missing:
            self._await_end(missing)

    def _await_end(self, names: Collection[str]) -> None:
        deadline = time.monotonic() + RECORD_SECONDS
        while True:
            live = self.engine.live_requests()
            names = [name for name in names if any(is_called(request, name) for request in live)]
            if not names or time.monotonic() > deadline:
                return
            time.sleep(LOOK_SECONDS)

    def session_of(self, record: Record) -> Session:
        """Returns the session of the adapter that a completion was generated with."""
        return self.check_trained(record.policy)

    def check_trained(self, policy: str | None) -> Session:
        """The session that learns from what this adapter answers."""
        self.session()
        if policy is None or policy not in self.sessions:
            who = "the model without an adapter" if policy is None else f"adapter {policy!r}"
            raise InvalidRequestError(
                f"{who} answers, and is not trained here: ask {' or '.join(map(repr, self.sessions))}, or send "
                "feedback that names one of them as the adapter that is to learn",
                param="adapter",
                code="not_trained",
            )
        return self.sessions[policy]

    def _keep(self, session: Session, rewarded: Sequence[RewardedRecord]) -> None:
        trajectories = []
        for one in rewarded:
            trajectory = Trajectory.recorded(one.record, one.reward, one.group_id)
            trajectory.off_policy = one.record.policy != session.name
            trajectories.append(trajectory)
        session.buffer.add(trajectories)

    def submit(self, rewarded: Sequence[RewardedRecord]) -> None:
        """Completions with their rewards, for the adapter that gave them."""
        if rewarded:
            self._keep(self.session_of(rewarded[0].record), rewarded)
            self._note_arms(rewarded)

    def status(self, name: str | None = None) -> dict[str, Any]:
        if not self.sessions:
            return {"training_enabled": False, "policy_version": self.engine.adapters.policy_version}
        background = self.engine.metrics.background
        return {
            "training_enabled": True,
            **self.session(name).status(),
            "adapters": list(self.sessions),
            "scoring_functions": self.rewards.names,
            "scoring_failures": self.rewards.failures,
            "inference_share": self.config.serving_share,
            "measured_inference_share": background.serving_share,
            "longest_stall_seconds": background.longest_stall,
            "training_seconds": background.seconds,
            "atropos": None if self.atropos is None else asdict(self.atropos.counts),
            "environment": self.environment and {"pid": self.environment.pid, "starts": self.environment.starts},
        }
