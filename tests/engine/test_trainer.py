"""The trainer on a tiny model: the same update however it is cut, what it refuses, what it learns, what it keeps."""

import re
from collections.abc import Sequence
from dataclasses import fields

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config.algorithms import ALGORITHMS
from mlx_parallm.config.training import LoRAConfig, RLConfig, TrainingConfig
from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.steps import run_through
from mlx_parallm.training.budget import Pace
from mlx_parallm.training.learner import Refused
from mlx_parallm.training.rl.batches import Batch, Micro, PaddedPrompts
from mlx_parallm.training.rl.objectives import chosen_logprobs, entropy
from mlx_parallm.training.rl.policy_loss import LossTotals
from mlx_parallm.training.rl.trainer import Outcome, Trainer
from mlx_parallm.training.rl.trajectories import Trajectory
from mlx_parallm.training.trainable_model import PromptCache, TrainableModel, can_share_prompts, completion_logits
from tests.engine.harness import as_served
from tests.tiny import tiny

PROMPTS = (list(range(20, 41)), list(range(60, 75)))
LORA = LoRAConfig(rank=4, alpha=8)


def made(reward_of: "object" = None, seed: int = 0, groups: int = 2, size: int = 4) -> list[Trajectory]:
    """Random answers of different lengths; by default random rewards."""
    random = np.random.default_rng(seed)
    found = []
    for group in range(groups):
        for _ in range(size):
            answer = random.integers(3, 90, random.integers(4, 10)).tolist()
            reward = reward_of(answer) if callable(reward_of) else float(random.integers(0, 3))
            found.append(Trajectory(PROMPTS[group % 2], answer, reward, f"g{group}"))
    return found


def run(trainer: Trainer, trajectories: Sequence[Trajectory]) -> Outcome:
    return run_through(trainer.update(trajectories))


def with_logprobs(trainer: Trainer, trajectories: Sequence[Trajectory], shift: float = 0.0) -> None:
    for one in trajectories:
        tokens = mx.array([one.completion_ids])
        logits = completion_logits(trainer.tree.module, PaddedPrompts.of([one.prompt_ids], [1]), tokens, False)
        one.logprobs = (chosen_logprobs(logits, tokens)[0] + shift).tolist()


def apart(left: Trainer, right: Trainer) -> float:
    return max(mx.mean(mx.abs(left.parameters[name] - right.parameters[name])).item() for name in left.parameters)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_answers_behind_one_prompt_are_the_same_as_whole_texts(kind: str) -> None:
    tree = TrainableModel(as_served(kind), LORA)
    assert tree.shares_prompts
    answers = mx.array([[5, 6, 7, 8], [50, 60, 70, 80]])
    prompt = PaddedPrompts.of(PROMPTS[:1], [2])
    found, expected = (completion_logits(tree.module, prompt, answers, shared) for shared in (True, False))
    assert mx.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("lengths", [(21, 13, 30), (9, 9), (1, 2), (1, 1)])
def test_answers_behind_several_prompts_are_the_same_as_whole_texts(kind: str, lengths: tuple[int, ...]) -> None:
    tree = TrainableModel(as_served(kind), LORA)
    assert tree.mixes_prompts
    random = np.random.default_rng(0)
    texts = [random.integers(3, 90, length).tolist() for length in lengths]
    answers = mx.array(random.integers(3, 90, (2 * len(lengths), 4)))
    found = completion_logits(tree.module, PaddedPrompts.of(texts, [2] * len(lengths)), answers, True)
    for number, text in enumerate(texts):
        rows = slice(2 * number, 2 * number + 2)
        assert mx.allclose(
            found[rows], completion_logits(tree.module, PaddedPrompts.of([text], [2]), answers[rows], False), atol=1e-4
        )


def test_positions_and_windows_behind_padded_prompts() -> None:
    ends, width, length, window = [5, 3], 5, 4, 4
    cache = PromptCache(mx.array([0, 1]), mx.array(ends))
    assert cache.make_mask(width) == "causal"
    cache.keep(mx.zeros((2, 1, width, 8)), mx.zeros((2, 1, width, 8)))
    for size in (None, window):
        mask = np.array(cache.make_mask(length, window_size=size))[:, 0]
        for row, end in enumerate(ends):
            seen = [*range(end), *range(width, width + length)]  # keys that are no padding, by their positions
            for query in range(length):
                begin = 0 if size is None else max(0, end + query + 1 - size)
                assert np.flatnonzero(mask[row, query]).tolist() == seen[begin : end + query + 1]


def test_a_model_with_one_position_for_all_rows_has_one_prompt_at_a_time() -> None:
    tree = TrainableModel(as_served("llama"), LORA)
    for layer in tree.module.layers:
        rope = layer.self_attn.rope
        layer.self_attn.rope = lambda x, offset=0, rope=rope: rope(x, offset=int(offset))
    assert can_share_prompts(tree.module, 90, [5])
    assert not can_share_prompts(tree.module, 90, [3, 5])


def test_models_with_other_state_do_not_share_prompts() -> None:
    assert not TrainableModel(as_served("gemma3"), LORA).shares_prompts
    assert not TrainableModel(
        as_served("hybrid"), LoRAConfig(rank=4, target_modules=("q_proj", "in_proj"))
    ).shares_prompts


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_update_is_the_same_however_it_is_cut(algorithm: str, checkpointing: bool) -> None:
    settings = {"algorithm": algorithm, "learning_rate": 1e-3, "beta": 0.1, "max_kl": 10.0}
    whole = Trainer(tiny(), LORA, RLConfig(microbatch_tokens=10_000, **settings))  # type: ignore[arg-type]
    cut = Trainer(tiny(), LORA, RLConfig(microbatch_tokens=30, gradient_checkpointing=checkpointing, **settings))  # type: ignore[arg-type]
    trajectories = made()
    with_logprobs(whole, trajectories)
    for trainer in (whole, cut):
        for _ in range(2):
            assert run(trainer, trajectories).adapter is not None
    assert apart(whole, cut) < 1e-5  # Adam makes much of gradients that are hardly any
    assert apart(whole, Trainer(tiny(), LORA, RLConfig())) > 2e-4


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_answers_to_several_prompts_together_have_the_same_gradient(checkpointing: bool, beta: float) -> None:
    config = RLConfig(learning_rate=1e-2, beta=beta, gradient_checkpointing=checkpointing, max_kl=100.0)
    trainer = Trainer(tiny(), LORA, config)
    run(trainer, made())  # else half of the parameters are zeros
    random = np.random.default_rng(5)
    trajectories = made(groups=4)
    for place, one in enumerate(trajectories):
        one.prompt_ids = list(range(20, 33 + 4 * (place // 4)))
        one.temperature = 0.9 + 0.1 * (place % 3)
        one.mask = (random.random(len(one.completion_ids)) < 0.8).tolist()
    with_logprobs(trainer, trajectories)
    trajectories[3].logprobs = None
    batch = Batch.of(trajectories, "grpo", 512)
    together = list(batch.micros(lambda: 10_000))
    alone = list(batch.micros(lambda: 10_000, several=False))
    pieces = list(batch.micros(lambda: 30))
    rounded = list(batch.micros(lambda: 10_000, rounded=True))
    assert [len(micros) for micros in (together, alone, rounded)] == [1, 4, 1]
    assert rounded[0].completions.shape == (16, 32)
    assert len(pieces) > 8

    def gradient(micros: Sequence[Micro]) -> tuple[dict[str, mx.array], mx.array]:
        found = [mx.value_and_grad(trainer.loss)(trainer.parameters, micro) for micro in micros]
        total = {name: sum(gradients[name] for _, gradients in found) for name in trainer.parameters}
        names = [item.name for item in fields(LossTotals) if item.name != "largest_gap"]
        return total, mx.stack([sum(values[name] for (_, values), _ in found) for name in names])

    expected, sums = gradient(alone)
    for micros in (together, pieces, rounded):
        total, others = gradient(micros)
        assert mx.allclose(others, sums, rtol=1e-4, atol=1e-4)
        for name, array in expected.items():
            assert mx.linalg.norm(array) > 0
            assert mx.linalg.norm(total[name] - array) < 1e-5 * mx.linalg.norm(array)


def test_a_micro_batch_has_no_more_tokens_than_memory_holds() -> None:
    trainer = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-3))
    seen: list[int] = []
    run_micro = trainer.budget.run
    trainer.budget.run = lambda tokens, *rest: seen.append(tokens) or run_micro(tokens, *rest)  # type: ignore[method-assign]
    for _ in range(3):  # until pieces are as large as the whole
        run(trainer, made())
    whole = max(seen)
    assert seen[-1] == whole
    largest = trainer.budget.largest
    trainer._memory = trainer.working_bytes + int(largest.nbytes / largest.tokens * whole / 3)
    seen.clear()
    assert run(trainer, made()).adapter is not None
    assert len(seen) > 2
    assert max(seen) <= whole / 3


def test_an_update_is_the_same_in_round_shapes() -> None:
    trainers = [Trainer(tiny(), LORA, RLConfig(learning_rate=1e-3)) for _ in range(2)]
    trainers[1].rounded = True
    for trainer in trainers:
        trainer.warm_up()
    shapes = set()
    for seed in range(4):
        trajectories = made(seed=seed, size=3 + seed)
        with_logprobs(trainers[0], trajectories)
        outcomes = [run(trainer, trajectories) for trainer in trainers]
        for name in ("loss", "tokens", "grad_norm", "entropy", "mismatch_kl", "effective_sample_size"):
            assert outcomes[0].metrics[name] == pytest.approx(outcomes[1].metrics[name], rel=1e-3, abs=1e-6)
        micros = Batch.of(trajectories, "grpo", 512).micros(lambda: 8192, rounded=True)
        shapes |= {(micro.prompts.tokens.shape, micro.completions.shape) for micro in micros}
    assert apart(*trainers) < 1e-5
    assert shapes == {((2, 32), (8, 32)), ((2, 32), (16, 32))}


@pytest.mark.parametrize("kind", ["gemma3", "llama"])
def test_an_update_is_the_same_one_prompt_at_a_time(kind: str) -> None:
    trainers = [Trainer(tiny(kind), LORA, RLConfig(learning_rate=1e-3, microbatch_tokens=1000)) for _ in range(2)]
    assert trainers[0].tree.mixes_prompts == (kind == "llama")
    trainers[1].tree.mixes_prompts = False
    for seed in range(2):
        outcomes = [run(trainer, made(seed=seed)) for trainer in trainers]
        assert outcomes[0].metrics["update_kl"] == pytest.approx(outcomes[1].metrics["update_kl"], rel=1e-3)
    assert apart(*trainers) < 1e-5


def test_checkpointing_leaves_the_models_classes_alone() -> None:
    served = tiny()
    kind = type(served.module.layers[0])
    before = kind.__call__
    trainer = Trainer(served, LORA, RLConfig(gradient_checkpointing=True))
    assert type(trainer.tree.module.layers[0]) is not kind
    assert type(served.module.layers[0]) is kind
    assert kind.__call__ is before


def test_the_base_is_shared_and_stays_as_it_is() -> None:
    model = tiny()
    before = {name: np.array(array) for name, array in tree_flatten(model.module.parameters())}
    trainer = Trainer(model, LORA, RLConfig(learning_rate=1e-2))
    run(trainer, made())
    served = dict(tree_flatten(model.module.parameters()))
    own = {id(array) for _, array in tree_flatten(trainer.tree.module.parameters())}
    assert all(id(array) in own for array in served.values())
    assert all(np.array_equal(before[name], np.array(array)) for name, array in served.items())


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_answers_that_did_better_become_likelier(algorithm: str) -> None:
    trainer = Trainer(tiny(), LORA, RLConfig(algorithm=algorithm, learning_rate=1e-3))  # type: ignore[arg-type]
    trajectories = made(seed=1)

    def scores() -> list[float]:
        with_logprobs(trainer, trajectories)
        return [float(np.mean(one.logprobs)) for one in trajectories]  # type: ignore[arg-type]

    before = scores()
    for _ in range(4):
        with_logprobs(trainer, trajectories)
        assert run(trainer, trajectories).adapter is not None
    change = np.array(scores()) - before
    advantage = Batch.of(trajectories, algorithm, 512).advantage  # type: ignore[arg-type]
    assert np.corrcoef(change, advantage)[0, 1] > 0.6


def test_metrics_of_an_update_on_policy() -> None:
    trainer = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-3))
    trajectories = made()
    with_logprobs(trainer, trajectories)
    found = run(trainer, trajectories).metrics
    assert found["max_logprob_gap"] < 1e-4
    assert found["mismatch_kl"] == pytest.approx(0, abs=1e-6)
    assert found["clip_fraction"] == 0
    assert found["effective_sample_size"] == pytest.approx(1, abs=1e-4)
    assert found["entropy"] > 0
    assert found["update_kl"] > 0
    assert found["tokens"] == sum(len(one.completion_ids) for one in trajectories)
    with_logprobs(trainer, trajectories, shift=-0.5)
    assert run(trainer, trajectories).metrics["max_logprob_gap"] == pytest.approx(0.5, abs=1e-3)


def test_groups_without_a_difference_are_skipped_and_counted() -> None:
    trainer = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-3))
    flat = made(lambda _: 1.0)
    outcome = run(trainer, flat)
    assert outcome.adapter is None
    assert (outcome.used, outcome.skipped) == (0, 8)
    mixed = flat[:4] + made(seed=2)[4:]
    outcome = run(trainer, mixed)
    assert (outcome.used, outcome.skipped) == (4, 4)


def test_with_a_penalty_flat_groups_are_drawn_back_to_the_model() -> None:
    flat = made(lambda _: 1.0)
    for beta, published in ((0.0, False), (0.5, True)):
        trainer = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-2, beta=beta, max_kl=100.0))
        for seed in range(3):
            assert run(trainer, made(seed=seed)).adapter is not None
        outcome = run(trainer, flat)
        assert (outcome.adapter is not None) == published
        assert (outcome.used, outcome.skipped) == ((8, 0) if published else (0, 8))
        assert outcome.metrics["flat_trajectories"] == 8


def test_a_penalty_draws_the_policy_nearer_to_the_model() -> None:
    trainer = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-2, beta=1.0, max_kl=100.0))
    run(trainer, made())
    away = [run(trainer, made(lambda _: 1.0)).metrics["kl"] for _ in range(8)]
    assert away[-1] < away[0] / 2


def test_a_divergence_is_told_only_by_the_update_that_measured_it() -> None:
    trainer = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-2))
    told = ["kl" in run(trainer, made(seed=seed)).metrics for seed in range(6)]
    assert told == [True, False, False, False, True, False]
    always = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-2, beta=0.1))
    assert all("kl" in run(always, made(seed=seed)).metrics for seed in range(3))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"learning_rate": 1e3}, "nats a token|not finite|norm"),
        ({"learning_rate": 1e-2, "max_kl": 1e-9}, "nats a token"),
        ({"learning_rate": 1e-2, "max_parameter_norm": 1e-3}, "norm"),
    ],
)
def test_a_bad_update_is_undone(settings: dict[str, float], why: str) -> None:
    trainer = Trainer(tiny(), LORA, RLConfig(**settings))  # type: ignore[arg-type]
    before = {name: np.array(array) for name, array in trainer.state().items()}
    outcome = run(trainer, made())
    assert outcome.adapter is None
    assert re.search(why, outcome.reason)
    after = trainer.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert trainer.updates == 0


def test_a_step_that_changes_nothing_is_refused() -> None:
    trainer = Trainer(tiny(), LORA, RLConfig())
    before = trainer.learner.snapshot().stacks
    with pytest.raises(Refused, match="nothing has changed"):
        trainer.check._parameter_norm(before)
    assert trainer.check._parameter_norm({name: array + 1.0 for name, array in before.items()}) > 0


def test_a_step_that_goes_too_far_is_halved_before_it_is_refused() -> None:
    far = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-1, max_kl=1e3))
    before = {name: np.array(array) for name, array in far.parameters.items()}
    whole = run(far, made())
    assert whole.adapter is not None
    assert whole.metrics["step_halvings"] == 0
    limit = whole.metrics["update_kl"] / 3
    held = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-1, max_kl=limit))
    outcome = run(held, made())
    assert outcome.adapter is not None, outcome.reason
    assert outcome.metrics["update_kl"] <= limit
    share = 0.5 ** outcome.metrics["step_halvings"]
    assert share < 1
    for name, array in held.parameters.items():
        expected = before[name] + share * (np.array(far.parameters[name]) - before[name])
        assert np.allclose(np.array(array), expected, atol=1e-6), name
    strict = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-1, max_kl=limit, max_kl_halvings=0))
    assert "nats a token" in run(strict, made()).reason
    assert strict.updates == 0
    stuck = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-1, max_kl=1e-9))
    assert "halved 3 times" in run(stuck, made()).reason
    assert all(np.array_equal(before[name], np.array(array)) for name, array in stuck.parameters.items())


def test_an_update_is_checked_by_enough_tokens() -> None:
    for answers, tokens, expected in ((4, 512, None), (60, 100, 100)):
        trainer = Trainer(tiny(), LORA, RLConfig(microbatch_tokens=64, max_kl_tokens=tokens))
        batch = trainer.batch(made(size=answers))
        samples = run_through(trainer.forward_backward(batch)).samples
        looked_at = sum(sample.micro.learnt for sample in samples)
        if expected is None:
            assert looked_at == sum(len(one.completion_ids) for one in batch.trajectories), "all that there are"
        else:
            assert expected <= looked_at < expected + 10, "no answer more than needed"


def test_a_schedule_counts_updates_and_its_warm_up_begins_with_nothing() -> None:
    config = RLConfig(learning_rate=1e-3, schedule="linear", warmup_steps=2, total_steps=6, epochs=2)
    trainer = Trainer(tiny(), LORA, config)
    rates = []
    for seed in range(7):
        outcome = run(trainer, made(seed=seed))
        assert outcome.adapter is not None, outcome.reason
        rates.append(outcome.metrics["learning_rate"])
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0], abs=1e-9)


def test_the_memory_of_an_update_is_that_of_its_gradients_and_of_what_was_before() -> None:
    trainer = Trainer(tiny(), LORA, RLConfig())
    parameters = sum(array.nbytes for array in trainer.parameters.values())
    stacks = sum(array.nbytes for array in trainer.learner.stacks.values())
    assert trainer.nbytes >= 3 * parameters, "with two moments of each"
    assert trainer.working_bytes == 2 * trainer.nbytes + stacks
    trainer.kept_snapshots = 3
    assert trainer.working_bytes == 5 * trainer.nbytes + stacks


def test_dropout_is_of_updates_alone_and_repeats_itself() -> None:
    lora = LoRAConfig(rank=4, alpha=8, dropout=0.5)
    first, again = (Trainer(tiny(), lora, RLConfig(learning_rate=1e-2)) for _ in range(2))
    plain = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-2))
    outcomes = [[run(trainer, made(seed=seed)) for seed in range(2)] for trainer in (first, again, plain)]
    assert apart(first, again) == 0.0
    assert apart(first, plain) > 0.0
    assert outcomes[0][1].metrics["max_logprob_gap"] == 0.0, "nobody knows what they were drawn with"
    micro = next(iter(plain._micros(plain.batch(made()))))
    with first.tree.dropping_out():
        some, other = (first.loss.logprobs(micro) for _ in range(2))
    assert not mx.allclose(some, other)
    assert mx.array_equal(first.loss.logprobs(micro), first.loss.logprobs(micro))
    with pytest.raises(ConfigError, match="exclude each other"):
        TrainingConfig(lora=lora, rl=RLConfig(gradient_checkpointing=True))
    with pytest.raises(ConfigError, match="below 1"):
        LoRAConfig(dropout=1.0)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_huge_ratio_does_not_cost_the_update(algorithm: str) -> None:
    trainer = Trainer(tiny(), LORA, RLConfig(algorithm=algorithm, learning_rate=1e-3, max_kl=100.0))  # type: ignore[arg-type]
    trajectories = made()
    with_logprobs(trainer, trajectories)
    for one in trajectories[::3]:
        assert one.logprobs is not None
        one.logprobs = [-200.0, *one.logprobs[1:]]  # the policy gives it e^195 times more
    outcome = run(trainer, trajectories)
    assert outcome.adapter is not None, outcome.reason
    assert all(np.isfinite(value) for value in outcome.metrics.values()), outcome.metrics


def test_an_update_from_more_than_a_batch_makes_several_steps() -> None:
    whole, apart_, one_step = (
        Trainer(tiny(), LORA, RLConfig(learning_rate=1e-3, batch_size=size)) for size in (8, 8, 32)
    )
    trajectories = made(groups=3, size=6)
    outcome = run(whole, trajectories)
    assert outcome.metrics["optimizer_steps"] == 3
    assert outcome.used + outcome.skipped == 18
    assert whole.updates == 1
    for batch in apart_.batches(trajectories):
        assert {one.group_id for one in batch.trajectories}.issubset({"g0", "g1", "g2"})
        run_through(apart_.forward_backward(batch))
        run_through(apart_.optim_step())
    assert apart(whole, apart_) == 0.0
    assert run(one_step, trajectories).metrics["optimizer_steps"] == 1
    assert apart(whole, one_step) > 0.0


def test_the_divergence_may_be_part_of_the_reward() -> None:
    """By what was drawn: its log-probabilities less those of the reference, summed over the answer."""
    inside = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-3, beta=0.5, kl_in_reward=True, kl_estimator="k1"))
    plain = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-3))
    trajectories, others = made(), made()
    for some in (trajectories, others):
        with_logprobs(plain, some, shift=0.1)
    for one in others:
        one.reward -= 0.5 * 0.1 * len(one.completion_ids)
    outcome = run(inside, trajectories)
    assert outcome.metrics["kl"] == pytest.approx(0.1, abs=1e-4)
    assert outcome.metrics["reward_mean"] == pytest.approx(np.mean([one.reward for one in trajectories]))
    run(plain, others)
    assert apart(inside, plain) < 1e-6


def test_truncated_answers_may_be_left_out() -> None:
    """They count in their group's mean, as in TRL, and teach nothing."""
    left_out, masked = (
        Trainer(tiny(), LORA, RLConfig(learning_rate=1e-3, mask_truncated=drop)) for drop in (True, False)
    )
    cut, hidden = made(), made()
    for one, other in zip(cut[::2], hidden[::2], strict=True):
        one.truncated = True
        other.mask = [False] * len(other.completion_ids)
    assert all(not one.truncated for one in left_out.batch(cut).trajectories)
    assert run(left_out, cut).metrics["tokens"] == run(masked, hidden).metrics["tokens"]
    assert apart(left_out, masked) < 1e-7


def test_an_entropy_bonus_keeps_the_policy_open() -> None:
    found = []
    for bonus in (0.0, 5.0):
        trainer = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-2, entropy_bonus=bonus, max_kl=100.0))
        for seed in range(4):
            assert run(trainer, made(seed=seed)).adapter is not None
        micro = next(iter(trainer._micros(trainer.batch(made()))))
        answers = mx.array(micro.completions)
        logits = completion_logits(trainer.tree.module, micro.prompts, answers, trainer.tree.shares_prompts)
        found.append(mx.mean(entropy(logits)).item())
    assert found[1] > found[0] + 0.01


def test_importance_is_measured_from_the_begin_of_an_update() -> None:
    config = RLConfig(learning_rate=1e-2, importance_cap=2.0, epochs=2, max_kl=100.0)
    trainer = Trainer(tiny(), LORA, config)
    trajectories = made()
    with_logprobs(trainer, trajectories, shift=-0.1)
    batch = trainer.batch(trajectories)
    run_through(trainer._keep_proximal(batch))
    for micro in trainer._micros(batch):
        assert micro.proximal is not None
        assert np.allclose(micro.proximal * micro.mask, np.array(trainer.loss.logprobs(micro)) * micro.mask, atol=1e-5)
    outcome = run(trainer, trajectories)
    assert outcome.adapter is not None
    assert outcome.metrics["clip_fraction"] == 0.0, "in the first step, nothing has changed since the begin"


def test_rewards_and_logprobs_that_are_no_numbers_never_get_in() -> None:
    for wrong in ({"reward": float("nan")}, {"reward": 1.0, "logprobs": [float("inf")] * 2}):
        with pytest.raises(InvalidRequestError):
            Trajectory([1], [2, 3], **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="1 logprobs for 2"):
        Trajectory([1], [2, 3], 1.0, logprobs=[0.0])


def test_masked_tokens_do_not_count() -> None:
    one, other = (Trainer(tiny(), LORA, RLConfig(learning_rate=1e-3)) for _ in range(2))
    short, long = made(), made()
    for a, b in zip(short, long, strict=True):
        b.completion_ids = [*a.completion_ids, 7, 7]
        b.mask = [True] * len(a.completion_ids) + [False] * 2
    run(one, short)
    run(other, long)
    assert apart(one, other) < 1e-5


def test_a_trainer_restored_goes_on_as_if_nothing_had_happened() -> None:
    config = RLConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=2, total_steps=6, microbatch_tokens=64)
    through, stopped = Trainer(tiny(), LORA, config), Trainer(tiny(), LORA, config)
    for seed in range(3):
        run(through, made(seed=seed))
        run(stopped, made(seed=seed))
    kept, updates = stopped.state(), stopped.updates
    restored = Trainer(tiny(), LORA, config)
    restored.load_state(kept, updates)
    for seed in range(3, 6):
        run(through, made(seed=seed))
        run(restored, made(seed=seed))
    assert all(np.array_equal(array, restored.state()[name]) for name, array in through.state().items())
    with pytest.raises(ConfigError, match="another rank"):
        Trainer(tiny(), LoRAConfig(rank=8), config).load_state(kept, updates)


@pytest.mark.parametrize("wrong", [{"algorithm": "ppo"}, {"epochs": 0}, {"learning_rate": -1}, {"schedule": "x"}])
def test_wrong_settings(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RLConfig(**wrong)  # type: ignore[arg-type]


def test_dora_learns_too() -> None:
    trainer = Trainer(
        tiny(), LoRAConfig(rank=4, alpha=8, dora=True, layers=1), RLConfig(learning_rate=1e-3, max_kl=10.0)
    )
    before = {name: np.array(array) for name, array in trainer.parameters.items()}
    assert {name.rsplit(".", 1)[-1] for name in before} == {"lora_a", "lora_b", "m"}
    assert {name.split("layers.")[1][0] for name in before} == {"1"}  # the last block alone
    outcome = run(trainer, made())
    assert outcome.adapter is not None
    assert outcome.adapter.dora
    changed = {name.rsplit(".", 1)[-1] for name in before if not np.array_equal(before[name], trainer.parameters[name])}
    assert {"lora_b", "m"} <= changed


def test_pieces_find_their_size() -> None:
    pace = Pace(0.5, 0)
    for _ in range(10):
        pace.note(pace.budget(), 0.01)
    assert pace.budget() == 8192
    pace.note(pace.budget(), 0.6)  # near enough
    assert pace.budget() == 8192
    pace.note(pace.budget(), 5.0)
    assert pace.budget() == 4096
    pace.note(100, 0.01)  # it was not full: no reason to grow
    assert pace.budget() == 4096
    for _ in range(20):
        pace.note(pace.budget(), 5.0)
    assert pace.budget() == 32
    assert Pace(0.5, 77).budget() == 77


def test_gradient_and_step_may_be_run_apart() -> None:
    """Two batches' gradients, then one step: the step of both together."""
    one, other = (Trainer(tiny(), LORA, RLConfig(learning_rate=1e-3, algorithm="dr_grpo", max_length=8)) for _ in "ab")
    trajectories = made(groups=4)
    whole = one.batch(trajectories)
    halves = [one.batch(trajectories[:8]), one.batch(trajectories[8:])]
    for half in halves:
        half.weight /= 2  # of one token in both
    run_through(one.forward_backward(whole))
    for half in halves:
        before = other.state()
        run_through(other.forward_backward(half))
        assert all(np.array_equal(array, before[name]) for name, array in other.state().items())
    assert run_through(one.optim_step()) == pytest.approx(run_through(other.optim_step()), rel=1e-4)
    assert apart(one, other) < 1e-5
    assert apart(one, Trainer(tiny(), LORA, RLConfig())) > 2e-4
    with pytest.raises(Refused, match="no gradient"):  # it is used up
        run_through(one.optim_step())


def test_whatever_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-3, epochs=2, max_kl=10.0))
    before = trainer.state()
    step, calls = trainer.forward_backward, []

    def failing(batch: Batch) -> object:
        calls.append(batch)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return step(batch)

    monkeypatch.setattr(trainer, "forward_backward", failing)
    with pytest.raises(RuntimeError, match="memory"):
        run(trainer, made())
    after = trainer.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert all(array.dtype == mx.float32 for array in trainer.tree.parameters().values())


def test_a_new_learning_rate_counts_after_a_restart() -> None:
    first = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-2))
    run(first, made())
    second = Trainer(tiny(), LORA, RLConfig(learning_rate=1e-4))
    second.load_state(first.state(), 1)
    assert run(second, made()).metrics["learning_rate"] == pytest.approx(1e-4)


def test_a_rehearsal_leaves_nothing_behind() -> None:
    """What a GPU does before the first update, so that its kernels are there."""
    rehearsed, fresh = (Trainer(as_served("llama"), LORA, RLConfig(learning_rate=1e-3)) for _ in range(2))
    rehearsed.warm_up()
    assert rehearsed.updates == 0
    for trajectories in (made(seed=1), made(seed=2)):
        outcomes = [run(trainer, trajectories) for trainer in (rehearsed, fresh)]
        assert outcomes[0].adapter is not None
        assert apart(rehearsed, fresh) < 1e-7
