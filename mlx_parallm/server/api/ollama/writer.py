"""Writes answers as Ollama's clients read them: one JSON object, or a line for each piece; times and counts last."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from mlx_parallm.errors import ParallmError
from mlx_parallm.server.api.ollama.errors import ollama_error
from mlx_parallm.server.api.ollama.response_types import (
    OllamaCall,
    OllamaCalledFunction,
    OllamaChatResponse,
    OllamaEnd,
    OllamaGenerateResponse,
    OllamaResponse,
    OllamaSaid,
)
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate, Collected
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.generation.responses import one_line
from mlx_parallm.server.generation.token_logprobs import token_logprobs
from mlx_parallm.server.http.error_shapes import Failure
from mlx_parallm.text.parsers.calls import CallDelta, read_arguments
from mlx_parallm.types import TokenLogprob


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e9))


@dataclass(slots=True)
class RequestTimes:
    """When a request came, when its model was there, and when its prompt was handed to it."""

    begun: float = field(default_factory=time.perf_counter)
    loaded: float = 0.0
    submitted: float = 0.0

    def mark_loaded(self) -> None:
        self.loaded = time.perf_counter()

    def mark_submitted(self) -> None:
        self.submitted = time.perf_counter()

    def add_to(self, answer: OllamaEnd) -> None:
        answer["total_duration"] = nanoseconds(time.perf_counter() - self.begun)
        answer["load_duration"] = nanoseconds(self.loaded - self.begun)


class LineWriter(ABC):
    """What chats and prompts share."""

    ending = b""
    media_type = b"application/x-ndjson"

    def __init__(self, model: str, generation: Generation, watch: RequestTimes, logprobs: bool) -> None:
        self._model = model
        self._generation = generation
        self._watch = watch
        self._logprobs = logprobs
        self._call: CallDelta | None = None  # the one that is being written

    @abstractmethod
    def _line(self, content: str, thinking: str, calls: Sequence[CallDelta], done: bool) -> OllamaResponse:
        """A piece of the response, or all of it, without its end."""

    def opening(self) -> bytes:
        return b""

    def chunk(self, choice: ChoiceStream, update: ChoiceUpdate) -> bytes:
        piece = update.piece
        calls = self._whole_calls(update.piece.calls)
        if update.finish_reason is not None and self._call is not None:
            calls.append(self._call)
        if not (piece.content or piece.reasoning or calls or (self._logprobs and update.logprobs)):
            return b""
        line = self._line(piece.content, piece.reasoning, calls, False)
        self._add_scores(line, update.logprobs)
        return _dumps(line)

    def closing(self) -> bytes:
        line = self._line("", "", (), True)
        self._add_end(line)
        return _dumps(line)

    def failure(self, error: ParallmError) -> bytes:
        return _dumps(ollama_error(Failure.of(error)))

    def answer(self, results: Sequence[Collected]) -> OllamaResponse:
        result = results[0]
        answer = self._line("".join(result.content), "".join(result.reasoning), result.calls, True)
        self._add_scores(answer, result.logprobs)
        self._add_end(answer)
        return answer

    def _whole_calls(self, deltas: Sequence[CallDelta]) -> list[CallDelta]:
        """Calls that are complete now: here they have no pieces."""
        whole: list[CallDelta] = []
        for delta in deltas:
            if delta.name is not None:
                whole += [self._call] if self._call is not None else []
                self._call = CallDelta(delta.index, delta.id, delta.name)
            assert self._call is not None
            self._call.arguments += delta.arguments
        return whole

    def _add_end(self, answer: OllamaResponse) -> None:
        choice = self._generation.choices[0]
        watch = self._watch
        ended = time.perf_counter()
        begun = choice.begun or ended
        answer["done_reason"] = "length" if choice.finish_reason == "length" else "stop"
        watch.add_to(answer)
        answer["prompt_eval_count"] = self._generation.prompt_tokens
        answer["prompt_eval_duration"] = nanoseconds(begun - watch.submitted)
        answer["eval_count"] = choice.completion_tokens
        answer["eval_duration"] = nanoseconds(ended - begun)

    def _add_scores(self, answer: OllamaResponse, entries: Sequence[tuple[TokenLogprob, int]]) -> None:
        if not self._logprobs:
            return
        vocabulary = self._generation.served.vocabulary
        answer["logprobs"] = [token_logprobs(vocabulary, entry) for entry, _ in entries]


class ChatLines(LineWriter):
    def _line(self, content: str, thinking: str, calls: Sequence[CallDelta], done: bool) -> OllamaChatResponse:
        message = OllamaSaid(role="assistant", content=content)
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return OllamaChatResponse(model=self._model, created_at=now(), message=message, done=done)


class PromptLines(LineWriter):
    def _line(self, content: str, thinking: str, calls: Sequence[CallDelta], done: bool) -> OllamaGenerateResponse:
        line = OllamaGenerateResponse(model=self._model, created_at=now(), response=content, done=done)
        if thinking:
            line["thinking"] = thinking
        return line


def _call(call: CallDelta) -> OllamaCall:
    arguments = read_arguments(call.arguments)
    function = OllamaCalledFunction(index=call.index, name=call.name or "", arguments=arguments)
    return OllamaCall(id=call.id or "", function=function)


def _dumps(line: Mapping[str, Any]) -> bytes:
    return one_line(line) + b"\n"
