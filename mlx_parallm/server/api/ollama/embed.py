"""`/api/embed`, and `/api/embeddings` as it was before."""

import time
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.sampling_params import INT64
from mlx_parallm.server.api.ollama.bodies import NamedModelBody
from mlx_parallm.server.api.ollama.durations import KeepAlive
from mlx_parallm.server.api.ollama.names import ModelNames
from mlx_parallm.server.api.ollama.response_types import OllamaEmbeddingResponse, OllamaEmbedResponse
from mlx_parallm.server.api.ollama.writer import nanoseconds
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.embedding_vectors import Vector, check_dimensions, cut, normalised, prompt_text
from mlx_parallm.server.generation.text_inputs import MAX_INPUTS, WHOLE_CONTEXT, Truncation, encode_texts, numbered
from mlx_parallm.server.http.http_errors import TensorJSONResponse
from mlx_parallm.server.predictors import ServedPredictor
from mlx_parallm.types import EmbeddingInfo


def _read_texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("input", "Expected a text or a list of texts")
    if len(texts) > MAX_INPUTS:
        raise PydanticCustomError("input", f"At most {MAX_INPUTS} texts fit in one request")
    return texts


Texts = Annotated[list[str], PlainValidator(_read_texts, json_schema_input_type=str | list[str])]


class OllamaEmbeddingBody(NamedModelBody):
    """What both routes take."""

    truncate: bool = Field(True, description="Cut texts that are too long at their end; false: refuse them")
    dimensions: int | None = Field(None, ge=1, le=INT64, description="Keep so many numbers, where the model can")
    options: dict[str, Any] = Field(default_factory=dict, description="Accepted: none is about embeddings")
    keep_alive: KeepAlive | None = Field(None, description="How long the model stays in memory afterwards")


class OllamaEmbedBody(OllamaEmbeddingBody):
    model_config = ConfigDict(
        json_schema_extra={"example": {"model": "all-MiniLM-L6-v2", "input": ["The food was delicious."]}}
    )
    input: Texts = Field(description=f"A text, or up to {MAX_INPUTS}")


class OllamaEmbeddingsBody(OllamaEmbeddingBody):
    model_config = ConfigDict(
        json_schema_extra={"example": {"model": "all-MiniLM-L6-v2", "prompt": "The food was delicious."}}
    )
    prompt: str


class OllamaEmbeddings:
    def __init__(self, context: ServerContext, names: ModelNames) -> None:
        self._predictors = context.predictors
        self._tokenizers = context.tokenizers
        self._names = names

    async def embed(self, body: OllamaEmbedBody, request: Request) -> Response:
        """A vector of length 1 for each text."""
        begun = time.perf_counter()
        vectors, loaded, tokens = await self._vectors(body, body.input, request, "input")
        answer = OllamaEmbedResponse(
            model=body.model,
            embeddings=[normalised(vector) for vector in vectors],
            total_duration=nanoseconds(time.perf_counter() - begun),
            load_duration=nanoseconds(loaded - begun),
            prompt_eval_count=tokens,
        )
        return TensorJSONResponse(answer)

    async def embeddings(self, body: OllamaEmbeddingsBody, request: Request) -> Response:
        """The vector of one text, as the model gives it. Ollama has replaced this route by `/api/embed`."""
        vectors, _, _ = await self._vectors(body, [body.prompt], request, "prompt")
        return TensorJSONResponse(OllamaEmbeddingResponse(embedding=vectors[0]))

    async def _vectors(
        self, body: OllamaEmbeddingBody, texts: list[str], request: Request, field: str
    ) -> tuple[list[Vector], float, int]:
        """Returns the texts' vectors, the time at which the model was there, and the number of tokens of all texts."""
        async with self._predictors.use(self._names.own(body.model), "embedding", request=request) as model:
            loaded = time.perf_counter()
            self._names.keep_alive(model.name, body.keep_alive, request)
            assert isinstance(model.info, EmbeddingInfo)
            check_dimensions(body.dimensions, model.info)
            inputs = await self._tokens(model, model.info, texts, body.truncate, field)
            found = await model.predict(inputs, request) if inputs else []
        vectors = [np.ascontiguousarray(cut(vector, body.dimensions)) for vector in found]
        return vectors, loaded, sum(map(len, inputs))

    async def _tokens(
        self, model: ServedPredictor, info: EmbeddingInfo, texts: list[str], truncate: bool, field: str
    ) -> list[list[int]]:
        prompt = prompt_text(None, info)
        truncation = Truncation(WHOLE_CONTEXT if truncate else None)
        named = numbered(field, len(texts))
        encoded = await encode_texts(model, [prompt + text for text in texts], self._tokenizers, truncation, named)
        return [list(one.input.tokens) for one in encoded]
