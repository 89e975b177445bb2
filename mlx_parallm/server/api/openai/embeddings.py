"""`/v1/embeddings`: texts or token ids to vectors."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import orjson
from pydantic import ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.sampling_params import INT64
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.embedding_vectors import Vector, check_dimensions, cut, prompt_text
from mlx_parallm.server.generation.text_inputs import MAX_INPUTS, TruncationBody, encode_texts, numbered
from mlx_parallm.server.http.schema import Numbers, read_prompts, response_body
from mlx_parallm.server.predictors import ServedPredictor
from mlx_parallm.types import EmbeddingInfo

MANY_NUMBERS = 1 << 16  # from here on a response is written off the event loop; a millisecond or two

Vectors = Sequence[Vector]


def _read_input(value: Any) -> list[str] | list[list[int]]:
    inputs = read_prompts(value, MAX_INPUTS)
    if "" in inputs:
        raise PydanticCustomError("input", "An input must not be empty")
    return inputs


EmbeddingTexts = Annotated[
    list[str] | list[list[int]],
    PlainValidator(_read_input, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class EmbeddingBody(TruncationBody):
    """Texts to embed."""

    model_config = ConfigDict(json_schema_extra={"example": {"input": ["The food was delicious.", "It tasted great."]}})
    api_fields: ClassVar = frozenset("user".split())
    model: str | None = Field(None, description="Default: the first embedding model")
    input: EmbeddingTexts = Field(description=f"A text, its token ids, or a list of up to {MAX_INPUTS} of either")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: of the numbers as little-endian float32"
    )
    dimensions: int | None = Field(
        None, ge=1, le=INT64, description="Keep so many numbers of each vector, where the model was trained for it"
    )
    prompt_name: str | None = Field(None, description="Put this prompt of the model's before each text")
    user: str | None = Field(None, description="Ignored")


@response_body
class EmbeddingItem(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: Numbers | str


@response_body
class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


@response_body
class EmbeddingResponse(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class EmbeddingRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._predictors = context.predictors
        self._tokenizers = context.tokenizers

    async def embed(self, body: EmbeddingBody, request: Request) -> Response:
        """A vector for each input, of the model's full size or cut to `dimensions`."""
        async with self._predictors.use(body.model, "embedding", request=request) as model:
            info = model.info
            assert isinstance(info, EmbeddingInfo)
            check_dimensions(body.dimensions, info)
            inputs = await self._tokens(body, model, info)
            vectors = await model.predict(inputs, request)
        count = sum(map(len, inputs))
        usage = EmbeddingUsage(prompt_tokens=count, total_tokens=count)

        def write() -> bytes:
            sized = [cut(vector, body.dimensions) for vector in vectors]
            items = _items(sized, body.encoding_format == "base64")
            answer = EmbeddingResponse(object="list", data=items, model=model.name, usage=usage)
            return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)

        many = len(vectors) * info.dimensions > MANY_NUMBERS
        return Response(await self._tokenizers.run(write) if many else write(), media_type="application/json")

    async def _tokens(self, body: EmbeddingBody, model: ServedPredictor, info: EmbeddingInfo) -> list[list[int]]:
        """Token ids of each input that the model knows, and that fit it."""
        prompt = prompt_text(body.prompt_name, info)
        if body.prompt_name is not None and not isinstance(body.input[0], str):
            raise InvalidRequestError("prompt_name is for texts, and the input is token ids", param="prompt_name")
        texts = [prompt + item if isinstance(item, str) else item for item in body.input]
        named = numbered("input", len(texts))
        encoded = await encode_texts(model, texts, self._tokenizers, body.truncation(), named)
        return [list(one.input.tokens) for one in encoded]


def _items(vectors: Vectors, as_base64: bool) -> list[EmbeddingItem]:
    def written(vector: Vector) -> Vector | str:
        if not as_base64:
            return np.ascontiguousarray(vector)
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()

    return [
        EmbeddingItem(object="embedding", index=index, embedding=written(vector))
        for index, vector in enumerate(vectors)
    ]
