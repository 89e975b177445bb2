"""Writes answers as Ollama's clients read them: one JSON object, or a line for each piece; times and counts last."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from mlx_parallm.errors import ParallmError
from mlx_parallm.server.api.ollama.errors import ollama_error
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate, Collected
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.generation.responses import one_line
from mlx_parallm.server.http.error_shapes import Failure
from mlx_parallm.text.parsers.calls import CallDelta, read_arguments
from mlx_parallm.types import TokenLogprob

LOWEST_LOGPROB = -9999.0  # JSON has no infinity
REASONS = {"tool_calls": "stop", "abort": "stop"}


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

    def durations(self) -> dict[str, int]:
        total, load = time.perf_counter() - self.begun, self.loaded - self.begun
        return {"total_duration": nanoseconds(total), "load_duration": nanoseconds(load)}


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
    def _said(self, content: str, thinking: str, calls: Sequence[CallDelta]) -> dict[str, Any]:
        """The fields that hold a piece of the answer, or all of it."""

    def opening(self) -> bytes:
        return b""

    def chunk(self, choice: ChoiceStream, update: ChoiceUpdate) -> bytes:
        piece, calls = update.piece, self._whole_calls(update.piece.calls)
        if update.finish_reason is not None and self._call is not None:
            calls.append(self._call)
        if not (piece.content or piece.reasoning or calls or (self._logprobs and update.logprobs)):
            return b""
        line = self._line(self._said(piece.content, piece.reasoning, calls), done=False)
        return _dumps(line | self._scores(update.logprobs))

    def closing(self) -> bytes:
        return _dumps(self._line(self._said("", "", ()), done=True) | self._end())

    def failure(self, error: ParallmError) -> bytes:
        return _dumps(ollama_error(Failure.of(error)))

    def answer(self, results: Sequence[Collected]) -> dict[str, Any]:
        result = results[0]
        said = self._said("".join(result.content), "".join(result.reasoning), result.calls)
        return self._line(said, done=True) | self._scores(result.logprobs) | self._end()

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

    def _line(self, said: dict[str, Any], *, done: bool) -> dict[str, Any]:
        return {"model": self._model, "created_at": now(), **said, "done": done}

    def _end(self) -> dict[str, Any]:
        choice, watch, ended = self._generation.choices[0], self._watch, time.perf_counter()
        begun = choice.begun or ended
        reason = str(choice.finish_reason)
        return {
            "done_reason": REASONS.get(reason, reason),
            **watch.durations(),
            "prompt_eval_count": self._generation.prompt_tokens,
            "prompt_eval_duration": nanoseconds(begun - watch.submitted),
            "eval_count": choice.completion_tokens,
            "eval_duration": nanoseconds(ended - begun),
        }

    def _scores(self, entries: Sequence[tuple[TokenLogprob, int]]) -> dict[str, Any]:
        if not self._logprobs:
            return {}
        found = [
            {
                **self._score(entry.token, entry.logprob),
                "top_logprobs": [self._score(token, logprob) for token, logprob in entry.top],
            }
            for entry, _ in entries
        ]
        return {"logprobs": found}

    def _score(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self._generation.served.vocabulary.spell(token)
        text = spelled.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(spelled)}


class ChatLines(LineWriter):
    def _said(self, content: str, thinking: str, calls: Sequence[CallDelta]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {"message": message}


class PromptLines(LineWriter):
    def _said(self, content: str, thinking: str, calls: Sequence[CallDelta]) -> dict[str, Any]:
        return {"response": content} | ({"thinking": thinking} if thinking else {})


def _call(call: CallDelta) -> dict[str, Any]:
    function = {"index": call.index, "name": call.name, "arguments": read_arguments(call.arguments)}
    return {"id": call.id, "function": function}


def _dumps(line: dict[str, Any]) -> bytes:
    return one_line(line) + b"\n"
