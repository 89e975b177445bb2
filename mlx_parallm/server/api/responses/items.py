"""Input items of `/v1/responses`, a class for each kind, as clients send them and the store keeps them.

Kinds that need a tool of OpenAI's own, such as file search, are refused by name.
"""

import uuid
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from mlx_parallm.server.http.schema import Body

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
ENCODED = "parallm:"  # begins reasoning that this server has encoded
ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "local_shell_call": "lsh",
}

Identity = Annotated[str, Field(min_length=1, max_length=256)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


def problem(text: str) -> PydanticCustomError:
    """Returns what is wrong with a value, in words that may hold braces."""
    return PydanticCustomError("value", text.replace("{", "{{").replace("}", "}}"))


def new_id(kind: str) -> str:
    return f"{ID_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"


class InputPart(Body):
    """A piece of a message or of a tool's output: text, or an image for models that read them."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = Field(None, description="data:image/png;base64,… or http(s)://…")
    detail: Literal["auto", "low", "high", "original"] | None = Field(
        None, description="Ignored: the model decides what it looks at"
    )
    annotations: list[Any] | None = None

    @model_validator(mode="after")
    def _is_known(self) -> "InputPart":
        if self.type == "input_image":
            if not self.image_url:
                raise problem("A part of type input_image needs an image_url; files by file_id are not supported")
        elif self.type in TEXT_PARTS or self.type == "refusal":
            if (self.refusal if self.type == "refusal" else self.text) is None:
                raise problem(f"A part of type {self.type} needs its text")
        else:
            raise problem(
                f"Parts of type {self.type[:60]!r} are not supported; input_text, output_text and input_image are"
            )
        return self

    @property
    def content(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""


class InputMessage(Body):
    type: Literal["message"] = "message"
    id: Identity | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = Field(None, description="Kept, and of no effect here")


class FunctionCallItem(Body):
    type: Literal["function_call"]
    id: Identity | None = None
    call_id: Identity
    name: str = Field(min_length=1, max_length=256)
    namespace: str | None = Field(None, max_length=256)
    arguments: str = Field(description="JSON text")
    status: ItemStatus | None = None


class FunctionOutputItem(Body):
    type: Literal["function_call_output"]
    id: Identity | None = None
    call_id: Identity
    output: str | list[InputPart]
    status: ItemStatus | None = None


class CustomCallItem(Body):
    type: Literal["custom_tool_call"]
    id: Identity | None = None
    call_id: Identity
    name: str = Field(min_length=1, max_length=256)
    namespace: str | None = Field(None, max_length=256)
    input: str
    status: ItemStatus | None = None


class CustomOutputItem(Body):
    type: Literal["custom_tool_call_output"]
    id: Identity | None = None
    call_id: Identity
    output: str | list[InputPart]
    status: ItemStatus | None = None


class ShellAction(Body):
    type: Literal["exec"] = "exec"
    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class ShellCallItem(Body):
    type: Literal["local_shell_call"]
    id: Identity | None = None
    call_id: Identity | None = None
    action: ShellAction
    status: ItemStatus | None = None


class ShellOutputItem(Body):
    type: Literal["local_shell_call_output"]
    id: Identity | None = Field(None, description="Of the call that it answers, where it has no call_id")
    call_id: Identity | None = None
    output: str
    status: ItemStatus | None = None


class ReasoningPart(Body):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    id: Identity | None = None
    summary: list[ReasoningPart] = Field(default_factory=list)
    content: list[ReasoningPart] = Field(default_factory=list)
    encrypted_content: str | None = Field(None, description="Read where this server has written it, else ignored")
    status: ItemStatus | None = None


class ItemReference(Body):
    type: Literal["item_reference"] = "item_reference"
    id: Identity


class UnsupportedItem(Body):
    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        raise problem(f"Items of type {str(kind)[:60]!r} are not supported; {', '.join(KINDS)} are")


KINDS = {
    "message": InputMessage,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CustomOutputItem,
    "local_shell_call": ShellCallItem,
    "local_shell_call_output": ShellOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}


def _kind(item: Any) -> str:
    """A message need not say that it is one, nor a reference, which has just an id."""
    if not isinstance(item, dict):
        return str(getattr(item, "type", "message"))
    kind = item.get("type")
    if kind is None:
        return "item_reference" if "id" in item and "role" not in item else "message"
    return kind if isinstance(kind, str) and kind in KINDS else "unsupported"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CustomOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ShellCallItem, Tag("local_shell_call")]
    | Annotated[ShellOutputItem, Tag("local_shell_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[UnsupportedItem, Tag("unsupported")],
    Discriminator(_kind),
]
_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)


def read_item(stored: dict[str, Any]) -> InputItem:
    """An item that was kept, an output item too."""
    return _ITEM.validate_python(stored)


def stored_items(items: list[InputItem]) -> list[dict[str, Any]]:
    """Returns items as they are kept and listed: with ids, and messages in parts."""
    stored: list[dict[str, Any]] = []
    taken: set[str] = set()
    for item in items:
        plain = item.model_dump(exclude_none=True)
        if plain.get("id") in taken or "id" not in plain:
            plain["id"] = new_id(plain["type"])
        taken.add(plain["id"])
        if isinstance(item, InputMessage):
            if isinstance(item.content, str):
                kind = "output_text" if item.role == "assistant" else "input_text"
                plain["content"] = [{"type": kind, "text": item.content}]
            for part in plain["content"]:
                if part["type"] == "output_text":
                    part.setdefault("annotations", [])
        if not isinstance(item, ReasoningItem):
            plain.setdefault("status", "completed")
        stored.append(plain)
    return stored
