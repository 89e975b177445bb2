"""Ollama's shape of errors."""

from typing import Any

from mlx_parallm.server.api.ollama.answers import OllamaError
from mlx_parallm.server.http.error_shapes import ErrorShape, Failure


def ollama_error(failure: Failure, request_id: str = "") -> dict[str, Any]:
    return {"error": failure.text}


OLLAMA = ErrorShape(ollama_error, OllamaError)
