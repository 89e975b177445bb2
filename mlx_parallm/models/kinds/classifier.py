"""Classifiers: an encoder or a decoder with a head that gives every text, or every token, a logit for each label.

Rerankers (cross-encoders) are classifiers with one label; on a decoder it is a reward model, the kind `reward`. Inputs
are `TextTokens`, outputs NumPy arrays of logits in float32: (labels,), or (tokens, labels).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.devices.padding import padded_shape, warm_up_shapes
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.host import to_numpy
from mlx_parallm.models.classification_heads import Backbone, ClassificationHead, load_head
from mlx_parallm.models.decoders import DecoderStates, load_decoder
from mlx_parallm.models.encoders import Encoder, is_encoder, load_encoder
from mlx_parallm.models.encoders.encoder_weights import Settings, Weights
from mlx_parallm.models.kinds import Predictor
from mlx_parallm.models.sentence import module_kind
from mlx_parallm.models.text_tokenizer import TokenizerConfig, text_tokenizer
from mlx_parallm.steps import LazySteps, run_through
from mlx_parallm.types import ClassifierInfo, TextTokens

SEQUENCES, TOKENS = "ForSequenceClassification", "ForTokenClassification"
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
    """Whether it is a decoder with one label for a text."""
    labels = config.get("id2label")
    one = len(labels) == 1 if isinstance(labels, dict) else config.get("num_labels") == 1
    return one and _architecture(config).endswith(SEQUENCES) and not is_encoder(config)


def load(folder: Path) -> "Classifier":
    settings, weights = Settings.of(folder), Weights.of(folder)
    per_token = _architecture(settings.values).endswith(TOKENS)
    backbone: Backbone
    backbone = load_encoder(folder, weights) if is_encoder(dict(settings.values)) else load_decoder(folder)
    head = load_head(settings, weights, backbone, per_token)
    return Classifier(settings, backbone, head, per_token)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


class Classifier(Predictor):
    info: ClassifierInfo

    def __init__(self, settings: Settings, backbone: Backbone, head: ClassificationHead, per_token: bool) -> None:
        mx.eval(head.arrays())
        self._backbone, self._head = backbone, head
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

    def cost(self, item: TextTokens) -> int:
        return len(item.tokens)

    def warm_up(self) -> None:
        for rows, length in warm_up_shapes(self._backbone.max_length):
            self.predict([TextTokens([0] * length)] * rows)

    def predict(self, batch: Sequence[TextTokens]) -> list[NDArray[np.float32]]:
        return run_through(self.steps(batch))

    def steps(self, batch: Sequence[TextTokens]) -> LazySteps[list[NDArray[np.float32]]]:
        lengths = [len(item.tokens) for item in batch]
        self._check(batch, lengths)
        rows, longest = padded_shape(len(batch), max(lengths), self._backbone.max_length)
        lengths += [1] * (rows - len(batch))
        tokens, segments = np.zeros((2, rows, longest), dtype=np.int32)
        for row, item in enumerate(batch):
            tokens[row, : lengths[row]] = item.tokens
            if item.segments is not None:
                segments[row, : lengths[row]] = item.segments
        logits = to_numpy((yield from self._forward(mx.array(tokens), mx.array(segments), mx.array(lengths))))
        answers = zip(logits[: len(batch)], lengths, strict=False)
        return [row[:length] if self.info.per_token else row for row, length in answers]

    def _check(self, batch: Sequence[TextTokens], lengths: Sequence[int]) -> None:
        """Checks lengths and ids before anything is computed: an id outside the table would read other memory."""
        limit, size = self._backbone.max_length, self._backbone.vocab_size
        if min(lengths) < 1 or max(lengths) > limit:
            raise InvalidRequestError(f"an input needs 1 to {limit} tokens", param="input")
        if any(min(item.tokens) < 0 or max(item.tokens) >= size for item in batch):
            raise InvalidRequestError(f"token ids must be below {size}, and not negative", param="input")

    def _forward(self, tokens: mx.array, segments: mx.array, lengths: mx.array) -> LazySteps[mx.array]:
        mask = mx.arange(tokens.shape[1]) < lengths[:, None]
        if isinstance(self._backbone, DecoderStates):
            hidden = self._backbone(tokens, mask)
        else:
            hidden = yield from self._backbone.steps(tokens, mask, segments)
        return self._head(hidden, tokens, lengths).astype(mx.float32)


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
