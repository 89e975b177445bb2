"""Makes the changes that all replicas agree on in this process, and says beforehand whether they can be made."""

from mlx_parallm.cluster.replicas.changes import Change
from mlx_parallm.errors import ConflictError, ModelNotFoundError
from mlx_parallm.runtime.client import PoolClient
from mlx_parallm.runtime.policy_weights import read_weights
from mlx_parallm.runtime.startup import Runtime
from mlx_parallm.types import AdapterRoute


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

    def __init__(self, pool: PoolClient, name: str) -> None:
        self._pool = pool
        self._name = name
        self._hold = 0

    def __enter__(self) -> None:
        self._hold = self._pool.acquire(self._name).result()

    def __exit__(self, *error: object) -> None:
        self._pool.release(self._hold)
