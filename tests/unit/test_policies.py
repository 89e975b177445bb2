"""Policies: log-probabilities equal torch's, a draw depends on seed and row alone, weights change between batches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.errors import InvalidRequestError, ModelLoadError, ModelNotFoundError
from mlx_parallm.models.kinds import kind_of, policy
from mlx_parallm.models.kinds.policy import PolicyPredictor
from mlx_parallm.models.networks import policy_heads as heads
from mlx_parallm.models.networks.seeded_random import normals, uniforms
from mlx_parallm.runtime.policy_weights import roll_back, update_weights
from mlx_parallm.signature import ActInput, ActOutput
from mlx_parallm.tensors import Array, dump_safetensors, parse_safetensors
from tests.support.networks import mlp_policy, recurrent_policy, sequence_network

PREFIX = "distributions/"
GOLDEN = {
    name.removeprefix(PREFIX): array
    for name, array in parse_safetensors(
        (Path(__file__).parents[1] / "golden/networks.safetensors").read_bytes()
    ).items()
    if name.startswith(PREFIX)
}
GAUSSIAN = {"distribution": "gaussian", "mean": "head", "log_std": "log_std"}
HEADS: list[dict[str, Any]] = [
    {"distribution": "categorical", "logits": "head"},
    {"distribution": "multi_discrete", "logits": "head", "nvec": [2, 4]},
    GAUSSIAN,
    GAUSSIAN | {"low": -0.5, "high": [0.5, 1, 1, 2, 2, 2]},
    GAUSSIAN | {"distribution": "tanh_gaussian", "low": -2, "high": 2},
]


def observations(rows: int, seed: int = 0) -> dict[str, Array]:
    return {"observation": np.random.default_rng(seed).standard_normal((rows, 4)).astype(np.float32)}


def load(folder: Path, head: dict[str, Any] | None = None, seed: int = 0) -> PolicyPredictor:
    return policy.load(mlp_policy(folder, head, actions=6, width=8, seed=seed))


def test_categorical_log_probabilities_are_torchs() -> None:
    logits, actions = GOLDEN["logits"].astype(np.float64), GOLDEN["categorical/actions"]
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    totals = np.cumsum(np.exp(scores), axis=1)
    below = np.take_along_axis(np.c_[np.zeros(5), totals], actions[:, None], 1)[:, 0]
    chances = (
        below + np.exp(np.take_along_axis(scores, actions[:, None], 1)[:, 0]) / 2
    )  # in the middle of the action's part
    drawn, found = heads.sample_categorical(logits, chances, np.zeros(5, bool))
    assert drawn.tolist() == actions.tolist()
    np.testing.assert_allclose(found, GOLDEN["categorical/log_probs"], atol=1e-6)
    chosen = GOLDEN["multi_discrete/actions"]
    np.testing.assert_allclose(several(logits, chosen), GOLDEN["multi_discrete/log_probs"], atol=1e-6)
    head = heads.MultiDiscrete(logits="l", nvec=(3, 2, 2))
    rows = heads.RowSeeds(np.full(5, 3, np.uint64), np.arange(5, dtype=np.uint64), np.zeros(5, bool))
    drawn, found = head.sample({"l": GOLDEN["logits"]}, {}, rows)
    assert drawn.shape == (5, 3)
    np.testing.assert_allclose(found, several(logits, drawn), atol=1e-6)


def several(logits: Array, actions: Array) -> Array:
    """The log-probability of three actions, of 3, 2 and 2 choices."""
    total = np.zeros(len(logits))
    for part, chosen in zip(np.split(logits, [3, 5], axis=1), actions.T, strict=True):
        own = part - np.log(np.exp(part).sum(-1, keepdims=True))
        total += np.take_along_axis(own, chosen[:, None], 1)[:, 0]
    return total


def test_an_action_without_any_probability_is_never_drawn() -> None:
    logits = np.array([[-np.inf, 0.0, -np.inf]] * 3)
    drawn, _ = heads.sample_categorical(logits, np.array([0.0, 0.5, np.nextafter(1.0, 0.0)]), np.zeros(3, bool))
    assert drawn.tolist() == [1, 1, 1]


def test_gaussian_log_probabilities_are_torchs() -> None:
    raw, mean, log_std = (GOLDEN[name].astype(np.float64) for name in ("raw", "mean", "log_std"))
    actions, scores = heads.Gaussian(mean="m", log_std="s").act(raw, mean, log_std)
    np.testing.assert_allclose(actions, raw, atol=1e-6)
    np.testing.assert_allclose(scores, GOLDEN["gaussian/log_probs"], atol=1e-5)
    low, high = tuple(GOLDEN["low"].tolist()), tuple(GOLDEN["high"].tolist())
    squashed = heads.TanhGaussian(mean="m", log_std="s", low=low, high=high)
    squashed._width = 3
    actions, scores = squashed.act(raw, mean, log_std)
    np.testing.assert_allclose(actions, GOLDEN["tanh_gaussian/actions"], atol=1e-6)
    np.testing.assert_allclose(scores, GOLDEN["tanh_gaussian/log_probs"], atol=1e-4)
    far, score = squashed.act(np.full((1, 3), 40.0), np.zeros((1, 3)), np.zeros((1, 3)))
    assert (far <= GOLDEN["high"]).all()
    assert np.isfinite(score).all()


def test_draws_are_what_they_should_be() -> None:
    seeds, rows = np.full(50_000, 7, np.uint64), np.arange(50_000, dtype=np.uint64)
    flat, bell = uniforms(seeds, rows, 3), normals(seeds, rows, 2)
    assert 0 < flat.min() < flat.max() < 1
    np.testing.assert_allclose(flat.mean(0), 0.5, atol=0.01)
    np.testing.assert_allclose(np.corrcoef(flat.T), np.eye(3), atol=0.02)
    assert abs(np.corrcoef(flat[1:, 0], flat[:-1, 0])[0, 1]) < 0.02, "rows are independent"
    other = uniforms(seeds + np.uint64(1), rows, 1)
    assert abs(np.corrcoef(flat[:, 0], other[:, 0])[0, 1]) < 0.02, "seeds are independent"
    np.testing.assert_allclose(bell.mean(0), 0, atol=0.02)
    np.testing.assert_allclose(np.cov(bell.T), np.eye(2), atol=0.03)


def test_actions_come_as_often_as_their_probability_says(tmp_path: Path) -> None:
    model = load(tmp_path)
    inputs = {"observation": np.repeat(observations(1)["observation"], 20_000, axis=0)}
    [found] = model.predict([ActInput(inputs=inputs, seed=3)])
    for action in range(6):
        chosen = found.actions == action
        if chosen.sum() > 100:
            assert abs(chosen.mean() - np.exp(found.log_probs[chosen][0])) < 0.02


@pytest.mark.parametrize("head", HEADS)
def test_a_row_acts_the_same_alone_and_in_any_batch(head: dict[str, Any], tmp_path: Path) -> None:
    model = load(tmp_path, head)
    mine, others = observations(5), observations(7, 1)
    items = [ActInput(inputs=others, seed=1), ActInput(inputs=mine, seed=9), ActInput(inputs=others, seed=2, first=3)]
    _, together, _ = model.predict(items)
    alone = [
        model.predict([ActInput(inputs={"observation": mine["observation"][at : at + 1]}, seed=9, first=at)])[0]
        for at in range(5)
    ]
    np.testing.assert_allclose(together.actions, np.concatenate([one.actions for one in alone]), atol=1e-5)
    np.testing.assert_allclose(together.log_probs, np.concatenate([one.log_probs for one in alone]), atol=1e-4)
    np.testing.assert_allclose(together.values, np.concatenate([one.values for one in alone]), atol=1e-5)
    [again] = model.predict([ActInput(inputs=mine, seed=10)])
    assert not np.allclose(again.actions, together.actions) or head["distribution"] == "categorical"
    [first], [second] = (model.predict([ActInput(inputs=mine, seed=seed, deterministic=True)]) for seed in (1, 2))
    assert np.array_equal(first.actions, second.actions)
    if head["distribution"] in ("gaussian", "tanh_gaussian") and "low" in head:
        assert (together.actions >= np.array(head["low"]) - 1e-6).all()
        assert (together.actions <= np.array(head["high"]) + 1e-6).all()


def test_the_normalisation_is_part_of_the_weights(tmp_path: Path) -> None:
    model = load(tmp_path)
    tensors = parse_safetensors((tmp_path / "model.safetensors").read_bytes())
    given = observations(3)
    normal = (given["observation"] - tensors["norm.mean"]) / np.sqrt(tensors["norm.var"] + 1e-8)
    hidden = np.clip(normal, -10, 10)
    for name in ("one", "two"):
        hidden = np.tanh(hidden @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
    [found] = model.predict([given])
    np.testing.assert_allclose(found["head"], hidden @ tensors["head.weight"].T + tensors["head.bias"], atol=1e-5)


def test_state_goes_in_and_out(tmp_path: Path) -> None:
    model = policy.load(recurrent_policy(tmp_path))
    assert model.info.states == ("h",)  # type: ignore[attr-defined]
    state: Array = np.zeros((2, 1, 8), np.float32)
    seen = []
    for step in range(3):
        inputs = {"observation": np.full((2, 2), 0.1 * step, np.float32), "h": state}
        [found] = model.predict([ActInput(inputs=inputs, seed=0)])
        assert found.states["h"].shape == (2, 1, 8)
        state = found.states["h"]
        seen.append(state)
    assert not np.allclose(seen[0], seen[2])


def swapped(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def act(model: PolicyPredictor) -> ActOutput:
    [found] = model.predict([ActInput(inputs=observations(4), seed=0)])
    assert isinstance(found, ActOutput)
    return found


def test_new_weights_are_a_new_version_and_can_be_taken_back(tmp_path: Path) -> None:
    model = load(tmp_path / "one", GAUSSIAN)
    other = load(tmp_path / "two", GAUSSIAN, seed=1)
    before, wanted = act(model), act(other)
    assert before.version == 1
    version = update_weights("p", model, lambda work: work(), swapped(tmp_path / "two"), None)
    assert (version.number, version.label, version.kept) == (2, "p@2", (1, 2))
    after = act(model)
    np.testing.assert_array_equal(after.actions, wanted.actions)
    np.testing.assert_array_equal(after.log_probs, wanted.log_probs)
    assert after.version == 2
    assert roll_back("p", model, lambda work: work(), None).number == 1
    np.testing.assert_array_equal(act(model).actions, before.actions)
    with pytest.raises(InvalidRequestError, match="no version before 1 is kept"):
        roll_back("p", model, lambda work: work(), None)
    with pytest.raises(ModelNotFoundError, match="there is no version 7; there is 1, 2"):
        roll_back("p", model, lambda work: work(), 7)
    with pytest.raises(InvalidRequestError, match="version 2 is not newer than 2"):
        update_weights("p", model, lambda work: work(), swapped(tmp_path / "two"), 2)
    for _ in range(6):
        version = update_weights("p", model, lambda work: work(), swapped(tmp_path / "two"), None)
    assert version.number == 8, "a number is never given twice"
    assert version.kept == (4, 5, 6, 7, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"one.weight": np.zeros((8, 5), np.float32)},
            r"'one.weight' has shape \[8, 5\], and its layer needs \[8, 4\]",
        ),
        ({"one.weight": None}, "'one.weight' is missing"),
        ({"three.weight": np.zeros(1, np.float32)}, "'three.weight' belongs to no layer"),
        ({"one.bias": np.full(8, np.inf, np.float32)}, "'one.bias' holds NaN or infinity"),
    ],
)
def test_wrong_weights_change_nothing(change: dict[str, Array | None], message: str, tmp_path: Path) -> None:
    model = load(tmp_path)
    before = act(model)
    tensors = {**parse_safetensors(swapped(tmp_path)), **change}
    data = dump_safetensors({name: array for name, array in tensors.items() if array is not None})
    for wrong, told in ((data, message), (b"no file", "not a sound safetensors file")):
        with pytest.raises(InvalidRequestError, match=told):
            update_weights("p", model, lambda work: work(), wrong, None)
    assert act(model).version == 1
    np.testing.assert_array_equal(act(model).actions, before.actions)


def test_only_policies_take_weights(tmp_path: Path) -> None:
    model = kind_of(str(sequence_network(tmp_path)))
    assert model is not None
    with pytest.raises(InvalidRequestError, match="'n' is a network model; only the weights of policies"):
        update_weights("n", model.load(tmp_path), lambda work: work(), b"", None)


def test_observations_that_are_too_large_harm_nobody(tmp_path: Path) -> None:
    folder = mlp_policy(tmp_path, width=8)
    definition = json.loads((folder / "network.json").read_text())
    definition["layers"][0].pop("clip")
    definition["layers"] = [layer for layer in definition["layers"] if layer["type"] != "tanh"]
    definition["layers"][2]["name"] = "features"
    tensors = parse_safetensors(swapped(folder))
    tensors |= {name.replace("two.", "features."): tensors.pop(name) for name in ("two.weight", "two.bias")}
    (folder / "network.json").write_text(json.dumps(definition))
    (folder / "model.safetensors").write_bytes(dump_safetensors(tensors))
    model = policy.load(folder)
    huge = {"observation": np.full((1, 4), 3e38, np.float32)}
    with pytest.raises(InvalidRequestError, match="not finite for these observations"):
        model.predict([ActInput(inputs=observations(2), seed=0), ActInput(inputs=huge, seed=0)])
    assert len(act(model).actions) == 4


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"distribution": "categoric", "logits": "head"}, "'categoric' is unknown; did you mean 'categorical'"),
    ({"distribution": "categorical", "logits": "heads"}, "no output of the network; did you mean 'head'"),
    ({"distribution": "categorical"}, "policy needs 'logits'"),
    ({"distribution": "categorical", "logits": "head", "mean": "head"}, "unknown option 'mean'"),
    (
        {"distribution": "multi_discrete", "logits": "head", "nvec": [2, 2]},
        "must be positive and add up to the 6 logits",
    ),
    (GAUSSIAN | {"low": -1}, "give both low and high"),
    (GAUSSIAN | {"low": 1, "high": 1}, "low must be below high"),
    (GAUSSIAN | {"low": [1, 2], "high": 3}, "low has 2 numbers for 6 actions"),
    (GAUSSIAN | {"value": "worth"}, "value is 'worth', which is no output"),
    (GAUSSIAN | {"value": "head"}, "value must be one number per row"),
    (GAUSSIAN | {"state": {"h": "head"}}, "state 'h' is no input"),
    (GAUSSIAN | {"state": {"observation": "value"}}, r"has shape \['batch', 4\] and its new value 'value'"),
    (GAUSSIAN | {"width": 3}, "unknown option 'width'"),
]


@pytest.mark.parametrize(("head", "message"), WRONG)
def test_a_wrong_policy_is_refused(head: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, head)


def test_the_draws_of_a_seed_are_the_same_in_every_version() -> None:
    """Clients keep seeds: the same seed must draw the same action after an update."""
    seeds, rows = np.array([7, 7, 8], np.uint64), np.array([0, 1, 0], np.uint64)
    np.testing.assert_allclose(
        normals(seeds, rows, 2),
        [
            [-0.06845872605660337, -0.8934797623138366],
            [0.9819454927369984, -1.4874521133107537],
            [-0.210169847993062, 1.480972650048764],
        ],
        rtol=1e-12,
    )
