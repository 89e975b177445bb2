"""What all bodies of requests and responses have in common.

Those of requests are strict: a number in quotes, a boolean for a number, a value out of range are errors that name
their place. A null field means an absent one. Fields that we don't know are ignored, as OpenAI-compatible servers do.
Those of responses are typed dictionaries, which cost no more than plain ones: writers build them, mypy holds writers to
them, and /docs describes them.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, PlainValidator, model_validator, with_config
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from mlx_parallm.sampling_params import MAX_STOP_CHARS, MAX_STOPS

T = TypeVar("T")
if TYPE_CHECKING:
    Numbers = npt.NDArray[Any]
else:
    Numbers = list[float]  # what they are in JSON

MAX_TOOLS = 128
MAX_MESSAGES = 8192  # of a conversation
MAX_PROMPTS = 1024
MAX_NAMES = 1 << 14  # of an object whose values are looked at
MAX_TOKENS = 1 << 21  # of a prompt: more than any context


def _end_early(schema: Any) -> None:
    """Changes a schema and all within it: lists end at their first error, and objects by name have few entries."""
    for inner in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(inner, dict | list):
            _end_early(inner)
    if not isinstance(schema, dict):
        return
    if schema.get("type") in ("list", "tuple", "set", "frozenset"):
        schema["fail_fast"] = True
    elif schema.get("type") == "dict" and schema.get("values_schema", {"type": "any"})["type"] != "any":
        inner = dict(schema)
        schema.clear()
        schema.update(core_schema.no_info_before_validator_function(_few_names, inner))


def _few_names(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_NAMES:
        raise PydanticCustomError("too_long", "Object should have at most {most} names", {"most": MAX_NAMES})
    return value


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    # Fields that the dialect's own API has and this server does not use: they are no mistakes of the client.
    api_fields: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Ends a list's validation at the first entry that is wrong: a million of them would be a million errors."""
        schema = handler(source)
        _end_early(handler.resolve_ref_schema(schema))
        return schema

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


def few(most: int) -> Any:
    """Limits lists of which each entry is work to so many; the first entry that is wrong is the one that is told of."""
    return Field(max_length=most, fail_fast=True)


def response_body(kind: type[T]) -> type[T]:
    """Marks the type of a response, or of a part of one, as having the fields that it names and no other."""
    return with_config(ConfigDict(extra="forbid"))(kind)


@response_body
class ErrorDetail(TypedDict):
    message: str
    type: str
    param: Annotated[str | None, Field(description="The field that is wrong, such as messages.0.role")]
    code: str | None


@response_body
class Error(TypedDict):
    error: ErrorDetail


@response_body
class Status(TypedDict):
    status: str


def read_prompt(value: Any) -> list[str] | list[list[int]]:
    """One prompt or several, as text or as token ids, always as a list of prompts."""
    return read_prompts(value, MAX_PROMPTS)


def read_prompts(value: Any, most: int) -> list[str] | list[list[int]]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "Expected a string, token ids, or a non-empty list of either")
    if _are_tokens(value):
        return [value]
    if len(value) > most:
        raise PydanticCustomError("prompt", f"At most {most} prompts fit in one request")
    texts = all(isinstance(item, str) for item in value)
    if texts or all(isinstance(item, list) and item and _are_tokens(item) for item in value):
        return value
    raise PydanticCustomError("prompt", "Expected only strings, only token ids, or only non-empty lists of token ids")


def _are_tokens(items: list[Any]) -> bool:
    """Returns whether all items are token ids, without Python's work for each: there may be millions."""
    if len(items) > MAX_TOKENS:
        raise PydanticCustomError("prompt", f"At most {MAX_TOKENS} token ids fit in one prompt")
    return set(map(type, items)) == {int} and min(items) >= 0


def _read_stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise PydanticCustomError("stop", "Expected a string or a list of strings")
    if len(strings) > MAX_STOPS:
        raise PydanticCustomError("stop", f"At most {MAX_STOPS} stop strings are allowed")
    if not all(strings):
        raise PydanticCustomError("stop", "A stop string must not be empty")
    if max(map(len, strings), default=0) > MAX_STOP_CHARS:
        raise PydanticCustomError("stop", f"A stop string has at most {MAX_STOP_CHARS} characters")
    return tuple(strings)


def _read_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "Expected an object of token ids and numbers")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise PydanticCustomError("logit_bias", "Its keys must be token ids")
        if isinstance(number, bool) or not isinstance(number, int | float) or not -100 <= number <= 100:
            raise PydanticCustomError("logit_bias", "Its values must be numbers between -100 and 100")
        bias[int(key)] = float(number)
    return bias


PromptInput = Annotated[
    list[str] | list[list[int]],
    PlainValidator(read_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Stop = Annotated[tuple[str, ...], PlainValidator(_read_stop, json_schema_input_type=str | list[str])]
LogitBias = Annotated[dict[int, float], PlainValidator(_read_logit_bias, json_schema_input_type=dict[str, float])]
TokenId = Annotated[int, Field(ge=0)]
