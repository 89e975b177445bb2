"""Builds tokenizer.json and tokenizer_config.json from GGUF metadata. Called by `convert`.

GGUF keeps a vocabulary, merges or scores, and a short name for how text is cut before merging. The two
families are byte-level BPE ("gpt2") and SentencePiece BPE ("llama").
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mlx_parallm.errors import ModelLoadError

# kinds of token, as GGUF numbers them
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = _WORDS % r"\p{N}{1,3}"
QWEN2 = _WORDS % r"\p{N}"
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(suffix)s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(suffix)s"
    r"|%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = _CASED_WORDS % {"suffix": "", "digits": r"\p{N}"}
GPT4O = _CASED_WORDS % {"suffix": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "digits": r"\p{N}{1,3}"}

# tokenizer.ggml.pre → how text is cut
GPT2_LIKE = ("gpt-2", "default", "gpt2", "phi-2", "jina-es", "jina-de", "roberta-bpe")
DIGITS_FIRST = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
LLAMA3_LIKE = ("llama-bpe", "llama3", "llama-v3", "falcon3")
QWEN2_LIKE = ("qwen2", "deepseek-r1-qwen")
PATTERNS = {
    **dict.fromkeys((*LLAMA3_LIKE, "dbrx", "smaug-bpe"), LLAMA3),  # dbrx: Phi-4
    **dict.fromkeys(QWEN2_LIKE, QWEN2),
    "tekken": TEKKEN,  # Mistral since Nemo
    "gpt-4o": GPT4O,  # Phi-4-mini
}
WHOLE_WORDS_FIRST = (*LLAMA3_LIKE, "tekken")  # a word that is a token is not merged; a text begins with BOS

PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other special tokens swallow white space behind them

END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


def save_tokenizer(metadata: dict[str, Any], file: str, folder: Path) -> None:
    if "tokenizer.ggml.tokens" not in metadata:
        raise ModelLoadError(f"{file}: the GGUF metadata has no tokenizer")
    try:
        build_tokenizer(metadata, file).save(str(folder / "tokenizer.json"))
        config = _tokenizer_config(metadata)
    except ModelLoadError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ModelLoadError(f"{file}: the tokenizer in its metadata is broken: {error}") from error
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def build_tokenizer(metadata: dict[str, Any], file: str) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, file)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ModelLoadError(f"{file}: GGUF tokenizer {kind!r} is not supported, only gpt2 and llama")
    _add_special_tokens(tokenizer, metadata)
    _add_begin_and_end(tokenizer, metadata)
    return tokenizer


def end_token_ids(metadata: dict[str, Any]) -> list[int]:
    """Every id that ends a completion: those the file names, and special tokens known to end a turn."""
    named = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = {number for number in named if number is not None}
    types = metadata.get("tokenizer.ggml.token_type", [])
    ids |= {
        index
        for index, (token, kind) in enumerate(zip(metadata.get("tokenizer.ggml.tokens", []), types, strict=False))
        if kind in (CONTROL, USER_DEFINED) and token in END_TOKENS
    }
    return sorted(ids)


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _byte_level(metadata: dict[str, Any], file: str) -> Tokenizer:
    cut = metadata.get("tokenizer.ggml.pre") or _assumed_cut(metadata)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    model = models.BPE(vocab=_vocabulary(metadata), merges=merges, ignore_merges=cut in WHOLE_WORDS_FIRST)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(cut, file)
    tokenizer.decoder = decoders.ByteLevel()
    if cut in QWEN2_LIKE:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _assumed_cut(metadata: dict[str, Any]) -> str:
    """Older files don't say. Qwen's own have always had one way; others are taken for GPT-2."""
    return "qwen2" if str(metadata.get("general.architecture")).startswith("qwen") else "gpt-2"


def _pre_tokenizer(cut: str, file: str) -> pre_tokenizers.PreTokenizer:
    if cut in GPT2_LIKE:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if cut in DIGITS_FIRST:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if cut in PATTERNS:
        split = pre_tokenizers.Split(Regex(PATTERNS[cut]), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join((*GPT2_LIKE, *DIGITS_FIRST, *PATTERNS))
    raise ModelLoadError(
        f"{file}: GGUF pre-tokenizer {cut!r} is not supported, only {known}: serve the model's folder from the "
        "Hugging Face hub instead"
    )


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
    vocabulary = _vocabulary(metadata)
    merges = metadata.get("tokenizer.ggml.merges")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges] if merges else _merges_from_scores(metadata, vocabulary)
    unknown = metadata["tokenizer.ggml.tokens"][metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_from_scores(metadata: dict[str, Any], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: so each split of a token is a merge, by score.
    Control tokens, bytes and the like never come about by joining."""
    scores = metadata["tokenizer.ggml.scores"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(scores)
    found = [
        (-scores[index], vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token, index in vocabulary.items()
        for cut in range(1, len(token))
        if kinds[index] in (NORMAL, USER_DEFINED) and token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _add_special_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    phi3 = metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"
    special = []
    defined = []
    for token, kind in zip(tokens, kinds, strict=False):
        strip = phi3 and token not in PHI3_KEEPS_SPACE
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False, rstrip=strip))
        elif kind == USER_DEFINED:
            defined.append(AddedToken(token, special=False, normalized=False, rstrip=strip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(defined)


def _add_begin_and_end(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    spm = metadata.get("tokenizer.ggml.model") == "llama"
    by_default = spm or metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS_FIRST
    begin = _special(metadata, "bos") if metadata.get("tokenizer.ggml.add_bos_token", by_default) else None
    end = _special(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if begin is None and end is None:
        return
    used = [token for token in (begin, end) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*([begin] if begin else []), "$A", *([end] if end else [])],
        special_tokens=[(token, metadata["tokenizer.ggml.tokens"].index(token)) for token in used],
    )


def _special(metadata: dict[str, Any], kind: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return None if index is None else str(metadata["tokenizer.ggml.tokens"][index])


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get("tokenizer.chat_template"),
        "bos_token": _special(metadata, "bos"),
        "eos_token": _special(metadata, "eos"),
        "pad_token": _special(metadata, "padding") or _special(metadata, "eos"),
        "unk_token": _special(metadata, "unknown"),
    }
    return {key: value for key, value in config.items() if value is not None}
