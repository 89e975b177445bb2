"""The runtime of a replica, as its server sees it: what all replicas must agree on is proposed to the front.

`ReplicatedRuntime` is a `RuntimeClient` over the process's own. Calls that read go through; calls that change something
become a `Change` with all that is left open decided here (numbers, configs, the files of a folder), which `propose` has
all replicas make, this one included (`local_state`). So no dialect knows of replicas.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from mlx_parallm.arms import AutoSplit, Decision
from mlx_parallm.cluster.replicas.changes import Change
from mlx_parallm.errors import ConflictError, InvalidRequestError
from mlx_parallm.metrics import EngineMetrics, PredictorMetrics
from mlx_parallm.runtime.client import AdapterTable, ImageReader, ModelClient, PoolClient, TrainingClient
from mlx_parallm.runtime.policy_weights import policy_of, read_weights, version_of
from mlx_parallm.runtime.predicting import LocalPredictor
from mlx_parallm.runtime.startup import Runtime
from mlx_parallm.signature import WeightsVersion
from mlx_parallm.text.compiled_grammar import CompiledGrammar
from mlx_parallm.types import (
    AdapterRoute,
    AdapterVersion,
    ModelInfo,
    ModelStatus,
    OnDelta,
    PauseMode,
    PredictorInfo,
    Request,
)

Propose = Callable[[Change], Change]  # returns the change as it was made


class ReplicatedRuntime:
    def __init__(self, runtime: Runtime, propose: Propose) -> None:
        self._own = runtime
        self._propose = propose
        self.pool = ReplicatedPool(runtime.pool, propose)
        self.adapters = ReplicatedAdapters(runtime, propose)
        self._models: dict[str, ReplicatedModel] = {}
        self._predictors: dict[str, ReplicatedPredictor] = {}

    @property
    def training(self) -> TrainingClient:
        return self._own.training

    @property
    def models(self) -> Mapping[str, "ReplicatedModel"]:
        found = self._own.models
        if {name: model.own for name, model in self._models.items()} != found:
            self._models = {name: ReplicatedModel(name, engine, self._propose) for name, engine in found.items()}
        return self._models

    @property
    def predictors(self) -> Mapping[str, "ReplicatedPredictor"]:
        found = self._own.predictors
        if {name: model.own for name, model in self._predictors.items()} != found:
            self._predictors = {name: ReplicatedPredictor(name, own, self._propose) for name, own in found.items()}
        return self._predictors


class ReplicatedModel:
    def __init__(self, name: str, engine: ModelClient, propose: Propose) -> None:
        self.own = engine
        self._name = name
        self._propose = propose
        self.adapters = ReplicatedTable(name, engine.adapters, propose)

    @property
    def on_failure(self) -> Callable[[str], None] | None:
        return self.own.on_failure

    @on_failure.setter
    def on_failure(self, told: Callable[[str], None] | None) -> None:
        self.own.on_failure = told

    @property
    def model(self) -> ModelInfo:
        return self.own.model

    @property
    def tokenizer(self) -> Any:
        return self.own.tokenizer

    @property
    def image_reader(self) -> ImageReader | None:
        return self.own.image_reader

    @property
    def block_size(self) -> int:
        return self.own.block_size

    @property
    def metrics(self) -> EngineMetrics:
        return self.own.metrics

    @property
    def failure(self) -> str | None:
        return self.own.failure

    @property
    def paused(self) -> bool:
        return self.own.paused

    def submit_all(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        self.own.submit_all(requests, on_delta)

    def cancel(self, request_id: str, index: int | None = None, visible: int | None = None) -> None:
        self.own.cancel(request_id, index, visible)

    def check_grammar(self, grammar: str, param: str, quick: bool = False) -> CompiledGrammar | None:
        return self.own.check_grammar(grammar, param, quick)

    def pause(self, mode: PauseMode, timeout: float) -> bool:
        try:
            self._propose(Change("pause", self._name, fields={"mode": mode, "timeout": timeout}))
        except ConflictError:
            return False
        return True

    def resume(self) -> None:
        self._propose(Change("resume", self._name))

    def flush_cache(self) -> int:
        prefix = self.own.metrics.prefix
        before = prefix.blocks_cached + prefix.snapshots
        self._propose(Change("flush_cache", self._name))
        return int(before - prefix.blocks_cached - prefix.snapshots)

    def check_integrity(self) -> None:
        self.own.check_integrity()

    def drain(self, timeout: float) -> bool:
        return self.own.drain(timeout)

    def stop(self) -> None:
        self.own.stop()

    def describe(self) -> list[tuple[str, str]]:
        return self.own.describe()


class ReplicatedTable:
    """A model's adapters."""

    def __init__(self, model: str, registry: AdapterTable, propose: Propose) -> None:
        self._own = registry
        self._model = model
        self._propose = propose

    @property
    def names(self) -> Sequence[str]:
        return self._own.names

    @property
    def routes(self) -> Sequence[AdapterRoute]:
        return self._own.routes

    @property
    def chosen(self) -> bool:
        return self._own.chosen

    @property
    def served_version(self) -> int:
        return self._own.served_version

    @property
    def policy_version(self) -> int:
        return self._own.policy_version

    @property
    def swaps(self) -> int:
        return self._own.swaps

    @property
    def resident_bytes(self) -> int:
        return self._own.resident_bytes

    @property
    def base(self) -> AdapterVersion:
        return self._own.base

    @property
    def auto(self) -> AutoSplit | None:
        return self._own.auto

    def __contains__(self, name: str) -> bool:
        return name in self._own

    def find(self, name: str, number: int | None = None) -> AdapterVersion:
        return self._own.find(name, number)

    def versions(self, name: str) -> Sequence[AdapterVersion]:
        return self._own.versions(name)

    def newest(self, version: AdapterVersion) -> AdapterVersion:
        return self._own.newest(version)

    def route(self) -> AdapterVersion | None:
        return self._own.route()

    def serve(self, routes: Sequence[AdapterRoute], auto: AutoSplit | None = None) -> None:
        if auto is not None:
            raise InvalidRequestError("auto: replicas do not share their rewards; one server decides", param="auto")
        for route in routes:
            if route.name is not None:
                self._own.find(route.name, route.number)
        listed = [[route.name, route.number, route.share] for route in routes]
        self._propose(Change("serve", self._model, fields={"routes": listed}))

    def pin(self, name: str, number: int | None, pinned: bool) -> AdapterVersion:
        version = self._own.find(name, number)
        self._propose(Change("pin", self._model, name, version.number, {"pinned": pinned}))
        return version


class ReplicatedAdapters:
    def __init__(self, runtime: Runtime, propose: Propose) -> None:
        self._runtime = runtime
        self._propose = propose

    @property
    def on_decision(self) -> Callable[[str, Decision], None]:
        return self._runtime.adapters.on_decision

    @on_decision.setter
    def on_decision(self, told: Callable[[str, Decision], None]) -> None:
        self._runtime.adapters.on_decision = told

    def checkpoint(
        self, model: str, name: str, may_use: Callable[[str], bool] = lambda name: True
    ) -> AdapterVersion | None:
        return self._runtime.adapters.checkpoint(model, name, may_use)

    def load(self, model: str, name: str, path: str, number: int | None = None, *, own: bool = False) -> AdapterVersion:
        config, data, folder = self._runtime.adapters.read(path)
        return self._publish(model, name, data, config, number, folder, own)

    def publish(
        self,
        model: str,
        name: str,
        data: bytes,
        config: Mapping[str, Any] | bytes | None,
        number: int | None,
        *,
        own: bool = False,
    ) -> AdapterVersion:
        known = self._runtime.adapters.config_for(model, name, data, config)
        return self._publish(model, name, data, known, number, "upload", own)

    def _publish(
        self, model: str, name: str, data: bytes, config: Mapping[str, Any], number: int | None, source: str, own: bool
    ) -> AdapterVersion:
        """Publishes a version. A given number is checked as one process would; else the front gives the next."""
        registry = self._runtime.pool.generators[model].adapters
        self._runtime.adapters.check(model, name, data, config)
        newest = max((version.number for version in registry.versions(name)), default=0)
        if number is not None and number <= newest:
            raise InvalidRequestError(f"version {number} of {name!r} is not newer than {newest}", param="version")
        fields = {"config": dict(config), "source": source, "asked": number is not None, "own": own}
        made = self._propose(Change("publish", model, name, number or newest + 1, fields, data))
        return registry.find(name, made.number)

    def unload(self, model: str, name: str) -> AdapterVersion:
        registry = self._runtime.pool.generators[model].adapters
        version = registry.find(name)
        self._propose(Change("unload", model, name))
        return version

    def rollback(self, model: str, name: str, number: int | None, checkpoint: str | None) -> tuple[AdapterVersion, str]:
        if checkpoint is not None:
            raise InvalidRequestError(f"{name!r} is not trained here, so it has no checkpoints", param="checkpoint")
        registry = self._runtime.pool.generators[model].adapters
        current = registry.find(name).number
        if number is None:
            earlier = [version.number for version in registry.versions(name) if version.number < current]
            if not earlier:
                raise InvalidRequestError(f"adapter {name!r} has no version before {current}", param="version")
            number = max(earlier)
        version = registry.find(name, number)
        self._propose(Change("rollback", model, name, version.number))
        return version, f"{version.label} is what {version.name!r} means now"


class ReplicatedPool:
    def __init__(self, pool: PoolClient, propose: Propose) -> None:
        self._own = pool
        self._propose = propose

    @property
    def on_failure(self) -> Callable[[str], None] | None:
        return self._own.on_failure

    @on_failure.setter
    def on_failure(self, told: Callable[[str], None] | None) -> None:
        self._own.on_failure = told

    def statuses(self) -> Sequence[ModelStatus]:
        return self._own.statuses()

    def listen(self, listener: Callable[[], None]) -> None:
        self._own.listen(listener)

    def acquire(self, name: str) -> "Future[int]":
        return self._own.acquire(name)

    def release(self, hold: int) -> None:
        self._own.release(hold)

    def load(self, name: str, source: str | None = None, pin: bool | None = None) -> "Future[None]":
        """Returns when all have it, whoever does not want to wait."""
        done: Future[None] = Future()
        self._propose(Change("load_model", name, fields={"source": source, "pin": pin}))
        done.set_result(None)
        return done

    def keep_alive(self, name: str, seconds: float) -> None:
        self._own.keep_alive(name, seconds)

    def unload(self, name: str, timeout: float) -> None:
        self._propose(Change("unload_model", name, fields={"timeout": timeout}))

    def drain(self, timeout: float) -> bool:
        return self._own.drain(timeout)

    def stop(self) -> None:
        self._own.stop()


class ReplicatedPredictor:
    def __init__(self, name: str, predictor: LocalPredictor, propose: Propose) -> None:
        self.own = predictor
        self._name = name
        self._propose = propose

    @property
    def info(self) -> PredictorInfo:
        return self.own.info

    @property
    def metrics(self) -> PredictorMetrics:
        return self.own.metrics

    @property
    def tokenizer(self) -> Any:
        return self.own.tokenizer

    def predict(self, inputs: Sequence[Any], timeout: float | None = None) -> "Future[list[Any]]":
        return self.own.predict(inputs, timeout)

    def update(self, name: str, data: bytes, number: int | None = None) -> WeightsVersion:
        read_weights(name, self.own.predictor, data)
        policy = policy_of(name, self.own.predictor)
        fields = {"asked": number is not None}
        made = self._propose(Change("publish", self._name, "", policy.next_version(number), fields, data))
        assert made.number is not None
        return version_of(name, policy, made.number)

    def rollback(self, name: str, number: int | None = None) -> WeightsVersion:
        policy = policy_of(name, self.own.predictor)
        number = policy.kept_version(number)
        self._propose(Change("rollback", self._name, "", number))
        return version_of(name, policy, number)
