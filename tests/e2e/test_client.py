"""`InferenceClient` and `parallm adapters` with a real server."""

import asyncio
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm import InferenceClient
from mlx_parallm.client import Sample
from mlx_parallm.errors import InvalidRequestError, ModelNotFoundError, PermissionDeniedError, UnavailableError
from mlx_parallm.lora.layout import Layout
from tests.e2e.test_generate import scored
from tests.engine.harness import Bare
from tests.support import forked
from tests.support.servers import ServerProcess, ours, running
from tests.tiny import tiny
from tests.unit.test_adapters import written

PROMPT = list(range(20, 50))
STEPS, SAMPLES = 50, 4
SCALE = 2.0
CONFIG = {"lora_parameters": {"rank": 4, "scale": SCALE}}


def weights(seed: int) -> dict[str, np.ndarray]:
    """A LoRA on q and v in mlx-lm's names."""
    random = np.random.default_rng(seed)
    found = {}
    for path, target in Layout(tiny().module).targets.items():
        if path.endswith(("q_proj", "v_proj")):
            found[f"{path}.lora_a"] = 0.2 * random.standard_normal((target.size, 4)).astype(np.float32)
            found[f"{path}.lora_b"] = 0.2 * random.standard_normal((4, target.out_features)).astype(np.float32)
    return found


def merged(arrays: dict[str, np.ndarray]) -> Bare:
    model = tiny()
    for path, layer in model.module.named_modules():
        if f"{path}.lora_a" in arrays:
            change = SCALE * (arrays[f"{path}.lora_a"] @ arrays[f"{path}.lora_b"]).T
            layer.weight = layer.weight + mx.array(change)
    return Bare(model)


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> "list[ServerProcess]":
    with running(ours(str(tiny_folder), ["--max-queue-size", "6"])) as found:
        yield [found]  # type: ignore[misc]


async def test_a_loop_that_is_one_step_off_policy(server: list[ServerProcess]) -> None:
    """Samples of one step are drawn while the next version is made and published: each is of the current version or
    the one before, none is lost, and its log-probabilities are those of the version that it names."""
    published = {1: weights(1)}
    samples: list[tuple[int, Sample]] = []
    async with InferenceClient(server[0].url) as client:
        current = await client.upload_adapter("policy", published[1], CONFIG)
        assert current == 1
        for step in range(STEPS):
            drawn = [
                asyncio.create_task(
                    client.generate(
                        PROMPT[step % 7 :],
                        adapter="policy",
                        step_id=step,
                        request_id=f"{step}-{number}",
                        max_tokens=8,
                        temperature=0.9,
                        seed=100 * step + number,
                    )
                )
                for number in range(SAMPLES)
            ]
            await asyncio.sleep(0)  # the trainer works on the batch before
            newest = await client.update_adapter_weights("policy", weights(step + 2))
            published[newest] = weights(step + 2)
            for sample in await asyncio.gather(*drawn):
                assert sample.policy_version in (newest, newest - 1), (step, sample)
                samples.append((step, sample))
        assert (await client.server_info())["models"][0]["adapters"]["policy"] == STEPS + 1
        assert (await client.metrics())["current_policy_version"] == 0  # the model's own name serves the model
        assert (await client.health())["status"] == "healthy"
    assert sorted(sample.request_id for _, sample in samples) == sorted(
        f"{step}-{number}" for step in range(STEPS) for number in range(SAMPLES)
    )
    for step, sample in samples[:: STEPS // 10]:
        assert sample.step_id == step
        assert sample.policy_spans == [(0, len(sample.completion_ids), sample.policy_version)]
        assert sample.logprobs == pytest.approx(
            scored(merged(published[sample.policy_version]), sample.prompt_ids, sample.completion_ids, 0.9), abs=1e-4
        )


async def test_what_else_it_does(server: list[ServerProcess], tmp_path: Path) -> None:
    folder = written(tmp_path, "few")
    async with InferenceClient(f"{server[0].url}/v1") as client:
        assert await client.load_adapter("a", folder) == 1
        assert await client.upload_adapter("a", folder) == 2  # the folder's own config
        assert await client.update_adapter_weights("a", (folder / "adapters.safetensors").read_bytes()) == 3
        assert await client.upload_adapter("b", {k: mx.array(v) for k, v in weights(1).items()}, CONFIG) == 1
        assert (
            await client.upload_adapter(
                "b", {k: mx.array(v).astype(mx.bfloat16) for k, v in weights(1).items()}, CONFIG, version=7
            )
            == 7
        )
        assert await client.rollback("a", 1) == 1
        await client.pin("a", 1)
        assert next(one for one in await client.adapters() if one["name"] == "a")["pinned"]
        await client.unpin("a", 1)
        assert await client.switch({"a": 0.5, "b": 0.5}) == {"a": 0.5, "b": 0.5}
        assert await client.switch("base") == {"base": 1.0}
        await client.pause()
        assert await client.is_paused()
        waiting = asyncio.create_task(client.generate("the", max_tokens=2, logprobs=3))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await client.resume()
        assert (await waiting).policy_version == 0
        await client.generate(PROMPT, max_tokens=20)
        assert await client.flush_cache() > 0
        assert await client.flush_cache() == 0
        assert (await client.server_info())["models"][0]["adapters"]["a"] == 1
        many = await asyncio.gather(*(client.generate(PROMPT, max_tokens=20, seed=n) for n in range(60)))
        assert len(many) == 60  # more than the queue holds: it asks again
        with pytest.raises(ModelNotFoundError, match="nobody"):
            await client.generate("x", adapter="nobody")
        with pytest.raises(InvalidRequestError, match="temperature"):
            await client.generate("x", temperature=-1)
        with pytest.raises(InvalidRequestError, match="n is not for generate"):
            await client.generate("x", n=3)
        with pytest.raises(InvalidRequestError):
            await client.upload_adapter("c", tmp_path / "nothing")
        for name in ("a", "b"):
            await client.unload_adapter(name)
    async with InferenceClient("http://127.0.0.1:9") as client:
        with pytest.raises(UnavailableError):
            await client.generate("x")


def test_keys(tiny_folder: Path) -> None:
    async def use(url: str) -> None:
        async with InferenceClient(url, api_key="k") as client:
            assert (await client.generate(PROMPT, max_tokens=2)).completion_ids
            with pytest.raises(PermissionDeniedError):
                await client.switch("base")
        async with InferenceClient(url, api_key="a") as client:
            assert await client.switch("base") == {"base": 1.0}

    with running(ours(str(tiny_folder), ["--api-key", "k", "--admin-key", "a"])) as server:
        asyncio.run(use(server.url))


def test_the_command(server: list[ServerProcess], tmp_path: Path) -> None:
    folder = str(written(tmp_path, "few"))

    def parallm(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mlx_parallm", "adapters", "--url", server[0].url, *arguments]
        return forked.run(command, 60)

    for arguments, said in (
        (("load", "x", folder), "x@1 is published"),
        (("upload", "x", folder), "x@2 is published"),
        (("rollback", "x"), "x means version 1 now"),
        (("pin", "x", "1"), "x is pinned"),
        (("unpin", "x", "1"), "x is no longer pinned"),
        (("switch", "x=0.5", "base=0.5"), "serves x (0.5), base (0.5)"),
        (("switch", "base"), "serves base (1)"),
        (("list",), "x"),
        ((), "x"),
        (("unload", "x"), "x is unloaded"),
    ):
        ended = parallm(*arguments)
        assert (ended.returncode, ended.stderr) == (0, ""), ended
        assert said in ended.stdout
    for arguments, code in (
        (("load", "x", "/nowhere"), 1),
        (("unload", "x"), 1),
        (("switch", "a", "b"), 2),
        (("load", "x", folder, "--version", "new"), 2),
    ):
        ended = parallm(*arguments)
        assert ended.returncode == code, ended
        assert ended.stderr.startswith("error: ")
