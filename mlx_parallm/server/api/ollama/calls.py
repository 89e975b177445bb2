"""From Ollama's bodies to calls that the service takes."""

from collections.abc import Sequence
from typing import Any

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.ollama.bodies import OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaMessage
from mlx_parallm.server.generation.call import ChatTurn, GenerationCall, ImageSource, Structure
from mlx_parallm.server.model_table import ServedModel
from mlx_parallm.text.grammar import json_grammar
from mlx_parallm.text.prompts import Conversation, Message


def chat_call(body: OllamaChatBody, served: ServedModel, model: str) -> GenerationCall:
    _check_thinking(body, served)
    images = [
        _image(data, f"messages.{index}.images.{number}")
        for index, message in enumerate(body.messages)
        for number, data in enumerate(message.images)
    ]
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    return _call(body, model, chat=_turn(body, [_message(message) for message in body.messages], images, tools))


def generate_call(body: OllamaGenerateBody, served: ServedModel, model: str) -> GenerationCall:
    if body.raw or not served.tokenizer.has_chat_template:
        return _call(body, model, prompts=[f"{body.system}\n\n{body.prompt}" if body.system else body.prompt])
    _check_thinking(body, served)
    messages: list[Message] = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": _content(body.prompt, len(body.images))})
    images = [_image(data, f"images.{number}") for number, data in enumerate(body.images)]
    return _call(body, model, chat=_turn(body, messages, images))


def _turn(
    body: OllamaBody, messages: list[Message], images: Sequence[ImageSource], tools: Sequence[dict[str, Any]] = ()
) -> ChatTurn:
    conversation = Conversation(messages=messages, tools=tools, template_kwargs=body.template_kwargs)
    return ChatTurn(conversation=conversation, images=images)


def _call(body: OllamaBody, model: str, **prompt: Any) -> GenerationCall:
    return GenerationCall(
        model=model,
        sampling=body.sampling(),
        structure=None if body.format is None else Structure(json_grammar(body.format), "format"),
        stream=body.stream,
        max_tokens_field="options.num_predict",
        fit_max_tokens=True,
        **prompt,
    )


def _message(message: OllamaMessage) -> Message:
    plain: Message = {"role": message.role, "content": _content(message.content, len(message.images))}
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_name is not None:
        plain["name"] = message.tool_name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.model_dump()} for call in message.tool_calls
        ]
    return plain


def _content(text: str, images: int) -> Any:
    """Text, or the images and then the text."""
    return [{"type": "image"}] * images + [{"type": "text", "text": text}] if images else text


def _image(data: str, param: str) -> ImageSource:
    """What kind of image it is says its data itself."""
    return ImageSource(data if data.startswith("data:") else f"data:image/png;base64,{data}", param)


def _check_thinking(body: OllamaBody, served: ServedModel) -> None:
    if body.think and served.thinking is None:
        raise InvalidRequestError(f"think: {served.name} does not support thinking", param="think")
