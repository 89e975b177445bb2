"""Texts to vectors: encoders and language models with a pooling, as sentence-transformers writes them, or plain.

A folder is one if its modules.json pools; or if it holds an encoder without a head for a task: mean pooling, and
vectors of length 1; or if it holds a language model without its output head, such as the architecture Qwen3Model: the
last token's state, and vectors of length 1. A language model with its head stays a chat model.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.devices.padding import padded_shape, warm_up_shapes
from mlx_parallm.errors import InvalidRequestError, ModelLoadError
from mlx_parallm.host import to_numpy
from mlx_parallm.models.decoders import DecoderStates, load_decoder
from mlx_parallm.models.encoders import Encoder, Settings, is_encoder, load_encoder
from mlx_parallm.models.kinds import Predictor
from mlx_parallm.models.sentence import SentenceFolder, module_kind, modules_of, normalized, pool, read_sentence_folder
from mlx_parallm.models.text_tokenizer import text_tokenizer
from mlx_parallm.steps import LazySteps, run_through
from mlx_parallm.types import EmbeddingInfo

CHAT_MODELS = ("LMHead", "ChatGLM")  # which are called models, and have a head
TASK_HEADS = ("Classification", "ForQuestionAnswering", "ForMultipleChoice")


def recognises(config: dict[str, Any]) -> bool:
    modules = config.get("modules")  # modules.json, where the folder has one
    if modules is not None:
        return any(isinstance(module, dict) and module_kind(module) == "Pooling" for module in modules)
    architecture = str(next(iter(config.get("architectures") or []), ""))
    if is_encoder(config):
        return not any(head in architecture for head in TASK_HEADS)
    headless = architecture.endswith("Model") and not any(name in architecture for name in CHAT_MODELS)
    return headless and "vision_config" not in config


def load(folder: Path) -> "Embedder":
    sentence = read_sentence_folder(folder)
    settings = Settings.of(sentence.transformer)
    plain = modules_of(folder) is None
    if is_encoder(dict(settings.values)):
        sentence = replace(sentence, normalize=True) if plain else sentence
        return Embedder(folder, load_encoder(sentence.transformer), sentence, settings)
    sentence = replace(sentence, modes=("lasttoken",), normalize=True) if plain else sentence
    return Embedder(folder, load_decoder(sentence.transformer), sentence, settings)


class Embedder(Predictor):
    """Inputs are lists of token ids; outputs are vectors, NumPy's, float32."""

    info: EmbeddingInfo

    def __init__(
        self, folder: Path, states: Encoder | DecoderStates, sentence: SentenceFolder, settings: Settings
    ) -> None:
        self._states = states
        self._sentence = sentence
        self.tokenizer = text_tokenizer(sentence.transformer, sentence.lower_case)
        size = states.hidden_size * len(sentence.modes)
        for dense in sentence.dense:
            if dense.weights.weight.shape[1] != size:
                raise ModelLoadError(
                    f"{folder}: a Dense module takes {dense.weights.weight.shape[1]} numbers, and gets {size}"
                )
            size = dense.weights.weight.shape[0]
        trained = tuple(range(1, size)) if settings.get("is_matryoshka") else sentence.trained_dimensions
        self.info = EmbeddingInfo(
            kind="embedding",
            source=str(folder),
            precision=states.precision,
            weight_bytes=states.weight_bytes,
            context_length=min(states.max_length, sentence.max_tokens or states.max_length),
            vocab_size=states.vocab_size,
            dimensions=size,
            trained_dimensions=tuple(one for one in trained if one < size),
            prompts=dict(sentence.prompts),
            default_prompt=sentence.default_prompt,
        )

    def cost(self, item: Sequence[int]) -> int:
        return len(item)

    def warm_up(self) -> None:
        for rows, length in warm_up_shapes(self._states.max_length):
            self.predict([[0] * length] * rows)

    def predict(self, batch: Sequence[Sequence[int]]) -> list[Any]:
        return run_through(self.steps(batch))

    def steps(self, batch: Sequence[Sequence[int]]) -> LazySteps[list[Any]]:
        lengths = [len(tokens) for tokens in batch]
        self._check(batch, lengths)
        rows, longest = padded_shape(len(batch), max(lengths), self._states.max_length)
        lengths += [1] * (rows - len(batch))
        tokens = np.zeros((rows, longest), np.int32)
        for row, ids in enumerate(batch):
            tokens[row, : len(ids)] = ids
        mask = np.arange(longest) < np.array(lengths, np.int32)[:, None]
        if isinstance(self._states, Encoder):
            hidden = yield from self._states.steps(mx.array(tokens), mx.array(mask))
        else:
            hidden = self._states(mx.array(tokens), mx.array(mask))
        x = pool(hidden, lengths, self._sentence.modes)
        for dense in self._sentence.dense:
            x = dense(x)
        return list(to_numpy(normalized(x) if self._sentence.normalize else x))[: len(batch)]

    def _check(self, batch: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Checks lengths and ids before anything is computed: an id outside the table would read other memory."""
        limit, size = self._states.max_length, self._states.vocab_size
        if min(lengths) < 1 or max(lengths) > limit:
            raise InvalidRequestError(f"an input needs 1 to {limit} tokens", param="input")
        if any(min(ids) < 0 or max(ids) >= size for ids in batch):
            raise InvalidRequestError(f"token ids must be below {size}, and not negative", param="input")
