"""`/v1/chat/completions`: its body, how its responses are written, and the route."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.sampling_params import INT64, MAX_LOGPROBS
from mlx_parallm.server.api.openai.chat_response_types import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Function,
    FunctionDelta,
    MessageDelta,
    ToolCallDelta,
    ToolCallResponse,
)
from mlx_parallm.server.api.openai.common import GenerationBody, call_of, options_of
from mlx_parallm.server.api.openai.writer import ResponseOptions, ResponseWriter, prompt_logprobs
from mlx_parallm.server.generation.call import ChatTurn, GenerationCall
from mlx_parallm.server.generation.chat_messages import ChatMessage, TemplateBody, conversation, image_sources
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate, Collected
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.generation.preparation import GenerationService, completion_name
from mlx_parallm.server.generation.responses import event, respond
from mlx_parallm.server.generation.token_logprobs import token_logprobs
from mlx_parallm.server.http.schema import Body
from mlx_parallm.text.parsers.calls import CallDelta
from mlx_parallm.types import TokenLogprob

CHAT_EXAMPLE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 64,
    "temperature": 0.7,
}


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatBody(GenerationBody, TemplateBody):
    """A conversation to continue."""

    model_config = ConfigDict(json_schema_extra={"example": CHAT_EXAMPLE})
    api_fields: ClassVar = frozenset(
        (
            "audio function_call functions metadata modalities moderation parallel_tool_calls prediction "
            "prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort safety_identifier "
            "service_tier store user verbosity web_search_options"
        ).split()
    )
    max_tokens: int | None = Field(
        None, ge=1, le=INT64, description="Must fit the context beside the prompt; default: what fits"
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=INT64, description="The same, and goes first")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool = Field(True, description="False: at most one call")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    add_special_tokens: bool = Field(False, description="Have the tokenizer add its own to the template's")
    echo: bool = Field(False, description="Begin the answer with the last message where that is the assistant's")
    separate_reasoning: bool = Field(True, description="False: reasoning stays in the content, marks and all")
    documents: list[dict[str, Any]] | None = Field(None, description="For chat templates that quote documents")
    chat_template: str | None = Field(None, description="Not supported: a model has its own")
    modalities: list[str] | None = Field(None, description="Only text")
    audio: Any = Field(None, description="Not supported")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        kwargs = dict(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
            kwargs.setdefault("enable_thinking", self.reasoning_effort != "none")
        if self.documents is not None:
            kwargs.setdefault("documents", self.documents)
        return kwargs

    @field_validator("chat_template", "modalities", "audio")
    @classmethod
    def _text_by_the_models_template(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "chat_template" and value:
            raise PydanticCustomError("chat_template", "Templates of requests are not taken: the model's own is used")
        if info.field_name == "modalities" and set(value or ()) - {"text"}:
            raise PydanticCustomError("modalities", "Responses are text: no other modality is supported")
        if info.field_name == "audio" and value is not None:
            raise PydanticCustomError("audio", "Responses are text: audio is not supported")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs to be true")
        return value

    functions: Any = Field(None, description="Not supported: OpenAI has replaced it by `tools`")
    function_call: Any = Field(None, description="Not supported: OpenAI has replaced it by `tool_choice`")

    @field_validator("functions", "function_call")
    @classmethod
    def _is_replaced(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            name = "tools" if info.field_name == "functions" else "tool_choice"
            raise PydanticCustomError(
                str(info.field_name), f"OpenAI has replaced {info.field_name}: send {name} instead"
            )
        return value

    @field_validator("tool_choice")
    @classmethod
    def _names_a_tool(cls, value: Any, info: ValidationInfo) -> Any:
        names = [tool.function.name for tool in info.data.get("tools", [])]
        if isinstance(value, NamedToolChoice) and value.function.name not in names:
            known = f"the tools are {', '.join(names[:20])}" if names else "there are no tools"
            message = f"There is no function {value.function.name[:100]!r} to choose: {known}"
            raise PydanticCustomError("tool_choice", message.replace("{", "{{").replace("}", "}}"))
        if value == "required" and not names:
            raise PydanticCustomError("tool_choice", "required needs at least one tool")
        return value


def chat_call(body: ChatBody) -> GenerationCall:
    named = body.tool_choice if isinstance(body.tool_choice, NamedToolChoice) else None
    turn = ChatTurn(
        conversation=conversation(
            body.messages,
            body.tools if body.tool_choice != "none" else [],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.template_kwargs,
            with_images=True,
        ),
        images=image_sources(body.messages),
        must_call=named is not None or body.tool_choice == "required",
        tool_name=named.function.name if named is not None else None,
        parallel_calls=body.parallel_tool_calls,
        separate_reasoning=body.separate_reasoning,
    )
    field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    return call_of(
        body,
        max_tokens=getattr(body, field),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        chat=turn,
        add_special_tokens=body.add_special_tokens,
        max_tokens_field=field,
    )


class ChatWriter(ResponseWriter[ChatChunkChoice, ChatChunk]):
    def __init__(self, name: str, generation: Generation, options: ResponseOptions, echo: str) -> None:
        self._echo = echo
        super().__init__(name, generation, options)

    def opening(self) -> bytes:
        return b"".join(event(self._opening(choice)) for choice in self.generation.choices)

    def _begin_chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            object="chat.completion.chunk",
            choices=choices,
            system_fingerprint=self.served.fingerprint,
        )

    def _opening(self, choice: ChoiceStream) -> ChatChunk:
        chunk = self._chunk([self._skeleton(choice, "")])
        chunk["choices"][0]["delta"] = {"role": "assistant", "content": self._echo}
        if self.options.token_ids:
            chunk["prompt_token_ids"] = self.generation.prompts[choice.prompt]
        return chunk

    def _skeleton(self, choice: ChoiceStream, text: str) -> ChatChunkChoice:
        return {"index": choice.index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def _choice(self, choice: ChoiceStream, update: ChoiceUpdate) -> ChatChunkChoice:
        delta = MessageDelta()
        if update.piece.content:
            delta["content"] = update.piece.content
        if update.piece.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = update.piece.reasoning
        if update.piece.calls:
            delta["tool_calls"] = _call_deltas(update.piece.calls)
        part = ChatChunkChoice(
            index=choice.index,
            delta=delta,
            logprobs=self._logprobs(update.logprobs),
            finish_reason=update.finish_reason,
        )
        if update.finish_reason is not None:
            part["stop_reason"] = choice.stop_reason
        if self.options.token_ids:
            part["token_ids"] = update.tokens
        self._add_policy(part, choice, update.finish_reason is not None)
        return part

    def answer(self, results: Sequence[Collected]) -> ChatCompletion:
        response = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            object="chat.completion",
            choices=[self._message(*pair) for pair in zip(self.generation.choices, results, strict=True)],
            usage=self.usage(),
            system_fingerprint=self.served.fingerprint,
            prompt_logprobs=None,
        )
        self._add_echoed(response)
        if self.options.prompt_logprobs:
            found = self.generation.choices[0].prompt_logprobs or []
            response["prompt_logprobs"] = prompt_logprobs(found, self.served.vocabulary)
        if self.options.token_ids:
            response["prompt_token_ids"] = self.generation.prompts[0]
        return response

    def _message(self, choice: ChoiceStream, result: Collected) -> ChatChoice:
        content = self._echo + "".join(result.content)
        message = AssistantMessage(role="assistant", content=content, refusal=None)
        if reasoning := "".join(result.reasoning):
            message["reasoning_content"] = message["reasoning"] = reasoning
        if result.calls:
            message["content"] = content or None
            message["tool_calls"] = [_call(call) for call in result.calls]
        answer = ChatChoice(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(result.logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if self.options.token_ids:
            answer["token_ids"] = result.tokens
        self._add_policy(answer, choice, True)
        return answer

    def _logprobs(self, entries: Sequence[tuple[TokenLogprob, int]]) -> ChatLogprobs | None:
        if not self.options.logprobs:
            return None
        vocabulary = self.served.vocabulary
        as_ids = self.options.tokens_as_ids
        content = [token_logprobs(vocabulary, entry, as_ids=as_ids) for entry, _ in entries]
        return {"content": content, "refusal": None}


class ChatRoutes:
    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def complete(self, body: ChatBody, request: Request) -> Response:
        """Answers the conversation, `n` times. With `stream`, chunks arrive as server-sent events."""
        call = chat_call(body)
        options = options_of(body, body.logprobs)
        generation = await self._service.prepare(call, request, completion_name("chatcmpl-", request))
        echo = _last_words(body.messages) if body.echo else ""
        writer = ChatWriter(generation.completion_id, generation, options, echo)
        return await respond(generation, writer, request)


def _last_words(messages: Sequence[ChatMessage]) -> str:
    """Returns the assistant's last words where the last message is its own, else an empty string."""
    last = messages[-1]
    if last.role != "assistant" or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "".join(part.content for part in last.content)


def _call_deltas(calls: Sequence[CallDelta]) -> list[ToolCallDelta]:
    """One entry for each call: clients take two of the same index in one chunk for two calls."""
    entries: dict[int, ToolCallDelta] = {}
    for call in calls:
        if (entry := entries.get(call.index)) is not None:
            entry["function"]["arguments"] += call.arguments
        elif call.name is None:
            entries[call.index] = {"index": call.index, "function": {"arguments": call.arguments}}
        else:
            function = FunctionDelta(name=call.name, arguments=call.arguments)
            entries[call.index] = ToolCallDelta(index=call.index, id=call.id or "", type="function", function=function)
    return list(entries.values())


def _call(call: CallDelta) -> ToolCallResponse:
    function = Function(name=call.name or "", arguments=call.arguments)
    return ToolCallResponse(id=call.id or "", type="function", function=function)
