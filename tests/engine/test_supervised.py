"""SFT and DPO on tiny models: TRL's losses, the same step however it is cut or packed, what is undone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import _get_classes
from safetensors.numpy import load_file

from mlx_parallm.config.training import LoRAConfig
from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.lora.adapter import Adapter, Part
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.steps import run_through
from mlx_parallm.training.budget import MemoryUse
from mlx_parallm.training.supervised import trainers as supervised
from mlx_parallm.training.supervised.datasets import Example, Preference
from mlx_parallm.training.supervised.trainers import DPO, SFT, Supervised, SupervisedConfig
from mlx_parallm.training.trainable_model import can_pack
from tests.engine.harness import as_served
from tests.tiny import tiny, tiny_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
TRL = json.loads((GOLDEN / "trl_supervised.json").read_text())
ARRAYS = load_file(GOLDEN / "trl_supervised.safetensors")
LORA = LoRAConfig(rank=4, alpha=8)


def config(rate: float = 1e-2, *, packing: bool = False, tokens: int = 0, **optimizer: Any) -> SupervisedConfig:
    return SupervisedConfig(learning_rate=rate, **optimizer, packing=packing, microbatch_tokens=tokens)


def below(prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in ARRAYS.items() if name.startswith(prefix)}


def trl_model() -> LanguageModel:
    settings = {**TRL["model"], "model_type": "llama"}
    model_class, args_class = _get_classes(settings)
    module = model_class(args_class.from_dict(settings))
    module.load_weights([(name, mx.array(array)) for name, array in below("model.").items()])
    module.eval()
    found = tiny()
    return LanguageModel(
        name="trl",
        module=module,
        tokenizer=tiny_tokenizer(),
        config=settings,
        context_length=64,
        vocab_size=settings["vocab_size"],
        eos_token_ids=frozenset([0]),
        weight_bytes=found.weight_bytes,
        precision="float32",
        source="trl",
    )


def peft_adapter(prefix: str) -> Adapter:
    arrays = below(prefix)
    scale = TRL["lora"]["lora_alpha"] / TRL["lora"]["r"]
    paths = {name.rsplit(".lora_", 1)[0] for name in arrays}
    return Adapter(
        {path: Part(arrays[f"{path}.lora_A.weight"], scale * arrays[f"{path}.lora_B.weight"]) for path in sorted(paths)}
    )


def items_of(method: str, rows: Sequence[dict[str, Any]]) -> list[Any]:
    examples = [Example(row["tokens"], [bool(one) for one in row["mask"]]) for row in rows]
    if method == "sft":
        return examples
    half = len(examples) // 2
    return [Preference(*pair) for pair in zip(examples[:half], examples[half:], strict=True)]


@pytest.mark.parametrize("cut", [0, 30])
@pytest.mark.parametrize(("method", "kind"), [("sft", SFT), ("dpo", DPO)])
def test_five_steps_are_those_of_trl(method: str, kind: type[Supervised[Any]], cut: int) -> None:
    """Of TRL's own trainers with PEFT's LoRA (tests/golden/make_trl_supervised.py)."""
    settings = config(
        TRL["settings"]["learning_rate"],
        tokens=cut,
        weight_decay=TRL["settings"]["weight_decay"],
        max_grad_norm=TRL["settings"]["max_grad_norm"],
        schedule="linear",
        total_steps=TRL["steps"],
    )
    trainer = kind(trl_model(), LORA, settings)
    trainer.start_from(peft_adapter(f"{method}.before."))
    for step in TRL[method]["steps"]:
        found = run_through(trainer.step(items_of(method, step["rows"])))
        assert found["loss"] == pytest.approx(step["loss"], abs=1e-4)
        assert found["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-3)
    expected = peft_adapter(f"{method}.after.").parts
    assert expected.keys() == trainer.adapter().parts.keys()
    for path, part in trainer.adapter().parts.items():
        np.testing.assert_allclose(part.a, expected[path].a, atol=2e-4)
        np.testing.assert_allclose(part.b, expected[path].b, atol=4e-4)


def examples(count: int = 12, seed: int = 0, most: int = 14) -> list[Example]:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(random.integers(4, most))
        mask = random.random(length) < 0.6
        mask[-1] = True
        found.append(Example(random.integers(3, 90, length).tolist(), mask.tolist()))
    return found


def pairs(count: int = 8, seed: int = 0) -> list[Preference]:
    some = examples(2 * count, seed)
    return [Preference(*pair) for pair in zip(some[:count], some[count:], strict=True)]


def apart(left: Supervised[Any], right: Supervised[Any]) -> float:
    other = right.learner.parameters
    return max(mx.mean(mx.abs(one - other[name])).item() for name, one in left.learner.parameters.items())


@pytest.mark.parametrize(
    ("kind", "made", "options"),
    [
        (SFT, examples, {"tokens": 25}),
        (SFT, examples, {"packing": True, "tokens": 10_000}),
        (SFT, examples, {"packing": True, "tokens": 30}),
        (DPO, pairs, {"tokens": 50}),
    ],
)
def test_a_step_is_the_same_however_it_is_cut_and_packed(kind: Any, made: Any, options: dict[str, Any]) -> None:
    whole, other = kind(tiny(), LORA, config(tokens=10_000)), kind(tiny(), LORA, config(**options))
    assert other.packs == options.get("packing", False)
    for seed in range(3):
        one, same = run_through(whole.step(made(seed=seed))), run_through(other.step(made(seed=seed)))
        assert same == pytest.approx(one, rel=2e-3, abs=1e-5)
    assert apart(whole, other) < 2e-5
    assert apart(whole, kind(tiny(), LORA, config())) > 1e-3
    held_out = made(seed=9)
    assert run_through(whole.evaluate(held_out)) == pytest.approx(
        run_through(other.evaluate(held_out)), rel=2e-3, abs=1e-4
    )


def test_packed_rows_hold_several_examples_with_less_padding() -> None:
    packed, plain = (SFT(tiny(), LORA, config(packing=packing, tokens=10_000)) for packing in (True, False))
    some = examples(40, most=60)
    sizes = [sum(micro.size for micro in one._micros(some, lambda: 10_000)) for one in (packed, plain)]
    assert sizes[0] < 0.8 * sizes[1]
    pieces = list(packed._micros(some, lambda: 10_000))
    assert sorted(place for piece in pieces for place in piece.places) == list(range(40))
    assert sum(piece.mask.sum() for piece in pieces) == sum(one.learnt for one in some)


def test_models_with_other_state_are_not_packed() -> None:
    assert not can_pack(as_served("gemma3").module, 90)
    assert not SFT(tiny("hybrid"), LoRAConfig(rank=4, target_modules=("q_proj",)), config(packing=True)).packs


def test_a_step_that_fails_is_undone() -> None:
    trainer = SFT(tiny(), LORA, config())
    run_through(trainer.step(examples()))
    before = trainer.learner.state()
    name = next(iter(trainer.learner.parameters))
    kept = trainer.learner.snapshot()
    trainer.learner.parameters = {**kept.parameters, name: kept.parameters[name] * float("nan")}
    with pytest.raises(ParallmError, match="the loss is nan"):
        run_through(trainer.step(examples()))
    trainer.learner.go_back(kept)
    assert all(np.array_equal(array, trainer.learner.state()[name]) for name, array in before.items())
    assert trainer.learner.updates == 1


def test_dpo_goes_by_the_policy_that_it_began_with() -> None:
    first = SFT(tiny(), LORA, config())
    run_through(first.step(examples()))
    trainer = DPO(tiny(), LORA, config())
    trainer.start_from(first.adapter())
    assert run_through(trainer.evaluate(pairs()))["margin"] == pytest.approx(0, abs=1e-4)
    for _ in range(8):
        metrics = run_through(trainer.step(pairs()))
    assert metrics["accuracy"] == 1
    assert metrics["margin"] > 0.1
    assert metrics["loss"] < 0.69


def test_an_adapter_of_another_shape_is_refused() -> None:
    other = SFT(tiny(), LoRAConfig(rank=8, alpha=8), config()).adapter()
    with pytest.raises(ConfigError, match="--lora-rank 8"):
        SFT(tiny(), LORA, config()).start_from(other)
    more = SFT(tiny(), LoRAConfig(4, 8, ("q_proj", "v_proj", "o_proj")), config()).adapter()
    with pytest.raises(ConfigError, match=r"o_proj.*does not learn"):
        SFT(tiny(), LORA, config()).start_from(more)
    with pytest.raises(ConfigError, match="is missing"):
        SFT(tiny(), LoRAConfig(4, 8, ("q_proj", "v_proj", "o_proj")), config()).start_from(
            SFT(tiny(), LORA, config()).adapter()
        )


def test_a_micro_batch_may_take_half_of_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "room_at_hand", lambda: 1 << 19)
    free, limited = SFT(tiny(), LORA, config()), SFT(tiny(), LORA, config(), memory=1 << 30)
    for trainer in (free, limited):
        trainer.budget.largest = MemoryUse(1 << 20, 100)  # as if one of a hundred tokens had taken so much
    assert free.budget.tokens(busy=True) == 50
    assert limited.budget.tokens(busy=True) > 50, "a limit that is given counts, not what is free"
