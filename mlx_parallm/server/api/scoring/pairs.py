"""How well two texts fit: by a cross-encoder, which reads both together."""

from collections.abc import Sequence

import numpy as np
from starlette.requests import Request

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.scoring.labels import probabilities
from mlx_parallm.server.predictors import ServedPredictor
from mlx_parallm.server.text_inputs import Name, TextPair, Truncation, encode_texts
from mlx_parallm.server.tokenizers import TokenizerPool
from mlx_parallm.types import ClassifierInfo


async def score_pairs(
    model: ServedPredictor,
    pairs: Sequence[TextPair],
    pool: TokenizerPool,
    truncation: Truncation,
    name: Name,
    request: Request,
) -> tuple[list[float], int]:
    """A score for each pair, and how many tokens were read."""
    info = check_one_label(model, "rank texts")
    encoded = await encode_texts(model, pairs, pool, truncation, name)
    logits = np.stack(await model.predict([one.input for one in encoded], request))
    return probabilities(logits, info.activation)[:, 0].tolist(), sum(len(one.input.tokens) for one in encoded)


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
