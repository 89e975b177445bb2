"""Small classifiers of random weights, as folders that transformers could have written."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.support.random_weights import random_tensors

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz.?!"


HEADS = ("classifier.", "classifier.out_proj.", "score.")


def with_labels(
    config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], labels: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Sequence[int]]]:
    """The same model with other labels, or another number of them."""
    ends = {head + part for head in HEADS for part in ("weight", "bias")}
    sized = {name: [len(labels), *shape[1:]] if name in ends else shape for name, shape in shapes.items()}
    return {**config, "id2label": dict(enumerate(labels)), "label2id": {}}, sized


def write_classifier(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(shapes), folder / "model.safetensors", metadata={"format": "pt"})
    word_piece().save(str(folder / "tokenizer.json"))


def word_piece() -> Tokenizer:
    """BERT's form of a tokenizer, of 62 tokens: letters, and letters within words."""
    vocabulary = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    numbers = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer
