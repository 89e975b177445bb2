"""From a valid body to what the engine takes: sampling parameters, conversations, grammars. Routes call it.

Here is what only the model can decide: ids within its vocabulary, lengths within its context, schemas that
can be enforced.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from mlx_parallm.engine.admission import check_ids, check_sampling
from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.server.models import ServedModel
from mlx_parallm.server.schemas import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
    NamedToolChoice,
    ToolDefinition,
)
from mlx_parallm.text.grammar import (
    after_thinking,
    choice_grammar,
    either,
    in_final_channel,
    json_grammar,
    regex_grammar,
    tool_grammar,
)
from mlx_parallm.text.parsers.calls import Tool
from mlx_parallm.text.prompts import Conversation, Message
from mlx_parallm.types import SamplingParams

RESERVED_TEMPLATE_KWARGS = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"}
    | {"continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}
)


def sampling_params(
    body: GenerationBody, served: ServedModel, *, max_tokens: int | None, logprobs: int | None, grammar: str | None
) -> SamplingParams:
    vocab_size = served.model.vocab_size
    prompt_logprobs = body.prompt_logprobs
    if isinstance(body, CompletionBody) and body.echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=0 if body.top_k >= vocab_size else max(body.top_k, 0),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=body.seed,
        n=body.n,
        stop=body.stop,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        processed_logprobs=body.logprobs_mode == "processed",
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )
    check_sampling(sampling, vocab_size)
    return sampling


def check_prompt_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    for index, prompt in enumerate(prompts):
        check_ids(prompt, vocab_size, "prompt" if len(prompts) == 1 else f"prompt.{index}")


def completion_length(
    served: ServedModel, prompt_tokens: int, *, asked: int | None, default: int | None, prompt: str, param: str
) -> int | None:
    """The most tokens to generate; None leaves it to the context. What was asked for must fit, as in vLLM."""
    context = served.context_length
    room = context - prompt_tokens
    if room < 1:
        raise ContextLengthError.of(context, prompt_tokens, param=prompt)
    if asked is not None and asked > room:
        error = ContextLengthError.of(context, prompt_tokens, asked, param=prompt)
        error.param = param
        raise error
    return asked if asked is not None else (min(default, room) if default is not None else None)


def truncated(tokens: list[int], keep: int | None) -> list[int]:
    return tokens if keep is None else tokens[-keep:]


def conversation(
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolDefinition],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    template_kwargs: dict[str, Any],
) -> Conversation:
    if taken := sorted(RESERVED_TEMPLATE_KWARGS & template_kwargs.keys()):
        raise InvalidRequestError(
            f"chat_template_kwargs: {taken[0]} is not the template's to take", param="chat_template_kwargs"
        )
    return Conversation(
        messages=[_message(message, index) for index, message in enumerate(messages)],
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=template_kwargs,
    )


def chat_conversation(body: ChatBody) -> Conversation:
    kwargs = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    return conversation(
        body.messages,
        body.tools if body.tool_choice != "none" else [],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=kwargs,
    )


def _message(message: ChatMessage, index: int) -> Message:
    """As chat templates expect it: content is text, a call's arguments are an object."""
    parts = message.content
    content = "\n".join(part.content for part in parts) if isinstance(parts, list) else parts or ""
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


def grammar_of(body: GenerationBody, served: ServedModel, *, inside_thinking: bool = False) -> tuple[str, str] | None:
    """The grammar that a body asks for, with the field that asks for it. Compiling is left to the caller."""
    asked = _structure(body)
    chat = isinstance(body, ChatBody)
    if asked is not None and chat and served.tool_format.kind == "harmony":
        asked = in_final_channel(asked[0], served.vocabulary), asked[1]
    if isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedToolChoice)
        if forced or asked is not None:
            calls = _tool_grammar(body, served)
            # Free to choose, a model may still call a tool instead of answering in the format.
            asked = (calls, "tools") if forced or asked is None else (either(asked[0], calls), asked[1])
    if asked is None or served.thinking is None or not chat:
        return asked
    grammar = after_thinking(asked[0], served.thinking, served.vocabulary, "inside" if inside_thinking else "before")
    return grammar, asked[1]


def _tool_grammar(body: ChatBody, served: ServedModel) -> str:
    name = body.tool_choice.function.name if isinstance(body.tool_choice, NamedToolChoice) else None
    return tool_grammar(
        tools_of(body), served.tool_format, served.vocabulary, name=name, parallel=body.parallel_tool_calls
    )


def tools_of(body: ChatBody) -> list[Tool]:
    return [tool.model_dump(exclude_none=True) for tool in body.tools]


def _structure(body: GenerationBody) -> tuple[str, str] | None:
    """A grammar, and the field it comes from."""
    found = list(_structures(body))
    if len(found) > 1:
        message = f"{found[0][1].split('.')[0]} and {found[1][1].split('.')[0]} can't both shape the output"
        raise InvalidRequestError(message, param=found[1][1].split(".")[0])
    return found[0] if found else None


def _structures(body: GenerationBody) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    form = body.response_format
    if form is not None and form.type == "json_object":
        found.append((json_grammar({"type": "object"}), "response_format"))
    if form is not None and form.type == "json_schema":
        assert form.json_schema is not None
        assert form.json_schema.schema_ is not None
        found.append((json_grammar(form.json_schema.schema_), "response_format.json_schema.schema"))
    if (wanted := body.structured_outputs) is not None:
        schema = {"type": "object"} if wanted.json_object else wanted.json_
        found += _from_fields("structured_outputs.", schema, wanted.regex, wanted.choice, wanted.grammar)
    found += _from_fields("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    return found


def _from_fields(
    prefix: str, schema: dict[str, Any] | str | None, regex: str | None, choice: list[str] | None, lark: str | None
) -> list[tuple[str, str]]:
    """vLLM's four ways to ask for structure, under either of its spellings."""
    found: list[tuple[str, str]] = []
    if schema is not None:
        found.append((json_grammar(_schema(schema, f"{prefix}json")), f"{prefix}json"))
    if regex is not None:
        found.append((regex_grammar(regex), f"{prefix}regex"))
    if choice is not None:
        found.append((choice_grammar(choice), f"{prefix}choice"))
    if lark is not None:
        found.append((lark, f"{prefix}grammar"))
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
