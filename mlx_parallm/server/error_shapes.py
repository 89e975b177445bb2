"""How an error is written, by the dialect of the path that it answers: OpenAI's shape, Anthropic's or Ollama's.

Routes and middleware answer with `errors.ErrorResponse`, which asks here when it is sent; the writers of streams ask
for the shape of their dialect. A path that no other dialect has is OpenAI's.
"""

from dataclasses import dataclass
from typing import Any

from mlx_parallm.errors import ParallmError

ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PREFIX = "/api/"
# Anthropic's names for kinds of errors, by the status that they come with.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """What is wrong, in no dialect."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: ParallmError) -> "Failure":
        return cls(error.status, error.type, error.message, error.param, error.code)

    @property
    def text(self) -> str:
        """The message with the field that is wrong, for shapes that have no place of its own for that."""
        named = self.param is None or self.param in self.message
        return self.message if named else f"{self.param}: {self.message}"


def is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def error_body(failure: Failure, path: str, request_id: str) -> dict[str, Any]:
    """In the dialect that the path belongs to."""
    if is_anthropic(path):
        return anthropic_error(failure, request_id)
    return ollama_error(failure) if path.startswith(OLLAMA_PREFIX) else openai_error(failure)


def openai_error(failure: Failure) -> dict[str, Any]:
    fields = {"message": failure.message, "type": failure.type, "param": failure.param, "code": failure.code}
    return {"error": fields}


def anthropic_error(failure: Failure, request_id: str) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(failure.status, "api_error" if failure.status >= 500 else "invalid_request_error")
    message = failure.text
    if failure.code == "context_length_exceeded":  # clients look for these words, and shorten the conversation
        message = f"prompt is too long: {failure.message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def ollama_error(failure: Failure) -> dict[str, Any]:
    return {"error": failure.text}
