"""DeepSeek's calls, which mlx-lm does not know: V3 and R1 write JSON in a code block, V3.1 without one."""

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.text.parsers.call_blocks import JSON_HEAD, NAME, Head
from mlx_parallm.text.parsers.notation import Notation
from mlx_parallm.text.parsers.templates import chat_template

MARKS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_SEP = "<｜tool▁sep｜>"
DEEPSEEK = Notation(
    heads=(
        JSON_HEAD,
        Head(rf"function{_SEP}{NAME}(?=[\s`{{])", r"\s{0,32}(?:```json)?\s{0,32}\{"),  # V3 and R1
        Head(rf"(?!function{_SEP}(?!\s{{0,32}}\{{)){NAME}{_SEP}"),  # V3.1
    ),
    fillers=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "```"),
)


def is_deepseek(tokenizer: TokenizerWrapper) -> bool:
    """Its own templates write calls but do not show tools: those of other makers do."""
    start, _ = MARKS
    return start in tokenizer.get_vocab() or start in chat_template(tokenizer)
