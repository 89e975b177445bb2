"""From messages and text to prompt tokens: chat templates, tools for models that know none, tokenising, a cache.

The server calls this from its request path and its worker threads; every method may run on any thread.
"""

import hashlib
import json
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.text.parsers.calls import Tool
from mlx_parallm.text.parsers.chat_parser import Thinking
from mlx_parallm.text.parsers.tool_format import ToolFormat

# role, content, and for some: name, tool_calls, tool_call_id, reasoning_content. Content is a string, or with images
# a list of parts: {"type": "text", "text": …} and {"type": "image"}.
Message = dict[str, Any]

CHECKED_CHARACTERS = 16  # for each token of the context: a text of fewer characters is simply tokenised
# What clients may not pass to a chat template beside messages and tools: these are settled here.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"}
    | {"continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}
)
TOOL_PROMPT = """You may call functions to help with the user's request. These are their signatures:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as a JSON object within {start}{end} tags:
{start}
{{"name": <function-name>, "arguments": <arguments-object>}}
{end}"""


def far_too_many(text: str, limit: int, count: Callable[[str], int]) -> int | None:
    """The tokens of the start of a text that is far too long; None where it may not be.

    To tokenise all of it takes seconds for megabytes."""
    if len(text) <= limit * CHECKED_CHARACTERS:
        return None
    found = count(text[: limit * CHECKED_CHARACTERS])
    return found if found > limit + limit // 16 + 64 else None  # cut off, a text may have a few tokens more


def check_template_kwargs(given: Mapping[str, Any]) -> None:
    if taken := sorted(RESERVED_TEMPLATE_KWARGS & given.keys()):
        raise InvalidRequestError(
            f"chat_template_kwargs: {taken[0]} is not the template's to take", param="chat_template_kwargs"
        )


@dataclass(frozen=True, slots=True)
class Conversation:
    """All that a chat template sees."""

    messages: list[Message]
    tools: Sequence[Tool] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def key(self) -> bytes:
        parts = [self.messages, self.tools, self.add_generation_prompt, self.continue_final_message]
        return orjson.dumps([*parts, self.template_kwargs], option=orjson.OPT_SORT_KEYS)

    def size(self) -> int:
        """About how many characters there are to render."""
        texts = sum(len(message.get("content") or "") for message in self.messages)
        return texts + 100 * len(self.messages) + 500 * len(self.tools)


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    inside_thinking: bool = False  # the template has opened the reasoning already


class Prompts:
    """Renders and tokenises for one model."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._format = ToolFormat.of(tokenizer)
        self._thinking = Thinking.of(tokenizer)
        self._template = str(getattr(tokenizer, "chat_template", None) or "")
        self._backend = _fast_backend(tokenizer)
        self._parts_alone = _reads_parts_alone(tokenizer, self._template)
        self._lock = threading.Lock()
        self._cache = _Cache()

    def encode(self, text: str, *, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        """Encodes a text. With a `limit`, one of that many tokens or more is refused, a long one by its start alone."""
        key = b"1" if add_special_tokens else b"0"
        prompt = self._cache.get(key + text.encode("utf-8", "surrogatepass"))
        if prompt is None:
            self._check_length(text, limit, "prompt")
            prompt = Prompt(self._tokenise(text, add_special_tokens))
            self._cache.put(key + text.encode("utf-8", "surrogatepass"), prompt)
        return prompt.tokens

    def chat(self, conversation: Conversation, *, add_special_tokens: bool = False, limit: int | None = None) -> Prompt:
        """`limit` as for `encode`."""
        key = (b"C" if add_special_tokens else b"c") + conversation.key()
        prompt = self._cache.get(key)
        if prompt is None:
            text = self.render(conversation)
            self._check_length(text, limit, "messages")
            prompt = Prompt(self._tokenise(text, add_special_tokens), self._ends_inside_thinking(text))
            self._cache.put(key, prompt)
        return prompt

    def common_prefix(self) -> list[int]:
        """Returns what the template puts before every conversation: the tokens that two different ones have in
        common."""
        try:
            one, other = (self.chat(Conversation([{"role": "user", "content": text}])).tokens for text in ("a", "Z"))
        except InvalidRequestError:  # no template, or one that wants more than a user's message
            return []
        return one[: next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))]

    def render(self, conversation: Conversation) -> str:
        """The prompt as text, by the model's own template."""
        if not self._tokenizer.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template, so it can't chat; use /v1/completions, or generate() of LLM",
                param="messages",
            )
        messages = [dict(message) for message in conversation.messages]
        tools = list(conversation.tools)
        if "developer" not in self._template:
            for message in messages:
                message["role"] = "system" if message["role"] == "developer" else message["role"]
        if not self._format.native:
            messages = _spelled_out(messages, tools, self._format)
            tools = []
        elif "single tool-calls" in self._template:  # Llama's refuse more
            messages = _one_call_each(messages)
        if self._parts_alone:
            messages = [_in_parts(message) for message in messages]
        try:  # the template is the model's own program: whatever it raises, it could not take these messages
            rendered = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                tokenize=False,
                **conversation.template_kwargs,
            )
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"the model's chat template can't render these messages: {reason}", param="messages"
            ) from error
        return str(rendered)

    def _check_length(self, text: str, limit: int | None, param: str) -> None:
        if limit is None:
            return
        count = far_too_many(text, limit, lambda prefix: len(self._tokenise(prefix, False)))
        if count is not None:
            raise ContextLengthError.of(limit, count, at_least=True, param=param)

    def _ends_inside_thinking(self, text: str) -> bool:
        return self._thinking is not None and text.rstrip().endswith(self._thinking.start)

    def _tokenise(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError("the text holds half of a surrogate pair, which is no character") from None
        if self._backend is not None:
            # The batch call gives up the interpreter lock while it works, the single one does not.
            encoded = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoded[0].ids)
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _fast_backend(tokenizer: TokenizerWrapper) -> Any:
    """The Rust tokenizer, if calling it directly is the same as asking the Python one around it.

    The Python layer sets padding and truncation anew in each call, which two threads can't do at once.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    probe = " A first\nline,  then ünïcode 日本 and <tags>\t12345"
    backend.no_truncation()
    backend.no_padding()
    direct = backend.encode_batch_fast([probe], add_special_tokens=True)[0].ids
    return backend if direct == list(tokenizer.encode(probe, add_special_tokens=True)) else None


class _Cache:
    """Least recently used prompts, by the digest of what they were made from, up to a number of tokens of 4 bytes."""

    def __init__(self, capacity: int = 500_000) -> None:
        self._capacity = capacity
        self._size = 0
        self._entries: OrderedDict[bytes, tuple[array[int], bool]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Prompt | None:
        digest = hashlib.blake2b(key, digest_size=16).digest()
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                return None
            self._entries.move_to_end(digest)
        tokens, inside_thinking = entry
        return Prompt(tokens.tolist(), inside_thinking)

    def put(self, key: bytes, prompt: Prompt) -> None:
        digest = hashlib.blake2b(key, digest_size=16).digest()
        with self._lock:
            if digest in self._entries:
                return
            self._entries[digest] = array("I", prompt.tokens), prompt.inside_thinking
            self._size += len(prompt.tokens)
            while self._size > self._capacity:
                _, (oldest, _) = self._entries.popitem(last=False)
                self._size -= len(oldest)


def _reads_parts_alone(tokenizer: TokenizerWrapper, template: str) -> bool:
    """Whether a chat template loses the text of a message that is a plain string, as some for images do."""
    if "type" not in template:
        return False
    word = "string-content"

    def renders(content: Any) -> bool:
        try:
            return word in str(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
        except Exception:  # the template is the model's own program
            return False

    return not renders(word) and renders([{"type": "text", "text": word}])


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return message if not isinstance(content, str) else {**message, "content": [{"type": "text", "text": content}]}


def _spelled_out(messages: list[Message], tools: Sequence[Tool], tool_format: ToolFormat) -> list[Message]:
    """The same conversation for a template that knows no tools: all of them, calls and results, as text."""
    plain: list[Message] = []
    for message in messages:
        if message["role"] in ("tool", "function"):
            _add_result(plain, f"<tool_response>\n{message['content']}\n</tool_response>")
        elif calls := message.get("tool_calls"):
            blocks = [f"{tool_format.start}\n{_call_text(call)}\n{tool_format.end}" for call in calls]
            content = "\n".join([*filter(None, [message["content"]]), *blocks])
            plain.append({"role": message["role"], "content": content})
        else:
            plain.append(message)
    if not tools:
        return plain
    signatures = "\n".join(map(_dumps, tools))
    return _with_system(plain, TOOL_PROMPT.format(tools=signatures, start=tool_format.start, end=tool_format.end))


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The same conversation with each call in a message of its own, and its result behind it."""
    plain: list[Message] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            plain.append(message)
            continue
        results: list[Message] = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        for number, call in enumerate(calls):
            plain.append({**message, "content": "" if number else message["content"], "tool_calls": [call]})
            if results:
                plain.append(results.pop(_place_of_result(call, results)))
        plain += results
    return plain


def _place_of_result(call: Mapping[str, Any], results: Sequence[Message]) -> int:
    """Finds a call's result by the call's id; results without ids are in the order of the calls."""
    identities = [result.get("tool_call_id") for result in results]
    return identities.index(call["id"]) if call.get("id") in identities else 0


def _add_result(messages: list[Message], text: str) -> None:
    """A result is a user's message; those that follow one another are one message."""
    last = messages[-1] if messages else None
    content = last["content"] if last is not None and last["role"] == "user" else None
    if last is not None and isinstance(content, str) and content.startswith("<tool_response>"):
        last["content"] += f"\n{text}"
    else:
        messages.append({"role": "user", "content": text})


def _with_system(messages: list[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return _dumps({"name": function["name"], "arguments": function["arguments"]})


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
