"""What a replica changes: proposed, then made in its own process as the front has every replica do it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_parallm.cluster.replicas.changes import Change, SharedState
from mlx_parallm.cluster.replicas.local_state import LocalState
from mlx_parallm.cluster.replicas.replicated import ReplicatedRuntime
from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.delivery import deliver
from mlx_parallm.errors import InvalidRequestError, ModelNotFoundError
from mlx_parallm.runtime.startup import start
from tests.support.networks import mlp_policy
from tests.tiny import save_tiny, tiny
from tests.unit.test_adapters import written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model, an adapter for it, and a policy."""
    root = tmp_path_factory.mktemp("replicated")
    (root / "tiny").mkdir()
    save_tiny(tiny("llama"), root / "tiny")
    written(root, "few")
    mlp_policy(root / "cartpole")
    return root


@pytest.fixture(scope="module")
def replica(folder: Path) -> Iterator[ReplicatedRuntime]:
    """The only one: what it proposes is checked and made here, as the front has it done."""
    paths = [f"tiny={folder / 'tiny'}", f"cartpole={folder / 'cartpole'}"]
    runtime = start(ServeConfig.of(model_path=paths, ssd=False, max_batch_size=2), deliver)
    state, shared = LocalState(runtime), SharedState()

    def propose(change: Change) -> Change:
        numbered = shared.numbered(change)
        state.check(numbered)
        state.apply(numbered)
        shared.add(numbered)
        return numbered

    yield ReplicatedRuntime(runtime, propose)
    runtime.close()


def test_adapters_come_and_go(replica: ReplicatedRuntime, folder: Path) -> None:
    first = replica.adapters.load("tiny", "math", str(folder / "few"))
    assert (first.label, first.source) == ("math@1", str(folder / "few"))
    config = json.loads((folder / "few" / "adapter_config.json").read_text())
    weights = (folder / "few" / "adapters.safetensors").read_bytes()
    second = replica.adapters.publish("tiny", "math", weights, config, None)
    assert (second.label, second.source) == ("math@2", "upload")
    with pytest.raises(InvalidRequestError, match="version 2 of 'math' is not newer than 2"):
        replica.adapters.publish("tiny", "math", weights, config, 2)
    assert replica.models["tiny"].adapters.find("math").number == 2
    assert replica.adapters.rollback("tiny", "math", None, None)[0].label == "math@1"
    assert replica.adapters.unload("tiny", "math").label == "math@1"
    with pytest.raises(ModelNotFoundError):
        replica.adapters.unload("tiny", "math")


def test_policies_take_weights_and_go_back(replica: ReplicatedRuntime, folder: Path) -> None:
    policy = replica.predictors["cartpole"]
    weights = (folder / "cartpole" / "model.safetensors").read_bytes()
    found = policy.update("cartpole", weights)
    assert (found.label, found.kept) == ("cartpole@2", (1, 2))
    assert policy.rollback("cartpole").label == "cartpole@1"
    assert policy.own.predictor.version == 1
