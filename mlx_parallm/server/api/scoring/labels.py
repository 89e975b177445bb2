"""From logits to what clients read: probabilities, labels, and the entities of a text."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.server.api.scoring.response_types import Entity, Labels
from mlx_parallm.server.generation.text_inputs import EncodedText
from mlx_parallm.types import ClassifierInfo

Values = NDArray[np.float64]
OUTSIDE = "O"  # of no entity


def probabilities(logits: NDArray[np.float32], activation: str) -> Values:
    """Returns the probabilities over the last axis: softmax, sigmoid, or the logits as they are."""
    values: Values = logits.astype(np.float64)
    if activation == "softmax":
        values = np.exp(values - values.max(axis=-1, keepdims=True))
        values = values / values.sum(axis=-1, keepdims=True)
    elif activation == "sigmoid":
        values = np.exp(-np.logaddexp(0.0, -values))
    return values


def add_classification(info: ClassifierInfo, values: Values, result: Labels) -> None:
    """Adds the classification of a whole text."""
    best = int(values.argmax())
    result["label"] = info.labels[best]
    result["score"] = float(values[best])
    result["probs"] = values.tolist()
    result["probabilities"] = dict(zip(info.labels, values.tolist(), strict=True))
    if info.problem == "multi_label":
        result["labels"] = [label for label, value in zip(info.labels, values, strict=True) if value > 0.5]


def entities(info: ClassifierInfo, values: Values, found: EncodedText, tokenizer: Any, whole: bool) -> list[Entity]:
    """Returns a text's tokens, special ones apart, that have a label, or with `whole` the entities that they form."""
    tokens = [_token(info, values[place], found, tokenizer, place) for place in _places(found)]
    if not whole:
        return [token for token in tokens if token["label"] != OUTSIDE]
    groups = (_entity(group, found, tokenizer) for group in _groups(tokens))
    return [entity for entity in groups if entity["label"] != OUTSIDE]


def _places(found: EncodedText) -> Sequence[int]:
    count = len(found.input.tokens)
    if found.encoding is None:
        return range(count)
    return [place for place, special in enumerate(found.encoding.special_tokens_mask) if not special]


def _token(info: ClassifierInfo, values: Values, found: EncodedText, tokenizer: Any, place: int) -> Entity:
    best = int(values.argmax())
    span = None if found.encoding is None else found.encoding.offsets[place]
    word, start, end = _word(span, [place], found, tokenizer)
    return Entity(label=info.labels[best], score=float(values[best]), index=place, word=word, start=start, end=end)


def _word(
    span: tuple[int, int] | None, places: Sequence[int], found: EncodedText, tokenizer: Any
) -> tuple[str, int | None, int | None]:
    """Returns a word with the characters at which it starts and ends."""
    if span is None or found.text is None:
        return tokenizer.decode([found.input.tokens[place] for place in places]), None, None
    start, end = span
    while start < end and found.text[start].isspace():  # some tokenizers count the space before a word
        start += 1
    return found.text[start:end], start, end


def _groups(tokens: Sequence[Entity]) -> Iterator[list[Entity]]:
    """Neighbours of one type; B- begins a new entity."""
    group: list[Entity] = []
    for token in tokens:
        if group and (token["label"].startswith("B-") or _type(token) != _type(group[-1])):
            yield group
            group = []
        group.append(token)
    if group:
        yield group


def _type(token: Entity) -> str:
    label = token["label"]
    return label[2:] if label[:2] in ("B-", "I-") else label


def _entity(group: Sequence[Entity], found: EncodedText, tokenizer: Any) -> Entity:
    first = group[0]["start"]
    last = group[-1]["end"]
    span = None if first is None or last is None else (first, last)
    score = float(np.mean([token["score"] for token in group]))
    word, start, end = _word(span, [token["index"] for token in group], found, tokenizer)
    return Entity(label=_type(group[0]), score=score, word=word, start=start, end=end)
