"""The tokenizer of a model that predicts, as its folder describes it: the server tokenises with it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from mlx_parallm.errors import ModelLoadError

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
UNLIMITED = 1 << 30  # tokenizers without a limit state a huge number


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    tokenizer: Any  # a `tokenizers.Tokenizer` that neither pads nor truncates
    max_length: int | None = None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "TextTokenizer":
        config = _config(folder)
        limit = config.get("model_max_length")
        return cls(
            tokenizer=_tokenizer(folder),
            max_length=int(limit) if isinstance(limit, int | float) and 0 < limit < UNLIMITED else None,
            chat_template=_chat_template(folder, config),
            special_tokens={name: text for name in SPECIAL if (text := _content(config.get(name))) is not None},
        )


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    try:
        config = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} can't be read: {error}") from error
    return config if isinstance(config, dict) else {}


def _tokenizer(folder: Path) -> Any:
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            tokenizer = Tokenizer.from_file(str(file))
        else:  # a vocabulary in an older form, which transformers converts
            tokenizer = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ModelLoadError(f"the tokenizer in {folder} can't be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file, stated = folder / "chat_template.jinja", config.get("chat_template")
    if file.is_file():
        return file.read_text()
    if isinstance(stated, list):  # several, by name
        stated = next((one.get("template") for one in stated if one.get("name") == "default"), None)
    return stated if isinstance(stated, str) else None


def _content(token: Any) -> str | None:
    """Of a special token: its text, or an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
