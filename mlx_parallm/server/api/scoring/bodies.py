"""Bodies of the routes that classify, score and rank."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from mlx_parallm.server.generation.chat_messages import ChatMessages
from mlx_parallm.server.generation.text_inputs import MAX_INPUTS, TextInputs, TextPair, TruncationBody
from mlx_parallm.server.http.schema import Body

CHAT: list[Any] = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


class InputBody(TruncationBody):
    """Texts, pairs or conversations."""

    input: TextInputs | None = Field(None, description="A text, token ids, a pair, a conversation, or a list of such")
    messages: ChatMessages | None = Field(None, min_length=1, description="One conversation instead")

    @property
    def texts(self) -> list[Any]:
        return [self.messages] if self.messages is not None else list(self.input or ())

    @property
    def field(self) -> str:
        return "messages" if self.messages is not None else "input"


class ClassifyBody(InputBody):
    model_config = ConfigDict(json_schema_extra={"example": {"model": "sentiment", "input": ["I like it", "I do not"]}})
    model: str | None = Field(None, description="A classifier; default: the first")
    use_activation: bool = Field(
        True,
        validation_alias=AliasChoices("use_activation", "activation", "softmax"),
        description="False: logits in place of probabilities",
    )
    aggregation: Literal["simple", "none"] = Field(
        "simple",
        validation_alias=AliasChoices("aggregation", "aggregation_strategy"),
        description="Of token classification: whole entities, or single tokens",
    )

    @model_validator(mode="after")
    def _something_to_classify(self) -> "ClassifyBody":
        if (self.input is None) == (self.messages is None):
            raise PydanticCustomError("input", "Expected input, or messages, and not both")
        return self


class RewardBody(InputBody):
    model_config = ConfigDict(json_schema_extra={"example": {"input": [CHAT, "any text"]}})
    model: str = Field("default", description="A reward model; default: the first")
    task: Literal["reward"] = Field("reward", description="For /pooling")

    @model_validator(mode="after")
    def _something_to_score(self) -> "RewardBody":
        if (self.input is None) == (self.messages is None) and not self.compares:
            raise PydanticCustomError("input", "Expected input, or messages, and not both")
        return self

    @property
    def compares(self) -> bool:
        """Whether it has texts to be compared with each other instead."""
        return False


def _as_texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_as_texts), Field(min_length=1, max_length=MAX_INPUTS)]


class ScoreBody(RewardBody):
    """vLLM's form compares texts with each other; with `input` or `messages` it is a body of /v1/rewards/score."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"text_1": "Where is Rome?", "text_2": ["In Italy.", "In the oven."]}}
    )
    text_1: Texts | None = Field(
        None,
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        description="One text, or one for each of the others; also `queries`",
    )
    text_2: Texts | None = Field(
        None, validation_alias=AliasChoices("text_2", "documents", "data_2"), description="Also `documents`"
    )

    @model_validator(mode="after")
    def _two_sides(self) -> "ScoreBody":
        if (self.text_1 is None) != (self.text_2 is None):
            raise PydanticCustomError("text", "Expected both text_1 and text_2, or input for a reward model")
        if self.compares and (self.input is not None or self.messages is not None):
            raise PydanticCustomError("text", "Expected text_1 and text_2, or input for a reward model, and not both")
        if self.text_1 and self.text_2 and len(self.text_1) not in (1, len(self.text_2)):
            counts = f"{len(self.text_1)} and {len(self.text_2)}"
            raise PydanticCustomError("text", f"Expected one text_1, or as many as there are text_2, not {counts}")
        return self

    @property
    def compares(self) -> bool:
        return self.text_1 is not None or self.text_2 is not None

    @property
    def pairs(self) -> list[TextPair]:
        firsts = self.text_1 or []
        seconds = self.text_2 or []
        firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
        return [TextPair(text=first, text_pair=second) for first, second in zip(firsts, seconds, strict=True)]


class Document(Body):
    """Fields beside its text come back as they are."""

    model_config = ConfigDict(extra="allow")
    text: str


def _as_document(value: Any) -> Any:
    return {"text": value} if isinstance(value, str) else value


class RerankBody(TruncationBody):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {"query": "Where is Rome?", "documents": ["In the oven.", "In Italy."], "top_n": 1}
        }
    )
    model: str | None = Field(None, description="A cross-encoder or an embedding model; default: the first")
    query: str = Field(min_length=1)
    documents: list[Annotated[Document, BeforeValidator(_as_document)]] = Field(
        min_length=1, max_length=MAX_INPUTS, description="Texts, or objects with a `text`"
    )
    top_n: int | None = Field(None, ge=1, description="So many of the best; default: all")
    return_documents: bool | None = Field(None, description="Default: true, but false on /v2/rerank")
    max_tokens_per_doc: int | None = Field(None, ge=1, description="Cut documents after so many tokens")

    @property
    def pairs(self) -> list[TextPair]:
        return [TextPair(text=self.query, text_pair=document.text) for document in self.documents]
