"""The tree that learns: the same arrays as the one that serves, the same numbers, and gradients that are right."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config.training import LoRAConfig, Objective
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.training.rl.objectives import chosen_logprobs, losses
from mlx_parallm.training.trainable_model import TrainableModel, shared_tree
from tests.engine.harness import as_served, driver_of
from tests.tiny import KINDS, tiny

PROMPT = list(range(20, 60))
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_tree_has_the_arrays_that_serve(kind: str) -> None:
    model = as_served(kind)
    tree = shared_tree(model)
    served = dict(tree_flatten(model.module.parameters()))
    own = dict(tree_flatten(tree.parameters()))
    assert served.keys() == own.keys()
    assert all(own[name] is array for name, array in served.items())
    assert not tree_flatten(tree.trainable_parameters())
    tokens = mx.array([PROMPT])
    assert mx.allclose(tree(tokens), tiny(kind).module(tokens), atol=1e-4)


def test_a_quantised_model_is_shared_too() -> None:
    model = tiny()
    nn.quantize(model.module, group_size=32, bits=4, class_predicate=lambda _, layer: isinstance(layer, nn.Linear))
    tree = shared_tree(model)
    served = dict(tree_flatten(model.module.parameters()))
    assert all(array is served[name] for name, array in tree_flatten(tree.parameters()))
    assert mx.allclose(tree(mx.array([PROMPT])), model.module(mx.array([PROMPT])), atol=1e-4)
    learning = TrainableModel(model, LoRAConfig(rank=4, target_modules=ALL))
    assert learning.parameters()


def random_parameters(tree: TrainableModel, seed: int) -> None:
    random = np.random.default_rng(seed)
    tree.set_parameters(
        {
            name: array
            if name.endswith(".m")
            else mx.array(0.2 * random.standard_normal(array.shape).astype(np.float32))
            for name, array in tree.parameters().items()
        }
    )


@pytest.mark.parametrize(
    "lora",
    [
        LoRAConfig(rank=4, alpha=8),
        LoRAConfig(rank=8, target_modules=ALL),
        LoRAConfig(rank=4, dora=True),
        LoRAConfig(rank=4, target_modules=("all-linear", "lm_head")),
        LoRAConfig(rank=4, target_modules=("lm_head",), dora=True),
    ],
)
def test_rollouts_and_the_tree_give_the_same_logprobs(lora: LoRAConfig) -> None:
    """Before and after each of two publishes, from cached prompts too."""
    models: list[LanguageModel] = []

    def load() -> LanguageModel:
        models.append(as_served("llama"))
        return models[0]

    with driver_of(load, block_size=8) as running:
        tree = TrainableModel(models[0], lora)
        for seed in (1, 2):
            random_parameters(tree, seed)
            running.engine.adapters.publish("policy", tree.adapter(), "")
            for _ in range(2):
                sampling = {"max_tokens": 20, "temperature": 0.8, "seed": seed, "ignore_eos": True}
                answer = running.ask(PROMPT, adapter="policy", logprobs=0, processed_logprobs=True, **sampling)
                tokens = mx.array([PROMPT + answer.tokens])
                logits = tree.module(tokens[:, :-1])[:, len(PROMPT) - 1 :]
                found = chosen_logprobs(logits, tokens[:, len(PROMPT) :], 0.8)[0]
                assert [scored.logprob for scored in answer.logprobs] == pytest.approx(found.tolist(), abs=1e-4)


def other_magnitudes(tree: TrainableModel, seed: int) -> None:
    """DoRA's: the directions stay."""
    random = np.random.default_rng(seed)
    tree.set_parameters(
        {
            name: array * mx.array(random.uniform(0.5, 1.5, array.shape).astype(np.float32))
            for name, array in tree.parameters().items()
            if name.endswith(".m")
        }
    )


def test_dora_on_layers_with_a_bias_and_adapters_that_differ_in_magnitude_alone() -> None:
    """A bias is not scaled; what differs in magnitudes alone is another adapter, in one batch and behind one prompt
    that the cache has."""
    models: list[LanguageModel] = []

    def load() -> LanguageModel:
        models.append(as_served("qwen2"))
        return models[0]

    options = {"max_tokens": 6, "logprobs": 0, "ignore_eos": True}
    with driver_of(load, block_size=8) as running:
        assert "bias" in models[0].module.layers[0].self_attn.q_proj
        tree = TrainableModel(models[0], LoRAConfig(rank=4, dora=True, target_modules=("q_proj", "v_proj", "o_proj")))
        random_parameters(tree, 1)
        parameters = {}
        for seed, name in enumerate(("one", "two")):
            other_magnitudes(tree, seed)
            parameters[name] = tree.parameters()
            running.engine.adapters.publish(name, tree.adapter(), "")
        pending = {name: running.submit(PROMPT, adapter=name, **options)[1] for name in parameters}  # in one batch
        answers = [(name, one.wait()[0]) for name, one in pending.items()]
        answers += [(name, running.ask(PROMPT, adapter=name, **options)) for name in (*parameters, *parameters)]
        values = {}
        for name, answer in answers:
            tree.set_parameters(parameters[name])
            tokens = mx.array([PROMPT + answer.tokens])
            logits = tree.module(tokens[:, :-1])[:, len(PROMPT) - 1 :]
            expected = chosen_logprobs(logits, tokens[:, len(PROMPT) :])[0].tolist()
            values[name] = [scored.logprob for scored in answer.logprobs]
            assert values[name] == pytest.approx(expected, abs=1e-4), name
        assert values["one"] != pytest.approx(values["two"], abs=1e-2)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "rloo"])  # CISPO holds its ratio fixed: not what its loss says
def test_gradients_are_those_of_finite_differences(algorithm: str) -> None:
    tree = TrainableModel(tiny(), LoRAConfig(rank=2, alpha=4))
    random_parameters(tree, 3)
    tokens = mx.array([PROMPT[:12], PROMPT[5:17]])
    mask = mx.array([[0.0] * 5 + [1.0] * 6, [0.0] * 4 + [1.0] * 5 + [0.0] * 2])
    objective = Objective(algorithm, clip_low=0.5, clip_high=0.5, beta=0.1)  # type: ignore[arg-type]
    advantage = mx.array([0.7, -1.1])
    with_base = chosen_logprobs(tiny().module(tokens[:, :-1]), tokens[:, 1:])
    old = chosen_logprobs(tree.module(tokens[:, :-1]), tokens[:, 1:]) + 0.05

    def loss(module: nn.Module) -> mx.array:
        new = chosen_logprobs(module(tokens[:, :-1]), tokens[:, 1:])
        found = losses(objective, new, old, advantage, mask, with_base)
        return (found.policy + objective.beta * found.divergence).sum()

    gradients = dict(tree_flatten(nn.value_and_grad(tree.module, loss)(tree.module)[1]))
    assert gradients.keys() == tree.parameters().keys()
    before = tree.parameters()
    random = np.random.default_rng(0)
    for name, gradient in gradients.items():
        direction = mx.array(random.standard_normal(gradient.shape).astype(np.float32))
        step = 2e-3
        sides = []
        for sign in (1, -1):
            tree.set_parameters(before | {name: before[name] + sign * step * direction})
            sides.append(loss(tree.module).item())
        tree.set_parameters(before)
        slope = (sides[0] - sides[1]) / (2 * step)
        assert (gradient * direction).sum().item() == pytest.approx(slope, rel=0.03, abs=0.02), name


@pytest.mark.parametrize("targets", [("wobble",), ("q_proj", "wobble"), ("q_prj",), ("lm_head",)])
def test_layers_that_are_not_there(targets: tuple[str, ...]) -> None:
    """Whatever else is named; the valid names are told, and the nearest."""
    with pytest.raises(ModelLoadError, match=f"no layer called {targets[-1]}") as error:
        TrainableModel(tiny(tie_word_embeddings=True), LoRAConfig(target_modules=targets))
    assert "down_proj, gate_proj" in error.value.message
    if targets == ("q_prj",):
        assert "did you mean 'q_proj'?" in error.value.message
    if targets == ("lm_head",):
        assert "its output head is its embedding" in error.value.message


def test_all_linear_layers() -> None:
    names = {
        path.rsplit(".", 2)[-2]
        for path in TrainableModel(tiny(), LoRAConfig(target_modules=("all-linear",))).parameters()
    }
    assert names == set(ALL)
