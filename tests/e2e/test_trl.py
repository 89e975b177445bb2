"""TRL's server protocol: the bodies that its clients send, old and new, and what they read of the answers."""

from collections.abc import Iterator

import httpx
import pytest

from mlx_parallm.server.api.trl import TrlGenerated
from tests.engine.harness import Bare
from tests.support.servers import ServerProcess
from tests.support.shapes import read_as
from tests.tiny import tiny

PROMPTS = [list(range(20, 40)), [7, 8, 9]]


@pytest.fixture(scope="module")
def client(tiny_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as found:
        yield found


def test_probes(client: httpx.Client) -> None:
    assert client.get("/health/").status_code == 200
    assert client.get("/get_world_size/").json() == {"world_size": 1}
    assert client.post("/reset_prefix_cache/").status_code == 200


def test_generate(client: httpx.Client) -> None:
    body = {"prompts": PROMPTS, "n": 2, "temperature": 0.0, "max_tokens": 6, "generation_kwargs": {"ignore_eos": True}}
    found = client.post("/generate/", json={**body, "truncate_prompt_tokens": None}).json()
    read_as(TrlGenerated, found)
    bare = Bare(tiny())
    assert found["prompt_ids"] == PROMPTS
    for number, prompt in enumerate(PROMPTS):
        tokens, logprobs = bare.greedy(prompt, 6, ignore_eos=True)
        for copy in (2 * number, 2 * number + 1):
            assert found["completion_ids"][copy] == tokens
            assert found["logprobs"][copy] == pytest.approx(logprobs, abs=1e-4)


def test_generate_as_newer_clients_ask(client: httpx.Client) -> None:
    body = {"prompts": ["the and", "of the"], "temperature": 0.0, "max_tokens": 4, "logprobs": 0}
    found = client.post("/generate/", json=body).json()
    read_as(TrlGenerated, found)
    for tokens, logprobs, ids in zip(
        found["completion_ids"], found["logprobs"], found["logprob_token_ids"], strict=True
    ):
        assert ids == [[token] for token in tokens]
        assert all(len(entry) == 1 and entry[0] <= 0 for entry in logprobs)
    several = client.post("/generate/", json={**body, "logprobs": 3}).json()
    assert all(len(entry) == 3 for one in several["logprobs"] for entry in one)
    assert [entry[0] for entry in several["logprob_token_ids"][0]] == several["completion_ids"][0]


def test_chat(client: httpx.Client) -> None:
    conversations = [[{"role": "user", "content": "hello"}], [{"role": "user", "content": "the and"}]]
    found = client.post("/chat/", json={"messages": conversations, "max_tokens": 5, "temperature": 0.0}).json()
    read_as(TrlGenerated, found)
    for conversation, prompt in zip(conversations, found["prompt_ids"], strict=True):
        expected = client.post("/tokenize", json={"messages": conversation}).json()["tokens"]
        assert prompt == expected
    one = {"messages": conversations[1], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    alone = client.post("/v1/chat/completions", json=one).json()["choices"][0]["token_ids"]
    assert found["completion_ids"][1] == alone


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompts"),
        ({"prompts": []}, "prompts"),
        ({"prompts": "the"}, "prompts"),
        ({"prompts": [1, 2]}, "prompts"),
        ({"prompts": ["a"], "images": ["x"]}, "images"),
        ({"prompts": ["a"], "n": 0}, "n"),
        ({"prompts": ["a"], "temperature": -1}, "temperature"),
        ({"prompts": ["a"], "generation_kwargs": {"stream": True}}, "generation_kwargs"),
        ({"prompts": ["a"], "generation_kwargs": {"beams": 4}}, "generation_kwargs"),
        ({"prompts": [[10**6]]}, "prompt.0"),
    ],
)
def test_bad_bodies(client: httpx.Client, body: dict[str, object], param: str) -> None:
    answer = client.post("/generate/", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/init_communicator/", "/update_named_param/", "/close_communicator/"])
def test_pushing_weights_says_what_to_use_instead(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json={"host": "x", "port": 1, "world_size": 2})
    assert answer.status_code == 400
    assert "/update_adapter_weights" in answer.json()["error"]["message"]
