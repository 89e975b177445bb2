"""Anthropic's shape of errors."""

from mlx_parallm.server.api.anthropic.response_types import AnthropicError, AnthropicErrorDetail
from mlx_parallm.server.http.error_shapes import ErrorShape, Failure

# Anthropic's names for kinds of errors, by the status that they come with.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(failure: Failure, request_id: str) -> AnthropicError:
    kind = TYPES.get(failure.status, "api_error" if failure.status >= 500 else "invalid_request_error")
    message = failure.text
    if failure.code == "context_length_exceeded":  # clients look for these words, and shorten the conversation
        message = f"prompt is too long: {failure.message}"
    detail = AnthropicErrorDetail(type=kind, message=message)
    return AnthropicError(type="error", error=detail, request_id=request_id)


ANTHROPIC = ErrorShape(anthropic_error, AnthropicError, named_events=True, id_header="request-id")
