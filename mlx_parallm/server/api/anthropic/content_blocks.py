"""Messages as Anthropic's clients send them: who says what, in blocks.

`cache_control` may stand in every block, and asks for what is done anyway: prompts are always cached.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, field_validator
from pydantic_core import PydanticCustomError

from mlx_parallm.server.http.schema import Body

Id = Annotated[str, Field(min_length=1, max_length=256)]


def _one_of(what: str, *kinds: str, key: str = "type", other: str = "") -> BeforeValidator:
    """Says which kinds there are of what follows, told apart by `key`; `other` is added to the list."""
    listed = f"{', '.join(kinds[:-1])}{' or ' * (len(kinds) > 1)}{kinds[-1]}"

    def check(value: Any) -> Any:
        if isinstance(value, dict) and value.get(key) not in kinds:
            raise PydanticCustomError("kind", f"Expected {what} {listed}{other}")
        return value

    return BeforeValidator(check)


class ContentBlock(Body):
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: every prompt is cached as it is")


class MessageText(ContentBlock):
    type: Literal["text"]
    text: str


class Base64Source(Body):
    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/gif", "image/webp"]
    data: str = Field(min_length=1)

    @property
    def address(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Body):
    type: Literal["url"]
    url: str = Field(min_length=1)

    @field_validator("url")
    @classmethod
    def _is_of_the_web(cls, value: str) -> str:
        if not value.lower().startswith(("http://", "https://")):
            raise PydanticCustomError("url", "Expected a URL that begins with http:// or https://")
        return value

    @property
    def address(self) -> str:
        return self.url


class ImageBlock(ContentBlock):
    type: Literal["image"]
    source: Annotated[
        Base64Source | UrlSource,
        Discriminator("type"),
        _one_of("a source of type", "base64", "url", other="; files are not kept on this server"),
    ]


class PlainTextSource(Body):
    type: Literal["text"]
    data: str

    @property
    def text(self) -> str:
        return self.data


class BlocksSource(Body):
    type: Literal["content"]
    content: str | list[MessageText]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(block.text for block in self.content)


class DocumentBlock(ContentBlock):
    type: Literal["document"]
    source: Annotated[
        PlainTextSource | BlocksSource,
        Discriminator("type"),
        _one_of("a source of type", "text", "content", other="; PDF files are not read here"),
    ]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(part for part in (self.title, self.context, self.source.text) if part)


class SearchResultBlock(ContentBlock):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[MessageText]

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class ThinkingBlock(ContentBlock):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", description="Not checked")


class RedactedThinkingBlock(ContentBlock):
    type: Literal["redacted_thinking"]
    data: str = Field("", description="Ignored: no model here can read it")


class ToolUseBlock(ContentBlock):
    type: Literal["tool_use"]
    id: Id
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any] = Field(default_factory=dict)


TextLike = MessageText | DocumentBlock | SearchResultBlock
ResultContent = Annotated[
    TextLike | ImageBlock,
    Discriminator("type"),
    _one_of("a block of type", "text", "image", "document", "search_result", other=" in a tool's result"),
]


class ToolResultBlock(ContentBlock):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: str | list[ResultContent] = ""
    is_error: bool = False


UserBlock = Annotated[
    TextLike | ImageBlock | ToolResultBlock,
    Discriminator("type"),
    _one_of("a block of type", "text", "image", "document", "search_result", "tool_result", other=" of a user"),
]
AssistantBlock = Annotated[
    MessageText | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock,
    Discriminator("type"),
    _one_of("a block of type", "text", "thinking", "redacted_thinking", "tool_use", other=" of the assistant"),
]


class UserMessage(Body):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1)]


class AssistantTurn(Body):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemMessage(Body):
    role: Literal["system"]
    content: str | list[MessageText]


AnyMessage = Annotated[
    UserMessage | AssistantTurn | SystemMessage,
    Discriminator("role"),
    _one_of("the role", "user", "assistant", "system", key="role"),
]
