"""Tools of `/v1/responses`: what clients send, and the functions that the model is offered for them.

Function, custom and local shell tools are called by the model and run by the client. A custom tool takes plain text: it
is offered as a function with one parameter, `input`. Tools that run on OpenAI's servers are refused by name, except
those that coding agents send with every request, wanted or not: those are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mlx_parallm.server.api.responses.items import problem
from mlx_parallm.server.http.schema import MAX_TOOLS, Body
from mlx_parallm.text.parsers.calls import Tool

# Codex and its kin send these by default: the model is not offered them, and never calls them.
LEFT_OUT = (
    *("web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11"),
    *("image_generation", "tool_search"),
)
SHELL = "local_shell"
SHELL_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments"},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
TEXT_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
CallKind = Literal["function", "custom", "local_shell"]


class FunctionTool(Body):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema")
    strict: bool | None = None


class CustomFormat(Body):
    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = Field(None, max_length=100_000)


class CustomTool(Body):
    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = Field(None, description="A grammar is told to the model, and not enforced")


class LocalShellTool(Body):
    type: Literal["local_shell"]


def _kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    known = ("function", "custom", "local_shell", "namespace")
    if kind in known or not isinstance(tool, dict):
        return str(kind) if kind in known else "function"
    return "left_out" if kind in LEFT_OUT else "unsupported"


class UnsupportedTool(Body):
    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        kind = str(data.get("type"))[:60]
        raise problem(f"Tools of type {kind!r} are not supported; function, custom, local_shell and namespace are")


class LeftOutTool(Body):
    """A tool that this server does not have, and that clients send whether it is wanted or not."""

    type: str


CallableTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[UnsupportedTool, Tag("unsupported")]
    | Annotated[UnsupportedTool, Tag("left_out")]
    | Annotated[UnsupportedTool, Tag("local_shell")]
    | Annotated[UnsupportedTool, Tag("namespace")],
    Discriminator(_kind),
]


class NamespaceTool(Body):
    """Several functions under one name, as agents send those of an MCP server."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[CallableTool] = Field(max_length=MAX_TOOLS)


ToolBody = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[LocalShellTool, Tag("local_shell")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[LeftOutTool, Tag("left_out")]
    | Annotated[UnsupportedTool, Tag("unsupported")],
    Discriminator(_kind),
]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that the model may call, and the client's tool that it stands for."""

    kind: CallKind
    name: str
    namespace: str | None
    definition: Tool

    @property
    def function(self) -> str:
        """What the model calls it."""
        return str(self.definition["function"]["name"])


def function_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}__{name}"


def offered_tools(tools: Sequence[ToolBody]) -> list[OfferedTool]:
    offered: list[OfferedTool] = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            offered += [_offered(one, tool.name) for one in tool.tools]
        elif not isinstance(tool, LeftOutTool):
            offered.append(_offered(tool, None))
    return offered


def _offered(tool: Any, namespace: str | None) -> OfferedTool:
    if isinstance(tool, LocalShellTool):
        about = "Runs a command on the user's machine and returns its output"
        return OfferedTool("local_shell", SHELL, None, _definition(SHELL, about, SHELL_PARAMETERS))
    function = function_name(tool.name, namespace)
    if isinstance(tool, CustomTool):
        return OfferedTool("custom", tool.name, namespace, _definition(function, _about(tool), TEXT_PARAMETERS))
    return OfferedTool("function", tool.name, namespace, _definition(function, tool.description, tool.parameters))


def _about(tool: CustomTool) -> str | None:
    """Returns a tool's description with the grammar of its input, for the model to read."""
    if tool.format is None or not tool.format.definition:
        return tool.description
    syntax = "regular expression" if tool.format.syntax == "regex" else "Lark grammar"
    return f"{tool.description or ''}\nIts input follows this {syntax}:\n{tool.format.definition}".strip()


def _definition(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    given = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


class ToolChoiceBody(Body):
    """A tool that must be called, or with `allowed_tools` those that may be."""

    type: Literal["function", "custom", "local_shell", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list["ToolChoiceBody"] = Field(default_factory=list, max_length=MAX_TOOLS)

    @model_validator(mode="before")
    @classmethod
    def _is_no_built_in(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in ("function", "custom", "local_shell", "allowed_tools"):
            raise problem(f"The tool {kind[:60]!r} can't be chosen: this server does not have it")
        return data

    def find(self, tools: Sequence[OfferedTool]) -> OfferedTool:
        for tool in tools:
            if tool.kind == self.type and (tool.kind == "local_shell" or self.name in (tool.name, tool.function)):
                return tool
        known = ", ".join(tool.function for tool in tools[:20])
        name = self.name or self.type
        raise problem(
            f"There is no tool {name[:100]!r} to choose: {f'the tools are {known}' if known else 'there are no tools'}"
        )


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools a response may call, and whether it must."""

    tools: Sequence[OfferedTool] = ()
    must_call: bool = False
    named: OfferedTool | None = None

    @classmethod
    def of(cls, tools: Sequence[OfferedTool], choice: str | ToolChoiceBody | None) -> "ToolUse":
        if choice == "none":
            return cls()
        if isinstance(choice, ToolChoiceBody):
            if choice.type != "allowed_tools":
                return cls(tools, True, choice.find(tools))
            if not choice.tools:
                raise problem("allowed_tools needs its tools")
            allowed = {one.find(tools).function for one in choice.tools}
            return cls([tool for tool in tools if tool.function in allowed], choice.mode == "required")
        if choice == "required" and not tools:
            raise problem("required needs at least one tool that the model can call")
        return cls(tools, choice == "required")

    def find(self, function: str) -> OfferedTool | None:
        return next((tool for tool in self.tools if tool.function == function), None)
