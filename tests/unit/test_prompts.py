"""Messages become prompts by the model's own template; tokenising is the tokenizer's own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from transformers import ByT5Tokenizer

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.text.parsers import harmony
from mlx_parallm.text.prompts import Conversation, Prompts
from tests.unit.vocabularies import byte_level, sentence_piece

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
NATIVE = "{{ tools|length if tools else 0 }} developer " + PLAIN
THINKS = PLAIN + "<think>\n"


def prompts(template: str | None, *, tools: bool = False) -> Prompts:
    inner = byte_level(["<think>", "</think>"])._tokenizer
    inner.chat_template = template
    if tools:
        return Prompts(TokenizerWrapper(inner, tool_call_start="<c>", tool_call_end="</c>", tool_parser=json_tools))
    return Prompts(TokenizerWrapper(inner))


def user(content: str, role: str = "user") -> Conversation:
    return Conversation([{"role": role, "content": content}])


PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}"
    "{% endfor %}"
)


def test_templates_that_read_parts_alone_get_parts() -> None:
    image = Conversation([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}])
    assert prompts(PARTS).render(user("hi")) == "[user]hi"
    assert prompts(PARTS).render(image) == "[user]<image>hi"
    both = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}type{% endif %}{% endfor %}"
    assert prompts(both).render(user("hi")) == "hi"
    assert prompts(both).render(image) == "type"
    broken = "{{ raise_exception('type') }}"
    with pytest.raises(InvalidRequestError, match="can't render"):
        prompts(broken).render(user("hi"))
    mixed = [
        *image.messages,
        {"role": "tool", "content": "42"},
    ]  # a result behind an image, for a template without tools
    assert "42" in prompts(PARTS).render(Conversation(mixed))


def test_template() -> None:
    assert prompts(PLAIN).render(user("hi")) == "[user]hi[assistant]"
    silent = Conversation([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert prompts(PLAIN).render(silent) == "[user]hi"


def test_what_every_conversation_begins_with() -> None:
    speaking = prompts("[system]be kind" + PLAIN)
    beginning = speaking.common_prefix()
    assert beginning == speaking.chat(user("anything else")).tokens[: len(beginning)]
    assert speaking._tokenizer.decode(beginning) == "[system]be kind[user]"
    assert prompts(None).common_prefix() == []
    assert prompts("{{ raise_exception('never') }}").common_prefix() == []


def test_developer_is_system_for_templates_that_do_not_know_it() -> None:
    assert prompts(PLAIN).render(user("x", "developer")).startswith("[system]x")
    assert prompts(NATIVE).render(user("x", "developer")).startswith("0 developer [developer]x")


def test_a_template_that_refuses_is_a_clear_error() -> None:
    with pytest.raises(InvalidRequestError, match="System role not supported") as caught:
        prompts(STRICT).chat(user("x", "system"))
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequestError, match="no chat template"):
        prompts(None).chat(user("x"))


def test_tools_are_rendered_by_the_template_or_spelled_out() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    call = {"function": {"name": "look", "arguments": {"at": "é"}}}
    talk = Conversation(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "wait", "tool_calls": [call]},
            {"role": "tool", "content": "seen"},
        ],
        tools=[tool],
    )
    assert prompts(NATIVE, tools=True).render(talk).startswith("1 developer [user]hi[assistant]wait[tool]seen")
    text = prompts(PLAIN).render(talk)
    assert text.startswith("[system]You may call functions")
    assert '{"type": "function", "function": {"name": "look"}}' in text
    assert 'wait\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>' in text
    assert "[user]<tool_response>\nseen\n</tool_response>" in text
    assert talk.messages[0] == {"role": "user", "content": "hi"}, "the conversation itself is left alone"


def test_deepseek_whose_template_shows_no_tools_is_taught_its_own_marks() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    talk = Conversation([{"role": "user", "content": "hi"}], tools=[tool])
    text = prompts(PLAIN + "{# <｜tool▁calls▁begin｜> #}").render(talk)
    example = '{"name": <function-name>, "arguments": <arguments-object>}'
    assert f"<｜tool▁calls▁begin｜>\n{example}\n<｜tool▁calls▁end｜>" in text
    assert "<tool_call>" not in text


def test_a_template_that_takes_single_calls_gets_them() -> None:
    template = (
        "{# tools #}{% if false %}This model only supports single tool-calls at once!{% endif %}"
        '{# {"name": function name, "parameters": … #}'
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<{{ c.id }}>{% endfor %}{% endfor %}"
    )
    calls = [{"id": name, "function": {"name": "look", "arguments": {}}} for name in "abc"]
    talk = Conversation(
        [
            {"role": "assistant", "content": "wait", "tool_calls": calls},
            {"role": "tool", "content": "B", "tool_call_id": "b"},
            {"role": "tool", "content": "A", "tool_call_id": "a"},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        ],
    )
    expected = "[assistant]wait<a>[tool]A[assistant]<b>[tool]B[assistant]<c>[user]and?[assistant]<a>"
    assert prompts(template).render(talk) == expected


def test_a_prompt_may_end_inside_the_reasoning() -> None:
    assert prompts(THINKS).chat(user("hi")).inside_thinking
    assert not prompts(PLAIN).chat(user("hi")).inside_thinking
    assert not prompts(PLAIN).chat(user("what is <think>")).inside_thinking
    gpt_oss = byte_level(harmony.MARKS)._tokenizer
    gpt_oss.chat_template = PLAIN + "<|start|>assistant<|channel|>analysis<|message|>"
    assert Prompts(TokenizerWrapper(gpt_oss)).chat(user("hi")).inside_thinking


@pytest.mark.parametrize("tokenizer", [byte_level(), sentence_piece()])
def test_encoding_is_the_tokenizers_own(tokenizer: TokenizerWrapper) -> None:
    subject = Prompts(tokenizer)
    for text in ("", "hello world", "Ünïcode 日本 👋\n\n<eos></s>"):
        for special in (True, False):
            expected = tokenizer.encode(text, add_special_tokens=special)
            assert subject.encode(text, add_special_tokens=special) == expected
            assert subject.encode(text, add_special_tokens=special) == expected  # from the cache


def test_a_tokenizer_in_python_alone_is_asked_too() -> None:
    tokenizer = TokenizerWrapper(ByT5Tokenizer())
    subject = Prompts(tokenizer)
    assert tokenizer.encode("é b", add_special_tokens=False) == [198, 172, 35, 101]
    assert subject.encode("é b", add_special_tokens=False) == [198, 172, 35, 101]
    assert subject.encode("é b", add_special_tokens=True) == [198, 172, 35, 101, 1]


def test_cached_prompts_are_copies() -> None:
    subject = prompts(PLAIN)
    subject.chat(user("hi")).tokens.append(99)
    subject.encode("hi", add_special_tokens=True).append(99)
    assert 99 not in subject.chat(user("hi")).tokens[-1:]
    assert subject.encode("hi", add_special_tokens=True)[-1] != 99


def test_many_threads_at_once() -> None:
    subject = prompts(PLAIN)
    texts = [f"text {number % 7} " * 50 for number in range(64)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: subject.encode(text, add_special_tokens=False), texts))
    assert found == [list(subject._tokenizer.encode(text, add_special_tokens=False)) for text in texts]
