"""The runtime of a replica, as its server sees it: what all replicas must agree on is proposed to the front.

`ReplicatedRuntime` is a `RuntimeClient` over the process's own. Calls that read go through; calls that change something
become a `Change` with all that is left open decided here (numbers, configs, the files of a folder), which `propose` has
all replicas make, this one included. So no dialect knows of replicas. `LocalState` makes changes in this process.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from mlx_parallm.arms import AutoSplit
from mlx_parallm.cluster.changes import Change
from mlx_parallm.errors import ConflictError, InvalidRequestError, ModelNotFoundError
from mlx_parallm.runtime.policy_weights import policy_of, read_weights, version_of
from mlx_parallm.runtime.startup import Runtime
from mlx_parallm.signature import WeightsVersion
from mlx_parallm.types import AdapterRoute, AdapterVersion, PauseMode

UNLOAD_SECONDS = 30.0

Propose = Callable[[Change], Change]  # returns the change as it was made


class LocalState:
    """Makes changes in this process, and says whether they could be made."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pool = runtime.pool

    def check(self, change: Change) -> None:
        if change.kind == "publish":
            with Held(self._pool, change.model):
                if change.name:
                    self._runtime.adapters.check(change.model, change.name, change.data, change.fields["config"])
                else:
                    read_weights(change.model, self._runtime.predictors[change.model].predictor, change.data)

    def apply(self, change: Change, *, starting: bool = False) -> None:
        """`starting`: a replica that has just started may have less than the others had."""
        if change.kind == "load_model":
            self._pool.load(change.model, change.fields["source"], change.fields["pin"]).result()
        elif change.kind == "unload_model":
            try:
                self._pool.unload(change.model, change.fields["timeout"])
            except ModelNotFoundError:  # the others had loaded it by a path
                if not starting:
                    raise
        else:
            with Held(self._pool, change.model):
                if change.model in self._runtime.predictors:
                    self._apply_to_policy(change)
                else:
                    self._apply(change, starting)

    def _apply_to_policy(self, change: Change) -> None:
        predictor = self._runtime.predictors[change.model]
        if change.kind == "publish":
            predictor.update(change.model, change.data, change.number)
        elif change.kind == "rollback":
            predictor.rollback(change.model, change.number)

    def _apply(self, change: Change, starting: bool) -> None:
        engine = self._pool.generators[change.model]
        if change.kind == "publish":
            source = change.fields["source"]
            arguments = (change.model, change.name, change.data, change.fields["config"], change.number)
            self._runtime.adapters.publish(*arguments, source=source, own=change.fields.get("own", False))
        elif change.kind == "unload":
            if not starting or change.name in engine.adapters:
                self._runtime.adapters.unload(change.model, change.name)
        elif change.kind == "rollback":
            engine.adapters.rollback(change.name, change.number)
        elif change.kind == "pin":
            engine.adapters.pin(change.name, change.number, change.fields["pinned"])
        elif change.kind == "serve":
            engine.adapters.serve([AdapterRoute(*route) for route in change.fields["routes"]])
        elif change.kind == "pause":
            if not engine.pause(change.fields["mode"], change.fields["timeout"]):
                raise ConflictError("what runs was not finished in time, or it was resumed")
        elif change.kind == "resume":
            engine.resume()
        elif change.kind == "flush_cache":
            engine.flush_cache()


class Held:
    """A model that is loaded, and stays so for a change."""

    def __init__(self, pool: Any, name: str) -> None:
        self._pool = pool
        self._name = name
        self._hold = 0

    def __enter__(self) -> None:
        self._hold = self._pool.acquire(self._name).result()

    def __exit__(self, *error: object) -> None:
        self._pool.release(self._hold)


class Through:
    """Passes on what it does not have itself."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class ReplicatedRuntime(Through):
    def __init__(self, runtime: Runtime, propose: Propose) -> None:
        super().__init__(runtime)
        self._propose = propose
        self.pool = ReplicatedPool(runtime.pool, propose)
        self.adapters = ReplicatedAdapters(runtime, propose)
        self._models: dict[str, ReplicatedModel] = {}
        self._predictors: dict[str, ReplicatedPredictor] = {}

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


class ReplicatedModel(Through):
    def __init__(self, name: str, engine: Any, propose: Propose) -> None:
        super().__init__(engine)
        self.own = engine
        self._name = name
        self._propose = propose
        self.adapters = ReplicatedTable(name, engine.adapters, propose)

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


class ReplicatedTable(Through):
    """A model's adapters."""

    def __init__(self, model: str, registry: Any, propose: Propose) -> None:
        super().__init__(registry)
        self._model = model
        self._propose = propose

    def __contains__(self, name: str) -> bool:
        return name in self._own

    def serve(self, routes: Sequence[AdapterRoute], auto: AutoSplit | None = None) -> None:
        if auto is not None:
            raise InvalidRequestError("auto: replicas do not share their rewards; one server decides", param="auto")
        for route in routes:
            if route.name is not None:
                self._own.find(route.name, route.number)
        listed = [[route.name, route.number, route.share] for route in routes]
        self._propose(Change("serve", self._model, fields={"routes": listed}))

    def pin(self, name: str, number: int | None, pinned: bool) -> AdapterVersion:
        version: AdapterVersion = self._own.find(name, number)
        self._propose(Change("pin", self._model, name, version.number, {"pinned": pinned}))
        return version


class ReplicatedAdapters(Through):
    def __init__(self, runtime: Runtime, propose: Propose) -> None:
        super().__init__(runtime.adapters)
        self._runtime = runtime
        self._propose = propose

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
        """Where a number is given, it is checked as one process would; else the front gives the next."""
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


class ReplicatedPool(Through):
    def __init__(self, pool: Any, propose: Propose) -> None:
        super().__init__(pool)
        object.__setattr__(self, "_propose", propose)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_own":
            object.__setattr__(self, name, value)
        else:  # `on_failure`
            setattr(self._own, name, value)

    def load(self, name: str, source: str | None = None, pin: bool | None = None) -> "Future[None]":
        """Returns when all have it, whoever does not want to wait."""
        done: Future[None] = Future()
        self._propose(Change("load_model", name, fields={"source": source, "pin": pin}))
        done.set_result(None)
        return done

    def unload(self, name: str, timeout: float) -> None:
        self._propose(Change("unload_model", name, fields={"timeout": timeout}))


class ReplicatedPredictor(Through):
    def __init__(self, name: str, predictor: Any, propose: Propose) -> None:
        super().__init__(predictor)
        self.own = predictor
        self._name = name
        self._propose = propose

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
