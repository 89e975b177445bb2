"""Reward models on tiny models: what they share, how they score, what they learn, what they keep, what they read."""

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config.training import LoRAConfig, OptimizerConfig
from mlx_parallm.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelLoadError, ParallmError
from mlx_parallm.steps import run_through
from mlx_parallm.text.prompts import Prompts
from mlx_parallm.training.storage.checkpoints import ADAPTER, Checkpoints
from mlx_parallm.training.supervised import reward_model
from mlx_parallm.training.supervised.pairs import Pair, read_pairs
from mlx_parallm.training.supervised.reward_model import RewardModel, open_reward_model
from mlx_parallm.training.supervised.reward_trainer import RewardTrainer
from tests.engine.harness import as_served, driver
from tests.tiny import tiny, tiny_tokenizer

LORA = LoRAConfig(rank=4, alpha=8)
WANTED = 77  # the better text holds this token


def texts(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 250, random.integers(3, 20)).tolist() for _ in range(count)]


def made(count: int, seed: int = 0) -> list[Pair]:
    """Random texts; one of the last three tokens of the better one is the wanted one."""
    random = np.random.default_rng(seed)

    def text(good: bool) -> list[int]:
        found = [token for token in random.integers(3, 250, random.integers(6, 14)).tolist() if token != WANTED]
        if good:
            found[-int(random.integers(1, 4))] = WANTED
        return found

    return [Pair(text(True), text(False)) for _ in range(count)]


def stirred(model: RewardModel, seed: int = 5) -> RewardModel:
    """One whose scores differ, as if it had learnt something."""
    mx.random.seed(seed)
    model.set_parameters({name: 0.1 * mx.random.normal(array.shape) for name, array in model.parameters.items()})
    return model


def ranked_right(model: RewardModel, pairs: Sequence[Pair]) -> float:
    chosen, rejected = (model.scores([getattr(pair, side) for pair in pairs]) for side in ("chosen", "rejected"))
    return float(np.mean(np.array(chosen) > np.array(rejected)))


def test_the_base_is_shared_and_stays_as_it_is() -> None:
    model = as_served("llama")
    before = {name: np.array(array) for name, array in tree_flatten(model.module.parameters())}
    rewards = RewardModel(model, LORA)
    run_through(RewardTrainer(rewards, OptimizerConfig(learning_rate=1e-2)).train(made(20)))
    served = dict(tree_flatten(model.module.parameters()))
    own = {id(array) for _, array in tree_flatten(rewards.tree.module.parameters())}
    assert all(id(array) in own for array in served.values())
    assert all(np.array_equal(before[name], np.array(array)) for name, array in served.items())
    assert all(array.dtype == mx.float32 for array in rewards.parameters.values())


@pytest.mark.parametrize("kind", ["llama", "gemma3", "hybrid", "qwen3_next", "mamba"])
def test_texts_together_score_as_they_do_alone(kind: str) -> None:
    lora = LoRAConfig(rank=4, alpha=8, target_modules=("all-linear",))
    rewards = stirred(RewardModel(as_served(kind), lora))
    some = texts(8)
    together = rewards.scores(some)
    assert together == pytest.approx([rewards.scores([text])[0] for text in some], abs=1e-4)
    assert np.std(together) > 0.01


def test_what_stands_behind_a_text_does_not_matter() -> None:
    rewards = stirred(RewardModel(tiny(), LORA))
    short, (alone,) = [5, 6, 7], rewards.scores([[5, 6, 7]])
    for other in ([9] * 30, list(range(50, 90))):
        assert rewards.scores([short, other])[0] == pytest.approx(alone, abs=1e-4)
    assert rewards.scores([[*short, 0]])[0] != pytest.approx(alone, abs=1e-3)  # a token that is there counts


@pytest.mark.long
def test_learns_which_text_is_better() -> None:
    rewards = RewardModel(tiny(), LoRAConfig(8, 16, ("q_proj", "k_proj", "v_proj", "o_proj")))
    held_out = made(200, seed=1)
    assert set(rewards.scores([held_out[0].chosen, held_out[0].rejected])) == {0.0}
    metrics = run_through(RewardTrainer(rewards, OptimizerConfig(learning_rate=2e-3), epochs=8).train(made(200)))
    assert ranked_right(rewards, held_out) >= 0.9
    assert metrics["accuracy"] >= 0.9
    assert metrics["loss"] < 0.4
    assert metrics["margin"] > 1
    assert metrics["updates"] == 8 * 13
    every = rewards.scores([text for pair in made(200) for text in (pair.chosen, pair.rejected)])
    assert abs(np.mean(every)) < 0.5 * np.std(every)  # the bias centres them


def test_metrics_are_means_over_the_pairs_and_the_bias_centres_their_scores() -> None:
    model, pairs = stirred(RewardModel(tiny(), LORA)), made(6)
    texts = [text for pair in pairs for text in (pair.chosen, pair.rejected)]
    before = np.array(model.scores(texts)).reshape(6, 2)
    metrics = run_through(
        RewardTrainer(model, OptimizerConfig(learning_rate=1e-12), epochs=1, batch_size=6).train(pairs)
    )
    margins = before[:, 0] - before[:, 1]
    assert metrics["margin"] == pytest.approx(margins.mean(), abs=1e-5)
    assert metrics["accuracy"] == pytest.approx((margins > 0).mean())
    assert metrics["loss"] == pytest.approx(np.log1p(np.exp(-margins)).mean(), abs=1e-5)
    assert abs(before.mean()) > 1e-3
    assert np.mean(model.scores(texts)) == pytest.approx(0, abs=1e-5)


def test_the_same_seed_and_any_cut_come_to_the_same() -> None:
    one, same, cut = (RewardModel(tiny(), LORA) for _ in range(3))
    for model, tokens in ((one, 10_000), (same, 10_000), (cut, 60)):
        run_through(
            RewardTrainer(model, OptimizerConfig(learning_rate=1e-3), seed=3, microbatch_tokens=tokens).train(made(24))
        )
    assert all(np.array_equal(array, same.state()[name]) for name, array in one.state().items())
    apart = max(float(np.mean(np.abs(array - cut.state()[name]))) for name, array in one.state().items())
    assert apart < 1e-5
    other = RewardModel(tiny(), LORA)
    run_through(RewardTrainer(other, OptimizerConfig(learning_rate=1e-3), seed=4).train(made(24)))
    assert not all(np.array_equal(array, other.state()[name]) for name, array in one.state().items())


@pytest.mark.parametrize("prompt", [[], list(range(20, 40))])
def test_pieces_are_within_the_budget(prompt: list[int]) -> None:
    """`prompt`: what all texts begin with; it goes through the model once a piece."""
    rewards = RewardModel(tiny(), LORA, microbatch_tokens=60)
    sizes, backbone = [0], rewards._backbone

    def measured(tokens: mx.array, cache: object) -> mx.array:
        sizes[-1] += tokens.size
        return backbone(tokens, cache=cache)

    def pieces(steps: Generator[None, None, object]) -> list[int]:
        """Tokens that went through the model from one break to the next; none for a step of the optimiser."""
        sizes[:] = [0]
        sizes.extend(0 for _ in steps)
        return sizes[:-1]

    rewards._backbone = measured
    pairs = [Pair(prompt + pair.chosen, prompt + pair.rejected) for pair in made(20)]
    learning = pieces(RewardTrainer(rewards, batch_size=10, microbatch_tokens=60).train(pairs))
    scoring = pieces(rewards.score_steps([prompt + text for text in texts(30)]))
    assert learning.count(0) == 2
    assert min(len(learning), len(scoring)) > 5
    assert max(learning + scoring) <= 60


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_texts_behind_one_beginning_are_the_same_as_whole_texts(kind: str) -> None:
    pairs = [Pair([*range(20, 40), *pair.chosen], [*range(20, 40), *pair.rejected]) for pair in made(8)]
    one, other = (stirred(RewardModel(as_served(kind), LORA)) for _ in range(2))
    other.tree.shares_prompts = False
    some = [pair.chosen for pair in pairs] + texts(4)
    assert one.scores(some) == pytest.approx(other.scores(some), abs=1e-4)
    left, right = (
        mx.value_and_grad(RewardTrainer(model)._loss)(model.parameters, pairs, 8)[1] for model in (one, other)
    )
    assert all(mx.allclose(left[name], right[name], rtol=1e-3, atol=1e-4) for name in left)
    assert mx.max(mx.abs(left["head.weight"])).item() > 0.01


def test_scores_are_of_one_version_while_it_learns() -> None:
    rewards = stirred(RewardModel(tiny(), LORA, microbatch_tokens=30))
    some = texts(10)
    before = rewards.scores(some)
    scoring, training = (
        rewards.score_steps(some),
        RewardTrainer(rewards, OptimizerConfig(learning_rate=1e-2)).train(made(32)),
    )
    next(scoring)
    run_through(training)
    assert run_through(scoring) == before
    assert rewards.scores(some) != pytest.approx(before, abs=1e-2)


def test_training_that_fails_is_undone() -> None:
    rewards = stirred(RewardModel(tiny(), LORA))
    trainer = RewardTrainer(rewards, OptimizerConfig(learning_rate=1e-3), batch_size=8)
    kept, scores = rewards.state(), rewards.scores(texts(3))
    steps = trainer.train(made(40))
    for _ in range(4):
        next(steps)
    assert rewards.updates
    learner = trainer.learner
    learner.parameters = {**learner.parameters, "head.weight": learner.parameters["head.weight"] * float("nan")}
    with pytest.raises(ParallmError, match=r"the gradient's norm is|the loss is"):
        run_through(steps)
    assert all(np.array_equal(array, rewards.state()[name]) for name, array in kept.items())
    assert rewards.updates == 0
    assert rewards.scores(texts(3)) == scores


def test_saved_and_loaded_it_scores_the_same(tmp_path: Path) -> None:
    lora = LoRAConfig(rank=3, alpha=7, layers=1)  # a scale that rounds
    rewards = RewardModel(tiny(), lora)
    run_through(RewardTrainer(rewards, OptimizerConfig(learning_rate=1e-2)).train(made(32)))
    expected = rewards.scores(texts(6))
    checkpoints = Checkpoints(tmp_path, keep=2)
    paths = [rewards.save(checkpoints), rewards.save(checkpoints, "other"), rewards.save(tmp_path / "folder")]
    assert [path.name for path in paths] == ["reward-model", "other", "folder"]
    assert all((path / ADAPTER).is_file() for path in paths)
    fresh = RewardModel(tiny(), lora, seed=9)
    fresh.load(checkpoints)
    assert fresh.scores(texts(6)) == expected
    assert fresh.updates == rewards.updates == 2
    assert open_reward_model(tiny(), tmp_path / "folder").scores(texts(6)) == expected
    assert open_reward_model(tiny(), checkpoints, "other").lora == lora
    with pytest.raises(ConfigError, match="another rank"):
        RewardModel(tiny(), LORA).load(checkpoints)
    with pytest.raises(InvalidRequestError, match="no checkpoint"):
        fresh.load(tmp_path / "nothing")
    checkpoints.save("policy", {}, {"x": np.zeros(1)}, {"updates": 1})
    with pytest.raises(ConfigError, match="no reward model"):
        fresh.load(checkpoints, "policy")


def test_on_an_engine_that_serves() -> None:
    with driver("llama") as one:
        expected = one.ask(list(range(20, 40))).tokens

        def begin() -> Generator[None, None, RewardModel]:
            yield
            return RewardModel(one.engine.model, LORA)

        rewards = one.engine.work(begin()).result(60)
        learning = one.engine.work(
            RewardTrainer(rewards, OptimizerConfig(learning_rate=5e-3), epochs=2).train(made(64))
        )
        assert one.ask(list(range(20, 40))).tokens == expected
        assert learning.result(60)["pairs"] == 64
        assert len(one.engine.work(rewards.score_steps(texts(5))).result(60)) == 5


def test_texts_that_are_none() -> None:
    rewards = RewardModel(tiny(), LORA)
    for wrong in ([], [-1], [10_000]):
        with pytest.raises(InvalidRequestError):
            rewards.scores([[1, 2], wrong])
        with pytest.raises(InvalidRequestError):
            run_through(RewardTrainer(rewards).train([Pair([1], wrong)]))
    with pytest.raises(ContextLengthError):
        rewards.scores([[1] * 2049])
    with pytest.raises(InvalidRequestError, match="no pairs"):
        run_through(RewardTrainer(rewards).train([]))
    assert rewards.scores([]) == []


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": 0}, {"batch_size": 0}, {"microbatch_tokens": 0}, {"optimizer": OptimizerConfig(learning_rate=0.0)}],
)
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RewardTrainer(RewardModel(tiny(), LORA), **wrong)


def test_models_without_a_backbone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError, match="under its head"):
        reward_model._backbone(nn.Linear(2, 2), "odd")
    monkeypatch.setattr(reward_model, "BACKBONES", ("elsewhere",))
    with pytest.raises(ModelLoadError, match="tiny-llama"):
        RewardModel(tiny(), LORA)


# Pairs from a file.

ASKED = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Hello"}
RUDE = {"role": "assistant", "content": "What\u2028now"}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "pairs.jsonl"
    rows = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def test_pairs_in_all_their_forms(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    path = written(
        tmp_path,
        {"prompt": "Hi", "chosen": "Hello", "rejected": "What\u2028now"},
        "",
        {"prompt": [ASKED], "chosen": "Hello", "rejected": "What\u2028now"},
        {"prompt": [ASKED], "chosen": [SAID], "rejected": [RUDE]},
        {"chosen": [ASKED, SAID], "rejected": [ASKED, RUDE], "source": "extra keys do no harm"},
    )
    found = read_pairs(path, Prompts(tokenizer))
    assert len(found) == 4
    assert all(pair == found[0] for pair in found)
    whole = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    assert found[0].chosen == tokenizer.encode(whole, add_special_tokens=False)
    assert tokenizer.decode(found[0].rejected).count("What\u2028now") == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{nonsense", "line 3"),
        ("[1, 2]", "line 3.*not an object"),
        ({"prompt": "Hi", "chosen": "Hello"}, "line 3.*'rejected'"),
        ({"chosen": "Hello", "rejected": "What"}, "line 3.*no prompt"),
        ({"prompt": "Hi", "chosen": 1, "rejected": "What"}, "line 3.*'chosen'"),
        ({"prompt": [], "chosen": "Hello", "rejected": "What"}, "line 3.*'prompt'"),
        ({"chosen": [ASKED, {"role": "assistant"}], "rejected": [ASKED]}, "line 3.*'chosen'"),
        ({"chosen": [ASKED, "Hello"], "rejected": [ASKED]}, "line 3.*'chosen'"),
        ('{"prompt": "\\ud800", "chosen": "Hello", "rejected": "What"}', "line 3"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: object, why: str) -> None:
    path = written(tmp_path, {"prompt": "Hi", "chosen": "a", "rejected": "b"}, "", line)
    with pytest.raises(ConfigError, match=why):
        read_pairs(path, Prompts(tiny_tokenizer()))


def test_files_without_pairs(tmp_path: Path) -> None:
    prompts = Prompts(tiny_tokenizer())
    with pytest.raises(ConfigError, match="can't be read"):
        read_pairs(tmp_path / "nothing.jsonl", prompts)
    with pytest.raises(ConfigError, match="no pairs"):
        read_pairs(written(tmp_path, "", " "), prompts)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="can't be read"):
        read_pairs(tmp_path / "bytes", prompts)
