"""A call for responses, in no dialect: what `service` takes, and every dialect's body is turned into."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.text.prompts import Conversation


@dataclass(frozen=True, slots=True)
class Structure:
    """A grammar that the output must follow, and the field of the body that asks for it."""

    grammar: str
    param: str


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a conversation: where it is, and the field of the body that says so."""

    url: str  # data, http(s) or file
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A conversation to answer, perhaps by calling its tools."""

    conversation: Conversation
    must_call: bool = False  # a tool has to be called
    tool_name: str | None = None  # just this one
    parallel_calls: bool = True
    separate_reasoning: bool = True  # False: reasoning stays in the content, marks and all
    images: Sequence[ImageSource] = ()  # in the order of the messages' parts of type image


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """Prompts to continue or a conversation to answer, by whom, how, and what becomes of the responses."""

    prompts: Sequence[str | list[int]] = ()
    chat: ChatTurn | None = None  # instead of prompts
    sampling: SamplingParams
    structure: Structure | None = None

    model: str = "default"
    lora_adapter: str | None = None  # name or name@version
    follow_policy: bool = False

    add_special_tokens: bool | None = None  # None: to prompts; a chat template has them already
    truncate_prompt_tokens: int | None = None
    default_max_tokens: int | None = None  # unless sampling or the server's settings say how many
    max_tokens_field: str = "max_tokens"  # what the dialect calls it, for errors
    fit_max_tokens: bool = False  # more than the context has room for means all of that room, and is no error
    include_stop: bool = False
    skip_special_tokens: bool = True
    exact_tokens: bool = False  # all tokens with their log-probabilities, the one that ends a response too

    stream: bool = False
    priority: int = 0
    cache_salt: str = ""

    request_id: str | None = None  # the client's own name for it
    collect_trajectory: bool = False
    scoring_function: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
