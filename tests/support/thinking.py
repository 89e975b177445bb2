"""A tiny model of random weights that reasons: its template opens `<think>`, and it soon writes `</think>` itself."""

from pathlib import Path

import mlx.core as mx
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken

from tests.tiny import save_tiny, tiny, tiny_tokenizer

MARKS = ["<think>", "</think>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def thinking_folder(folder: Path, eagerness: float = 2.5) -> Path:
    """`eagerness`: by how much the weights of `</think>` exceed other tokens'."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = tiny_tokenizer()._tokenizer
    inner.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    inner.chat_template = TEMPLATE
    model = tiny("llama", vocab_size=len(inner))
    model.tokenizer = TokenizerWrapper(inner, BPEStreamingDetokenizer)
    head = model.module.lm_head.weight
    end = inner.convert_tokens_to_ids("</think>")
    model.module.lm_head.weight = mx.where(mx.arange(len(inner))[:, None] == end, eagerness * head, head)
    save_tiny(model, folder)
    return folder
