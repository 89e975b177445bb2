"""What Ollama's routes answer, for /docs and the tests. A stream's lines are the same objects, with `done` false."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from mlx_parallm.server.generation.token_logprobs import TokenLogprobs
from mlx_parallm.server.http.schema import Numbers, response_body


@response_body
class OllamaEnd(TypedDict, total=False):
    """What the end of a response tells. Times are in nanoseconds."""

    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: int
    load_duration: int
    prompt_eval_count: Annotated[int, Field(description="Tokens of the prompt, those of the cache included")]
    prompt_eval_duration: int
    eval_count: Annotated[int, Field(description="Tokens of the response")]
    eval_duration: int


@response_body
class OllamaResponse(OllamaEnd):
    model: str
    created_at: str
    done: bool
    logprobs: NotRequired[list[TokenLogprobs]]


@response_body
class OllamaCalledFunction(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


@response_body
class OllamaCall(TypedDict):
    id: str
    function: OllamaCalledFunction


@response_body
class OllamaSaid(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


@response_body
class OllamaChatResponse(OllamaResponse):
    message: OllamaSaid


@response_body
class OllamaGenerateResponse(OllamaResponse):
    response: str
    thinking: NotRequired[str]


@response_body
class OllamaEmbedResponse(TypedDict):
    model: str
    embeddings: list[Numbers]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


@response_body
class OllamaEmbeddingResponse(TypedDict):
    embedding: Numbers


@response_body
class OllamaDetails(TypedDict):
    parent_model: Annotated[str, Field(description="The base model, for an adapter")]
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


@response_body
class OllamaModel(TypedDict):
    name: str
    model: str
    size: Annotated[int, Field(description="Bytes of its weights")]
    digest: str
    details: OllamaDetails


@response_body
class OllamaListed(OllamaModel):
    modified_at: str


@response_body
class OllamaTags(TypedDict):
    models: list[OllamaListed]


@response_body
class OllamaRunning(OllamaModel):
    size_vram: int
    context_length: int
    expires_at: Annotated[str, Field(description="When it leaves memory if nobody asks for it; far away: never")]


@response_body
class OllamaProcesses(TypedDict):
    models: list[OllamaRunning]


@response_body
class OllamaShown(TypedDict):
    modelfile: str
    parameters: str
    template: Annotated[str, Field(description="The chat template, of a model that is loaded")]
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


@response_body
class OllamaVersion(TypedDict):
    version: Annotated[str, Field(description="Of Ollama's API")]


@response_body
class OllamaError(TypedDict):
    error: str
