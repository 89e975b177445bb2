"""`structural_tag`: free text in which some parts, each between its own marks, follow a schema or a grammar.

Two spellings, both vLLM's: `structures` with `triggers`, and xgrammar's `format` of type `triggered_tags` or `tag`.
"""

from collections.abc import Sequence
from typing import Any, Literal

from llguidance import StructTag
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from mlx_parallm.server.http.schema import MAX_TOOLS, Body
from mlx_parallm.text.grammar import choice_grammar, json_grammar, pattern_grammar, tagged_grammar

Mark = str


class TagStructure(Body):
    begin: Mark = Field(min_length=1, max_length=1000, description="What the part begins with")
    schema_: dict[str, Any] = Field(alias="schema", description="A JSON schema of what stands between")
    end: Mark = Field(max_length=1000, description="What the part ends with")


class TagContent(Body):
    type: Literal["json_schema", "regex", "grammar", "const_string"]
    json_schema: dict[str, Any] | None = None
    pattern: str | None = Field(None, min_length=1, max_length=10_000)
    grammar: str | None = Field(None, min_length=1, max_length=100_000, description="A Lark grammar")
    value: str | None = Field(None, min_length=1, max_length=10_000)

    @model_validator(mode="after")
    def _has_its_field(self) -> "TagContent":
        field = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar", "const_string": "value"}
        if getattr(self, field[self.type]) is None:
            raise PydanticCustomError("content", f"Content of type {self.type} needs {field[self.type]}")
        return self

    def written(self) -> str:
        """Writes the content as a Lark grammar."""
        if self.json_schema is not None and self.type == "json_schema":
            return json_grammar(self.json_schema)
        if self.type == "regex":
            return pattern_grammar(self.pattern or "")
        return choice_grammar([self.value or ""]) if self.type == "const_string" else self.grammar or ""


class TagFormat(Body):
    begin: Mark = Field(min_length=1, max_length=1000)
    content: TagContent
    end: Mark = Field("", max_length=1000)


class TriggeredTags(Body):
    """Or one tag, which is its own trigger."""

    type: Literal["triggered_tags", "tag"]
    triggers: list[Mark] = Field(default_factory=list, max_length=MAX_TOOLS)
    tags: list[TagFormat] = Field(default_factory=list, max_length=MAX_TOOLS)
    begin: Mark | None = Field(None, min_length=1, max_length=1000)
    content: TagContent | None = None
    end: Mark = Field("", max_length=1000)


class StructuralTag(Body):
    """Give `structures` with `triggers`, or `format`."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: list[TagStructure] | None = Field(None, min_length=1, max_length=MAX_TOOLS)
    triggers: list[Mark] | None = Field(None, min_length=1, max_length=MAX_TOOLS)
    format: TriggeredTags | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "StructuralTag":
        if (self.format is None) == (self.structures is None):
            raise PydanticCustomError("structural_tag", "Give structures with triggers, or format")
        parts = self._parts()
        if not parts:
            raise PydanticCustomError(
                "structural_tag", "The type tag needs begin and content, triggered_tags needs tags"
            )
        for begin, *_ in parts:
            if _trigger(begin, self._triggers()) is None:
                message = f"{begin[:100]!r} begins with none of the triggers"
                raise PydanticCustomError("structural_tag", message.replace("{", "{{").replace("}", "}}"))
        return self

    def grammar(self) -> str:
        triggers = self._triggers()
        return tagged_grammar(
            [
                StructTag(trigger=_trigger(begin, triggers) or begin, begin=begin, grammar=content, end=end)
                for begin, content, end in self._parts()
            ]
        )

    def _triggers(self) -> Sequence[str]:
        if self.format is None:
            return self.triggers or ()
        return self.format.triggers if self.format.type == "triggered_tags" else (self.format.begin or "",)

    def _parts(self) -> list[tuple[str, str, str]]:
        """Begin, content and end of each."""
        if self.format is None:
            return [(one.begin, json_grammar(one.schema_), one.end) for one in self.structures or ()]
        if self.format.type == "tag":
            content = self.format.content
            begin = self.format.begin
            return [] if begin is None or content is None else [(begin, content.written(), self.format.end)]
        return [(tag.begin, tag.content.written(), tag.end) for tag in self.format.tags]


def _trigger(begin: str, triggers: Sequence[str]) -> str | None:
    return next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
