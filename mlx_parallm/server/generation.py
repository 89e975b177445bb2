"""One HTTP call on its way through the engine: its prompts, their choices, and who is told of their updates.

`service` builds a `Generation`; a `Listener` (the event stream, or the collector of a whole answer) hears of it. All of
this runs on the event loop: the engine's deltas come in through `_on_delta`, many in one callback of the event loop.
"""

import asyncio
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.types import Receive

from mlx_parallm.errors import ParallmError, UnavailableError
from mlx_parallm.server.call import GenerationCall
from mlx_parallm.server.errors import ClientLeft
from mlx_parallm.server.models import ServedModel
from mlx_parallm.text.detokenize import TextStream
from mlx_parallm.text.parsers.calls import CallDelta, Piece
from mlx_parallm.text.parsers.chat import Parser
from mlx_parallm.types import AdapterVersion, Delta, Request, SamplingParams, TokenLogprob


@dataclass(slots=True)
class ChoiceUpdate:
    """What one delta means for the client."""

    piece: Piece
    tokens: Sequence[int]
    scores: Sequence[TokenLogprob] = ()  # of just these tokens, where log-probabilities are asked for
    logprobs: Sequence[tuple[TokenLogprob, int]] = ()  # of tokens whose text is out, with the place in it
    finish_reason: str | None = None


class ChoiceStream:
    """One choice's text, counted and split as its tokens come in.

    `exact`: log-probabilities of all its tokens, the one that ended it and those of a stop string included.
    """

    def __init__(
        self,
        index: int,
        prompt: int,
        stream: TextStream,
        parser: Parser | None = None,
        stop_token_ids: Collection[int] = (),
        exact: bool = False,
    ) -> None:
        self.index = index
        self.prompt = prompt  # the number of the prompt it answers
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.stop_token: int | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.cached_tokens = 0
        self.versions: tuple[tuple[int, int], ...] = ((0, 0),)  # of adapters, each with its first token's number
        self._exact = exact
        self._stream = stream
        self._parser = parser
        self._stop_token_ids = stop_token_ids
        self._released = 0  # characters
        self._held: list[tuple[TokenLogprob, int]] = []  # of tokens whose text is still withheld

    @property
    def policy_version(self) -> int:
        """The version of the adapter that made its newest token; 0: none did."""
        made = [version for first, version in self.versions if first < self.completion_tokens]
        return made[-1] if made else self.versions[0][1]

    @property
    def policy_spans(self) -> list[list[int]]:
        """[first token, the one after the last, version] of each adapter version that made some."""
        ends = [*(first for first, _ in self.versions[1:]), self.completion_tokens]
        return [
            [first, min(end, self.completion_tokens), version]
            for (first, version), end in zip(self.versions, ends, strict=True)
            if first < min(end, self.completion_tokens)
        ]

    @property
    def mixed_policy(self) -> bool:
        """Whether several adapter versions made it: then its log-probabilities are those of no single policy."""
        return len(self.policy_spans) > 1

    def take(self, delta: Delta) -> ChoiceUpdate | None:
        """What there is to tell, or None while there is nothing."""
        if self.finish_reason is not None:
            return None
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.cached_tokens = self.cached_tokens or delta.cached_tokens
        self.versions = delta.versions or self.versions
        update = ChoiceUpdate(Piece(), delta.tokens)
        before = self.completion_tokens
        one_by_one = self._parser is not None or self._stream.has_stops
        if delta.logprobs is not None or (one_by_one and len(delta.tokens) > 1):
            for place, token in enumerate(delta.tokens):
                self._push([token], update, delta.logprobs[place] if delta.logprobs is not None else None)
        else:
            self._push(delta.tokens, update, None)
        update.tokens = delta.tokens[: self.completion_tokens - before]
        update.scores = (delta.logprobs or [])[: len(update.tokens)]
        if delta.stop_token is not None and self._stream.stopped is None:
            self.completion_tokens += 1
            update.tokens = [*update.tokens, delta.stop_token]
            if delta.stop_logprob is not None:
                update.scores = [*update.scores, delta.stop_logprob]
                if self._exact:
                    self._held.append((delta.stop_logprob, self._stream.decoded))
        self._end(delta, update)
        if self._held and (not self._stream.withholds or update.finish_reason):
            update.logprobs, self._held = self._held, []
        return update if update.piece or update.finish_reason or update.tokens else None

    def _push(self, tokens: Sequence[int], update: ChoiceUpdate, logprob: TokenLogprob | None) -> None:
        if self._stream.stopped is not None:
            return
        self.completion_tokens += len(tokens)
        if logprob is not None:
            self._held.append((logprob, self._stream.decoded))
        self._add(self._stream.push(tokens), update, len(tokens))

    def _add(self, text: str, update: ChoiceUpdate, tokens: int = 0) -> None:
        self._released += len(text)
        parser = self._parser
        if parser is None:
            update.piece.content += text
            return
        if parser.state == "reasoning":
            self.reasoning_tokens += tokens
        if text:
            _extend(update.piece, parser.push(text))
        self._stream.show_special = parser.state == "tool"

    def _end(self, delta: Delta, update: ChoiceUpdate) -> None:
        reason: str | None = delta.finish_reason
        self.stop_token = delta.stop_token
        self.stop_reason = delta.stop_token if delta.stop_token in self._stop_token_ids else None
        if reason is not None:
            self._add(self._stream.finish(), update)
        if self._stream.stopped is not None:
            reason, self.stop_reason = "stop", self._stream.stopped
            if not self._exact:
                self._held = [entry for entry in self._held if entry[1] < self._released]
        if self._parser is not None:
            if self._parser.finished:
                reason = "stop"
            if reason is not None:
                _extend(update.piece, self._parser.finish(cut_off=reason != "stop"))
            if reason == "stop" and self._parser.calls:
                reason = "tool_calls"
        self.finish_reason = update.finish_reason = reason


def _extend(piece: Piece, more: Piece) -> None:
    piece.content += more.content
    piece.reasoning += more.reasoning
    piece.calls += more.calls


class Listener(Protocol):
    def on_update(self, choice: ChoiceStream, update: ChoiceUpdate) -> None: ...
    def on_end(self, error: ParallmError | None) -> None: ...


class Generation:
    """The requests of one HTTP call: one per prompt, each with n choices."""

    def __init__(
        self,
        served: ServedModel,
        call: GenerationCall,
        version: AdapterVersion | None,
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        make_choice: Callable[[int, int], ChoiceStream],  # (its index, its prompt's number)
        *,
        name: str,
        label: str,
        timeout: float | None,
    ) -> None:
        self.served = served
        self.call = call
        self.version = version  # of the adapter that answers; None: the model alone
        self.score: Callable[[], asyncio.Future[dict[int, float]]] | None = None  # when all choices have ended well
        self.rewards: dict[int, float] | None = None  # by the choices' numbers, where they were to be scored
        self.prompts = prompts
        self.n = sampling[0].n
        self.choices = [make_choice(index, index // self.n) for index in range(len(prompts) * self.n)]
        self.listener: Listener | None = None
        self._client = served.client
        self._open = len(self.choices)
        self._ended = False
        self._submitted = False
        self._requests = [
            Request(
                id=f"{name}-{uuid.uuid4().hex[:12]}",  # unique even when clients send one id twice
                prompt=prompt,
                sampling=params,
                stream=call.stream,
                priority=call.priority,
                timeout=timeout,
                cache_salt=call.cache_salt,
                adapter=None if version is None else version.name,
                adapter_version=None if version is None else version.number,
                follow=call.follow_policy,
                label=label,
                first=number * self.n,
            )
            for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
        ]
        self._first = {request.id: request.first for request in self._requests}

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def recorded(self) -> list[tuple[str, int, int]]:
        """Of each choice: the engine's name of its request, its number, and how many tokens it has."""
        return [
            (self._requests[choice.prompt].id, choice.index, choice.completion_tokens)
            for choice in self.choices
            if choice.finish_reason != "abort"
        ]

    def start(self, listener: Listener) -> None:
        """Submits all requests, or none."""
        self.listener = listener
        self._client.submit_all(self._requests, self._on_delta)
        self._submitted = True

    def cancel(self) -> None:
        """Frees every row that still runs. May be called at any time, more than once."""
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
        """The answer is whole; where scoring has failed, it has no rewards."""
        failed = scores.cancelled() or scores.exception() is not None
        self.rewards = {} if failed else scores.result()
        assert self.listener is not None
        self.listener.on_end(None)

    def _fail(self, error: ParallmError) -> None:
        self.cancel()
        assert self.listener is not None
        self.listener.on_end(error)


class Collected:
    """All that one choice has said, for an answer in one piece."""

    __slots__ = ("calls", "content", "finish_reason", "logprobs", "reasoning", "scores", "tokens")

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[CallDelta] = []
        self.tokens: list[int] = []
        self.scores: list[TokenLogprob] = []
        self.logprobs: list[tuple[TokenLogprob, int]] = []

    def add(self, update: ChoiceUpdate) -> None:
        self.content.append(update.piece.content)
        self.reasoning.append(update.piece.reasoning)
        self.tokens += update.tokens
        self.scores += update.scores
        self.logprobs += update.logprobs
        for call in update.piece.calls:
            if call.name is not None:
                self.calls.append(CallDelta(call.index, call.id, call.name))
            self.calls[-1].arguments += call.arguments


class Collector:
    """Waits for the whole answer, unless the client leaves before it is there."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.results = [Collected() for _ in generation.choices]

    async def collect(self, receive: Receive) -> list[Collected]:
        watcher = asyncio.ensure_future(client_left(receive))
        watcher.add_done_callback(self._on_left)
        try:
            self._generation.start(self)
            await self._done
        finally:
            watcher.cancel()
            self._generation.cancel()
        return self.results

    def on_update(self, choice: ChoiceStream, update: ChoiceUpdate) -> None:
        self.results[choice.index].add(update)

    def on_end(self, error: ParallmError | None) -> None:
        if self._done.done():
            return
        if error is not None:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)

    def _on_left(self, watcher: "asyncio.Future[None]") -> None:
        if not watcher.cancelled() and not self._done.done():
            self._done.set_exception(ClientLeft())


async def client_left(receive: Receive) -> None:
    """Returns when the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue
