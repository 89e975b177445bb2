"""Ollama's shape of errors."""

from mlx_parallm.server.api.ollama.response_types import OllamaError
from mlx_parallm.server.http.error_shapes import ErrorShape, Failure


def ollama_error(failure: Failure, request_id: str = "") -> OllamaError:
    return OllamaError(error=failure.text)


OLLAMA = ErrorShape(ollama_error, OllamaError)
