"""Requests that each did harm to others once, and the status that refuses them. For tests and benchmarks."""

from typing import Any

CHAT, TEXT, ITEMS, ROLLOUT = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/rl/rollout"
HELLO = [{"role": "user", "content": "hi"}]
PATTERNS = [{"pattern": f"[a-z]*{chr(97 + i)}[a-z]{{3}}"} for i in range(20)]
SCHEMA = {"type": "object", "properties": {"x": {"type": "string", "allOf": PATTERNS}}}
PART = {"type": "text", "text": "x"}
# A whole request each, and the status that answers it; all within two seconds.
HOSTILE: dict[str, tuple[str, Any, int]] = {
    "stop strings of 1 MB": (CHAT, {"messages": HELLO, "stop": [letter * 1_000_000 for letter in "abcd"]}, 400),
    "an exponential schema": (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        400,
    ),
    "200,000 parts": (CHAT, {"messages": [{"role": "user", "content": [PART] * 200_000}]}, 400),
    "49,000 parts": (CHAT, {"messages": [{"role": "user", "content": [PART] * 49_000}]}, 400),
    "49,000 blocks": ("/v1/messages", {"messages": [{"role": "user", "content": [PART] * 49_000}]}, 400),
    "50,000 messages": (CHAT, {"messages": HELLO * 50_000}, 400),
    "8,000 messages": (CHAT, {"messages": HELLO * 8_000}, 400),
    "10,000 items": (ITEMS, {"input": HELLO * 10_000, "truncation": "auto"}, 400),
    "20 MB to tokenise": ("/tokenize", {"prompt": "hello world " * 1_700_000}, 400),
    "1,024 prompts": (TEXT, {"prompt": ["hello world " * 300] * 1024, "max_tokens": 1}, 400),
    "8,192 answers": (TEXT, {"prompt": [[1, 2]] * 1024, "n": 8, "max_tokens": 1}, 429),
    "8,193 answers": (TEXT, {"prompt": [[1, 2]] * 1024, "n": 9, "max_tokens": 1}, 400),
    "a million wrong ids": ("/detokenize", {"tokens": ["a"] * 1_000_000}, 400),
    "a million names": (CHAT, {"messages": HELLO, "metadata": {f"k{i}": "" for i in range(1_000_000)}}, 400),
}
