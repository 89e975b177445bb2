"""Rows with different adapters in one batch answer as each would on a model with that adapter alone."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.errors import ModelNotFoundError
from mlx_parallm.lora.adapter import AdapterError
from mlx_parallm.lora.adapter_files import read_folder
from tests.engine.harness import Bare, Driver, bare_with, driver
from tests.engine.test_parity import GPU
from tests.tiny import tiny
from tests.unit.test_adapters import ADAPTERS, LIMIT, written

NAMES = [None, "few", "all", "dora", "embedding"]
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("adapters")
    return {name: written(base, name) for name in ADAPTERS}


@pytest.fixture(scope="module")
def bare(folders: dict[str, Path]) -> dict[str | None, Bare]:
    return bare_with(folders)


@pytest.fixture(params=[None, GPU], ids=["cpu", "gpu"])
def running(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Driver]:
    with driver("llama", profile=request.param, max_batch_size=8, block_size=8, max_loras=4) as found:
        for name, folder in folders.items():
            found.engine.adapters.publish(name, read_folder(folder, LIMIT)[0], str(folder))
        yield found
        found.settle()
        found.engine.check_integrity()


def test_eight_rows_over_base_and_four_adapters(running: Driver, bare: dict[str | None, Bare]) -> None:
    prompts = [(PROMPT[: 9 + 4 * number], NAMES[number % len(NAMES)]) for number in range(8)]
    for _ in range(2):  # the second time from the prefix cache
        in_flight = [
            running.submit(prompt, max_tokens=12, ignore_eos=True, logprobs=0, adapter=name)[1]
            for prompt, name in prompts
        ]
        answers = [pending.wait()[0] for pending in in_flight]
        running.settle()
        for (prompt, name), answer in zip(prompts, answers, strict=True):
            tokens, logprobs = bare[name].greedy(prompt, 12, ignore_eos=True)
            assert answer.tokens == tokens, name
            bare[name].hold(prompt, tokens, logprobs, [scored.logprob for scored in answer.logprobs])


def test_the_same_prompt_is_not_shared_between_adapters(running: Driver, bare: dict[str | None, Bare]) -> None:
    for name in ("few", "all", None, "few"):
        answer = running.ask(PROMPT, max_tokens=6, ignore_eos=True, logprobs=0, adapter=name)
        assert answer.tokens == bare[name].greedy(PROMPT, 6, ignore_eos=True)[0]
    assert answer.deltas[0].cached_tokens >= 32  # it was asked before


def test_a_new_version_is_for_new_requests(
    running: Driver, bare: dict[str | None, Bare], folders: dict[str, Path]
) -> None:
    engine = running.engine
    engine.adapters.publish("policy", read_folder(folders["few"], LIMIT)[0], "")
    pending = running.submit(PROMPT, max_tokens=40, ignore_eos=True, stream=True, adapter="policy")[1]
    pending.wait_for_tokens(3)
    second = engine.adapters.publish("policy", read_folder(folders["all"], LIMIT)[0], "")
    assert second.number == 2
    newer = running.ask(PROMPT, max_tokens=6, ignore_eos=True, adapter="policy")
    older = running.ask(PROMPT, max_tokens=6, ignore_eos=True, adapter="policy", adapter_version=1)
    assert newer.tokens == bare["all"].greedy(PROMPT, 6, ignore_eos=True)[0]
    assert older.tokens == bare["few"].greedy(PROMPT, 6, ignore_eos=True)[0]
    assert pending.wait()[0].tokens == bare["few"].greedy(PROMPT, 40, ignore_eos=True)[0]
    assert engine.adapters.rollback("policy").number == 1
    assert running.ask(PROMPT, max_tokens=6, ignore_eos=True, adapter="policy").tokens == older.tokens
    with pytest.raises(AdapterError, match="not newer"):
        engine.adapters.publish("policy", read_folder(folders["few"], LIMIT)[0], "", number=2)


def test_an_adapter_that_is_unloaded_stays_for_its_rows(
    running: Driver, bare: dict[str | None, Bare], folders: dict[str, Path]
) -> None:
    pending = running.submit(PROMPT, max_tokens=40, ignore_eos=True, stream=True, adapter="dora")[1]
    pending.wait_for_tokens(2)
    running.engine.adapters.unload("dora")
    with pytest.raises(ModelNotFoundError, match="dora"):
        running.submit(PROMPT, max_tokens=2, adapter="dora")
    assert pending.wait()[0].tokens == bare["dora"].greedy(PROMPT, 40, ignore_eos=True)[0]
    with pytest.raises(ModelNotFoundError):
        running.engine.adapters.unload("dora")
    running.engine.adapters.publish("dora", read_folder(folders["dora"], LIMIT)[0], "")


def test_more_adapters_than_places(running: Driver, bare: dict[str | None, Bare], folders: dict[str, Path]) -> None:
    """Twelve names on four places: all answer, and no more than four are on the device."""
    kinds = ["few", "all", "dora"]
    for number in range(12):
        running.engine.adapters.publish(f"n{number}", read_folder(folders[kinds[number % 3]], LIMIT)[0], "")
    in_flight = [
        running.submit(PROMPT[number:], max_tokens=5, ignore_eos=True, adapter=f"n{number}")[1] for number in range(12)
    ]
    for number, pending in enumerate(in_flight):
        expected = bare[kinds[number % 3]].greedy(PROMPT[number:], 5, ignore_eos=True)[0]
        assert pending.wait()[0].tokens == expected
    running.engine.check_integrity()
    for number in range(12):
        running.engine.adapters.unload(f"n{number}")


@pytest.mark.long
def test_equal_requests_for_other_weights_of_one_name_share_nothing(
    bare: dict[str | None, Bare], folders: dict[str, Path]
) -> None:
    with driver("llama", dedupe=True) as running:
        running.engine.adapters.publish("x", read_folder(folders["few"], LIMIT)[0], "")
        first = running.submit(PROMPT, max_tokens=300, ignore_eos=True, stream=True, adapter="x")[1]
        first.wait_for_tokens(2)
        running.engine.adapters.unload("x")
        again = running.engine.adapters.publish("x", read_folder(folders["all"], LIMIT)[0], "")
        assert again.number == 2, "a number means one set of weights, for ever"
        second = running.submit(PROMPT, max_tokens=300, ignore_eos=True, stream=True, adapter="x")[1]
        assert second.wait()[0].tokens == bare["all"].greedy(PROMPT, 300, ignore_eos=True)[0]
        assert first.wait()[0].tokens == bare["few"].greedy(PROMPT, 300, ignore_eos=True)[0]
        assert running.engine.metrics.deduplicated == 0


@pytest.mark.parametrize("kind", ["gemma3", "hybrid"])
def test_other_caches(kind: str, tmp_path: Path) -> None:
    """A batch through mlx-lm's caches; the adapter is on the attention layers that this model has."""
    model = tiny(kind)
    module = model.module
    from mlx_parallm.lora.adapter import Adapter, Part
    from mlx_parallm.lora.layout import Layout

    targets = {path: target for path, target in Layout(module).targets.items() if path.endswith("q_proj")}
    key = mx.random.key(3)
    import numpy as np

    parts = {
        path: Part(
            0.3 * np.array(mx.random.normal((4, target.size), key=key)),
            0.3 * np.array(mx.random.normal((target.out_features, 4), key=key)),
        )
        for path, target in targets.items()
    }
    adapted = tiny(kind)
    for path, layer in adapted.module.named_modules():
        if path in parts:
            layer.weight = layer.weight + mx.array(parts[path].b @ parts[path].a)
    expected = {None: Bare(model), "x": Bare(adapted)}
    with driver(kind, max_batch_size=4, block_size=8) as running:
        running.engine.adapters.publish("x", Adapter(parts), "")
        rows = [(PROMPT[:n], name) for n, name in ((12, "x"), (30, None), (30, "x"), (7, None))]
        in_flight = [running.submit(p, max_tokens=8, ignore_eos=True, adapter=name)[1] for p, name in rows]
        answers = [pending.wait()[0] for pending in in_flight]
        running.settle()
        for (prompt, name), answer in zip(rows, answers, strict=True):
            assert answer.tokens == expected[name].greedy(prompt, 8, ignore_eos=True)[0]
