"""The ways in which OpenAI's and vLLM's clients ask for structured output, and the grammar of each."""

from typing import Any, Literal

import orjson
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.call import Structure
from mlx_parallm.server.schema import Body
from mlx_parallm.text.grammar import choice_grammar, json_grammar, regex_grammar


class StructuredOutputs(Body):
    """vLLM's way to ask for structure: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema")
    regex: str | None = Field(None, max_length=10_000)
    choice: list[str] | None = Field(None, min_length=1, max_length=1000)
    grammar: str | None = Field(None, max_length=100_000, description="A Lark grammar")
    json_object: bool | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        if sum(bool(value) for value in (self.json_, self.regex, self.choice, self.grammar, self.json_object)) != 1:
            raise PydanticCustomError("structure", "Give exactly one of json, regex, choice, grammar and json_object")
        return self


class JsonSchema(Body):
    name: str = Field(max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool = Field(False, description="The schema is always enforced, whatever this says")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise PydanticCustomError("missing_schema", "The type json_schema needs json_schema.schema")
        return self


class StructureBody(Body):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, min_length=1, max_length=10_000)
    guided_choice: list[str] | None = Field(None, min_length=1, max_length=1000)
    guided_grammar: str | None = Field(None, min_length=1, max_length=100_000)


def structure_of(body: StructureBody) -> Structure | None:
    """The one structure that a body asks for."""
    found = list(_structures(body))
    if len(found) > 1:
        first, second = (one.param.split(".")[0] for one in found[:2])
        raise InvalidRequestError(f"{first} and {second} can't both shape the output", param=second)
    return found[0] if found else None


def _structures(body: StructureBody) -> list[Structure]:
    found: list[Structure] = []
    wanted_format = body.response_format
    if wanted_format is not None and wanted_format.type == "json_object":
        found.append(Structure(json_grammar({"type": "object"}), "response_format"))
    if wanted_format is not None and wanted_format.type == "json_schema":
        assert wanted_format.json_schema is not None
        assert wanted_format.json_schema.schema_ is not None
        found.append(Structure(json_grammar(wanted_format.json_schema.schema_), "response_format.json_schema.schema"))
    if (wanted := body.structured_outputs) is not None:
        schema = {"type": "object"} if wanted.json_object else wanted.json_
        found += _from_fields("structured_outputs.", schema, wanted.regex, wanted.choice, wanted.grammar)
    found += _from_fields("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    return found


def _from_fields(
    prefix: str, schema: dict[str, Any] | str | None, regex: str | None, choice: list[str] | None, lark: str | None
) -> list[Structure]:
    """vLLM's four ways to ask for structure, under either of its spellings."""
    found: list[Structure] = []
    if schema is not None:
        found.append(Structure(json_grammar(_schema(schema, f"{prefix}json")), f"{prefix}json"))
    if regex is not None:
        found.append(Structure(regex_grammar(regex), f"{prefix}regex"))
    if choice is not None:
        found.append(Structure(choice_grammar(choice), f"{prefix}choice"))
    if lark is not None:
        found.append(Structure(lark, f"{prefix}grammar"))
    return found


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
