"""A model folder's tokenizer as `tokenizers.Tokenizer`, for models whose inputs are texts. The server runs it."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from mlx_parallm.errors import ModelLoadError


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
