"""Makes heads.json: what transformers' models for sequence and token classification answer, with small random weights.

    python -m venv HF && HF/bin/pip install torch transformers && PYTHONPATH=. HF/bin/python tests/golden/make_heads.py

Run once; the file is committed. Weights are drawn again from their names and shapes (tests/support/random_weights.py).
Every input goes through the model alone, without padding.
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.support.classifiers import with_labels, word_piece, write_classifier
from tests.support.random_weights import random_tensors

VOCABULARY = 64
LENGTHS = (1, 3, 9, 17, 30)
SHARED = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = SHARED | {"intermediate_size": 48, "max_position_embeddings": 64, "type_vocab_size": 2, "pad_token_id": 0}
ROBERTA = ENCODER | {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
DISTILBERT = {
    "vocab_size": VOCABULARY,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
    "activation": "gelu",
}
MODERNBERT = SHARED | {
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "num_hidden_layers": 4,
    "global_attn_every_n_layers": 3,
    "local_attention": 8,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "hidden_activation": "gelu",
}
NOMIC = SHARED | {
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "rope_theta": 1000.0,
    "hidden_act": "silu",
}
DECODER = SHARED | {
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 8}
WINDOW = {"sliding_window": 8, "sliding_window_pattern": 2, "layer_types": ["sliding_attention", "full_attention"]}
# mlx-lm rounds the factor of Gemma 3's embeddings, the root of the hidden size, to bfloat16: here it is exact.
GEMMA3 = {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "hidden_size": 64, "head_dim": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "architectures": ["BertForSequenceClassification"]} | ENCODER,
    "bert_tokens": {"model_type": "bert", "architectures": ["BertForTokenClassification"]} | ENCODER,
    "roberta": {"model_type": "roberta", "architectures": ["RobertaForSequenceClassification"]} | ROBERTA,
    "roberta_tokens": {"model_type": "roberta", "architectures": ["RobertaForTokenClassification"]} | ROBERTA,
    "xlm_roberta": {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"]} | ROBERTA,
    "distilbert": {"model_type": "distilbert", "architectures": ["DistilBertForSequenceClassification"]} | DISTILBERT,
    "distilbert_tokens": {"model_type": "distilbert", "architectures": ["DistilBertForTokenClassification"]}
    | DISTILBERT,
    "modernbert_cls": {
        "model_type": "modernbert",
        "architectures": ["ModernBertForSequenceClassification"],
        "classifier_pooling": "cls",
    }
    | MODERNBERT,
    "modernbert_mean": {
        "model_type": "modernbert",
        "architectures": ["ModernBertForSequenceClassification"],
        "classifier_pooling": "mean",
        "classifier_bias": True,
    }
    | MODERNBERT,
    "modernbert_tokens": {"model_type": "modernbert", "architectures": ["ModernBertForTokenClassification"]}
    | MODERNBERT,
    "nomic_bert": {"model_type": "nomic_bert", "architectures": ["NomicBertForSequenceClassification"]} | NOMIC,
    "nomic_bert_tokens": {"model_type": "nomic_bert", "architectures": ["NomicBertForTokenClassification"]} | NOMIC,
    "llama": {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]} | DECODER,
    "llama_tokens": {"model_type": "llama", "architectures": ["LlamaForTokenClassification"]} | DECODER,
    "mistral": {"model_type": "mistral", "architectures": ["MistralForSequenceClassification"]} | DECODER,
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]} | DECODER,
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]} | DECODER,
    "gemma": {"model_type": "gemma", "architectures": ["GemmaForSequenceClassification"]} | DECODER | GEMMA,
    "gemma2": {"model_type": "gemma2", "architectures": ["Gemma2ForSequenceClassification"]} | DECODER | GEMMA,
    "gemma3": {"model_type": "gemma3_text", "architectures": ["Gemma3TextForSequenceClassification"]}
    | (DECODER | GEMMA | WINDOW | GEMMA3),
}
# The same with config.json as transformers writes it today.
SAVED = {
    "llama_saved": FAMILIES["llama"] | {"rope_theta": 500.0},
    "modernbert_saved": FAMILIES["modernbert_cls"] | {"local_rope_theta": 500.0},
    "qwen3_saved": FAMILIES["qwen3"] | {"rope_theta": 500.0},
    "gemma3_saved": FAMILIES["gemma3"] | {"rope_theta": 5000.0, "rope_local_base_freq": 500.0},
}

ENTITY_LABELS = ["I-PER", "B-PER", "O", "B-LOC", "I-LOC", "MISC", "O", "B-PER"]
ENTITY_TEXT = "Ann  went to Rome, and Bob did not. Why?"


def labels(number: int) -> dict[str, Any]:
    names = [f"label {place}" for place in range(number)]
    return {"id2label": dict(enumerate(names)), "label2id": {name: place for place, name in enumerate(names)}}


def main() -> None:
    chance = random.Random(0)
    families = {name: outputs(config, chance) for name, config in FAMILIES.items()}
    families |= {name: outputs(config, chance, saved=True) for name, config in SAVED.items()}
    entities = entities_of(families["bert_tokens"])
    made = {
        "transformers": transformers.__version__,
        "families": families,
        "entities": entities,
    }
    Path(__file__).with_name("heads.json").write_text(json.dumps(made, separators=(",", ":")) + "\n")


def outputs(config: dict[str, Any], chance: random.Random, saved: bool = False) -> dict[str, Any]:
    config = config | labels(3)
    model_class = getattr(transformers, config["architectures"][0])
    written, shapes = saved_as(model_class, config)
    config = written if saved else config
    with tempfile.TemporaryDirectory() as folder:
        save_file(random_tensors(shapes), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model, loading = model_class.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(loading[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    model.eval()
    cases = []
    for inputs in texts(config, chance):
        with torch.no_grad():
            logits = model(**{name: torch.tensor([values]) for name, values in inputs.items()}).logits[0]
        rounded = torch.round(logits, decimals=6).tolist()
        cases.append(inputs | {"logits": rounded})
    return {"config": config, "shapes": shapes, "cases": cases}


def saved_as(model_class: Any, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """config.json, and the names and shapes that a checkpoint on disk has."""
    with tempfile.TemporaryDirectory() as folder:
        config_class = transformers.AutoConfig.for_model(config["model_type"]).__class__
        model_class(config_class.from_dict(config)).save_pretrained(folder)
        written = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            return written, {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def entities_of(family: dict[str, Any]) -> dict[str, Any]:
    """What the pipeline for token classification finds in a text, as tokens and as whole entities."""
    config, shapes = with_labels(family["config"], family["shapes"], ENTITY_LABELS)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=word_piece(), pad_token="[PAD]")
    found: dict[str, Any] = {"text": ENTITY_TEXT, "labels": ENTITY_LABELS}
    with tempfile.TemporaryDirectory() as folder:
        write_classifier(Path(folder), config, shapes)
        model = transformers.BertForTokenClassification.from_pretrained(folder)
        for aggregation in ("none", "simple"):
            pipeline = transformers.pipeline(
                "token-classification", model=model, tokenizer=tokenizer, aggregation_strategy=aggregation
            )
            entities = pipeline(ENTITY_TEXT)
            found[aggregation] = [
                [one.get("entity", one.get("entity_group")), float(one["score"]), one["start"], one["end"]]
                for one in entities
            ]
    return found


def texts(config: dict[str, Any], chance: random.Random) -> list[dict[str, list[int]]]:
    """Of several lengths; pairs where the model knows of them; and on decoders, one that ends with padding."""
    found = [{"input_ids": [chance.randrange(4, VOCABULARY) for _ in range(length)]} for length in LENGTHS]
    if config.get("type_vocab_size") == 2:
        for inputs in found[2:4]:
            count = len(inputs["input_ids"])
            inputs["token_type_ids"] = [0] * (count // 2) + [1] * (count - count // 2)
    if "ForSequence" in config["architectures"][0] and "rms_norm_eps" in config:
        found.append({"input_ids": [9, 8, 7, 0, 5, 0, 0]})
    return found


if __name__ == "__main__":
    main()
