"""What is wrong with token ids and the number of completions, whoever sends them: the server, `LLM`, the engine ask."""

from collections.abc import Sequence

from mlx_parallm.errors import InvalidRequestError


def check_choices(n: int, max_rows: int) -> None:
    if not 1 <= n <= max_rows:
        raise InvalidRequestError(f"n must be between 1 and {max_rows}, not {n}", param="n")


def check_ids(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises when a text has an id that is not the model's; `param` is the field that it came in."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        at = next(place for place, token in enumerate(tokens) if not 0 <= token < vocab_size)
        message = f"{param}.{at}: token {tokens[at]} is not in the vocabulary, whose ids go from 0 to {vocab_size - 1}"
        raise InvalidRequestError(message, param=f"{param}.{at}")
