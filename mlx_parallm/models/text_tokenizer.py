"""A model folder's tokenizer as `tokenizers.Tokenizer`, for models whose inputs are texts. The server runs it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from mlx_parallm.errors import ModelLoadError

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
UNLIMITED = 1 << 30  # tokenizers without a limit state a huge number


def text_tokenizer(folder: Path, lower_case: bool = False) -> Any:
    """Neither pads nor truncates: what is too long is the caller's business."""
    try:
        if (folder / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        else:
            from transformers import AutoTokenizer  # slow to import, and seldom needed

            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    except Exception as error:  # `tokenizers` raises bare ones; transformers all sorts
        raise ModelLoadError(f"{folder}: its tokenizer can't be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if lower_case:
        before = [tokenizer.normalizer] if tokenizer.normalizer is not None else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])
    return tokenizer


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What tokenizer_config.json says beside the vocabulary."""

    max_length: int | None = None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # by the names that chat templates use

    @classmethod
    def of(cls, folder: Path) -> "TokenizerConfig":
        file = folder / "tokenizer_config.json"
        try:
            config = json.loads(file.read_text()) if file.is_file() else {}
            template = folder / "chat_template.jinja"
            stated = template.read_text() if template.is_file() else config.get("chat_template")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelLoadError(f"{file} can't be read: {error}") from error
        if isinstance(stated, list):  # several, by name
            stated = next((one.get("template") for one in stated if one.get("name") == "default"), None)
        limit = config.get("model_max_length")
        return cls(
            max_length=int(limit) if isinstance(limit, int | float) and 0 < limit < UNLIMITED else None,
            chat_template=stated if isinstance(stated, str) else None,
            special_tokens={name: text for name in SPECIAL if (text := _content(config.get(name))) is not None},
        )


def _content(token: Any) -> str | None:
    """A special token is its text, or an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
