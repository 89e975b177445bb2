"""What both of OpenAI's routes write: the envelope, usage, and the fast way to write text.

A chunk that carries only text, which is nearly every chunk, is a constant start and end around that text.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import orjson

from mlx_parallm.errors import ParallmError
from mlx_parallm.server.api.openai.response_types import (
    CompletionTokensDetails,
    EchoedFields,
    GenerationChunk,
    GenerationResponse,
    PolicyChoice,
    PromptLogprobs,
    PromptTokenLogprob,
    Usage,
)
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate, Collected
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.generation.responses import DONE, event, one_line
from mlx_parallm.server.generation.token_logprobs import finite
from mlx_parallm.text.detokenize import Vocabulary
from mlx_parallm.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What a client wants to see beside the text."""

    logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False  # in logprobs
    prompt_logprobs: bool = False
    usage: bool = False  # at the end of a stream
    running_usage: bool = False  # in every chunk
    policy: bool = False  # which adapter version made which tokens
    echoed: EchoedFields = field(default_factory=EchoedFields)  # what comes back as it was sent


Choice = TypeVar("Choice", bound=PolicyChoice)
Chunk = TypeVar("Chunk", bound=GenerationChunk)


class ResponseWriter(ABC, Generic[Choice, Chunk]):
    """What chat and completions share: the envelope, usage, and the fast way to write text."""

    ending = DONE
    media_type = b"text/event-stream; charset=utf-8"

    def __init__(self, name: str, generation: Generation, options: ResponseOptions) -> None:
        self.id = name
        self.created = int(time.time())
        self.model = _model_name(generation)
        self.served = generation.served
        self.generation = generation
        self.options = options
        self._plain = not (options.logprobs or options.token_ids or options.running_usage or options.policy)
        self._frames = [self._frame(choice) for choice in generation.choices]

    @abstractmethod
    def _begin_chunk(self, choices: list[Choice]) -> Chunk:
        """Returns a chunk without usage and echoed fields."""

    @abstractmethod
    def _skeleton(self, choice: ChoiceStream, text: str) -> Choice:
        """A chunk's choice that has this text and no other update."""

    @abstractmethod
    def _choice(self, choice: ChoiceStream, update: ChoiceUpdate) -> Choice:
        """A chunk's choice with all of its update."""

    @abstractmethod
    def answer(self, results: Sequence[Collected]) -> GenerationResponse:
        """The whole response."""

    def chunk(self, choice: ChoiceStream, update: ChoiceUpdate) -> bytes:
        piece = update.piece
        if self._plain and update.finish_reason is None and not piece.reasoning and not piece.calls:
            if not piece.content:
                return b""
            before, after = self._frames[choice.index]
            return before + one_line(piece.content) + after
        if not piece and update.finish_reason is None and not update.logprobs and not self.options.token_ids:
            return b""
        return event(self._chunk([self._choice(choice, update)]))

    def closing(self) -> bytes:
        rewards = self.generation.rewards
        if rewards is not None:  # they are known when all choices have ended
            chunk = self._chunk([])
            chunk["rewards"] = [rewards.get(choice.index) for choice in self.generation.choices]
            return event(chunk) + self._last_usage()
        return self._last_usage()

    def _last_usage(self) -> bytes:
        if not self.options.usage:
            return b""
        chunk = self._chunk([])
        chunk["usage"] = self.usage()
        return event(chunk)

    def failure(self, error: ParallmError) -> bytes:
        return event(error.body())

    def usage(self) -> Usage:
        choices = self.generation.choices
        prompt_tokens = self.generation.prompt_tokens
        completion_tokens = sum(choice.completion_tokens for choice in choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(choice.cached_tokens for choice in choices[:: self.generation.n])
            },
            "completion_tokens_details": _completion_details(choices),
        }

    def _token_text(self, token: int) -> str:
        """Returns a token's text as logprobs show it."""
        return f"token_id:{token}" if self.options.tokens_as_ids else self.served.vocabulary.text(token)

    def _chunk(self, choices: list[Choice]) -> Chunk:
        chunk = self._begin_chunk(choices)
        self._add_echoed(chunk)
        if self.options.usage or self.options.running_usage:
            chunk["usage"] = self.usage() if self.options.running_usage else None
        return chunk

    def _add_echoed(self, response: EchoedFields) -> None:
        response.update(self.options.echoed)

    def _add_policy(self, part: PolicyChoice, choice: ChoiceStream, ended: bool) -> None:
        """Adds what trainers are told; and where several adapters share the traffic, which of them answered."""
        if not self.options.policy and not self.generation.is_arm:
            return
        version = self.generation.version
        part["policy_version"] = choice.policy_version
        part["lora_adapter"] = "base" if version is None else version.name
        if ended:
            part["policy_spans"] = choice.policy_spans
            part["mixed_policy"] = choice.mixed_policy
        if self.generation.rewards is not None:
            part["reward"] = self.generation.rewards.get(choice.index)

    def _frame(self, choice: ChoiceStream) -> tuple[bytes, bytes]:
        """The bytes around a chunk's text. The mark between them needs no escaping and can't occur elsewhere."""
        mark = f"\x00{self.id}"
        before, after = event(self._chunk([self._skeleton(choice, mark)])).split(orjson.dumps(mark), 1)
        return before, after


def prompt_logprobs(entries: Sequence[TokenLogprob | None], vocabulary: Vocabulary) -> PromptLogprobs:
    """vLLM's shape: per prompt token an object from token id to its logprob; null for the first."""
    return [None if entry is None else _by_id(entry, vocabulary) for entry in entries]


def _by_id(entry: TokenLogprob, vocabulary: Vocabulary) -> dict[str, PromptTokenLogprob]:
    ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)]
    return {
        str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": vocabulary.text(token)}
        for token, logprob, rank in [*ranked, (entry.token, entry.logprob, entry.rank)]
    }


def _completion_details(choices: Sequence[ChoiceStream]) -> CompletionTokensDetails:
    details: CompletionTokensDetails = {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)}
    drafted = sum(choice.drafted_tokens for choice in choices)
    if drafted:
        accepted = sum(choice.accepted_tokens for choice in choices)
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = drafted - accepted
    return details


def _model_name(generation: Generation) -> str:
    """Returns the model's name as it was asked for; for `default`, its own."""
    asked = generation.call.model
    return generation.served.name if asked == "default" else asked
