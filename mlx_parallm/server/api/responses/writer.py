"""How a response is written: the object itself, and the numbered events of a stream."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from mlx_parallm.errors import ParallmError, QueueFullError
from mlx_parallm.server.api.responses.bodies import ENCRYPTED, ResponseBody
from mlx_parallm.server.api.responses.output import OutputBuilder
from mlx_parallm.server.api.responses.response_types import (
    IncompleteDetails,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from mlx_parallm.server.api.responses.tools import ToolChoiceBody
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate, Collected
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.generation.responses import one_line
from mlx_parallm.server.generation.token_logprobs import TokenLogprobs, token_logprobs
from mlx_parallm.server.http.schema import Body
from mlx_parallm.text.parsers.calls import Piece
from mlx_parallm.types import TokenLogprob

ABORTED = ResponseFailure(code="server_error", message="the server was told to stop what it was generating")


class ResponsesWriter:
    """Writes one response. `keep` is given the response when it has ended."""

    ending = b""
    media_type = b"text/event-stream; charset=utf-8"

    def __init__(
        self, body: ResponseBody, generation: Generation, keep: Callable[[ResponseObject], None], *, stores: bool
    ) -> None:
        self._generation = generation
        self._logprobs = body.wants_logprobs
        self._keep = keep
        self._pending: list[bytes] = []
        self._number = 2  # of the next event: the first two open the stream, when some others are written already
        self._builder = OutputBuilder(body.tool_use, self._emit, encoded_reasoning=ENCRYPTED in body.include)
        self._start = _envelope(body, generation, stores)
        self._final: ResponseObject | None = None

    @property
    def id(self) -> str:
        return str(self._start["id"])

    def in_progress(self) -> ResponseObject:
        return self._start.copy()

    def opening(self) -> bytes:
        return _event("response.created", 0, response=self._start) + _event(
            "response.in_progress", 1, response=self._start
        )

    def chunk(self, choice: ChoiceStream, update: ChoiceUpdate) -> bytes:
        self._builder.add(update.piece, self._scores(update.logprobs))
        return self._taken()

    def finish(self, error: ParallmError | None = None) -> ResponseObject:
        """The response as it ends, which `keep` has been given; once."""
        if self._final is None:
            self._final = self.ended() if error is None else self.failed(error)
        return self._final

    def closing(self) -> bytes:
        response = self.finish()
        self._emit(f"response.{response['status']}", response=response)
        return self._taken()

    def failure(self, error: ParallmError) -> bytes:
        self._emit("response.failed", response=self.finish(error))
        return self._taken()

    def answer(self, results: Sequence[Collected]) -> ResponseObject:
        [result] = results
        piece = Piece("".join(result.content), "".join(result.reasoning), tuple(result.calls))
        reasoned = self._generation.choices[0].reasoning_tokens
        self._builder.add(piece, self._scores(result.logprobs[reasoned:]))
        return self.finish()

    def ended(self) -> ResponseObject:
        """The response when all has been generated."""
        reason = self._generation.choices[0].finish_reason
        complete = reason not in ("length", "abort")
        self._builder.finish("completed" if complete else "incomplete")
        response = self._start.copy()
        response["output"] = self._builder.items
        response["usage"] = self._usage()
        if complete:
            response["status"] = "completed"
            response["completed_at"] = int(time.time())
        elif reason == "length":
            response["status"] = "incomplete"
            response["incomplete_details"] = IncompleteDetails(reason="max_output_tokens")
        else:
            response["status"] = "failed"
            response["error"] = ABORTED
        self._keep(response)
        return response

    def failed(self, error: ParallmError) -> ResponseObject:
        code = "rate_limit_exceeded" if isinstance(error, QueueFullError) else error.code or "server_error"
        response = self._start.copy()
        response["status"] = "failed"
        response["error"] = ResponseFailure(code=code, message=error.message)
        response["output"] = self._builder.items
        self._keep(response)
        return response

    def cancelled(self) -> ResponseObject:
        response = self._start.copy()
        response["status"] = "cancelled"
        self._keep(response)
        return response

    def _emit(self, kind: str, **fields: Any) -> None:
        self._pending.append(_event(kind, self._number, **fields))
        self._number += 1

    def _taken(self) -> bytes:
        data = b"".join(self._pending)
        self._pending.clear()
        return data

    def _usage(self) -> ResponseUsage:
        [choice] = self._generation.choices
        prompt = self._generation.prompt_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": choice.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": prompt + choice.completion_tokens,
        }

    def _scores(self, entries: Sequence[tuple[TokenLogprob, int]]) -> list[TokenLogprobs]:
        if not self._logprobs:
            return []
        vocabulary = self._generation.served.vocabulary
        return [token_logprobs(vocabulary, entry) for entry, _ in entries]


def _event(kind: str, number: int, **fields: Any) -> bytes:
    content = one_line({"type": kind, "sequence_number": number, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + content + b"\n\n"


def _envelope(body: ResponseBody, generation: Generation, stores: bool) -> ResponseObject:
    """The response before anything has been generated: mostly what was asked for."""
    text = body.text
    reasoning = body.reasoning
    shape = _plain(text.format) if text and text.format else {"type": "text"}
    chosen = body.tool_choice
    sampling = generation.call.sampling
    return {
        "id": generation.completion_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": body.background,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "model": generation.served.name if body.model == "default" else body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": stores,
        "temperature": sampling.temperature,
        "text": {"format": shape, "verbosity": (text and text.verbosity) or "medium"},
        "tool_choice": _plain(chosen) if isinstance(chosen, ToolChoiceBody) else chosen or "auto",
        "tools": [_plain(tool) for tool in body.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user,
    }


def _plain(body: Body) -> dict[str, Any]:
    """Returns a body as it was sent."""
    return body.model_dump(exclude_unset=True, by_alias=True)
