"""How an error is written: OpenAI's shape, or that of the dialect whose route it answers.

Routes and middleware answer with `errors.ErrorResponse`, which asks the request's route when it is sent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_parallm.errors import ParallmError
from mlx_parallm.server.http.schema import Error, ErrorDetail


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


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """A dialect's."""

    body: Callable[[Failure, str], Mapping[str, Any]]  # of what is wrong and the request's id
    model: Any  # the type of that body
    named_events: bool = False  # an error within a stream is an event of that name
    id_header: str | None = None  # where its clients look for the request's id beside X-Request-Id


def openai_error(failure: Failure, request_id: str = "") -> Error:
    return Error(error=ErrorDetail(message=failure.message, type=failure.type, param=failure.param, code=failure.code))


OPENAI = ErrorShape(openai_error, Error)
