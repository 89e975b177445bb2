"""The requests of mixed_load.py: one method for each kind, which raises where the server's answer is not right."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import orjson
from mixed_lives import Told, output_text
from safetensors.numpy import save
from stress import MALFORMED

from mlx_parallm.common_words import WORDS
from mlx_parallm.lora.adapter import Target
from tests.support.hostile import HOSTILE

SYSTEM = " ".join(WORDS[:30])  # what many prompts begin with, so that the prefix cache has something to find
ADAPTER = {"lora_parameters": {"scale": 1.0, "rank": 4}}
TARGETS = ("q_proj", "v_proj")
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "model": "chat", "lora_adapter": "base"}
GREEDY_PROMPTS = [" ".join(WORDS[first : first + 3 + first % 29]) for first in range(0, 120, 5)]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
REFUSED: list[tuple[str, Any]] = [
    *MALFORMED,
    ("/v1/responses", {"model": "chat", "input": []}),
    ("/v1/responses", {"model": "chat", "input": "hi", "previous_response_id": "resp_nobody"}),
    ("/v1/messages", {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/messages", {"model": "nobody", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}),
    ("/api/chat", {"model": "nobody", "messages": []}),
    ("/api/generate", {"model": "chat", "prompt": "hi", "options": {"temperature": -1}}),
    ("/generate", {"prompt": "hi", "max_tokens": -3}),
    ("/v1/embeddings", {"model": "words", "input": []}),
    ("/v1/embeddings", {"model": "chat", "input": "hi"}),
    ("/update_adapter_weights", {"name": "published", "tensors": "AAAA"}),
    ("/v1/adapters/unload", {"name": "nobody"}),
    ("/v1/training/update", {"trajectories": [{"reward": 1.0}]}),
    ("/v1/models/load", {"model": "gone", "path": "no/such/folder"}),
]


@dataclass(slots=True)
class Timings:
    """Seconds to the first token of a stream, and from each to the next."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a stream of it is asked for, what a line with a token holds, and what its last line holds."""

    path: str
    token: str
    ends: tuple[str, ...]  # one of them
    body: Callable[[str, int], dict[str, Any]]  # of a prompt and the most tokens of the answer


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        '"content":"',
        ("[DONE]",),
        lambda prompt, most: {"messages": _messages(prompt), "max_tokens": most, "stream": True},
    ),
    "completion": Dialect(
        "/v1/completions",
        '"text":"',
        ("[DONE]",),
        lambda prompt, most: {"prompt": f"{SYSTEM} {prompt}", "max_tokens": most, "stream": True},
    ),
    "response": Dialect(
        "/v1/responses",
        "response.output_text.delta",
        ("response.completed", "response.incomplete"),
        lambda prompt, most: {"input": prompt, "instructions": SYSTEM, "max_output_tokens": most, "stream": True},
    ),
    "message": Dialect(
        "/v1/messages",
        '"text_delta"',
        ("message_stop",),
        lambda prompt, most: {
            "system": SYSTEM,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": most,
            "stream": True,
        },
    ),
    "ollama chat": Dialect(
        "/api/chat",
        '"done":false',
        ('"done":true',),
        lambda prompt, most: {"messages": _messages(prompt), "options": {"num_predict": most}},
    ),
    "ollama generate": Dialect(
        "/api/generate",
        '"done":false',
        ('"done":true',),
        lambda prompt, most: {"prompt": prompt, "system": SYSTEM, "options": {"num_predict": most}},
    ),
}


class Mixed:
    """Sends requests of every kind to one server."""

    def __init__(self, http: httpx.AsyncClient, targets: Mapping[str, Target]) -> None:
        self._http = http
        self._targets = {path: one for path, one in targets.items() if path.rsplit(".", 1)[-1] in TARGETS}
        self._updating = asyncio.Lock()
        self._uploads = 0
        self._greedy: dict[str, str] = {}  # answers of prompts that nothing ran beside
        self.told = Told()
        self._others: dict[str, tuple[float, Callable[[random.Random], Coroutine[Any, Any, None]]]] = {
            "whole chat": (2, self._whole),
            "schema": (1, self._schema),
            "tool": (1, self._tool),
            "continued response": (1, self._continued),
            "generate": (1, self._generate),
            "embeddings": (2, self._embeddings),
            "lists": (1, self._lists),
            "refused": (2, self._refused),
            "greedy": (2, self._is_greedy),
            "hostile": (0.15, self._hostile),
            "left rollout": (0.1, self._left_rollout),
            "reward": (0.5, self._reward),
            "publish": (0.5, self._publish),
            "upload": (0.3, self._upload),
            "update": (0.3, self._update),
        }

    def choose(self, chance: random.Random) -> str:
        weights = dict.fromkeys(DIALECTS, 1.5) | {"abort": 2.0} | {kind: one[0] for kind, one in self._others.items()}
        return chance.choices(list(weights), list(weights.values()))[0]

    async def prepare(self) -> None:
        await self._publish(random.Random(0))
        for prompt in GREEDY_PROMPTS if not self._greedy else ():
            found = await self._post("/v1/completions", GREEDY | {"prompt": prompt})
            self._greedy[prompt] = found["choices"][0]["text"]
        await self._fill_pools(random.Random(1))

    async def _fill_pools(self, chance: random.Random) -> None:
        """Has the server start the threads of its pools, which it does for each call that finds none free, up to the
        pools' sizes: from then on more of them are a leak."""
        for _ in range(2):
            rollouts = [self._rollout(chance) for _ in range(16)]
            rewards = [self._reward(chance) for _ in range(16)]
            updates = [self._update(chance) for _ in range(4)]
            await asyncio.gather(*rollouts, *rewards, *updates, *(self._upload(chance) for _ in range(4)))

    async def _rollout(self, chance: random.Random) -> None:
        await self._post("/v1/rl/rollout", {"model": "chat", "prompts": [_prompt(chance)], "n": 1, "max_tokens": 32})

    async def send(self, kind: str, chance: random.Random, timings: Timings) -> None:
        if kind in self._others:
            await self._others[kind][1](chance)
        elif kind == "abort":
            await self._stream(DIALECTS[chance.choice(list(DIALECTS))], chance, Timings(), chance.randint(1, 6))
        else:
            await self._stream(DIALECTS[kind], chance, timings)

    async def _stream(
        self, dialect: Dialect, chance: random.Random, timings: Timings, leave_after: int | None = None
    ) -> None:
        """Reads it to its end, or leaves after so many tokens."""
        most = chance.randint(4, 24) if leave_after is None else 200
        body = {"model": _model(chance), **dialect.body(_prompt(chance), most)}
        last, previous, tokens = "", time.perf_counter(), 0
        async with self._http.stream("POST", dialect.path, json=body) as answer:
            if answer.status_code != 200:
                raise ValueError(f"{dialect.path}: {answer.status_code} {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                if not line or line.startswith("event:"):
                    continue
                last = line.removeprefix("data: ")
                _check_event(last)
                if dialect.token in last:
                    now = time.perf_counter()
                    (timings.between if tokens else timings.first).append(now - previous)
                    previous, tokens = now, tokens + 1
                    if tokens == leave_after:
                        return
        if not any(end in last for end in dialect.ends):
            raise ValueError(f"{dialect.path}: the stream ended with {last:.200}")

    async def _post(self, path: str, body: Any, status: int = 200) -> Any:
        answer = await self._http.post(path, json=body)
        if answer.status_code != status:
            raise ValueError(f"{path}: {answer.status_code} {answer.text}")
        return answer.json()

    async def _whole(self, chance: random.Random) -> None:
        body = {"model": _model(chance), "messages": _messages(_prompt(chance)), "n": 2, "logprobs": True}
        found = await self._post("/v1/chat/completions", body | {"max_tokens": 8, "ignore_eos": True})
        assert [one["finish_reason"] for one in found["choices"]] == ["length"] * 2, found
        assert found["usage"]["completion_tokens"] == 16, found

    async def _schema(self, chance: random.Random) -> None:
        shape = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
        body = {"model": _model(chance), "messages": _messages(_prompt(chance)), "response_format": shape}
        found = await self._post("/v1/chat/completions", body | {"max_tokens": 100})
        assert json.loads(found["choices"][0]["message"]["content"])["city"] in ("Rome", "Oslo"), found

    async def _tool(self, chance: random.Random) -> None:
        body = {"model": _model(chance), "messages": [{"role": "user", "content": _prompt(chance)}], "max_tokens": 200}
        tool = {"name": "travel", "input_schema": CITY}
        choice = {"type": "tool", "name": "travel", "disable_parallel_tool_use": True}
        found = await self._post("/v1/messages", body | {"tools": [tool], "tool_choice": choice})
        assert found["stop_reason"] == "tool_use", found

    async def _continued(self, chance: random.Random) -> None:
        """A stored response, one that goes on from it, and sometimes none of both afterwards."""
        body = {"model": "chat", "input": _prompt(chance), "max_output_tokens": 8}
        first = await self._post("/v1/responses", body)
        second = await self._post("/v1/responses", body | {"previous_response_id": first["id"]})
        if chance.random() < 0.5:
            for one in (first, second):
                answer = await self._http.delete(f"/v1/responses/{one['id']}")
                assert answer.status_code == 200, answer.text
        else:
            assert second["store"] is True, second
            self.told.stored(second["id"], output_text(second))

    async def _generate(self, chance: random.Random) -> None:
        prompt = _prompt(chance)
        own = {"prompt": prompt, "max_tokens": 8, "logprobs": True}
        sglang = {"text": prompt, "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
        trl = {"prompts": [prompt, prompt], "n": 2, "max_tokens": 8}
        path, body = chance.choice([("/generate", own), ("/generate", sglang), ("/generate/", trl)])
        await self._post(path, body)

    async def _embeddings(self, chance: random.Random) -> None:
        texts = [_prompt(chance)[:100] for _ in range(chance.randint(1, 8))]
        path, key = chance.choice([("/v1/embeddings", "data"), ("/api/embed", "embeddings")])
        found = await self._post(path, {"model": "words", "input": texts})
        assert len(found[key]) == len(texts), found

    async def _lists(self, chance: random.Random) -> None:
        for path in ("/v1/models", "/v1/adapters", "/api/tags", "/v1/training/status", "/metrics", "/health"):
            answer = await self._http.get(path)
            assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        await self._post("/tokenize", {"model": "chat", "prompt": _prompt(chance)})

    async def _refused(self, chance: random.Random) -> None:
        path, body = chance.choice(REFUSED)
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        answer = await self._http.post(path, content=content, headers={"Content-Type": "application/json"})
        if not 400 <= answer.status_code < 500 or not answer.json().get("error"):
            raise ValueError(f"{path} {body!r:.100} was answered {answer.status_code} {answer.text:.300}")

    async def _is_greedy(self, chance: random.Random) -> None:
        """The tokens that the same prompt had alone, whatever runs beside it."""
        prompt = chance.choice(GREEDY_PROMPTS)
        found = await self._post("/v1/completions", GREEDY | {"prompt": prompt})
        text = found["choices"][0]["text"]
        assert text == self._greedy[prompt], f"WRONG: {prompt!r} gave {text!r}, alone {self._greedy[prompt]!r}"

    async def _hostile(self, chance: random.Random) -> None:
        name, (path, body, _) = chance.choice(list(HOSTILE.items()))
        content = await asyncio.to_thread(orjson.dumps, body | {"model": "chat"})
        answer = await self._http.post(path, content=content, headers={"Content-Type": "application/json"})
        if not 400 <= answer.status_code < 500:
            raise ValueError(f"{name} was answered {answer.status_code} {answer.text:.300}")

    async def _left_rollout(self, chance: random.Random) -> None:
        """Thousands of answers, whose client leaves after a moment."""
        body = {"model": "chat", "prompts": [_prompt(chance) for _ in range(200)], "n": 8, "max_tokens": 400}
        try:
            answer = await self._http.post("/v1/rl/rollout", json=body, timeout=chance.uniform(0.2, 1.5))
        except httpx.TimeoutException:
            return
        if answer.status_code != 429:  # its queue is full
            raise ValueError(f"/v1/rl/rollout: {answer.status_code} {answer.text:.300}")

    async def _reward(self, chance: random.Random) -> None:
        body = {"model": "chat", "prompt": _prompt(chance), "max_tokens": 4, "temperature": 1.0, "n": 2}
        found = await self._post("/v1/completions", body)
        for index in range(2):
            reward = {"request_id": found["id"], "index": index, "reward": chance.random()}
            await self._post("/v1/training/feedback", reward)
            self.told.rewards += 1

    async def _publish(self, chance: random.Random) -> None:
        """A new version of the adapter that other requests use meanwhile."""
        answer = await self._http.post(
            "/update_adapter_weights",
            params={"name": "published", "config": json.dumps(ADAPTER)},
            content=self._weights(chance),
            headers={"Content-Type": "application/octet-stream"},
        )
        assert answer.status_code == 200, answer.text

    async def _upload(self, chance: random.Random) -> None:
        """An adapter that comes, answers once, and goes."""
        self._uploads += 1
        name = f"uploaded-{self._uploads}"
        files = {
            "weights": ("adapters.safetensors", self._weights(chance)),
            "config": ("adapter_config.json", json.dumps(ADAPTER).encode()),
        }
        answer = await self._http.post("/v1/adapters/upload", data={"name": name}, files=files)
        assert answer.status_code == 200, answer.text
        await self._post("/v1/completions", {"model": name, "prompt": _prompt(chance), "max_tokens": 4})
        await self._post("/v1/adapters/unload", {"name": name})

    async def _update(self, chance: random.Random) -> None:
        """Four answers to a prompt, and an update by rewards that say nothing."""
        rollout = {"model": "chat", "prompts": [_prompt(chance)], "n": 4, "max_tokens": 8}
        [group] = (await self._post("/v1/rl/rollout", rollout))["groups"]
        trajectories = [
            {
                "group_id": "group",
                "prompt_ids": group["prompt_ids"],
                **{name: sample[name] for name in ("completion_ids", "logprobs", "request_id", "index")},
                "reward": float(place),
            }
            for place, sample in enumerate(group["samples"])
        ]
        async with self._updating:
            found = await self._post("/v1/training/update", {"trajectories": trajectories})
        assert found["trajectories_used"] == 4, found
        self.told.version = max(self.told.version, found["policy_version"])

    def _weights(self, chance: random.Random) -> bytes:
        draw, rank = np.random.default_rng(chance.getrandbits(32)).standard_normal, ADAPTER["lora_parameters"]["rank"]
        found = {}
        for path, target in self._targets.items():
            found[f"{path}.lora_a"] = draw((target.size, int(rank)), np.float32) * target.size**-0.5
            found[f"{path}.lora_b"] = draw((int(rank), target.out_features), np.float32) * 0.02
        return save(found)


def _model(chance: random.Random) -> str:
    return chance.choice(["chat", "chat", "published"])


def _prompt(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, 40)))


def _check_event(data: str) -> None:
    """Raises what an event says went wrong."""
    if data == "[DONE]":
        return
    event = orjson.loads(data)
    if event.get("error") or event.get("type") == "response.failed":
        raise ValueError(f"the stream says {data:.300}")
