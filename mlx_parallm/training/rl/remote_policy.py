"""Training with servers elsewhere: they sample the rollouts, and each version reaches them before training counts it.

`mlx_parallm_train --mode rl --connect-to HOST:PORT` uses it, with one server or with the replicas behind one address.
The learner holds a model of its own; servers that do not answer are waited for. Any thread but the engine's.
"""

import asyncio
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mlx_parallm.client import InferenceClient, Sample
from mlx_parallm.errors import ConfigError, ModelNotFoundError, UnavailableError
from mlx_parallm.lora.adapter import Adapter
from mlx_parallm.lora.adapter_files import CONFIG
from mlx_parallm.policy_spans import PolicySpan
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.training.rl.records import Record
from mlx_parallm.training.storage.checkpoints import ADAPTER, adapter_files
from mlx_parallm.types import CompletionNames

log = logging.getLogger(__name__)

T = TypeVar("T")
WAIT_SECONDS = 600.0  # for a server that does not answer, such as one that restarts
RETRY_SECONDS = 1.0
MAX_REDRAWS = 20


@dataclass(frozen=True, slots=True)
class _Published:
    """What a server was given last."""

    name: str
    data: bytes
    config: Mapping[str, Any]
    number: int


class RemotePolicy:
    """An adapter on a server. Calls block, and are tried again while the server does not answer."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        max_staleness: int | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.url = address if "://" in address else f"http://{address}"
        self.version = 0  # the newest that was published
        self._published: _Published | None = None
        self._restoring = asyncio.Lock()
        self._max_staleness = max_staleness
        self._wait_seconds = wait_seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote policy", daemon=True)
        self._thread.start()
        self._stopped = threading.Event()
        self._client = self._run(self._connected(api_key))

    async def _connected(self, api_key: str | None) -> InferenceClient:
        return InferenceClient(self.url, api_key=api_key)

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Calls that wait for a server that does not answer raise UnavailableError."""
        self._stopped.set()

    def close(self) -> None:
        self.stop()
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    async def _persist(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Tries again until the server answers, or the time to wait for it is over."""
        deadline = time.monotonic() + self._wait_seconds
        told = False
        while True:
            try:
                return await make()
            except UnavailableError as error:
                if self._stopped.is_set() or time.monotonic() > deadline:
                    raise
                if not told:
                    log.warning("waiting for %s: %s", self.url, error.message)
                told = True
                await asyncio.sleep(RETRY_SECONDS)

    # Versions.

    def newest(self, name: str) -> int:
        """The highest version of an adapter that the server has; 0 where it has none."""
        return max(self._run(self._persist(lambda: self._versions(name))), default=0)

    async def _versions(self, name: str) -> list[int]:
        return [int(one["version"]) for one in await self._client.adapters() if one["name"] == name]

    def publish(self, name: str, adapter: Adapter, number: int) -> None:
        files = adapter_files(adapter, 1.0, adapter.rank, "")  # at a scale of 1 its numbers arrive as they are
        published = _Published(name, files[ADAPTER], json.loads(files[CONFIG]), number)
        self._run(self._persist(lambda: self._send(published)))
        self._published = published
        self.version = number

    def roll_back(self, name: str, number: int) -> None:
        self._run(self._persist(lambda: self._client.rollback(name, number)))
        self._published = None
        self.version = number

    async def _send(self, published: "_Published") -> None:
        await self._client.update_adapter_weights(
            published.name, published.data, published.config, version=published.number
        )

    async def _sampled(self, call: Mapping[str, Any]) -> list[list[Sample]]:
        """A server that has restarted gets the adapter again."""
        try:
            return await self._client.rollout(**call)
        except ModelNotFoundError:
            published = self._published
            if published is None or published.name != call["model"]:
                raise
            async with self._restoring:
                if published.number not in await self._versions(published.name):
                    log.warning("%s has lost %s: it gets version %d again", self.url, published.name, published.number)
                    await self._send(published)
            return await self._client.rollout(**call)

    # Rollouts.

    def check_prompt(self, prompt: list[int], completions: int) -> None:
        """Nothing: only the server knows how much it can hold."""

    def sample(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        adapter: str | None,
        seed: int | None = None,
        salt: str = "",
    ) -> list[list[Record]]:
        """`sampling.n` completions to each prompt, each prompt by a call of its own, so that replicas share the
        work."""
        _check(sampling)
        label = f"rollout-{uuid.uuid4().hex[:12]}"
        body = {
            "model": adapter or "default",
            "n": sampling.n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(sampling.stop_token_ids),
            "cache_salt": salt,
        }
        calls = [
            {**body, "prompts": [list(prompt)], **({} if seed is None else {"seed": seed + number})}
            for number, prompt in enumerate(prompts)
        ]
        groups = self._run(self._all(calls))
        return [
            [_record(sample, f"{label}-{number}", index, adapter, sampling) for index, sample in enumerate(group)]
            for number, group in enumerate(groups)
        ]

    async def _all(self, calls: Sequence[Mapping[str, Any]]) -> list[list[Sample]]:
        return list(await asyncio.gather(*(self._group(call) for call in calls)))

    async def _group(self, call: Mapping[str, Any]) -> list[Sample]:
        """One that is fresh enough."""
        for _ in range(MAX_REDRAWS):
            [group] = await self._persist(lambda: self._sampled(call))
            oldest = min((span[2] for sample in group for span in sample.policy_spans), default=self.version)
            if self._max_staleness is None or self.version - oldest <= self._max_staleness:
                return group
            log.warning(
                "version %d sampled answers, and %d is the newest: they are sampled again", oldest, self.version
            )
        raise UnavailableError(
            f"{self.url} answers with versions more than --max-staleness {self._max_staleness} behind {self.version}"
        )


def _check(sampling: SamplingParams) -> None:
    """What `/v1/rl/rollout` has no field for is refused, not ignored."""
    plain = SamplingParams(
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=sampling.stop_token_ids,
    )
    if sampling != plain:
        raise ConfigError("rollouts of a server know temperature, top_p, top_k, max_tokens, n and stop_token_ids alone")


def _record(sample: Sample, request: str, index: int, adapter: str | None, sampling: SamplingParams) -> Record:
    return Record(
        request=request,
        names=CompletionNames(client=sample.request_id),
        index=index,
        prompt_ids=tuple(sample.prompt_ids),
        completion_ids=tuple(sample.completion_ids),
        logprobs=tuple(sample.logprobs or ()),
        spans=tuple(PolicySpan(first=first, end=end, version=version) for first, end, version in sample.policy_spans),
        policy=adapter,
        temperature=1.0 if sampling.greedy else sampling.temperature,
        finish_reason=sample.finish_reason,
        max_tokens=sampling.max_tokens,
        choices=sampling.n,
    )
