"""Answers of the routes that classify, score and rank."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from mlx_parallm.server.http.schema import AnswerBody

USAGE: dict[str, Any] = {"prompt_tokens": 14, "total_tokens": 14}


class ScoreUsage(AnswerBody):
    prompt_tokens: int
    total_tokens: int


class Entity(AnswerBody):
    label: str = Field(description="Of whole entities without B- and I-")
    score: float
    word: str
    start: int | None = Field(description="Its first character; null where the input came as token ids")
    end: int | None = Field(description="The character behind its last")
    index: int | None = Field(None, description="Of a single token: its place among the input's")


class Classification(AnswerBody):
    index: int
    object: Literal["classification"]
    num_classes: int
    label: str | None = Field(None, description="The likeliest; none of token classification")
    score: float | None = Field(None, description="The likeliest label's")
    probs: list[float] | None = Field(None, description="In the order of the labels; of regression, the values")
    probabilities: dict[str, float] | None = Field(None, description="The same by label")
    labels: list[str] | None = Field(None, description="Of a multi-label model: those over one half")
    entities: list[Entity] | None = Field(None, description="Of token classification")


class Classifications(AnswerBody):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "classify-3a62c1dcd7e84f6ab1d1a5bd0c5ee4cf",
                "object": "list",
                "created": 1794837180,
                "model": "sentiment",
                "data": [
                    {
                        "index": 0,
                        "object": "classification",
                        "num_classes": 2,
                        "label": "positive",
                        "score": 0.98,
                        "probs": [0.02, 0.98],
                        "probabilities": {"negative": 0.02, "positive": 0.98},
                    }
                ],
                "usage": USAGE,
            }
        }
    )
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: ScoreUsage


class Score(AnswerBody):
    index: int
    object: Literal["reward", "score"] = Field(description="A reward of one input, or a score of two texts")
    score: float


class Scored(AnswerBody):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: ScoreUsage


class RankedDocument(AnswerBody):
    index: int = Field(description="Its place in the request")
    relevance_score: float
    document: dict[str, Any] | None = None


class Ranking(AnswerBody):
    """What Cohere and Jina answer, in one."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "rerank-3a62c1dcd7e84f6ab1d1a5bd0c5ee4cf",
                "model": "reranker",
                "results": [{"index": 1, "relevance_score": 0.97, "document": {"text": "In Italy."}}],
                "usage": USAGE,
                "meta": {
                    "api_version": {"version": "1"},
                    "billed_units": {"search_units": 1},
                    "tokens": {"input_tokens": 14},
                },
            }
        }
    )
    id: str
    model: str
    results: list[RankedDocument] = Field(description="The most relevant first")
    usage: ScoreUsage
    meta: dict[str, Any]
