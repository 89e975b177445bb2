"""Hidden states of small random encoders by transformers, for tests/unit/test_encoders.py.

    python tests/golden/make_encoders.py    # in an environment with torch and transformers

Weights are not kept: `random_tensors` makes the same ones from their names and shapes. Written: encoders.json (configs,
shapes, tokens) and encoders.safetensors (hidden states of every other number, of BERT also the pooler's output).
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

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.support.random_weights import random_tensors  # noqa: E402

SIZES = dict(vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40)
LENGTHS = (23, 1, 9)
MODELS = {
    "bert": (hf.BertModel, hf.BertConfig(**SIZES, max_position_embeddings=40)),
    "bert_tanh": (hf.BertModel, hf.BertConfig(**SIZES, max_position_embeddings=40, hidden_act="gelu_new")),
    "roberta": (
        hf.RobertaModel,
        hf.RobertaConfig(**SIZES, max_position_embeddings=42, type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5),
    ),
    "xlm-roberta": (
        hf.XLMRobertaModel,
        hf.XLMRobertaConfig(**SIZES, max_position_embeddings=42, type_vocab_size=1, pad_token_id=1),
    ),
    "distilbert": (
        hf.DistilBertModel,
        hf.DistilBertConfig(vocab_size=60, dim=32, n_layers=3, n_heads=4, hidden_dim=40, max_position_embeddings=40),
    ),
    "modernbert": (
        hf.ModernBertModel,
        hf.ModernBertConfig(
            **SIZES | {"num_hidden_layers": 4},
            max_position_embeddings=40,
            local_attention=8,
            attention_bias=True,
            norm_bias=True,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1),
        ),
    ),
    "nomic_bert": (hf.NomicBertModel, hf.NomicBertConfig(**SIZES, max_position_embeddings=40)),
}


def tokens_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and what they are, padded to the longest with 1; no other token is 1."""
    random = np.random.RandomState(len(name))
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    return np.where(mask, random.randint(2, 60, mask.shape), 1), mask


def main() -> None:
    described, arrays = {}, {}
    folder = Path(tempfile.mkdtemp())
    for name, (model_class, config) in MODELS.items():
        torch.manual_seed(0)
        model = model_class(config).eval()
        model.save_pretrained(folder)
        with safe_open(folder / "model.safetensors", "np") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
        save_file(random_tensors(shapes), folder / "model.safetensors", metadata={"format": "pt"})
        model = model_class.from_pretrained(folder).eval()
        tokens, mask = tokens_of(name)
        types = (np.arange(tokens.shape[1]) > 4) & mask if getattr(config, "type_vocab_size", 0) > 1 else None
        inputs = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask.astype(np.int64))}
        if types is not None:
            inputs["token_type_ids"] = torch.tensor(types.astype(np.int64))
        with torch.no_grad():
            output = model(**inputs)
        arrays[name] = output.last_hidden_state.numpy()[mask][:, ::2].copy()
        if getattr(output, "pooler_output", None) is not None:
            arrays[f"{name}.pooled"] = output.pooler_output.numpy()
        described[name] = {
            "config": json.loads((folder / "config.json").read_text()),
            "shapes": shapes,
            "tokens": tokens.tolist(),
            "lengths": LENGTHS,
            "types": None if types is None else types.astype(int).tolist(),
        }
    save_file(arrays, HERE / "encoders.safetensors")
    (HERE / "encoders.json").write_text(json.dumps(described) + "\n")


if __name__ == "__main__":
    main()
