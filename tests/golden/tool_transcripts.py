"""What models write when they call tools, in every format that is known, and what it means.

The transcripts follow the chat templates of the models: content before calls, one call, two at once, nested arguments
with quotes, braces and letters of other languages, reasoning where the format has it. `markup` is what must never be
seen in content; the end mark inside of a value is part of some arguments, where the format permits it.
"""

from dataclasses import dataclass
from typing import Any

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Transcript:
    title: str
    text: str
    calls: tuple[tuple[str, Arguments], ...] = ()
    content: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Format:
    parser: str  # of mlx_lm.tool_parsers; or "ours", "deepseek", "llama", "llama4", "harmony"
    markup: tuple[str, ...]
    transcripts: tuple[Transcript, ...]
    thinking: tuple[str, str] | None = ("<think>", "</think>")
    drop: tuple[str, ...] = ()


STRING, INTEGER = {"type": "string"}, {"type": "integer"}


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [
    _tool("get_weather", city=STRING, days=INTEGER),
    _tool("note", text=STRING, options={"type": "object"}, tags={"type": "array", "items": STRING}),
    _tool("now"),
]

ROME = ("get_weather", {"city": "Rome", "days": 2})
PAULO = ("get_weather", {"city": "São Paulo", "days": 1})
NOTE = (
    "note",
    {
        "text": 'He said: "{hi}", isn\'t it?',
        "options": {"a": {"b": [1, "x}", True]}, "é": None},
        "tags": ["ü", "日本", "]["],
    },
)
NOW = ("now", {})
HIDDEN = "hm, <tool_call> would be right.\n[TOOL_CALLS] <|python_tag|>{"  # marks in reasoning are reasoning

# The arguments of NOTE as JSON, with escapes.
NOTE_JSON = (
    r'{"text": "He said: \"{hi}\", isn\u0027t it?", "options": {"a": {"b": [1, "x}", true]}, "é": null}, '
    r'"tags": ["ü", "日本", "]["]}'
)


def _json(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


ROME_JSON = '{"city": "Rome", "days": 2}'
PAULO_JSON = '{"city": "S\\u00e3o Paulo",\n "days": 1}'


def _marked_json(end_in_string: str) -> tuple[Transcript, ...]:
    def block(name: str, arguments: str) -> str:
        return f"<tool_call>\n{_json(name, arguments)}\n</tool_call>"

    return (
        Transcript("one", block("get_weather", ROME_JSON), (ROME,)),
        Transcript("content", f"Let me look.\n\n{block('now', '{}')}", (NOW,), "Let me look."),
        Transcript("two", f"{block('get_weather', ROME_JSON)}\n{block('get_weather', PAULO_JSON)}", (ROME, PAULO)),
        Transcript("nested", f"Noted: {block('note', NOTE_JSON)}", (NOTE,), "Noted:"),
        Transcript(
            "end mark in a string",
            block("note", f'{{"text": "a {end_in_string} b"}}'),
            (("note", {"text": f"a {end_in_string} b"}),),
        ),
        Transcript(
            "reasoning",
            f"<think>\n{HIDDEN}</think>\n\nSo:\n{block('get_weather', ROME_JSON)}",
            (ROME,),
            "So:",
            HIDDEN,
        ),
        Transcript(
            "keys in another order",
            f'<tool_call>{{"arguments": {ROME_JSON}, "name": "get_weather"}}</tool_call>',
            (ROME,),
        ),
        Transcript(
            "a list", f"<tool_call>[{_json('get_weather', ROME_JSON)}, {_json('now', '{}')}]</tool_call>", (ROME, NOW)
        ),
    )


HERMES_MARKUP = ("<tool_call", "</tool_call", '{"name"', '"arguments"')

QWEN_ROME = """<tool_call>
<function=get_weather>
<parameter=city>
Rome
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>"""
QWEN_PAULO = QWEN_ROME.replace("Rome", "São Paulo").replace("2", "1")
QWEN_NOTE = """<tool_call>
<function=note>
<parameter=text>
He said: "{hi}", isn't it?
</parameter>
<parameter=options>
{"a": {"b": [1, "x}", true]}, "é": null}
</parameter>
<parameter=tags>
["ü", "日本", "]["]
</parameter>
</function>
</tool_call>"""
QWEN_CODE = """<tool_call>
<function=note>
<parameter=text>

if a < b:
    print("<x>\\n")

</parameter>
</function>
</tool_call>"""

GLM_ROME = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
<arg_key>days</arg_key>
<arg_value>2</arg_value>
</tool_call>"""
GLM_PAULO = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>São Paulo</arg_value>"
    "<arg_key>days</arg_key><arg_value>1</arg_value></tool_call>"
)
GLM_NOTE = """<tool_call>note
<arg_key>text</arg_key>
<arg_value>He said: "{hi}", isn't it?</arg_value>
<arg_key>options</arg_key>
<arg_value>{"a": {"b": [1, "x}", true]}, "é": null}</arg_value>
<arg_key>tags</arg_key>
<arg_value>["ü", "日本", "]["]</arg_value>
</tool_call>"""


def _longcat(text: str) -> str:
    for word in ("tool_call", "arg_key", "arg_value", "think"):
        text = text.replace(f"<{word}>", f"<longcat_{word}>").replace(f"</{word}>", f"</longcat_{word}>")
    return text


def _glm(longcat: bool = False) -> tuple[Transcript, ...]:
    raw = [
        Transcript("one", GLM_ROME, (ROME,)),
        Transcript("content", f"Let me look.\n{GLM_PAULO}", (PAULO,), "Let me look."),
        Transcript("two", f"{GLM_ROME}\n{GLM_PAULO}", (ROME, PAULO)),
        Transcript("nested", GLM_NOTE, (NOTE,)),
        Transcript("no arguments", "<tool_call>now</tool_call>", (NOW,)),
        Transcript("reasoning", f"<think>{HIDDEN}</think>\nSo:{GLM_ROME}", (ROME,), "So:", HIDDEN),
    ]
    if not longcat:
        return tuple(raw)
    return tuple(
        Transcript(one.title, _longcat(one.text), one.calls, one.content, _longcat(one.reasoning)) for one in raw
    )


MINIMAX_NOTE = """<invoke name="note">
<parameter name="text">He said: "{hi}", isn't it?</parameter>
<parameter name="options">{"a": {"b": [1, "x}", true]}, "é": null}</parameter>
<parameter name="tags">["ü", "日本", "]["]</parameter>
</invoke>
"""


def _minimax_weather(city: str, days: int) -> str:
    return (
        f'<invoke name="get_weather">\n<parameter name="city">{city}</parameter>\n'
        f'<parameter name="days">{days}</parameter>\n</invoke>\n'
    )


def _minimax(*calls: str) -> str:
    return f"<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>"


MINICPM_ROME = '<function name="get_weather"><param name="city">Rome</param><param name="days">2</param></function>'
MINICPM_PAULO = MINICPM_ROME.replace("Rome", "São Paulo").replace("2", "1")
MINICPM_NOTE = (
    """<function name="note"><param name="text">He said: "{hi}", isn't it?</param>"""
    """<param name="options">{"a": {"b": [1, "x}", true]}, "é": null}</param>"""
    """<param name="tags">["ü", "日本", "]["]</param></function>"""
)
MINICPM_CDATA = (
    '<function name="note"><param name="text"><![CDATA[if a < b & c:\n  "</function></param>"]]></param></function>'
)

MUSE_NOTE = (
    '<atem:invoke name="note"><atem:parameter name="text">He said: "{hi}", isn\'t it?</atem:parameter>'
    '<atem:parameter name="options">{"a": {"b": [1, "x}", true]}, "é": null}</atem:parameter>'
    '<atem:parameter name="tags">["ü", "日本", "]["]</atem:parameter></atem:invoke>'
)


def _muse_weather(city: str, days: int) -> str:
    return (
        f'<atem:invoke name="get_weather">\n<atem:parameter name="city">{city}</atem:parameter>\n'
        f'<atem:parameter name="days">{days}</atem:parameter>\n</atem:invoke>\n'
    )


def _muse(*calls: str) -> str:
    return f"<atem:function_calls>\n{''.join(calls)}</atem:function_calls>"


def _k3_call(name: str, *arguments: tuple[str, str, str]) -> str:
    values = [
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in arguments
    ]
    return f'<|open|>call tool="{name}" index="1"<|sep|>{"".join(values)}<|close|>call<|sep|>'


def _k3(*calls: str) -> str:
    return f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>"


K3_ROME = _k3_call("get_weather", ("city", "string", "Rome"), ("days", "number", "2"))
K3_PAULO = _k3_call("get_weather", ("city", "string", "São Paulo"), ("days", "number", "1"))
K3_NOTE = _k3_call(
    "note",
    ("text", "string", 'He said: "{hi}", isn\'t it?'),
    ("options", "object", '{"a": {"b": [1, "x}", true]}, "é": null}'),
    ("tags", "array", '["ü", "日本", "]["]'),
)
K3_OBJECT = (
    '<|open|>call tool="get_weather" index="1"<|sep|><|open|>json type="object"<|sep|>'
    f"{ROME_JSON}<|close|>json<|sep|><|close|>call<|sep|>"
)


def _gemma(quote: str, start: str, end: str, thinking: tuple[str, str] | None) -> tuple[Transcript, ...]:
    def block(body: str) -> str:
        return f"{start}{body}{end}"

    def weather(city: str, days: int) -> str:
        return block(f"call:get_weather{{city:{quote}{city}{quote},days:{days}}}")

    note = block(
        f'call:note{{text:{quote}He said: "{{hi}}", isn\'t it?{quote},'
        f"options:{{a:{{b:[1,{quote}x}}{quote},true]}},é:null}},"
        f"tags:[{quote}ü{quote},{quote}日本{quote},{quote}]["
        f"{quote}]}}"
    )
    marked = block(f"call:note{{text:{quote}a {end} b{quote}}}")
    transcripts = [
        Transcript("one", weather("Rome", 2), (ROME,)),
        Transcript("content", f"Let me look.\n{block('call:now{}')}", (NOW,), "Let me look."),
        Transcript("two", weather("Rome", 2) + weather("São Paulo", 1), (ROME, PAULO)),
        Transcript("nested", note, (NOTE,)),
        Transcript("end mark in a string", marked, (("note", {"text": f"a {end} b"}),)),
    ]
    if thinking is not None:
        text = f"{thinking[0]}\n{HIDDEN}{thinking[1]}So:{weather('Rome', 2)}"
        transcripts.append(Transcript("reasoning", text, (ROME,), "So:", HIDDEN))
    return tuple(transcripts)


def _kimi_call(name: str, number: int, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def _kimi(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


KIMI_ROME = _kimi_call("get_weather", 0, ROME_JSON)
KIMI_MARKED = '{"text": "a <|tool_calls_section_end|> b"}'


def _deepseek(*calls: str) -> str:
    """Calls as V3.1 writes them."""
    written = "".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def _deepseek_v3(*calls: tuple[str, str]) -> str:
    """Calls as V3 and R1 write them."""
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


DEEPSEEK_ROME = f"get_weather<｜tool▁sep｜>{ROME_JSON}"
DEEPSEEK_PAULO = f"get_weather<｜tool▁sep｜>{PAULO_JSON}"
DEEPSEEK_MARKED = '{"text": "a <｜tool▁calls▁end｜> b ``` c"}'
DEEPSEEK = (
    Transcript("one", _deepseek(DEEPSEEK_ROME), (ROME,)),
    Transcript("content", f"Let me look.\n\n{_deepseek('now<｜tool▁sep｜>{}')}", (NOW,), "Let me look."),
    Transcript("two", _deepseek(DEEPSEEK_ROME, DEEPSEEK_PAULO), (ROME, PAULO)),
    Transcript("nested", _deepseek(f"note<｜tool▁sep｜>{NOTE_JSON}"), (NOTE,)),
    Transcript(
        "end mark in a string",
        _deepseek(f"note<｜tool▁sep｜>{DEEPSEEK_MARKED}"),
        (("note", {"text": "a <｜tool▁calls▁end｜> b ``` c"}),),
    ),
    Transcript("reasoning", f"<think>\n{HIDDEN}</think>So:{_deepseek(DEEPSEEK_ROME)}", (ROME,), "So:", HIDDEN),
    Transcript("a tool called function", _deepseek("function<｜tool▁sep｜>{}"), (("function", {}),)),
    Transcript("one of V3", _deepseek_v3(("get_weather", ROME_JSON)), (ROME,)),
    Transcript("content and one of V3", f"Let me look.\n{_deepseek_v3(('now', '{}'))}", (NOW,), "Let me look."),
    Transcript("two of V3", _deepseek_v3(("get_weather", ROME_JSON), ("get_weather", PAULO_JSON)), (ROME, PAULO)),
    Transcript("nested of V3", _deepseek_v3(("note", NOTE_JSON)), (NOTE,)),
    Transcript(
        "end mark in a string of V3",
        _deepseek_v3(("note", DEEPSEEK_MARKED)),
        (("note", {"text": "a <｜tool▁calls▁end｜> b ``` c"}),),
    ),
    Transcript(
        "reasoning of R1",
        f"<think>\n{HIDDEN}</think>\n\nSo:\n{_deepseek_v3(('get_weather', ROME_JSON), ('note', NOTE_JSON))}",
        (ROME, NOTE),
        "So:",
        HIDDEN,
    ),
)

PYTHON_NOTE = (
    """note(text='He said: "{hi}", isn\\'t it?', options={"a": {"b": [1, "x}", true]}, "é": None}, """
    """tags=["ü", "日本", "]["])"""
)
PYTHON_ROME = 'get_weather(city="Rome", days=2)'
PYTHON_PAULO = 'get_weather(city="São Paulo", days=1)'


def _pythonic(*calls: str) -> str:
    return f"<|tool_call_start|>[{', '.join(calls)}]<|tool_call_end|>"


LLAMA_ROME = _json("get_weather", ROME_JSON, "parameters")
LLAMA_PAULO = _json("get_weather", PAULO_JSON, "parameters")
LLAMA_MARKUP = ("<|python", '"parameters"', '{"name": "get', '{"name": "no', "get_weather", "note(")


def _harmony_call(name: str, arguments: str, end: str = "<|call|>") -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}{end}"


ANALYSIS = f"<|channel|>analysis<|message|>{HIDDEN}<|end|><|start|>assistant"
HARMONY = (
    Transcript("one", _harmony_call("get_weather", ROME_JSON), (ROME,)),
    Transcript("ended by a token that is no text", _harmony_call("get_weather", ROME_JSON, ""), (ROME,)),
    Transcript("reasoning", ANALYSIS + _harmony_call("get_weather", ROME_JSON), (ROME,), "", HIDDEN),
    Transcript(
        "preamble",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        "<|start|>assistant" + _harmony_call("now", "{}"),
        (NOW,),
        "Let me look.",
        "hm",
    ),
    Transcript(
        "two",
        f"{_harmony_call('get_weather', ROME_JSON)}<|start|>assistant{_harmony_call('get_weather', PAULO_JSON)}",
        (ROME, PAULO),
    ),
    Transcript("nested", ANALYSIS + _harmony_call("note", NOTE_JSON), (NOTE,), "", HIDDEN),
    Transcript(
        "end mark in a string",
        _harmony_call("note", '{"text": "a <|call|> b"}'),
        (("note", {"text": "a <|call|> b"}),),
    ),
    Transcript(
        "recipient in the role",
        f"{ANALYSIS} to=functions.get_weather<|channel|>commentary json<|message|>{ROME_JSON}<|call|>",
        (ROME,),
        "",
        HIDDEN,
    ),
    Transcript(
        "recipient first of all", f" to=functions.get_weather<|channel|>commentary<|message|>{ROME_JSON}", (ROME,)
    ),
    Transcript(
        "constrained without a space",
        f"<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{ROME_JSON}<|call|>",
        (ROME,),
    ),
    Transcript("final", f"{ANALYSIS}<|channel|>final<|message|>Is a < b?<|return|>", (), "Is a < b?", HIDDEN),
)

FORMATS: tuple[Format, ...] = (
    Format("ours", HERMES_MARKUP, _marked_json("</tool_call>")),
    Format("json_tools", HERMES_MARKUP, _marked_json("</tool_call>")),
    Format("deepseek", ("<｜tool", "tool▁", "```", "get_weather", '{"city"'), DEEPSEEK),
    Format(
        "qwen3_coder",
        ("<tool_call", "<function", "<parameter", "</"),
        (
            Transcript("one", QWEN_ROME, (ROME,)),
            Transcript("content", f"Let me look.\n\n{QWEN_PAULO}", (PAULO,), "Let me look."),
            Transcript("two", f"{QWEN_ROME}\n{QWEN_PAULO}", (ROME, PAULO)),
            Transcript("nested", QWEN_NOTE, (NOTE,)),
            Transcript("lines", QWEN_CODE, (("note", {"text": '\nif a < b:\n    print("<x>\\n")\n'}),)),
            Transcript("no arguments", "<tool_call>\n<function=now>\n</function>\n</tool_call>", (NOW,)),
            Transcript("reasoning", f"<think>\n{HIDDEN}\n</think>\n\nSo:{QWEN_ROME}", (ROME,), "So:", f"{HIDDEN}\n"),
        ),
    ),
    Format("glm47", ("<tool_call", "<arg_", "</", "get_weather"), _glm()),
    Format(
        "longcat",
        ("<longcat", "</", "get_weather"),
        _glm(longcat=True),
        ("<longcat_think>", "</longcat_think>"),
    ),
    Format(
        "minimax_m2",
        ("<minimax", "<invoke", "<parameter", "</"),
        (
            Transcript("one", _minimax(_minimax_weather("Rome", 2)), (ROME,)),
            Transcript("content", f"Let me look.\n{_minimax(_minimax_weather('Rome', 2))}", (ROME,), "Let me look."),
            Transcript("two", _minimax(_minimax_weather("Rome", 2), _minimax_weather("São Paulo", 1)), (ROME, PAULO)),
            Transcript("nested", _minimax(MINIMAX_NOTE), (NOTE,)),
            Transcript("reasoning", f"<think>\n{HIDDEN}</think>\nSo:{_minimax(MINIMAX_NOTE)}", (NOTE,), "So:", HIDDEN),
        ),
    ),
    Format(
        "minicpm5",
        ("<function", "<param", "</"),
        (
            Transcript("one", MINICPM_ROME, (ROME,)),
            Transcript("content", f"Let me look.\n{MINICPM_ROME}", (ROME,), "Let me look."),
            Transcript("two", MINICPM_ROME + MINICPM_PAULO, (ROME, PAULO)),
            Transcript("nested", MINICPM_NOTE, (NOTE,)),
            Transcript("no arguments", '<function name="now"></function>', (NOW,)),
            Transcript(
                "end mark in a value", MINICPM_CDATA, (("note", {"text": 'if a < b & c:\n  "</function></param>"'}),)
            ),
            Transcript("reasoning", f"<think>{HIDDEN}</think>{MINICPM_ROME}", (ROME,), "", HIDDEN),
        ),
    ),
    Format(
        "muse_spark",
        ("<atem", "</atem"),
        (
            Transcript("one", _muse(_muse_weather("Rome", 2)), (ROME,)),
            Transcript("content", f"Let me look.\n{_muse(_muse_weather('Rome', 2))}", (ROME,), "Let me look."),
            Transcript("two", _muse(_muse_weather("Rome", 2), _muse_weather("São Paulo", 1)), (ROME, PAULO)),
            Transcript("nested", _muse(MUSE_NOTE), (NOTE,)),
            Transcript("reasoning", f"<think>{HIDDEN}</think>{_muse(MUSE_NOTE)}", (NOTE,), "", HIDDEN),
        ),
    ),
    Format(
        "kimi_k3",
        ("<|open|>", "<|close|>", "<|sep|>"),
        (
            Transcript("one", _k3(K3_ROME), (ROME,)),
            Transcript(
                "content",
                f"<|open|>response<|sep|>Let me look.<|close|>response<|sep|>{_k3(K3_ROME)}<|close|>message<|sep|>",
                (ROME,),
                "Let me look.",
            ),
            Transcript("two", _k3(K3_ROME, K3_PAULO), (ROME, PAULO)),
            Transcript("nested", _k3(K3_NOTE), (NOTE,)),
            Transcript("an object", _k3(K3_OBJECT), (ROME,)),
            Transcript(
                "reasoning",
                f"<|open|>think<|sep|>{HIDDEN}<|close|>think<|sep|>{_k3(K3_ROME)}",
                (ROME,),
                "",
                HIDDEN,
            ),
        ),
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    Format(
        "kimi_k2",
        ("<|tool", "functions."),
        (
            Transcript("one", _kimi(KIMI_ROME), (ROME,)),
            Transcript("content", f"Let me look.{_kimi(_kimi_call('now', 0, '{}'))}", (NOW,), "Let me look."),
            Transcript("two", _kimi(KIMI_ROME, _kimi_call("get_weather", 1, PAULO_JSON)), (ROME, PAULO)),
            Transcript("nested", _kimi(_kimi_call("note", 0, NOTE_JSON)), (NOTE,)),
            Transcript(
                "end mark in a string",
                _kimi(_kimi_call("note", 0, KIMI_MARKED)),
                (("note", {"text": "a <|tool_calls_section_end|> b"}),),
            ),
            Transcript("reasoning", f"<think>{HIDDEN}</think>So:{_kimi(KIMI_ROME)}", (ROME,), "So:", HIDDEN),
        ),
    ),
    Format(
        "mistral",
        ("[TOOL", "[ARGS", '{"name"', "get_weather"),
        (
            Transcript("one", f"[TOOL_CALLS]get_weather[ARGS]{ROME_JSON}", (ROME,)),
            Transcript("content", "Let me look.[TOOL_CALLS]now[ARGS]{}", (NOW,), "Let me look."),
            Transcript(
                "two",
                f"[TOOL_CALLS]get_weather[ARGS]{ROME_JSON}[TOOL_CALLS]get_weather[ARGS]{PAULO_JSON}",
                (ROME, PAULO),
            ),
            Transcript("with an id", f"[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{ROME_JSON}", (ROME,)),
            Transcript("nested", f"[TOOL_CALLS]note[ARGS]{NOTE_JSON}", (NOTE,)),
            Transcript("list of one", f"[TOOL_CALLS] [{_json('get_weather', ROME_JSON)}]", (ROME,)),
            Transcript(
                "list of two",
                f"So:\n[TOOL_CALLS][{_json('get_weather', ROME_JSON)}, {_json('get_weather', PAULO_JSON)}]",
                (ROME, PAULO),
                "So:",
            ),
            Transcript("nested in a list", f"[TOOL_CALLS][{_json('note', NOTE_JSON)}]", (NOTE,)),
            Transcript(
                "reasoning", f"[THINK]{HIDDEN}[/THINK][TOOL_CALLS]get_weather[ARGS]{ROME_JSON}", (ROME,), "", HIDDEN
            ),
        ),
        ("[THINK]", "[/THINK]"),
    ),
    Format(
        "function_gemma",
        ("<start_function", "<end_function", "call:"),
        _gemma("<escape>", "<start_function_call>", "<end_function_call>", None),
        None,
    ),
    Format(
        "gemma4",
        ("<|tool", "<tool_call|", "call:", "<|channel"),
        _gemma('<|"|>', "<|tool_call>", "<tool_call|>", ("<|channel>thought", "<channel|>")),
        ("<|channel>thought", "<channel|>"),
    ),
    Format(
        "pythonic",
        ("<|tool", "get_weather", "note("),
        (
            Transcript("one", _pythonic(PYTHON_ROME), (ROME,)),
            Transcript("content", f"Let me look.\n{_pythonic('now()')}", (NOW,), "Let me look."),
            Transcript("two", _pythonic(PYTHON_ROME, PYTHON_PAULO), (ROME, PAULO)),
            Transcript("nested", _pythonic(PYTHON_NOTE), (NOTE,)),
            Transcript(
                "end mark in a string",
                _pythonic('note(text="a <|tool_call_end|> b")'),
                (("note", {"text": "a <|tool_call_end|> b"}),),
            ),
            Transcript("reasoning", f"<think>{HIDDEN}</think>So:{_pythonic(PYTHON_NOTE)}", (NOTE,), "So:", HIDDEN),
        ),
    ),
    Format(
        "llama",
        LLAMA_MARKUP,
        (
            Transcript("one", LLAMA_ROME, (ROME,)),
            Transcript("with white space", f"\n\n{LLAMA_ROME}\n", (ROME,)),
            Transcript("two", f"{LLAMA_ROME}; {LLAMA_PAULO}", (ROME, PAULO)),
            Transcript("on lines", f"{LLAMA_ROME}\n{LLAMA_PAULO}", (ROME, PAULO)),
            Transcript("nested", _json("note", NOTE_JSON, "parameters"), (NOTE,)),
            Transcript("with a type", f'{{"type": "function", {LLAMA_ROME[1:]}', (ROME,)),
            Transcript("tagged", f"<|python_tag|>{LLAMA_ROME}", (ROME,)),
            Transcript("two tagged", f"<|python_tag|>{LLAMA_ROME}; {LLAMA_PAULO}<|eom_id|>", (ROME, PAULO)),
            Transcript("content", f"Let me look.\n<|python_tag|>{LLAMA_ROME}", (ROME,), "Let me look."),
            Transcript("built-in", '<|python_tag|>get_weather.call(city="Rome", days=2)', (ROME,)),
            Transcript("python", f"[{PYTHON_ROME}, {PYTHON_PAULO}]", (ROME, PAULO)),
            Transcript("nested python", f"[{PYTHON_NOTE}]", (NOTE,)),
            Transcript("a list", f"[{LLAMA_ROME}, {LLAMA_PAULO}]", (ROME, PAULO)),
            Transcript("reasoning", f"<think>{HIDDEN}</think>\n{LLAMA_ROME}", (ROME,), "", HIDDEN),
        ),
    ),
    Format(
        "llama4",
        LLAMA_MARKUP,
        (
            Transcript("one", f"[{PYTHON_ROME}]", (ROME,)),
            Transcript("two", f"[{PYTHON_ROME}, {PYTHON_PAULO}]", (ROME, PAULO)),
            Transcript("marked", f"So:<|python_start|>[{PYTHON_NOTE}]<|python_end|>", (NOTE,), "So:"),
            Transcript("JSON", f"<|python_start|>{LLAMA_ROME}<|python_end|>", (ROME,)),
            Transcript("bare JSON", _json("note", NOTE_JSON, "parameters"), (NOTE,)),
        ),
        None,
    ),
    Format("harmony", ("<|", "functions.", "commentary", "analysis", "assistant"), HARMONY, None),
)
