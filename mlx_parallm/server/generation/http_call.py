"""One HTTP call on its way through the engine: its requests, their choices, and who is told of updates.

`service` builds a `Generation`; a `Listener` (in `responses`: the event stream, or the collector of a whole response)
hears of it. All of this runs on the event loop: deltas come in through `_on_delta`, many in one callback.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_parallm.errors import ParallmError, UnavailableError
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.server.auth.caller import ANYBODY, Caller
from mlx_parallm.server.generation.call import GenerationCall
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate
from mlx_parallm.server.generation.tokenizers import TokenizedPrompts
from mlx_parallm.server.http.request_state import ResponseSummary
from mlx_parallm.server.model_table import ServedModel
from mlx_parallm.text.compiled_grammar import CompiledGrammar
from mlx_parallm.types import AdapterVersion, CompletionNames, Delta, Request


class Listener(Protocol):
    def on_update(self, choice: ChoiceStream, update: ChoiceUpdate) -> None: ...
    def on_end(self, error: ParallmError | None) -> None: ...


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """What preparation has found out about a call."""

    version: AdapterVersion | None  # of the adapter that answers; None: the model alone
    prompts: TokenizedPrompts
    sampling: Sequence[SamplingParams]  # of each prompt
    grammar: CompiledGrammar | None = None


class Generation:
    """The requests of one HTTP call: one per prompt, each with n choices."""

    def __init__(
        self,
        served: ServedModel,
        call: GenerationCall,
        prepared: PreparedCall,
        *,
        names: CompletionNames,
        timeout: float | None,
        caller: Caller = ANYBODY,
    ) -> None:
        self.served = served
        self.call = call
        self.version = prepared.version  # of the adapter that answers; None: the model alone
        self.score: Callable[[], asyncio.Future[dict[int, float]]] | None = None  # when all choices have ended well
        self.rewards: dict[int, float] | None = None  # by the choices' numbers, where they were to be scored
        self.prompts = prepared.prompts.tokens
        self.n = prepared.sampling[0].n
        self.choices = [
            ChoiceStream.of(call, served, prepared.prompts, index, index // self.n)
            for index in range(len(self.prompts) * self.n)
        ]
        self.listener: Listener | None = None
        self.first_delta_at: float | None = None  # by time.perf_counter
        self._client = served.client
        self._caller = caller
        self._charged = 0  # tokens of the responses so far
        self._expected = 0  # that they may have at most, reserved while they are generated
        self._open = len(self.choices)
        self._submitted = self._ended = False
        shared = _request_fields(call, self.version)
        shared |= {"images": prepared.prompts.images, "compiled_grammar": prepared.grammar}
        self._requests = [
            Request(
                id=f"{names.dialect}-{uuid.uuid4().hex[:12]}",  # unique even when clients send one id twice
                prompt=prompt,
                sampling=params,
                timeout=timeout,
                names=names,
                owner=caller.owner,
                first=number * self.n,
                **shared,
            )
            for number, (prompt, params) in enumerate(zip(self.prompts, prepared.sampling, strict=True))
        ]
        self._first = {request.id: request.first for request in self._requests}

    @property
    def completion_id(self) -> str:
        """What the response calls itself."""
        return self._requests[0].names.dialect

    @property
    def is_arm(self) -> bool:
        """Whether it was given its adapter as one of several that share the traffic."""
        return self.call.lora_adapter is None and len(self.served.adapters.routes) > 1

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def summary(self) -> ResponseSummary:
        """Summarises the call for the list of recent requests. Only the rows of a stream tell of their first token when
        it is there."""
        return ResponseSummary(
            model=self.served.name,
            adapter=None if self.version is None else self.version.label,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=sum(choice.cached_tokens for choice in self.choices[:: self.n]),
            completion_tokens=sum(choice.completion_tokens for choice in self.choices),
            first_token_at=self.first_delta_at if self.call.stream else None,
        )

    def recorded(self) -> list[tuple[str, int, int]]:
        """Returns for each choice, unless aborted: the engine's name of its request, its number and its token count."""
        return [
            (self._requests[choice.prompt].id, choice.index, choice.completion_tokens)
            for choice in self.choices
            if choice.finish_reason != "abort"
        ]

    def start(self, listener: Listener) -> None:
        """Submits all requests, or none; then their prompts are not charged."""
        self.listener = listener
        self._caller.charge_prompt(self.prompt_tokens)
        try:
            stated = self.call.sampling.max_tokens is not None
            longest = sum((one.sampling.max_tokens or 0) * self.n for one in self._requests)
            self._expected = self._caller.expect_output(longest, stated)
            self._client.submit_all(self._requests, self._on_delta)
        except ParallmError:
            self._caller.refund_prompt(self.prompt_tokens)
            self._caller.release_output(self._expected)
            self._expected = 0
            raise
        self._submitted = True

    def cancel(self) -> None:
        """Frees every row that still runs, and charges what was generated. May be called at any time, more than once;
        whoever starts a generation calls it at the end."""
        generated = sum(choice.completion_tokens for choice in self.choices)
        self._caller.charge_output(generated - self._charged)
        self._charged = generated
        self._caller.release_output(self._expected)
        self._expected = 0
        if self._ended:
            return
        self._ended = True
        if self._submitted:
            for request in self._requests:
                self._client.cancel(request.id)

    def _on_delta(self, delta: Delta) -> None:
        if self._ended:
            return
        if delta.error is not None or delta.finish_reason == "error":
            self._fail(delta.error or UnavailableError("the engine has given this request up"))
            return
        if self.first_delta_at is None:
            self.first_delta_at = time.perf_counter()
        choice = self.choices[self._first[delta.request_id] + delta.index]
        running = choice.finish_reason is None
        update = choice.take(delta)
        assert self.listener is not None
        if update is not None:
            self.listener.on_update(choice, update)
        if running and choice.finish_reason is not None:
            if delta.finish_reason is None:  # ended by its text, which the engine does not see
                self._client.cancel(delta.request_id, delta.index, choice.completion_tokens)
            self._open -= 1
            if self._open == 0:
                self._ended = True
                if self.score is None:
                    self.listener.on_end(None)
                else:
                    self.score().add_done_callback(self._on_scores)

    def _on_scores(self, scores: "asyncio.Future[dict[int, float]]") -> None:
        """The response is whole; where scoring has failed, it has no rewards."""
        failed = scores.cancelled() or scores.exception() is not None
        self.rewards = {} if failed else scores.result()
        assert self.listener is not None
        self.listener.on_end(None)

    def _fail(self, error: ParallmError) -> None:
        self.cancel()
        assert self.listener is not None
        self.listener.on_end(error)


def _request_fields(call: GenerationCall, version: AdapterVersion | None) -> dict[str, Any]:
    """What all requests of a call have alike."""
    return {
        "stream": call.stream,
        "priority": call.priority,
        "cache_salt": call.cache_salt,
        "adapter": None if version is None else version.name,
        "adapter_version": None if version is None else version.number,
        "follow": call.follow_policy,
    }
