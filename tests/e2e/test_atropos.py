"""Atropos drives the server, as vLLM and as SGLang: real `atroposlib`, where it is installed (it is no small thing)."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_generate import scored
from tests.engine.harness import Bare
from tests.support.servers import ServerProcess
from tests.tiny import tiny

pytest.importorskip("atroposlib", reason="pip install atroposlib")
pytestmark = pytest.mark.filterwarnings("default")  # its own are not ours

MESSAGES = [{"role": "user", "content": "the and of in"}]


def managed(kind: str, url: str, folder: Path) -> Any:
    from atroposlib.envs.server_handling.managed_server import ManagedServer
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig
    from atroposlib.envs.server_handling.sglang_server import SGLangServer
    from atroposlib.envs.server_handling.vllm_server import VLLMServer

    config = APIServerConfig(
        server_type=kind,
        api_key="x",
        base_url=f"{url}/v1",
        model_name="default",
        tokenizer_name=str(folder),
        timeout=60,
        health_check=False,
    )
    return ManagedServer({"vllm": VLLMServer, "sglang": SGLangServer}[kind](config))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_managed_server_tracks_tokens_and_logprobs(
    kind: str, tiny_server: ServerProcess, tiny_folder: Path
) -> None:
    server = managed(kind, tiny_server.url, tiny_folder)
    first = await server.chat_completion(messages=MESSAGES, n=3, max_tokens=12, temperature=1.0)
    assert len(first.choices) == 3
    assert all(choice.finish_reason in ("stop", "length") for choice in first.choices)
    nodes = server.get_state()["nodes"]
    assert len(nodes) == 3
    check(nodes)
    # A second turn goes on from the first: its tokens are taken as they are, and stay unmasked.
    grown = [*MESSAGES, {"role": "assistant", "content": first.choices[0].message.content}, *MESSAGES]
    await server.chat_completion(messages=grown, n=1, max_tokens=6, temperature=1.0)
    completed = await server.completion(prompt="the and of", n=2, max_tokens=8, temperature=1.0, stop=["zzz"])
    assert [choice.index for choice in completed.choices] == [0, 1]
    check(server.get_state()["nodes"])
    if kind == "vllm":
        found = await server.get_logprobs(input_ids=[20, 30, 40, 50], top_k=2)
        assert found["prompt_tokens"] == [20, 30, 40, 50]
        expected = scored(Bare(tiny()), [20], [30, 40, 50])
        for ids, logprobs, token, logprob in zip(
            found["prompt_topk_token_ids"][1:], found["prompt_topk_logprobs"][1:], [30, 40, 50], expected, strict=True
        ):
            assert logprobs[ids.index(token)] == pytest.approx(logprob, abs=1e-4)


def check(nodes: list[Any]) -> None:
    """Each sampled token has the log-probability that the model gives it there."""
    bare = Bare(tiny())
    for node in nodes:
        assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
        sampled = [place for place, token in enumerate(node.masked_tokens) if token != -100]
        assert sampled
        assert [node.tokens[place] for place in sampled] == [node.masked_tokens[place] for place in sampled]
        expected = scored(bare, node.tokens[:1], node.tokens[1:])
        for place in sampled:
            assert node.logprobs[place] == pytest.approx(expected[place - 1], abs=2e-4)
