"""Errors that users see, each with its HTTP status and OpenAI error type.

ParallmError                     500 server_error
├── InvalidRequestError          400 invalid_request_error
│   ├── ContextLengthError       400 code context_length_exceeded
│   ├── UnprocessableError       422
│   │   └── GrammarError         422 code grammar_failed: a grammar that went over its limits while it was followed
│   ├── ConflictError            409 what is asked for can't be, as things stand
│   └── PayloadTooLargeError     413
├── AuthenticationError          401 authentication_error
├── PermissionDeniedError        403 permission_error
├── NotFoundError                404 not_found_error
│   └── ModelNotFoundError       404 code model_not_found
├── QueueFullError               429 rate_limit_error, with Retry-After
│   └── RateLimitError           429 code rate_limit_exceeded: a key has used what it may
├── RequestTimeoutError          504 timeout_error
├── UnavailableError             503 the server drains, or its engine has died
│   └── RankLostError            503 a process that held a part of the model has ended
├── ModelLoadError               a model that can't be loaded: names the file, architecture or tensor type
│   └── MemoryLimitError         it does not fit into the memory that the process may hold
└── ConfigError                  a flag, variable or config key that is wrong
"""

from typing import ClassVar


class ParallmError(Exception):
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequestError(ParallmError):
    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    default_code = "context_length_exceeded"

    @classmethod
    def of(
        cls, context: int, prompt: int, asked: int | None = None, *, at_least: bool = False, param: str = "prompt"
    ) -> "ContextLengthError":
        """Makes the error in OpenAI's words, which clients know. `at_least`: the rest of the prompt was not counted."""
        words = "messages" if param == "messages" else "prompt"
        if asked is None:
            count = f"more than {prompt}" if at_least else str(prompt)
            found = f"your {words} resulted in {count} tokens, and the completion needs at least one more"
            remedy = f"the {words}"
        else:
            found = f"you requested {prompt + asked} tokens ({prompt} in the {words}, {asked} in the completion)"
            remedy = f"the {words} or completion"
        return cls(
            f"This model's maximum context length is {context} tokens. However, {found}. "
            f"Please reduce the length of {remedy}.",
            param=param,
        )


class UnprocessableError(InvalidRequestError):
    status = 422


class GrammarError(UnprocessableError):
    default_code = "grammar_failed"


class ConflictError(InvalidRequestError):
    status = 409


class PayloadTooLargeError(InvalidRequestError):
    status = 413
    default_code = "payload_too_large"


class AuthenticationError(ParallmError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class PermissionDeniedError(ParallmError):
    status = 403
    type = "permission_error"


class NotFoundError(ParallmError):
    status = 404
    type = "not_found_error"


class ModelNotFoundError(NotFoundError):
    default_code = "model_not_found"


class QueueFullError(ParallmError):
    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimitError(QueueFullError):
    default_code = "rate_limit_exceeded"


class RequestTimeoutError(ParallmError):
    status = 504
    type = "timeout_error"
    default_code = "request_timeout"


class UnavailableError(ParallmError):
    status = 503
    type = "service_unavailable"
    default_code = "unavailable"


class RankLostError(UnavailableError):
    pass


class ModelLoadError(ParallmError):
    pass


class MemoryLimitError(ModelLoadError):
    pass


class ConfigError(ParallmError):
    pass
