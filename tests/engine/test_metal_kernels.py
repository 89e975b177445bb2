"""An engine whose Metal kernels are run as C++ answers as the bare model does, and as it does without them."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.devices.device import DEVICES, FORCED
from mlx_parallm.devices.metal import check, kernels, sources
from mlx_parallm.devices.metal.token_cuts import cut_kernel
from mlx_parallm.doctor import operations
from mlx_parallm.lora.adapter_files import read_folder
from tests.engine.harness import Bare, Driver, driver_of
from tests.support.metal_shim import ShimKernel
from tests.tiny import tiny
from tests.unit.test_adapters import LIMIT, load_adapters, written

SHAPE = {"head_dim": 64}  # one that the attention kernel has
NAMES = [None, "few", "all", "dora"]
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("adapters")
    return {name: written(base, name, **SHAPE) for name in NAMES if name is not None}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each kernel ran. Steps are not traced: a trace would have no numbers to compute with."""
    counted: Counter[str] = Counter()

    class Counted(ShimKernel):
        def __call__(self, **given: Any) -> list[mx.array]:
            counted[self.name] += 1
            return super().__call__(**given)

    caches = (kernels._lora_kernel, kernels._attention_kernel, kernels._attention_sum_kernel, kernels._cut_kernel)
    monkeypatch.setenv(FORCED, "metal")
    monkeypatch.setattr(mx, "compile", lambda function: function)
    monkeypatch.setattr(mx.fast, "metal_kernel", Counted)
    monkeypatch.setattr(check, "_seconds", lambda kernel, operations: (1.0, 2.0))
    for cache in (*caches, cut_kernel):
        cache.cache_clear()
    yield counted
    for cache in (*caches, cut_kernel):
        cache.cache_clear()


def bare(folders: dict[str, Path], name: str | None) -> Bare:
    model = tiny(**SHAPE)
    if name is not None:
        load_adapters(model.module, str(folders[name]))
    return Bare(model)


def serve(folders: dict[str, Path]) -> Any:
    return driver_of(lambda: tiny(**SHAPE), profile=DEVICES["metal"].profile, max_batch_size=8, max_loras=4)


def load(running: Driver, folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        running.engine.adapters.publish(name, read_folder(folder, LIMIT)[0], str(folder))


def ask_all(running: Driver, **params: Any) -> list[Any]:
    in_flight = [
        running.submit(PROMPT[: 9 + 7 * i], max_tokens=6, ignore_eos=True, logprobs=0, adapter=NAMES[i % 4], **params)[
            1
        ]
        for i in range(5)
    ]
    return [pending.wait()[0] for pending in in_flight]


def test_rows_equal_the_bare_model(calls: Counter[str], folders: dict[str, Path]) -> None:
    with serve(folders) as running:
        load(running, folders)
        calls.clear()
        answers = ask_all(running)
        running.settle()
        running.engine.check_integrity()
    used = {name.rsplit("_", 1)[0] if "lora" in name else name.split("_")[1] for name in calls}
    assert {"parallm_add_own_lora", "attend"} <= used
    for i, answer in enumerate(answers):
        model = bare(folders, NAMES[i % 4])
        tokens, logprobs = model.greedy(PROMPT[: 9 + 7 * i], 6, ignore_eos=True)
        assert answer.tokens == tokens, NAMES[i % 4]
        model.hold(PROMPT[: 9 + 7 * i], tokens, logprobs, [scored.logprob for scored in answer.logprobs])


def test_the_self_test_knows_whether_they_are_right(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = operations.examine(["our kernels"])
    assert finding.verdict == "ok", finding
    assert len(calls) >= 4
    kernels._attention_kernel.cache_clear()
    monkeypatch.setattr(sources, "ATTENTION", sources.ATTENTION.replace("offsets[row] + 1", "offsets[row]"))
    (finding,) = operations.examine(["our kernels"])
    assert finding.verdict == "wrong"
    assert "attention over slots" in finding.found


@pytest.mark.slow
def test_cuts_keep_the_same_tokens(
    calls: Counter[str], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sampled() -> list[list[int]]:
        with serve(folders) as running:
            load(running, folders)
            found = []
            for params in ({"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.9, "top_k": 20}):
                found += [answer.tokens for answer in ask_all(running, temperature=0.9, seed=7, **params)]
        return found

    by_kernel = sampled()
    assert calls["parallm_least_kept"] > 0
    monkeypatch.setattr(check, "_seconds", lambda kernel, operations: (2.0, 1.0))
    cut_kernel.cache_clear()
    calls.clear()
    assert sampled() == by_kernel
    tried = calls["parallm_least_kept"]
    assert tried == 1, "it was left out"
