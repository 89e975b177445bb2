"""What a tokenizer's chat template says of tools."""

import re

from mlx_lm.tokenizer_utils import TokenizerWrapper


def chat_template(tokenizer: TokenizerWrapper) -> str:
    return str(getattr(tokenizer, "chat_template", None) or "")


def shows_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None
