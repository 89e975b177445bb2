"""Which grammar each way to ask for structured output gives, and what is wrong with the others."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.openai.structure import StructureBody, structure_of
from mlx_parallm.text.grammar import choice_grammar, json_grammar, regex_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def asked(**fields: Any) -> Any:
    return structure_of(StructureBody.model_validate(fields))


@pytest.mark.parametrize(
    ("fields", "grammar", "param"),
    [
        ({"response_format": {"type": "json_object"}}, json_grammar({"type": "object"}), "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, json_grammar(SCHEMA), "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            json_grammar(SCHEMA),
            "response_format.json_schema.schema",
        ),
        ({"guided_json": SCHEMA}, json_grammar(SCHEMA), "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, json_grammar(SCHEMA), "guided_json"),
        ({"guided_regex": "a+"}, regex_grammar("a+"), "guided_regex"),
        ({"guided_choice": ["a", "b"]}, choice_grammar(["a", "b"]), "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, 'start: "a"', "guided_grammar"),
        ({"structured_outputs": {"json": SCHEMA}}, json_grammar(SCHEMA), "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, regex_grammar("a+"), "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, choice_grammar(["a"]), "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: A"}}, "start: A", "structured_outputs.grammar"),
        (
            {"structured_outputs": {"json_object": True}},
            json_grammar({"type": "object"}),
            "structured_outputs.json",
        ),
    ],
)
def test_each_way_has_its_grammar(fields: dict[str, Any], grammar: str, param: str) -> None:
    found = asked(**fields)
    assert (found.grammar, found.param) == (grammar, param)


def test_nothing_is_asked_for() -> None:
    assert asked() is None
    assert asked(response_format={"type": "text"}) is None


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": "[1]"}, "guided_json", "expected a JSON schema, which is an object"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice can't both"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "response_format and structured_outputs can't both",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as found:
        asked(**fields)
    assert found.value.param == param
    assert said in found.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "yaml"}},
        {"guided_regex": ""},
        {"guided_choice": []},
        {"guided_choice": ["a"] * 1001},
        {"guided_regex": "a" * 10_001},
    ],
)
def test_fields_have_their_bounds(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        asked(**fields)
