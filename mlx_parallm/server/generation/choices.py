"""One choice of a call: its text, counted and split as its tokens come in, and what of it is told when.

A `Generation` has a `ChoiceStream` for each of its choices; dialects write its `ChoiceUpdate`s, or what it `Collected`.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from mlx_parallm.policy_spans import PolicySpan, Spans, as_lists, within
from mlx_parallm.server.generation.call import GenerationCall
from mlx_parallm.server.generation.tokenizers import TokenizedPrompts
from mlx_parallm.server.model_table import ServedModel
from mlx_parallm.text.detokenize import TextStream
from mlx_parallm.text.parsers.calls import CallDelta, Piece
from mlx_parallm.text.parsers.chat_parser import Parser, chat_parser
from mlx_parallm.types import Delta, FinishReason, TokenLogprob

ResponseFinish = FinishReason | Literal["tool_calls"]


@dataclass(slots=True)
class ChoiceUpdate:
    """What one delta means for the client."""

    piece: Piece
    tokens: Sequence[int]
    scores: Sequence[TokenLogprob] = ()  # of just these tokens, where log-probabilities are asked for
    logprobs: Sequence[tuple[TokenLogprob, int]] = ()  # of tokens whose text is out, with the place in it
    finish_reason: ResponseFinish | None = None


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
        self.finish_reason: ResponseFinish | None = None
        self.stop_reason: str | int | None = None
        self.stop_token: int | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.cached_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.begun: float | None = None  # by time.perf_counter, when its first delta came
        self._spans: Spans = (PolicySpan(0, 0, 0),)  # of its tokens, and of those that are being made
        self._exact = exact
        self._stream = stream
        self._parser = parser
        self._stop_token_ids = stop_token_ids
        self._released = 0  # characters
        self._held: list[tuple[TokenLogprob, int]] = []  # of tokens whose text is still withheld

    @classmethod
    def of(
        cls, call: GenerationCall, served: ServedModel, prompts: TokenizedPrompts, index: int, number: int
    ) -> "ChoiceStream":
        """A choice of a call; `number` is its prompt's."""
        chat = call.chat
        stream = TextStream.of(
            served.vocabulary,
            call.sampling,
            prompts.tokens[number],
            chat=chat is not None,
            include_stop=call.include_stop,
            skip_special=call.skip_special_tokens,
            visible=served.marks if chat is not None else (),
        )
        parser = None
        if chat is not None:
            parser = chat_parser(
                served.tool_format,
                thinking=served.thinking,
                inside_thinking=prompts.inside_thinking,
                tools=chat.conversation.tools,
                parallel=chat.parallel_calls,
                separate_reasoning=chat.separate_reasoning,
                drop=served.tokenizer.structural_markers,
            )
        return cls(index, number, stream, parser, call.sampling.stop_token_ids, call.exact_tokens)

    @property
    def policy_version(self) -> int:
        """The version of the adapter that made its newest token; 0: none did."""
        made = self.spans
        return made[-1].version if made else self._spans[0].version

    @property
    def spans(self) -> Spans:
        """Which adapter version made which of its tokens."""
        return within(self._spans, self.completion_tokens)

    @property
    def policy_spans(self) -> list[list[int]]:
        """The same as responses have it."""
        return as_lists(self.spans)

    @property
    def mixed_policy(self) -> bool:
        """Whether several adapter versions made it: then its log-probabilities are those of no single policy."""
        return len(self.spans) > 1

    def take(self, delta: Delta) -> ChoiceUpdate | None:
        """Returns what there is to tell, or None while there is nothing."""
        if self.finish_reason is not None:
            return None
        self.begun = self.begun or delta.begun or time.perf_counter()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.cached_tokens = self.cached_tokens or delta.cached_tokens
        self.drafted_tokens = delta.drafted or self.drafted_tokens
        self.accepted_tokens = delta.accepted or self.accepted_tokens
        self._spans = delta.spans or self._spans
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
            update.logprobs = self._held
            self._held = []
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
        reason: ResponseFinish | None = delta.finish_reason
        self.stop_token = delta.stop_token
        self.stop_reason = delta.stop_token if delta.stop_token in self._stop_token_ids else None
        if reason is not None:
            self._add(self._stream.finish(), update)
        if self._stream.stopped is not None:
            reason = "stop"
            self.stop_reason = self._stream.stopped
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


class Collected:
    """All that one choice has said, for a response in one piece."""

    __slots__ = ("calls", "content", "logprobs", "reasoning", "scores", "tokens")

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
