"""What Ollama's routes answer, for /docs and the tests. A stream's lines are the same objects, with `done` false."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from mlx_parallm.server.http.schema import AnswerBody

TIMES: dict[str, Any] = {
    "done_reason": "stop",
    "total_duration": 411000000,
    "load_duration": 20000,
    "prompt_eval_count": 37,
    "prompt_eval_duration": 180000000,
    "eval_count": 8,
    "eval_duration": 230000000,
}
CREATED = {"model": "SmolLM2-135M-Instruct", "created_at": "2026-11-17T10:00:00.000000Z"}
DETAILS: dict[str, Any] = {
    "parent_model": "",
    "format": "safetensors",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "",
    "quantization_level": "bfloat16",
}
LISTED_MODEL: dict[str, Any] = {
    "name": "SmolLM2-135M-Instruct:latest",
    "model": "SmolLM2-135M-Instruct:latest",
    "size": 269060552,
    "digest": "5f1c4a0e7bb1f6f3c3f5d0f0a1f6b6a1d9d0f0a1f6b6a1d9d0f0a1f6b6a1d9d0",
    "details": DETAILS,
}


class OllamaScore(AnswerBody):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaScore):
    top_logprobs: list[OllamaScore]


class OllamaAnswer(AnswerBody):
    """Times are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = Field(None, description="Tokens of the prompt, those of the cache included")
    prompt_eval_duration: int | None = None
    eval_count: int | None = Field(None, description="Tokens of the answer")
    eval_duration: int | None = None
    logprobs: list[OllamaLogprob] | None = None


class OllamaCalledFunction(AnswerBody):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(AnswerBody):
    id: str
    function: OllamaCalledFunction


class OllamaSaid(AnswerBody):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaChatAnswer(OllamaAnswer):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                **CREATED,
                "message": {"role": "assistant", "content": "The capital of France is Paris."},
                "done": True,
                **TIMES,
            }
        }
    )
    message: OllamaSaid


class OllamaGenerateAnswer(OllamaAnswer):
    model_config = ConfigDict(
        json_schema_extra={"example": {**CREATED, "response": "Because of its air.", "done": True, **TIMES}}
    )
    response: str
    thinking: str | None = None


class OllamaEmbedAnswer(AnswerBody):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": "all-MiniLM-L6-v2",
                "embeddings": [[0.0123, -0.0456, 0.0789]],
                "total_duration": 14000000,
                "load_duration": 10000,
                "prompt_eval_count": 7,
            }
        }
    )
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingAnswer(AnswerBody):
    model_config = ConfigDict(json_schema_extra={"example": {"embedding": [0.0123, -0.0456, 0.0789]}})
    embedding: list[float]


class OllamaDetails(AnswerBody):
    parent_model: str = Field(description="The base model, for an adapter")
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaListed(AnswerBody):
    name: str
    model: str
    modified_at: str
    size: int = Field(description="Bytes of its weights")
    digest: str
    details: OllamaDetails


class OllamaTags(AnswerBody):
    model_config = ConfigDict(
        json_schema_extra={"example": {"models": [{**LISTED_MODEL, "modified_at": "2026-11-17T10:00:00Z"}]}}
    )
    models: list[OllamaListed]


class OllamaRunning(AnswerBody):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    size_vram: int
    context_length: int
    expires_at: str = Field(description="When it leaves memory if nobody asks for it; far away: never")


class OllamaProcesses(AnswerBody):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "models": [
                    {
                        **LISTED_MODEL,
                        "size_vram": 269060552,
                        "context_length": 8192,
                        "expires_at": "2026-11-17T10:05:00Z",
                    }
                ]
            }
        }
    )
    models: list[OllamaRunning]


class OllamaShown(AnswerBody):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "modelfile": "FROM models/SmolLM2-135M-Instruct",
                "parameters": "",
                "template": "{% for message in messages %}…{% endfor %}",
                "details": DETAILS,
                "model_info": {
                    "general.architecture": "llama",
                    "general.basename": "SmolLM2-135M-Instruct",
                    "llama.context_length": 8192,
                },
                "capabilities": ["completion", "tools"],
                "modified_at": "2026-11-17T10:00:00Z",
            }
        }
    )
    modelfile: str
    parameters: str
    template: str = Field(description="The chat template, of a model that is loaded")
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(AnswerBody):
    model_config = ConfigDict(json_schema_extra={"example": {"version": "0.12.6"}})
    version: str = Field(description="Of Ollama's API")


class OllamaError(AnswerBody):
    model_config = ConfigDict(json_schema_extra={"example": {"error": "model: Field required"}})
    error: str
