"""How fast the bare forward pass is: prefill, and a dense batch that decodes greedily, with no server around it.

    python benchmarks/bare.py MODEL --rows 8,32 --prompt-tokens 100 --steps 32

Prints JSON: prefilled tokens a second, and decoded tokens a second for each number of rows.
"""

import argparse
import json
import time
from typing import Any

import mlx_parallm.blas

mlx_parallm.blas.preload()

import mlx.core as mx  # noqa: E402  (the BLAS goes first)
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.utils import load  # noqa: E402


def random_tokens(model: Any, rows: int, length: int) -> mx.array:
    vocabulary = model(mx.zeros((1, 1), dtype=mx.int32)).shape[-1]
    return mx.random.randint(0, vocabulary, (rows, length))


def prefill_rate(model: Any, rows: int, length: int, repeats: int = 3) -> float:
    """Tokens a second, without the output head, which a prompt needs only once."""
    best = 0.0
    for attempt in range(repeats + 1):
        prompt = random_tokens(model, rows, length)
        cache = make_prompt_cache(model)
        mx.eval(prompt)
        begin = time.perf_counter()
        mx.eval(model.model(prompt, cache), [layer.state for layer in cache])
        if attempt:  # the first one compiles and allocates
            best = max(best, rows * length / (time.perf_counter() - begin))
    return best


def decode_rate(model: Any, rows: int, length: int, steps: int) -> float:
    """Tokens a second; each step is launched before the last one is read, as a server does."""
    cache = make_prompt_cache(model)
    for start in range(0, length, 256):
        chunk = random_tokens(model, rows, min(256, length - start))
        mx.eval(model.model(chunk, cache))
    tokens = mx.zeros((rows, 1), dtype=mx.int32)

    def step(tokens: mx.array) -> mx.array:
        following = mx.argmax(model(tokens, cache)[:, -1], axis=-1, keepdims=True)  # (rows, 1)
        mx.async_eval(following)
        return following

    for _ in range(4):
        tokens = step(tokens)
    mx.eval(tokens)
    begin = time.perf_counter()
    for _ in range(steps):
        following = step(tokens)
        tokens.tolist()
        tokens = following
    mx.eval(tokens)
    return rows * steps / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="8,32")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--steps", type=int, default=32)
    args = parser.parse_args()
    model = load(args.model)[0]
    rows = [int(part) for part in args.rows.split(",")]
    decode = {number: decode_rate(model, number, args.prompt_tokens, args.steps) for number in rows}
    print(json.dumps({"prefill": prefill_rate(model, 4, args.prompt_tokens), "decode": decode}))


if __name__ == "__main__":
    main()
