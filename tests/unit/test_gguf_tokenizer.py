"""Tokenizers made of GGUF metadata cut and join text as those that the metadata came from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.models.gguf.tokenizer import build_tokenizer, end_token_ids
from mlx_parallm.models.loader import load
from tests.gguf_models import model_file
from tests.tiny import tiny_tokenizer


def test_byte_level_tokenizer_is_restored(tmp_path: Path) -> None:
    model = load(str(model_file("llama")[0].write(tmp_path / "model.gguf")), name="m")
    expected = tiny_tokenizer()
    for text in ("the sand and the other of", "naïve 日本 🙂\n\tx = 1234", "<|im_start|>user\nhi<|im_end|>", ""):
        assert model.tokenizer.encode(text) == expected.encode(text)
        assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    messages = [{"role": "user", "content": "hello"}]
    render = {"add_generation_prompt": True, "tokenize": False}
    assert model.tokenizer.apply_chat_template(messages, **render) == expected.apply_chat_template(messages, **render)
    assert model.tokenizer.bos_token == "<|endoftext|>"
    assert model.tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("cut", "pieces"),
    [
        ("gpt-2", ["Hello", "Ġ123456", "'", "S", "Ġit"]),  # GPT-2 knows 's, not 'S
        ("smollm", ["Hello", "Ġ", "1", "2", "3", "4", "5", "6", "'", "S", "Ġit"]),
        ("llama-bpe", ["Hello", "Ġ", "123", "456", "'S", "Ġit"]),
        ("dbrx", ["Hello", "Ġ", "123", "456", "'S", "Ġit"]),
        ("smaug-bpe", ["Hello", "Ġ", "123", "456", "'S", "Ġit"]),
        ("qwen2", ["Hello", "Ġ", "1", "2", "3", "4", "5", "6", "'S", "Ġit"]),
        ("tekken", ["Hello", "Ġ", "1", "2", "3", "4", "5", "6", "'S", "Ġit"]),
        ("gpt-4o", ["Hello", "Ġ", "123", "456", "'S", "Ġit"]),
    ],
)
def test_text_is_cut_as_the_file_says(cut: str, pieces: list[str]) -> None:
    metadata = model_file("llama")[0].metadata | {"tokenizer.ggml.pre": cut}
    tokenizer = build_tokenizer(metadata, "file")
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("Hello 123456'S it")] == pieces


@pytest.mark.parametrize(
    ("cut", "pieces"),
    [
        ("tekken", ["hello", "World", "'s", "ĠHTTPServer"]),
        ("gpt-4o", ["hello", "World's", "ĠHTTPServer"]),
        ("llama-bpe", ["helloWorld", "'s", "ĠHTTPServer"]),
    ],
)
def test_words_are_cut_by_case(cut: str, pieces: list[str]) -> None:
    metadata = model_file("llama")[0].metadata | {"tokenizer.ggml.pre": cut}
    tokenizer = build_tokenizer(metadata, "file")
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("helloWorld's HTTPServer")] == pieces


def sentencepiece_metadata() -> dict[str, Any]:
    words = [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "ll",
        "he",
        "▁w",
        "or",
        "▁hell",
        "▁he",
        "▁hello",
        "ld",
        "▁world",
        "▁wor",
    ]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = [0.0] * 259 + [-float(len(words) - len(word)) for word in words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_tokenizer_is_restored() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata(), "file")
    assert tokenizer.encode("hello world").tokens == ["<s>", "▁hello", "▁world"]
    assert tokenizer.encode("hello é").tokens == ["<s>", "▁hello", "▁", "<0xC3>", "<0xA9>"]
    for text in ("hello world", "held é 日本", "  two  spaces"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(("name", "prefix"), [("mistral", True), ("phi3", True), ("gemma3", False)])
def test_sentencepiece_model_loads(name: str, prefix: bool, tmp_path: Path) -> None:
    file, *_ = model_file(name)
    del file.metadata["tokenizer.ggml.merges"], file.metadata["tokenizer.ggml.add_bos_token"]
    file.metadata |= sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": prefix}
    file.metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0]['content'] }}"
    size = len(file.metadata["tokenizer.ggml.tokens"])
    for tensor in ("token_embd.weight", "output.weight"):
        if tensor in file.tensors:
            file.add(tensor, np.random.default_rng(0).normal(size=(size, 64)), "F32")
    model = load(str(file.write(tmp_path / "model.gguf")), name="m")
    assert model.vocab_size == size
    assert model.eos_token_ids == {2}
    detokenizer = model.tokenizer.detokenizer
    for token in model.tokenizer.encode("hello world é", add_special_tokens=False):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == "hello world é"
    assert model.tokenizer.encode("hello")[0] == 1
    assert model.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "<s>hello"


def test_end_tokens_by_id_and_by_name() -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<|eot_id|>", "<|im_end|>", "</x>", "<end_of_turn>"],
        "tokenizer.ggml.token_type": [1, 3, 1, 3, 4],  # an ordinary token may look like one
        "tokenizer.ggml.eos_token_id": 3,
    }
    assert end_token_ids(metadata) == [1, 3, 4]


CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "she sells sea shells by the sea shore, and the shells she sells are sea shells",
    "def main():\n    print('hello world')\n\n\treturn 42",
    "Straße, naïve café, 東京 and 大阪; 1,234.56 % of it",
    "user asks, model answers: what is the answer to the question?",
] * 20
TEXTS = [
    *CORPUS[:5],
    "",
    " leading and trailing ",
    "two  spaces   and\n\n\nlines\t\ttabs",
    "unseen: жизнь 🙂 \x07 ﬁ ½",
    "<0x0A> and </s> as text? no: < / s >",
    "shellsshellsshells" * 5,
]


def trained(tmp_path: Path, **options: Any) -> Any:
    """A real SentencePiece model, small and trained here."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(tmp_path / "spm"), model_type="bpe", vocab_size=420,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1,
        hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    return SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))


def metadata_of(reference: Any, **changes: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a SentencePiece model."""
    ids = range(reference.vocab_size())
    kinds = [
        2 if reference.IsUnknown(i) else 3 if reference.IsControl(i) else 6 if reference.IsByte(i) else 1 for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [reference.IdToPiece(i) for i in ids],
        "tokenizer.ggml.scores": [reference.GetScore(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": reference.bos_id(),
        "tokenizer.ggml.eos_token_id": reference.eos_id(),
        "tokenizer.ggml.unknown_token_id": reference.unk_id(),
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def test_mistrals_tokens_are_sentencepieces(tmp_path: Path) -> None:
    """Llama 2's and Mistral's way: a space before the text, BOS by default."""
    reference = trained(tmp_path)
    tokenizer = build_tokenizer(metadata_of(reference), "file")
    for text in TEXTS:
        if "</s>" in text:
            continue  # a special token here, text there
        assert tokenizer.encode(text).ids == [reference.bos_id(), *reference.encode(text)], text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_gemmas_tokens_are_sentencepieces(tmp_path: Path) -> None:
    """No space before the text, and runs of spaces and lines that are user-defined tokens, spaces written as such."""
    runs = ["  ", "   ", "\n\n", "\n\n\n", "\t\t"]
    symbols = [run.replace(" ", "▁") for run in runs]
    reference = trained(
        tmp_path, add_dummy_prefix=False, user_defined_symbols=symbols, control_symbols=["<start_of_turn>"]
    )
    metadata = metadata_of(reference, add_space_prefix=False, add_bos_token=True)
    for run, symbol in zip(runs, symbols, strict=True):
        index = reference.PieceToId(symbol)
        metadata["tokenizer.ggml.tokens"][index] = run
        metadata["tokenizer.ggml.token_type"][index] = 4
        metadata["tokenizer.ggml.scores"][index] = -1000.0
    tokenizer = build_tokenizer(metadata, "file")
    for text in TEXTS:
        if "</s>" in text:
            continue
        assert tokenizer.encode(text).ids == [reference.bos_id(), *reference.encode(text)], text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    turn = reference.PieceToId("<start_of_turn>")
    ids = tokenizer.encode("<start_of_turn>user\nthe shells").ids
    assert ids == [reference.bos_id(), turn, *reference.encode("user\nthe shells")]


def test_phi_3s_special_tokens_swallow_the_space_behind_them(tmp_path: Path) -> None:
    reference = trained(tmp_path, control_symbols=["<|user|>", "<|end|>", "<|endoftext|>"])
    metadata = metadata_of(reference, add_bos_token=False) | {"general.architecture": "phi3"}
    user, end, last = (reference.PieceToId(token) for token in ("<|user|>", "<|end|>", "<|endoftext|>"))
    tokenizer = build_tokenizer(metadata, "file")
    assert tokenizer.encode("<|user|>\nthe shells<|end|>\n").ids == [user, *reference.encode("the shells"), end]
    assert tokenizer.encode("<|endoftext|>\n").ids == [last, *reference.encode("\n")]
    others = build_tokenizer(metadata | {"general.architecture": "llama"}, "file")
    assert others.encode("<|user|>\nthe").ids == [user, *reference.encode("\nthe")]
    assert end_token_ids(metadata) == sorted({reference.eos_id(), end, last})


def test_literal_byte_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    reference = trained(tmp_path)
    tokenizer = build_tokenizer(metadata_of(reference), "file")
    found = tokenizer.encode("<0x41>").tokens
    assert "<0x41>" not in found
    assert tokenizer.decode(tokenizer.encode("<0x41>").ids) == "<0x41>"


def test_tekken_and_its_kin_begin_a_text_as_llama_cpp_does() -> None:
    metadata = model_file("llama")[0].metadata
    del metadata["tokenizer.ggml.add_bos_token"]
    begins = {
        cut: build_tokenizer(metadata | {"tokenizer.ggml.pre": cut}, "file").encode("the").ids[0] == 0
        for cut in ("tekken", "llama-bpe", "dbrx", "gpt-4o", "qwen2")
    }
    assert begins == {"tekken": True, "llama-bpe": True, "dbrx": False, "gpt-4o": False, "qwen2": False}


def test_what_the_vocabulary_lacks_is_the_token_that_the_file_names() -> None:
    metadata = sentencepiece_metadata()
    pieces = [piece for piece in metadata["tokenizer.ggml.tokens"] if not piece.startswith("<0x")]
    for number, name in enumerate(("<unk>", "<s>")):
        own = metadata | {
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.scores": metadata["tokenizer.ggml.scores"][: len(pieces)],
            "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (len(pieces) - 3),
            "tokenizer.ggml.unknown_token_id": number,
        }
        assert name in build_tokenizer(own, "file").encode("h日").tokens[1:]
