"""Classifiers, reward models and rerankers over HTTP, in our own, vLLM's, Cohere's and Jina's shapes.

All of them score: a classifier's logits become probabilities, a reward is the logit of a model with one label, and a
reranker's is that of a pair.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.scoring.bodies import ClassifyBody, RerankBody, RewardBody, ScoreBody
from mlx_parallm.server.api.scoring.labels import add_classification, entities, probabilities
from mlx_parallm.server.api.scoring.response_types import (
    Classification,
    Classifications,
    Counted,
    RankedDocument,
    Ranking,
    Score,
    Scored,
)
from mlx_parallm.server.api.scoring.reward_route import RewardModels
from mlx_parallm.server.api.scoring.text_pairs import score_pairs
from mlx_parallm.server.auth.caller import current_caller
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.generation.text_inputs import EncodedText, encode_texts, numbered
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import router_of
from mlx_parallm.server.predictors import ServedPredictor
from mlx_parallm.types import ClassifierInfo, EmbeddingInfo, PredictorInfo

CLASSIFIERS = ("classifier", "reward")
RERANKERS = ("classifier", "reward", "embedding")


class ScoringRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._rewards = RewardModels(context)

    async def classify(self, body: ClassifyBody, request: Request) -> Response:
        """The label of each text and the probabilities of all; of a model for token classification, the entities."""
        name = self._first(body.model, _classifies)
        async with self._context.predictors.use(name, *CLASSIFIERS, request=request) as model:
            assert isinstance(model.info, ClassifierInfo)
            texts = body.texts
            _check_forms(model.info, texts)
            named = numbered(body.field, len(texts))
            encoded = await encode_texts(
                model, texts, self._context.tokenizers, body.truncation(), named, offsets=model.info.per_token
            )
            outputs = await model.predict([one.input for one in encoded], request)
            data = [
                _classified(model, place, logits, one, body)
                for place, (logits, one) in enumerate(zip(outputs, encoded, strict=True))
            ]
            counted = _counted("classify", model.name, sum(len(one.input.tokens) for one in encoded))
            return JSONResponse(Classifications(data=data, **counted))

    async def reward(self, body: RewardBody, request: Request) -> Response:
        """A number for each text or conversation: how good the reward model thinks it is."""
        name, scores, count = await self._rewards.score(body, request)
        return JSONResponse(_scored(name, "reward", scores, count))

    async def score(self, body: ScoreBody, request: Request) -> Response:
        """Returns how well two texts fit, by a cross-encoder or by the cosine of embeddings. With `input` or `messages`
        in place of two texts, it is /v1/rewards/score."""
        if not body.compares:
            return await self.reward(body, request)
        name = self._first(body.model, _compares, _embeds)
        async with self._context.predictors.use(name, *RERANKERS, request=request) as model:
            scores, count = await score_pairs(
                model,
                body.pairs,
                self._context.tokenizers,
                body.truncation(),
                (numbered("text_1", len(body.text_1 or ())), numbered("text_2", len(body.pairs))),
                request,
            )
            return JSONResponse(_scored(model.name, "score", scores, count))

    async def rerank(self, body: RerankBody, request: Request) -> Response:
        """The documents that a cross-encoder or an embedding model finds most relevant to the query, the best first."""
        return await self._rerank(body, request, "1")

    async def rerank_v2(self, body: RerankBody, request: Request) -> Response:
        """Does the same as /v1/rerank; documents come back only with `return_documents`."""
        return await self._rerank(body, request, "2")

    async def _rerank(self, body: RerankBody, request: Request, version: Literal["1", "2"]) -> Response:
        name = self._first(body.model, _compares, _embeds)
        async with self._context.predictors.use(name, *RERANKERS, request=request) as model:
            truncation = body.truncation(second=body.max_tokens_per_doc)
            names = (lambda place: "query"), (lambda place: f"documents.{place}")
            scores, count = await score_pairs(model, body.pairs, self._context.tokenizers, truncation, names, request)
            with_documents = version == "1" if body.return_documents is None else body.return_documents
            order = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
            results = [RankedDocument(index=place, relevance_score=scores[place]) for place in order]
            for result in results if with_documents else ():
                result["document"] = body.documents[result["index"]].model_dump()
            ranking: Ranking = {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": model.name,
                "results": results,
                "usage": {"prompt_tokens": count, "total_tokens": count},
                "meta": {
                    "api_version": {"version": version},
                    "billed_units": {"search_units": 1},
                    "tokens": {"input_tokens": count},
                },
            }
            return JSONResponse(ranking)

    def _first(self, name: str | None, *suitable: Callable[[PredictorInfo], bool]) -> str | None:
        """Returns the name or, without one, the first model that suits, by the first test that any passes; None where
        there is none."""
        if name not in (None, "default"):
            return name
        caller = current_caller.get()
        clients = self._context.runtime.predictors
        loaded = [(one, client.info) for one, client in clients.items() if caller.may_use_model(one)]
        return next((one for suits in suitable for one, info in loaded if suits(info)), None)


def _classifies(info: PredictorInfo) -> bool:
    return isinstance(info, ClassifierInfo)


def _compares(info: PredictorInfo) -> bool:
    return isinstance(info, ClassifierInfo) and len(info.labels) == 1 and not info.per_token


def _embeds(info: PredictorInfo) -> bool:
    return isinstance(info, EmbeddingInfo)


def _check_forms(info: ClassifierInfo, texts: Sequence[Any]) -> None:
    """Checks the inputs of a model that labels tokens: where an entity stands can be said of a plain text alone."""
    plain = (isinstance(text, str) or (isinstance(text, list) and isinstance(text[0], int)) for text in texts)
    if info.per_token and not all(plain):
        raise InvalidRequestError(
            "this model labels tokens: it takes texts or token ids, no pairs or conversations", param="input"
        )


def _classified(
    model: ServedPredictor, place: int, logits: Any, found: EncodedText, body: ClassifyBody
) -> Classification:
    info = model.info
    assert isinstance(info, ClassifierInfo)
    result = Classification(index=place, object="classification", num_classes=len(info.labels))
    values = probabilities(logits, info.activation if body.use_activation else "identity")
    if info.per_token:
        result["entities"] = entities(info, values, found, model.tokenizer, body.aggregation == "simple")
    else:
        add_classification(info, values, result)
    return result


def _scored(model: str, kind: Literal["reward", "score"], scores: Sequence[float], count: int) -> Scored:
    data = [Score(index=place, object=kind, score=score) for place, score in enumerate(scores)]
    return {**_counted("score", model, count), "data": data}


def _counted(prefix: str, model: str, count: int) -> Counted:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


CLASSIFY = ScoringRoutes.classify, Classifications
REWARD = ScoringRoutes.reward, Scored
ROUTES = (
    Route("/v1/classifications", "POST", *CLASSIFY, "Classify texts"),
    Route("/classify", "POST", *CLASSIFY, "Classify texts, as vLLM"),
    Route("/v1/rewards/score", "POST", *REWARD, "Score texts with a reward model"),
    Route("/pooling", "POST", *REWARD, "Score texts with a reward model, as vLLM"),
    Route("/v1/pool", "POST", *REWARD, "Score texts with a reward model, as vLLM"),
    Route("/v1/score", "POST", ScoringRoutes.score, Scored, "Score pairs of texts, or texts with a reward model"),
    Route("/score", "POST", ScoringRoutes.score, Scored, "Score pairs of texts, as vLLM"),
    Route("/v1/rerank", "POST", ScoringRoutes.rerank, Ranking, "Rank documents by a query"),
    Route("/rerank", "POST", ScoringRoutes.rerank, Ranking, "Rank documents by a query"),
    Route(
        "/v2/rerank", "POST", ScoringRoutes.rerank_v2, Ranking, "Rank documents by a query, as Cohere's second version"
    ),
)


def router(context: ServerContext) -> APIRouter:
    return router_of("Classify and rank", ROUTES, ScoringRoutes(context))
