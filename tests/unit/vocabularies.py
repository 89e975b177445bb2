"""Small tokenizers of each kind of decoder, for the tests of text."""

from collections.abc import Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["▁the", "▁a", "▁hello", "▁world", "th", "e", "l", "o", "▁", "h", "w", "r", "d", ",", ".", "!", "\n"]


def wrap(tokenizer: Tokenizer, **special: str) -> TokenizerWrapper:
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special))


def byte_level(extra_special: Sequence[str] = (), extra_plain: Sequence[str] = ()) -> TokenizerWrapper:
    """GPT-2's kind: every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ["<eos>", *extra_special]])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in extra_plain])
    return wrap(tokenizer, eos_token="<eos>")


def sentence_piece(strip: bool = True) -> TokenizerWrapper:
    """Llama 2's kind: spaces are part of words, unknown characters fall back to bytes."""
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: 259 + index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return wrap(tokenizer, bos_token="<s>", eos_token="</s>")


def word_piece() -> TokenizerWrapper:
    """BERT's kind: a token's text depends on the one before it."""
    words = ["[UNK]", "[SEP]", "hello", "world", "##ing", "##s", "a", "test", ",", "."]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return wrap(tokenizer, eos_token="[SEP]")
