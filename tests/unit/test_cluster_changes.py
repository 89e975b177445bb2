"""What replicas agree on: changes on their way, and what a replica that starts late is given."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from mlx_parallm.cluster.replicas import views
from mlx_parallm.cluster.replicas.changes import KEPT_WEIGHTS, Change, SharedState, decode
from mlx_parallm.cluster.replicas.links import pack_hashes, read_error, unpack_hashes, write_error
from mlx_parallm.cluster.replicas.members import _opposite
from mlx_parallm.cluster.replicas.replica import FrontLink, Replica
from mlx_parallm.cluster.replicas.replicated import ReplicatedModel, ReplicatedPool, ReplicatedPredictor
from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ConflictError, ModelNotFoundError, ParallmError
from mlx_parallm.lora.adapter import AdapterError
from mlx_parallm.metrics import PREFIX, EngineMetrics
from mlx_parallm.models.kinds import policy
from mlx_parallm.server.api.ops import MetricsSummary
from mlx_parallm.server.api.ops.metrics import JOINS, debug_summary
from mlx_parallm.tensors import parse_safetensors
from tests import surface
from tests.support.networks import mlp_policy
from tests.support.recording import recording_server


def publish(number: int, name: str = "math", data: bytes = b"") -> Change:
    return Change("publish", "tiny", name, number, {"config": {}, "source": "upload"}, data or bytes([number]))


def replayed(state: SharedState) -> list[tuple[str, str, int | None]]:
    return [(change.kind, change.name, change.number) for change in state.replay()]


def test_changes_travel_whole() -> None:
    changes = [publish(3, data=b"\x00\xff" * 1000), Change("serve", "tiny", fields={"routes": [["math", None, 1.0]]})]
    assert list(decode(b"".join(change.encode() for change in changes))) == changes


def test_a_late_replica_gets_what_is_kept() -> None:
    state = SharedState()
    for number in range(1, 8):
        state.add(publish(number))
        if number == 1:
            state.add(Change("pin", "tiny", "math", 1, {"pinned": True}))
        if number == 2:
            state.add(Change("serve", "tiny", fields={"routes": [["math", 2, 1.0]]}))
    assert replayed(state) == [
        *(("publish", "math", number) for number in (1, 2, 4, 5, 6, 7)),
        ("pin", "math", 1),
        ("serve", "", None),
    ]
    assert [change.fields for change in state.replay() if change.kind == "pin"] == [{"pinned": True}]
    state.add(Change("rollback", "tiny", "math", 5))
    assert ("rollback", "math", 5) in replayed(state)
    state.add(Change("pin", "tiny", "math", 1, {"pinned": False}))
    state.add(publish(8))
    assert [number for kind, _, number in replayed(state) if kind == "publish"] == [2, 5, 6, 7, 8]
    assert state.replay()[0].data == bytes([2])


def test_numbers_are_given_once() -> None:
    state = SharedState()
    state.take_number(publish(1))  # and then the change failed
    assert state.numbered(publish(1)).number == 2
    state.add(publish(2))
    state.add(Change("unload", "tiny", "math"))
    assert state.numbered(publish(1)).number == 3
    assert replayed(state) == [("unload", "math", None)]
    state.add(publish(3))
    assert replayed(state) == [("unload", "math", None), ("publish", "math", 3)]


def test_who_lacks_little_is_given_that_and_who_lacks_much_starts_anew() -> None:
    state = SharedState()
    assert state.since(0) == []
    for number in range(1, 31):
        state.add(publish(number))
    assert state.since(30) == []
    assert [change.number for change in state.since(28) or []] == [29, 30]
    assert state.since(3) is None
    assert state.since(31) is None
    assert len(state.since(0) or []) == 4


def test_the_weights_of_a_policy_are_kept_as_the_policy_keeps_them() -> None:
    state = SharedState()
    for number in range(2, 10):
        state.add(Change("publish", "cartpole", "", number, {"asked": False}, bytes([number])))
    state.add(Change("rollback", "cartpole", "", 6))
    assert replayed(state) == [*(("publish", "", number) for number in range(5, 10)), ("rollback", "", 6)]
    assert KEPT_WEIGHTS == policy.KEPT_VERSIONS + 1, "and the current one"
    assert state.numbered(Change("publish", "cartpole", "", 7)).number == 10
    state.add(Change("unload_model", "cartpole", fields={"timeout": 1.0}))
    assert [change.kind for change in state.replay()] == ["unload_model"]


def test_what_a_client_changes_is_proposed_to_all_replicas(tmp_path: Path) -> None:
    proposed: list[Change] = []

    def propose(change: Change) -> Change:
        proposed.append(change)
        return change

    def refuse(change: Change) -> Change:
        raise ConflictError("others use it")

    versions = SimpleNamespace(find=lambda name, number: SimpleNamespace(name=name, number=number or 4))
    engine = SimpleNamespace(adapters=versions)
    tiny = ReplicatedModel("tiny", engine, propose)
    assert tiny.pause("keep", 1.0) is True
    assert ReplicatedModel("tiny", engine, refuse).pause("keep", 1.0) is False
    assert tiny.adapters.pin("math", None, True).number == 4
    assert [(one.kind, one.name, one.number, one.fields) for one in proposed] == [
        ("pause", "", None, {"mode": "keep", "timeout": 1.0}),
        ("pin", "math", 4, {"pinned": True}),
    ]
    proposed.clear()
    pool = ReplicatedPool(None, propose)
    assert pool.load("other", "/models/other", True).done()
    pool.unload("other", 2.0)
    model = policy.load(mlp_policy(tmp_path))
    model.replace(model.fit(parse_safetensors((tmp_path / "model.safetensors").read_bytes())), 2)
    own = SimpleNamespace(predictor=model)
    told = ReplicatedPredictor("cartpole", own, propose).rollback("cartpole", 1)
    assert (told.label, told.kept) == ("cartpole@1", (1, 2))
    assert [(one.kind, one.model, one.name, one.number, one.fields) for one in proposed] == [
        ("load_model", "other", "", None, {"source": "/models/other", "pin": True}),
        ("unload_model", "other", "", None, {"timeout": 2.0}),
        ("rollback", "cartpole", "", 1, {}),
    ]


def test_models_and_pauses() -> None:
    state = SharedState()
    state.add(Change("load_model", "other", fields={"source": "x", "pin": None}))
    state.add(Change("publish", "other", "math", 1, {"config": {}, "source": "x"}, b"1"))
    state.add(Change("pause", "tiny", fields={"mode": "keep", "timeout": 1.0}))
    assert [change.kind for change in state.replay()] == ["load_model", "publish", "pause"]
    state.add(Change("unload_model", "other", fields={"timeout": 1.0}))
    state.add(Change("resume", "tiny"))
    assert [change.kind for change in state.replay()] == ["unload_model"]
    assert state.position == 5


def test_errors_keep_their_kind() -> None:
    error = read_error(write_error(ModelNotFoundError("there is no 'x'", param="model")))
    assert (type(error), error.message, error.param, error.status) == (
        ModelNotFoundError,
        "there is no 'x'",
        "model",
        404,
    )
    ours = read_error(write_error(AdapterError("rank", param="r", code="c")))
    assert (ours.status, ours.message, ours.param, ours.code) == (400, "rank", "r", "c")
    assert read_error(b"<html>").status == 500
    assert unpack_hashes(pack_hashes([0, 1, 2**64 - 1])) == [0, 1, 2**64 - 1]


TEXT = b"""# HELP mlx_parallm_steps_total Steps
# TYPE mlx_parallm_steps_total counter
mlx_parallm_steps_total{model="tiny"} %d.0
# TYPE mlx_parallm_policy_version gauge
mlx_parallm_policy_version{model="tiny"} 4.0
# TYPE mlx_parallm_up gauge
mlx_parallm_up 1.0
"""


def test_metrics_of_the_whole_and_of_each_part() -> None:
    text = views.metrics({"a": TEXT % 3, "b": TEXT % 5}, [(b"content-type", b"text/plain")]).decode()
    assert 'mlx_parallm_steps_total{model="tiny"} 8.0' in text
    assert 'mlx_parallm_policy_version{model="tiny"} 4.0' in text
    assert 'mlx_parallm_replica_steps_total{replica="a",model="tiny"} 3.0' in text
    assert 'mlx_parallm_replica_up{replica="b"} 1.0' in text
    assert text.count("# HELP") == 1


def test_json_of_the_whole_and_of_each_part() -> None:
    one = {
        "steps": 2,
        "avg_batch_fill_pct": 0.5,
        "hist": [1, 2],
        "prefix": {"hits": 3},
        "current_policy_version": 7,
        "name": "x",
    }
    two = {**one, "steps": 4, "avg_batch_fill_pct": 1.0, "prefix": {"hits": 1, "new": 1}}
    found = orjson.loads(views.whole_and_parts({"a": orjson.dumps(one), "b": orjson.dumps(two)}, []))
    assert found["replicas"] == {"a": one, "b": two}
    assert (found["steps"], found["avg_batch_fill_pct"], found["hist"]) == (6, 0.75, [2, 4])
    assert (found["prefix"], found["current_policy_version"], found["name"]) == ({"hits": 4, "new": 1}, 7, "x")


def test_all_numbers_say_how_those_of_replicas_are_joined() -> None:
    """In Prometheus, and in JSON but for those that are plainly added up."""
    listed = (surface.FOLDER / "metrics.txt").read_text().splitlines()
    families = [line.split()[2].removeprefix(PREFIX) for line in listed if line.startswith("# TYPE")]
    families = [name.removesuffix("_total").removesuffix("_info") for name in families]
    assert {name for name in families if name not in JOINS and f"{name}_total" not in JOINS} == set()
    added_up = {"count", "contended_seconds", "serving_seconds", "batch_fill_hist"}
    assert set(_numbers(debug_summary(EngineMetrics()))) - added_up <= set(JOINS)
    assert set(MetricsSummary.__annotations__) <= set(JOINS)


def _numbers(found: Mapping[str, Any]) -> Iterator[str]:
    for name, value in found.items():
        if is_dataclass(value) and not isinstance(value, type):
            yield from _numbers(asdict(value))
        elif isinstance(value, Mapping):
            yield from _numbers(value)
        else:
            yield name


def test_models_of_all_replicas() -> None:
    def listed(*entries: tuple[str, str]) -> bytes:
        return orjson.dumps({"object": "list", "data": [{"id": id_, "status": status} for id_, status in entries]})

    answers = {"a": listed(("tiny", "ready")), "b": listed(("tiny", "ready"), ("more", "loading"))}
    found = orjson.loads(views.models(answers, []))
    assert [(entry["id"], entry["replicas"]) for entry in found["data"]] == [
        ("tiny", {"a": "ready", "b": "ready"}),
        ("more", {"b": "loading"}),
    ]


@pytest.mark.parametrize("sharing", [1, 2])
def test_a_replica_that_can_not_start_tells_the_front(sharing: int, tmp_path: Path) -> None:
    with recording_server() as front:
        front.answers["POST /failed"] = {}
        link = FrontLink(front.url, "between us", "left")
        config = ServeConfig.of(model_path=[str(tmp_path / "nothing")])
        with pytest.raises(ParallmError, match="nothing"):
            Replica(config, link, "between us", "127.0.0.1", sharing).start()
        link._client.close()
        told = front.last.json
    assert (told["name"], told["fatal"]) == ("left", True)
    assert "nothing" in told["message"]


def test_what_is_taken_back_leaves_no_trace() -> None:
    """Where one replica could make a change, and another could not."""
    state = SharedState()
    for change in (Change("load_model", "m", fields={"source": "x"}), Change("pause", "m", fields={"mode": "keep"})):
        state.add(change)
        undo = _opposite(change)
        assert undo is not None
        state.add(undo)
    assert [change.kind for change in state.replay()] == ["unload_model"]
    assert _opposite(publish(1)) is None
