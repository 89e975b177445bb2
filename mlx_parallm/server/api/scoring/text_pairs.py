"""How well two texts fit: by a cross-encoder, which reads both together, or by the cosine of their embeddings."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from starlette.requests import Request

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.scoring.labels import probabilities
from mlx_parallm.server.generation.text_inputs import Name, TextPair, Truncation, encode_texts
from mlx_parallm.server.generation.tokenizers import TokenizerPool
from mlx_parallm.server.predictors import ServedPredictor
from mlx_parallm.types import ClassifierInfo, EmbeddingInfo

# names that sentence-transformers looks for
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage")


async def score_pairs(
    model: ServedPredictor,
    pairs: Sequence[TextPair],
    pool: TokenizerPool,
    truncation: Truncation,
    names: tuple[Name, Name],
    request: Request,
) -> tuple[list[float], int]:
    """A score for each pair, and how many tokens were read. `names`: what errors call the first and the second texts;
    a pair as a whole is called as its second."""
    if isinstance(model.info, EmbeddingInfo):
        return await _cosines(model, model.info, pairs, pool, truncation, names, request)
    info = check_one_label(model, "rank texts")
    encoded = await encode_texts(model, pairs, pool, truncation, names[1])
    logits = np.stack(await model.predict([one.input for one in encoded], request))
    return probabilities(logits, info.activation)[:, 0].tolist(), sum(len(one.input.tokens) for one in encoded)


async def _cosines(
    model: ServedPredictor,
    info: EmbeddingInfo,
    pairs: Sequence[TextPair],
    pool: TokenizerPool,
    truncation: Truncation,
    names: tuple[Name, Name],
    request: Request,
) -> tuple[list[float], int]:
    """Each text is embedded once, with the model's prompt for queries or documents."""
    inputs: list[list[int]] = []
    places: list[dict[str, int]] = []
    documents = replace(truncation, alone=truncation.second)
    for texts, prompts, cut, name in (
        ([pair.text for pair in pairs], QUERY_PROMPTS, truncation, names[0]),
        ([pair.text_pair or "" for pair in pairs], DOCUMENT_PROMPTS, documents, names[1]),
    ):
        prompt = next((info.prompts[one] for one in (*prompts, info.default_prompt) if one in info.prompts), "")
        different = {text: place for place, text in reversed(list(enumerate(texts)))}  # where each stands first
        named = [name(place) for place in different.values()]
        encoded = await encode_texts(model, [prompt + text for text in different], pool, cut, named.__getitem__)
        places.append({text: len(inputs) + number for number, text in enumerate(different)})
        inputs += [list(one.input.tokens) for one in encoded]
    vectors = np.stack(await model.predict(inputs, request)).astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    firsts = vectors[[places[0][pair.text] for pair in pairs]]
    seconds = vectors[[places[1][pair.text_pair or ""] for pair in pairs]]
    return np.sum(firsts * seconds, axis=1).tolist(), sum(map(len, inputs))


def check_one_label(model: ServedPredictor, purpose: str) -> ClassifierInfo:
    """A number for each text is what a model with one label gives."""
    info = model.info
    assert isinstance(info, ClassifierInfo)
    if info.per_token:
        raise InvalidRequestError(f"{model.name} labels tokens, and can't {purpose}", param="model")
    if len(info.labels) != 1:
        raise InvalidRequestError(
            f"{model.name} has {len(info.labels)} labels, and a model with one is needed to {purpose}", param="model"
        )
    return info
