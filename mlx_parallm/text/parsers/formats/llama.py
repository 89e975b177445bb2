"""Llama's calls: JSON with "parameters", or Python, behind a mark or alone, without any."""

import regex
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.text.parsers.call_blocks import JSON_HEAD, PYTHON_QUOTES
from mlx_parallm.text.parsers.formats.pythonic import read_python
from mlx_parallm.text.parsers.notation import Notation
from mlx_parallm.text.parsers.templates import chat_template, shows_tools

_LLAMA_FILLERS = (
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|eom|>",
    "<|eot|>",
)
LLAMA = Notation(fillers=_LLAMA_FILLERS, read=read_python, quoting=PYTHON_QUOTES)

BARE_JSON = regex.compile(rf"\s*\[?\s{{0,32}}{JSON_HEAD.whole.pattern}")
_BARE_PYTHON = regex.compile(r"\s*\[\s{0,32}(?P<name>[A-Za-z_][\w.]{0,127})\(")


def bare_call(text: str, names: set[str]) -> bool | None:
    """Returns whether the text begins with a call of one of these tools; None as long as it may become one."""
    for pattern in (BARE_JSON, _BARE_PYTHON):
        found = pattern.match(text, partial=True)
        if found is not None and (found["name"] is None or found["name"] in names):
            return None if found.partial else True
    return False


def llama_marks(tokenizer: TokenizerWrapper) -> tuple[str, str] | None:
    """The marks that Llama's calls may have, if the template shows tools to the model in Llama's way."""
    template = chat_template(tokenizer).replace('\\"', '"')
    vocab = tokenizer.get_vocab()
    if not shows_tools(template):
        return None
    if "<|python_start|>" in vocab and ("<|python_start|>" in template or _ASKS_FOR_JSON in template):
        return "<|python_start|>", "<|python_end|>"
    if "<|python_tag|>" in vocab and ("<|python_tag|>" in template or _ASKS_FOR_JSON in template):
        return "<|python_tag|>", ""
    return ("", "") if _ASKS_FOR_JSON in template else None


_ASKS_FOR_JSON = '{"name": function name, "parameters":'
