"""Texts to vectors: encoders and language models with a pooling, as sentence-transformers writes them, or plain.

A folder is one if its modules.json pools; or if it holds an encoder without a head for a task: mean pooling, and
vectors of length 1; or if it holds a language model without its output head, such as the architecture Qwen3Model: the
last token's state, and vectors of length 1. A language model with its head stays a chat model.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.host import to_numpy
from mlx_parallm.models.decoders import DecoderStates, load_decoder
from mlx_parallm.models.encoders import Encoder, Settings, is_encoder, load_encoder
from mlx_parallm.models.sentence import SentenceFolder, module_kind, modules_of, normalized, pool, read_sentence_folder
from mlx_parallm.models.text_predictor import TextPredictor
from mlx_parallm.models.text_tokenizer import text_tokenizer
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


class Embedder(TextPredictor):
    """Inputs are lists of token ids; outputs are vectors, NumPy's, float32."""

    info: EmbeddingInfo

    def __init__(
        self, folder: Path, states: Encoder | DecoderStates, sentence: SentenceFolder, settings: Settings
    ) -> None:
        super().__init__(states)
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

    def read(self, hidden: mx.array, tokens: mx.array, lengths: list[int]) -> list[Any]:
        x = pool(hidden, lengths, self._sentence.modes)
        for dense in self._sentence.dense:
            x = dense(x)
        return list(to_numpy(normalized(x) if self._sentence.normalize else x))
