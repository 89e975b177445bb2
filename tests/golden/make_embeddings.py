"""Vectors of sentence-transformers, for tests/unit/test_embedding.py.

    python tests/golden/make_embeddings.py MINILM_FOLDER    # in an environment with torch and sentence-transformers

Small random models of each kind of pooling, written by sentence-transformers itself: embeddings.json has their files,
embeddings.safetensors their vectors. Weights are not kept, see `random_tensors`. minilm.safetensors has the vectors of
all-MiniLM-L6-v2 for 200 texts of `sample_texts`, in float16.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.support.random_weights import random_tensors  # noqa: E402
from tests.support.texts import WORDS, sample_texts  # noqa: E402

VOCABULARY = ["<pad>", "<unk>", "<s>", "</s>", *dict.fromkeys(WORDS)]
SIZES = dict(vocab_size=len(VOCABULARY), hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
TEXTS = ["hot water", "the", *sample_texts(4, seed=1, shortest=5, longest=30)]
KEPT = {"modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "config.json"}


def tokenizer(ends: str) -> hf.PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(VOCABULARY)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single=ends, special_tokens=[("<s>", 2), ("</s>", 3)])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def bert() -> tuple[hf.PreTrainedModel, hf.PreTrainedTokenizerFast]:
    config = hf.BertConfig(**SIZES, intermediate_size=48, max_position_embeddings=40)
    return hf.BertModel(config), tokenizer("<s> $A </s>")


def qwen() -> tuple[hf.PreTrainedModel, hf.PreTrainedTokenizerFast]:
    config = hf.Qwen3Config(
        **SIZES, intermediate_size=48, max_position_embeddings=64, num_key_value_heads=2, head_dim=8
    )
    return hf.Qwen3Model(config), tokenizer("$A </s>")


def gemma() -> tuple[hf.PreTrainedModel, hf.PreTrainedTokenizerFast]:
    config = hf.Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        intermediate_size=48,
        max_position_embeddings=64,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_bidirectional_attention=True,
    )
    return hf.Gemma3TextModel(config), tokenizer("<s> $A </s>")


MODELS = {
    "mean": (bert, "mean", []),
    "cls": (bert, "cls", [st.Normalize()]),
    "max": (bert, "max", []),
    "weighted": (bert, ("weightedmean", "mean_sqrt_len_tokens"), []),
    "dense": (bert, "mean", [st.Dense(32, 24), st.Normalize()]),
    "qwen": (qwen, "lasttoken", [st.Normalize()]),
    "gemma": (
        gemma,
        "mean",
        [
            st.Dense(32, 48, bias=False, activation_function=torch.nn.Identity()),
            st.Dense(48, 32, bias=False, activation_function=torch.nn.Identity()),
            st.Normalize(),
        ],
    ),
}


def save(folder: Path, name: str) -> None:
    build, mode, others = MODELS[name]
    model, words = build()
    model.save_pretrained(folder / "transformer")
    words.save_pretrained(folder / "transformer")
    transformer = st.Transformer(str(folder / "transformer"))
    pooling = st.Pooling(transformer.get_word_embedding_dimension(), pooling_mode=mode)
    prompts = {"query": "hot word ", "document": ""} if name == "qwen" else {}
    whole = SentenceTransformer(modules=[transformer, pooling, *others], prompts=prompts, device="cpu")
    whole.save(str(folder / "whole"))


def main() -> None:
    described: dict[str, dict] = {}
    vectors: dict[str, np.ndarray] = {}
    for name in MODELS:
        folder = Path(tempfile.mkdtemp())
        save(folder, name)
        whole, shapes = folder / "whole", {}
        for file in sorted(whole.rglob("*.safetensors")):
            with safe_open(file, "np") as tensors:
                found = {key: tensors.get_slice(key).get_shape() for key in sorted(tensors.keys())}
            save_file(random_tensors(found), file, metadata={"format": "pt"})
            shapes[str(file.relative_to(whole))] = found
        texts = {str(file.relative_to(whole)): file.read_text() for file in whole.rglob("*") if file.name in KEPT}
        loaded = SentenceTransformer(str(whole), device="cpu")
        vectors[name] = loaded.encode(TEXTS, batch_size=4)
        if name == "qwen":
            vectors["qwen.query"] = loaded.encode(TEXTS, prompt_name="query")
        described[name] = {"files": texts, "shapes": shapes, "tokenizer": (whole / "tokenizer.json").read_text()}
    save_file(vectors, HERE / "embeddings.safetensors")
    (HERE / "embeddings.json").write_text(json.dumps({"texts": TEXTS, "models": described}) + "\n")
    minilm = SentenceTransformer(sys.argv[1], device="cpu")
    save_file({"vectors": minilm.encode(sample_texts(200)).astype(np.float16)}, HERE / "minilm.safetensors")


if __name__ == "__main__":
    main()
