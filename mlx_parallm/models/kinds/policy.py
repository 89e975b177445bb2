"""Policies: networks whose network.json has a `policy`, which says what actions are sampled from their outputs.

An input is an `ActInput`, a block of observations with their state; or arrays by name, for the bare outputs. Weights
are replaced between two batches; the last few versions are kept, to go back to.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_parallm.config import nearest
from mlx_parallm.errors import InvalidRequestError, ModelLoadError, ModelNotFoundError
from mlx_parallm.models.kinds.network import NetworkPredictor
from mlx_parallm.models.networks.definition import read_definition, read_file
from mlx_parallm.models.networks.graph import Graph, fit_tensors
from mlx_parallm.models.networks.layer import Weights
from mlx_parallm.models.networks.network_files import read_weights
from mlx_parallm.models.networks.policy_heads import ActionHead, RowSeeds, read_head
from mlx_parallm.signature import ActInput, ActOutput, PolicyInfo, TensorSpec
from mlx_parallm.tensors import DTYPES, Array, TensorError

KEPT_VERSIONS = 4  # beside the current one
WORD = (1 << 64) - 1


def recognises(config: dict[str, Any]) -> bool:
    return isinstance(config.get("network"), dict) and "policy" in config["network"]


def load(folder: Path) -> "PolicyPredictor":
    definition = read_definition(read_file(folder))
    if definition.policy is None:
        raise ModelLoadError(f"{folder}: policy in network.json is null")
    graph = Graph(definition)
    states, value, head = read_policy(dict(definition.policy), graph)
    needed = graph.tensors | head.tensors
    try:
        tensors = fit_tensors(read_weights(folder), needed)
    except TensorError as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    names = [spec.name for spec in graph.signature.inputs]
    actions = head.describe() | ({"value": value} if value else {}) | ({"state": states} if states else {})
    info = PolicyInfo(
        kind="policy",
        source=str(folder),
        weight_bytes=sum(array.nbytes for array in tensors.values()),
        signature=graph.signature.describe() | {"policy": actions},
        tensors=graph.signature,
        observations=tuple(name for name in names if name not in states),
        states=tuple(states),
        actions=actions,
    )
    found = PolicyPredictor(info, graph, tensors, head, value, states)
    found.rehearse()
    return found


class PolicyPredictor(NetworkPredictor):
    def __init__(
        self,
        info: PolicyInfo,
        graph: Graph,
        tensors: Mapping[str, Array],
        head: ActionHead,
        value: str | None,
        states: Mapping[str, str],
    ) -> None:
        super().__init__(info, graph, tensors)
        self._head = head
        self._value = value
        self._states = states
        self._head_weights = {name: tensors[name] for name in head.tensors}
        self.version = 1
        self._newest = 1
        self._kept: dict[int, tuple[list[Weights], dict[str, Array]]] = {1: (self._weights, self._head_weights)}

    def cost(self, item: Any) -> int:
        return super().cost(item.inputs if isinstance(item, ActInput) else item)

    def predict(self, batch: Sequence[Any]) -> list[Any]:
        acting = [item for item in batch if isinstance(item, ActInput)]
        acted = iter(self._act(acting))
        bare = iter(self.forward([item for item in batch if not isinstance(item, ActInput)]))
        return [next(acted) if isinstance(item, ActInput) else next(bare) for item in batch]

    def _act(self, items: Sequence[ActInput]) -> list[ActOutput]:
        found: list[ActOutput | None] = [None] * len(items)
        for places, outputs in self.passes([item.inputs for item in items]):
            for place, one in zip(places, self._sample([items[place] for place in places], outputs), strict=True):
                found[place] = one
        return [one for one in found if one is not None]

    def _sample(self, items: Sequence[ActInput], outputs: Mapping[str, Array]) -> Iterator[ActOutput]:
        """The rows of all clients at once."""
        first = self._names[0]
        counts = [len(item.inputs[first]) for item in items]
        ends = np.cumsum(counts)
        actions, scores = self._sample_rows(items, outputs, counts, int(ends[-1]))
        log_probs = scores.astype(np.float32)
        values = outputs[self._value].reshape(-1) if self._value else None
        for n, end in zip(counts, ends.tolist(), strict=True):
            rows = slice(end - n, end)
            yield ActOutput(
                actions=actions[rows],
                log_probs=log_probs[rows],
                values=None if values is None else values[rows],
                states={name: outputs[new][rows] for name, new in self._states.items()},
                version=self.version,
            )

    def _sample_rows(
        self, items: Sequence[ActInput], outputs: Mapping[str, Array], counts: Sequence[int], total: int
    ) -> tuple[Array, Array]:
        """Actions and log-probabilities of all rows; InvalidRequestError where they are not finite."""
        starts = np.cumsum([0, *counts[:-1]])
        offsets = np.array([item.first for item in items]) - starts
        rows = RowSeeds(
            np.repeat(np.array([item.seed & WORD for item in items], np.uint64), counts),
            (np.arange(total) + np.repeat(offsets, counts)).astype(np.uint64),
            np.repeat(np.array([item.deterministic for item in items]), counts),
        )
        with np.errstate(all="ignore"):
            actions, scores = self._head.sample(outputs, self._head_weights, rows)
        read = [*self._head.names, *([self._value] if self._value else []), *self._states.values()]
        named = [(name, outputs[name]) for name in read]
        for name, array in (*named, ("actions", actions), ("action_log_probs", scores)):
            if not np.isfinite(array).all():
                raise InvalidRequestError(
                    f"the policy's {name} are not finite for these observations: they are too large for it",
                    param="observations",
                )
        return actions, scores

    # New weights. `fit` may run on any thread; the others on the engine's, between two batches.

    def fit(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The weights, checked; TensorError."""
        return fit_tensors(tensors, self._graph.tensors | self._head.tensors)

    def replace(self, tensors: Mapping[str, Array], number: int | None = None) -> int:
        """Serves these from the next batch on; the version that they are."""
        number = self.next_version(number)
        weights = self._graph.prepare(tensors)
        self._kept[number] = weights, {name: tensors[name] for name in self._head.tensors}
        self._newest = number
        self._serve(number)
        for old in sorted(self._kept)[: -KEPT_VERSIONS - 1]:
            del self._kept[old]
        return number

    def next_version(self, number: int | None) -> int:
        """The version number that new weights get: the one asked for, which must be newer than all, or the next."""
        number = self._newest + 1 if number is None else number
        if number <= self._newest:
            raise InvalidRequestError(f"version {number} is not newer than {self._newest}", param="version")
        return number

    def rollback(self, number: int | None = None) -> int:
        """Serves an earlier version that is kept; without a number, the one before."""
        number = self.kept_version(number)
        self._serve(number)
        return number

    def kept_version(self, number: int | None) -> int:
        """The number of a version that can be served; None: the one before the current."""
        if number is None:
            earlier = [one for one in self._kept if one < self.version]
            if not earlier:
                raise InvalidRequestError(f"no version before {self.version} is kept", param="version")
            number = max(earlier)
        if number not in self._kept:
            raise ModelNotFoundError(
                f"there is no version {number}; there is {', '.join(map(str, self.versions))}", param="version"
            )
        return number

    @property
    def has_changed(self) -> bool:
        return self._newest > 1

    @property
    def versions(self) -> list[int]:
        return sorted(self._kept)

    def _serve(self, number: int) -> None:
        self._weights, self._head_weights = self._kept[number]
        self.version = number


def read_policy(options: dict[str, Any], graph: Graph) -> tuple[dict[str, str], str | None, ActionHead]:
    """State (inputs, and the outputs that they get their next values from), value output and head."""
    outputs = {spec.name: spec for spec in graph.signature.outputs}
    inputs = {spec.name: spec for spec in graph.signature.inputs}
    states = options.pop("state", {})
    value = options.pop("value", None)
    if not isinstance(states, dict):
        raise ModelLoadError("policy: state must be an object of inputs and the outputs that they get new values from")
    for name, new in states.items():
        _check_state(name, new, inputs, outputs)
    if not set(inputs) - set(states):
        raise ModelLoadError("policy: all inputs are state, and none is an observation")
    if value is not None:
        if not isinstance(value, str) or value not in outputs:
            raise ModelLoadError(f"policy: value is {value!r:.60}, which is no output{nearest(value, outputs)}")
        if outputs[value].shape[1:] not in ((), (1,)) or outputs[value].dtype != "float32":
            raise ModelLoadError(f"policy: value must be one number per row, and has {list(outputs[value].shape)}")
    return states, value, read_head(options, outputs)


def _check_state(name: str, new: Any, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]) -> None:
    if name not in inputs:
        raise ModelLoadError(f"policy: state {name!r} is no input{nearest(name, inputs)}")
    if not isinstance(new, str) or new not in outputs:
        raise ModelLoadError(
            f"policy: state {name!r} gets its value from {new!r:.60}, which is no output{nearest(new, outputs)}"
        )
    before = inputs[name]
    after = outputs[new]
    fixed = DTYPES[before.dtype].kind == "f" and all(isinstance(dim, int) for dim in before.shape[1:])
    if before.shape != after.shape or not fixed:
        shapes = f"{list(before.shape)} and its new value {new!r} {list(after.shape)}"
        raise ModelLoadError(f"policy: state {name!r} has shape {shapes}; both must be floats of one fixed shape")
