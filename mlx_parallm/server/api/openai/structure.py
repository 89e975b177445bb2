"""The ways in which OpenAI's and vLLM's clients ask for structured output, and the grammar of each."""

from collections.abc import Callable
from typing import Any, Literal

import orjson
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.openai.structural_tags import StructuralTag
from mlx_parallm.server.generation.call import Structure
from mlx_parallm.server.http.schema import Body
from mlx_parallm.text.grammar import choice_grammar, json_grammar, regex_grammar

GRAMMARS: dict[str, Callable[[Any], str]] = {
    "json": json_grammar,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": str,  # Lark, as it is
    "structural_tag": StructuralTag.grammar,
}
GUIDED = ("json", "regex", "choice", "grammar")  # those with a field `guided_…`


class StructuredOutputs(Body):
    """vLLM's way to ask for structure: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema")
    regex: str | None = Field(None, max_length=10_000)
    choice: list[str] | None = Field(None, min_length=1, max_length=1000)
    grammar: str | None = Field(None, max_length=100_000, description="A Lark grammar")
    json_object: bool | None = None
    structural_tag: StructuralTag | None = Field(None, description="Parts of the text, between marks of their own")

    @field_validator("structural_tag", mode="before")
    @classmethod
    def _may_be_text(cls, value: Any) -> Any:
        """vLLM's clients send it as JSON text."""
        if not isinstance(value, str):
            return value
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            raise PydanticCustomError("structural_tag", "It is not valid JSON") from None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        given = (self.json_, self.regex, self.choice, self.grammar, self.json_object, self.structural_tag)
        if sum(bool(value) for value in given) != 1:
            raise PydanticCustomError(
                "structure", "Give exactly one of json, regex, choice, grammar, json_object and structural_tag"
            )
        return self


class JsonSchema(Body):
    name: str = Field(max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool = Field(False, description="The schema is always enforced, whatever this says")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="With json_object, as llama.cpp has it")
    structures: list[Any] | None = None
    triggers: list[Any] | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise PydanticCustomError("missing_schema", "The type json_schema needs json_schema.schema")
        if self.type == "structural_tag":
            self._tag = StructuralTag.model_validate(self.model_dump(include={"structures", "triggers", "format"}))
        return self

    _tag: StructuralTag | None = None

    @property
    def structural_tag(self) -> StructuralTag | None:
        return self._tag


class StructureBody(Body):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, min_length=1, max_length=10_000)
    guided_choice: list[str] | None = Field(None, min_length=1, max_length=1000)
    guided_grammar: str | None = Field(None, min_length=1, max_length=100_000)


def structure_of(body: StructureBody) -> Structure | None:
    """The one structure that a body asks for."""
    asked = _asked(body)
    if len(asked) > 1:
        first, second = list(asked)[:2]
        if first.split(".")[0] != second.split(".")[0]:
            first = first.split(".")[0]
            second = second.split(".")[0]
        raise InvalidRequestError(f"{first} and {second} can't both shape the output", param=second)
    for param, (kind, value) in asked.items():
        return Structure(GRAMMARS[kind](value), param)
    return None


def _asked(body: StructureBody) -> dict[str, tuple[str, Any]]:
    """Fields that ask for a structure, each with its kind and value, in all spellings."""
    asked: dict[str, tuple[str, Any]] = {}
    shape = body.response_format
    wanted = body.structured_outputs
    if shape is not None and shape.type == "json_object":
        asked["response_format"] = "json", shape.schema_ or {"type": "object"}
    if shape is not None and shape.structural_tag is not None:
        asked["response_format"] = "structural_tag", shape.structural_tag
    if shape is not None and shape.json_schema is not None and shape.type == "json_schema":
        asked["response_format.json_schema.schema"] = "json", shape.json_schema.schema_
    if wanted is not None and wanted.json_object:
        asked["structured_outputs.json"] = "json", {"type": "object"}
    fields = {f"guided_{kind}": (kind, getattr(body, f"guided_{kind}")) for kind in GUIDED}
    if wanted is not None:
        values = {kind: getattr(wanted, "json_" if kind == "json" else kind) for kind in GRAMMARS}
        fields = {f"structured_outputs.{kind}": (kind, value) for kind, value in values.items()} | fields
    for param, (kind, value) in fields.items():
        if value is not None:
            asked[param] = kind, _schema(value, param) if kind == "json" else value
    return asked


def _schema(schema: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        parsed = orjson.loads(schema)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"{param}: not valid JSON: {error}", param=param) from None
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"{param}: expected a JSON schema, which is an object", param=param)
    return parsed
