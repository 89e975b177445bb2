"""Messages and tools as OpenAI's clients send them, for every route that takes them, and the conversation they make."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.generation.call import ImageSource
from mlx_parallm.server.http.schema import MAX_MESSAGES, MAX_TOOLS, Body, few
from mlx_parallm.text.prompts import Conversation, Message, check_template_kwargs

IMAGE_PARTS = ("image_url", "input_image")


class ImageURL(Body):
    url: str = Field(min_length=1, description="data:image/png;base64,… or http(s)://…")
    detail: Literal["auto", "low", "high"] = Field("auto", description="Ignored: the model decides what it looks at")


class ContentPart(Body):
    """A piece of a message: text, or an image for models that read them."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageURL | str | None = Field(None, description="Of a part of type image_url")

    @model_validator(mode="after")
    def _is_known(self) -> "ContentPart":
        if self.type in IMAGE_PARTS:
            if not self.image_url:
                raise PydanticCustomError("part", f"A part of type {self.type} needs an image_url")
            return self
        if self.type in ("image", "input_audio", "audio_url", "video_url", "file"):
            raise PydanticCustomError("part", f"Parts of type {self.type} are not supported; images are of image_url")
        if self.type not in ("text", "input_text", "output_text", "refusal"):
            raise PydanticCustomError("part", "Expected a part of type text or image_url")
        if (self.refusal if self.type == "refusal" else self.text) is None:
            raise PydanticCustomError("part", f"A part of type {self.type} needs its text")
        return self

    @property
    def content(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""

    @property
    def url(self) -> str | None:
        """The URL of an image; None of other parts."""
        if self.type not in IMAGE_PARTS:
            return None
        return self.image_url.url if isinstance(self.image_url, ImageURL) else self.image_url


class FunctionCall(Body):
    name: str = Field(min_length=1, max_length=256)
    arguments: str | dict[str, Any] = Field("{}", description="JSON text")


class MessageToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = Field(
        None, validate_default=True, description="Text, or parts"
    )
    name: str | None = None
    tool_calls: list[MessageToolCall] = Field(default_factory=list, max_length=MAX_TOOLS, description="An assistant's")
    tool_call_id: str | None = Field(
        None, validate_default=True, description="Of the call that a tool message answers; needed there"
    )
    reasoning_content: str | None = None

    @field_validator("content")
    @classmethod
    def _needed(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role") not in ("assistant", None):
            raise PydanticCustomError("content", f"A {info.data['role']} message needs content")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _names_its_call(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("role") == "tool" and not value:
            raise PydanticCustomError("tool_call_id", "A tool message needs the id of the call that it answers")
        return value


ChatMessages = Annotated[list[ChatMessage], few(MAX_MESSAGES)]


class FunctionDefinition(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema")
    strict: bool | None = None


class ToolDefinition(Body):
    type: Literal["function"]
    function: FunctionDefinition


class TemplateBody(Body):
    """What a chat template takes."""

    messages: ChatMessages = Field(min_length=1)
    tools: list[ToolDefinition] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn; the default")
    continue_final_message: bool = Field(False, description="Go on writing the last message")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Passed to the chat template")

    @field_validator("continue_final_message")
    @classmethod
    def _one_or_the_other(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("add_generation_prompt"):
            raise PydanticCustomError("continue", "It excludes add_generation_prompt: one message can't be both")
        return value


def conversation(
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolDefinition],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    template_kwargs: dict[str, Any],
    with_images: bool = False,
) -> Conversation:
    """`with_images`: the caller takes `image_sources` too; else images are refused."""
    if not with_images and (images := image_sources(messages)):
        param = images[0].param
        raise InvalidRequestError(f"{param}: images are not supported here", param=param, code="invalid_value")
    check_template_kwargs(template_kwargs)
    return Conversation(
        messages=[_message(message, index) for index, message in enumerate(messages)],
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=template_kwargs,
    )


def image_sources(messages: Sequence[ChatMessage]) -> list[ImageSource]:
    """The images of a conversation, in their order."""
    return [
        ImageSource(part.url, f"messages.{index}.content.{number}")
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for number, part in enumerate(message.content)
        if part.url is not None
    ]


def _message(message: ChatMessage, index: int) -> Message:
    """Returns a message as chat templates expect it: content is text, or parts where there are images; a call's
    arguments are an object."""
    parts = message.content
    content: Any = "\n".join(part.content for part in parts) if isinstance(parts, list) else parts or ""
    if isinstance(parts, list) and any(part.url is not None for part in parts):
        content = [{"type": "text", "text": part.content} if part.url is None else {"type": "image"} for part in parts]
    plain: Message = {"role": message.role, "content": content}
    plain |= message.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"messages.{index}.tool_calls.{number}"),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return plain


def _arguments(arguments: str | dict[str, Any], place: str) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        param = f"{place}.function.arguments"
        raise InvalidRequestError(f"{param}: expected a JSON object as text", param=param)
    return parsed
