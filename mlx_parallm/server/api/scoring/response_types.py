"""Responses of the routes that classify, score and rank."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from mlx_parallm.server.http.schema import response_body

USAGE: dict[str, Any] = {"prompt_tokens": 14, "total_tokens": 14}


@response_body
class ScoreUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


@response_body
class Entity(TypedDict):
    label: Annotated[str, Field(description="Of whole entities without B- and I-")]
    score: float
    word: str
    start: Annotated[int | None, Field(description="Its first character; null where the input came as token ids")]
    end: Annotated[int | None, Field(description="The character behind its last")]
    index: NotRequired[Annotated[int, Field(description="Of a single token: its place among the input's")]]


@response_body
class Labels(TypedDict, total=False):
    label: Annotated[str, Field(description="The likeliest; none of token classification")]
    score: Annotated[float, Field(description="The likeliest label's")]
    probs: Annotated[list[float], Field(description="In the order of the labels; of regression, the values")]
    probabilities: Annotated[dict[str, float], Field(description="The same by label")]
    labels: Annotated[list[str], Field(description="Of a multi-label model: those over one half")]
    entities: Annotated[list[Entity], Field(description="Of token classification")]


@response_body
class Classification(Labels):
    index: int
    object: Literal["classification"]
    num_classes: int


@response_body
class Counted(TypedDict):
    """What every list of scores has."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: ScoreUsage


@response_body
class Classifications(Counted):
    data: list[Classification]


@response_body
class Score(TypedDict):
    index: int
    object: Annotated[Literal["reward", "score"], Field(description="A reward of one input, or a score of two texts")]
    score: float


@response_body
class Scored(Counted):
    data: list[Score]


@response_body
class RankedDocument(TypedDict):
    index: Annotated[int, Field(description="Its place in the request")]
    relevance_score: float
    document: NotRequired[dict[str, Any]]


@response_body
class ApiVersion(TypedDict):
    version: Literal["1", "2"]


@response_body
class BilledUnits(TypedDict):
    search_units: int


@response_body
class TokensRead(TypedDict):
    input_tokens: int


@response_body
class RankingMeta(TypedDict):
    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: TokensRead


@response_body
class Ranking(TypedDict):
    """What Cohere and Jina answer, in one."""

    id: str
    model: str
    results: Annotated[list[RankedDocument], Field(description="The most relevant first")]
    usage: ScoreUsage
    meta: RankingMeta
