"""Classifiers: an encoder or a decoder with a head that gives every text, or every token, a logit for each label.

Rerankers (cross-encoders) are classifiers with one label; on a decoder it is a reward model, the kind `reward`. Inputs
are `TextTokens`, outputs NumPy arrays of logits in float32: (labels,), or (tokens, labels).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.host import to_numpy
from mlx_parallm.models.classification_heads import Backbone, ClassificationHead, load_head
from mlx_parallm.models.decoders import DecoderStates, load_decoder
from mlx_parallm.models.encoders import Encoder, is_encoder, load_encoder
from mlx_parallm.models.encoders.encoder_weights import Settings, Weights
from mlx_parallm.models.sentence import module_kind
from mlx_parallm.models.text_predictor import TextPredictor
from mlx_parallm.models.text_tokenizer import TokenizerConfig, text_tokenizer
from mlx_parallm.types import ClassifierInfo

SEQUENCES = "ForSequenceClassification"
TOKENS = "ForTokenClassification"
Problem = Literal["single_label", "multi_label", "regression"]
Activation = Literal["softmax", "sigmoid", "identity"]
PROBLEMS: dict[str | None, Problem] = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
ACTIVATIONS: dict[Problem, Activation] = {
    "single_label": "softmax",
    "multi_label": "sigmoid",
    "regression": "identity",
}


def recognises(config: dict[str, Any]) -> bool:
    modules = [module for module in config.get("modules", ()) if isinstance(module, dict)]
    pools = any(module_kind(module) == "Pooling" for module in modules)  # it embeds
    return _architecture(config).endswith((SEQUENCES, TOKENS)) and not pools and not is_reward_model(config)


def is_reward_model(config: dict[str, Any]) -> bool:
    """Returns whether it is a decoder with one label for a text."""
    labels = config.get("id2label")
    one = len(labels) == 1 if isinstance(labels, dict) else config.get("num_labels") == 1
    return one and _architecture(config).endswith(SEQUENCES) and not is_encoder(config)


def load(folder: Path) -> "Classifier":
    settings = Settings.of(folder)
    weights = Weights.of(folder)
    per_token = _architecture(settings.values).endswith(TOKENS)
    backbone: Backbone
    backbone = load_encoder(folder, weights) if is_encoder(dict(settings.values)) else load_decoder(folder)
    head = load_head(settings, weights, backbone, per_token)
    return Classifier(settings, backbone, head, per_token)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


class Classifier(TextPredictor):
    info: ClassifierInfo

    def __init__(self, settings: Settings, backbone: Backbone, head: ClassificationHead, per_token: bool) -> None:
        mx.eval(head.arrays())
        super().__init__(backbone)
        self._head = head
        self.tokenizer = text_tokenizer(settings.folder)
        text = TokenizerConfig.of(settings.folder)
        problem, activation = _problem(settings, head.labels)
        self.info = ClassifierInfo(
            kind="reward"
            if isinstance(backbone, DecoderStates) and head.labels == 1 and not per_token
            else "classifier",
            source=str(settings.folder),
            precision=backbone.precision,
            weight_bytes=_weight_bytes(backbone, head),
            context_length=min(backbone.max_length, text.max_length or backbone.max_length),
            vocab_size=backbone.vocab_size,
            labels=_labels(settings, head.labels),
            problem=problem,
            per_token=per_token,
            activation=activation,
            chat_template=text.chat_template,
            special_tokens=text.special_tokens,
        )

    def read(self, hidden: mx.array, tokens: mx.array, lengths: list[int]) -> list[NDArray[np.float32]]:
        logits = to_numpy(self._head(hidden, tokens, mx.array(lengths)).astype(mx.float32))
        return [row[:length] if self.info.per_token else row for row, length in zip(logits, lengths, strict=True)]


def _weight_bytes(backbone: Backbone, head: ClassificationHead) -> int:
    """Returns the bytes of backbone and head, whose arrays may be the same."""
    known = set(map(id, backbone.arrays())) if isinstance(backbone, Encoder) else set()
    return backbone.weight_bytes + sum(array.nbytes for array in head.arrays() if id(array) not in known)


def _labels(settings: Settings, count: int) -> tuple[str, ...]:
    """Returns the labels as id2label names them; those that it does not name have transformers' names."""
    names = settings.get("id2label", default={})
    if not isinstance(names, dict) or (names and len(names) != count):
        raise settings.wrong("id2label", names, f"an object with {count} names, one for each output of the head,")
    return tuple(str(names.get(str(place), f"LABEL_{place}")) for place in range(count))


def _problem(settings: Settings, labels: int) -> tuple[Problem, Activation]:
    """One label is a number; what CrossEncoder makes of it stands in the config, and is a sigmoid unless it says so."""
    stated = settings.one_of("problem_type", (None, *PROBLEMS), None)
    problem: Problem = "regression" if labels == 1 else "single_label"
    if stated:
        problem = PROBLEMS[stated]
    if labels > 1:
        return problem, ACTIVATIONS[problem]
    found = _cross_encoder_activation(settings)
    return problem, found or ("identity" if stated == "regression" else "sigmoid")


def _cross_encoder_activation(settings: Settings) -> Activation | None:
    """sentence-transformers writes the class of a module: torch.nn.modules.activation.Sigmoid."""
    nested = settings.get("sentence_transformers", default={})
    name = nested.get("activation_fn") or settings.get("sbert_ce_default_activation_function")
    if name is None:
        return None
    known: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity"}
    found = known.get(str(name).rpartition(".")[2])
    if found is None:
        raise settings.wrong("activation_fn", name, "Sigmoid or Identity")
    return found
