"""Log-probabilities of tokens, as several dialects write them."""

from typing_extensions import TypedDict

from mlx_parallm.server.http.schema import response_body
from mlx_parallm.text.detokenize import Vocabulary
from mlx_parallm.types import TokenLogprob

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@response_body
class TopLogprob(TypedDict):
    token: str
    logprob: float | None
    bytes: list[int]


@response_body
class TokenLogprobs(TopLogprob):
    top_logprobs: list[TopLogprob]


def finite(logprob: float) -> float | None:
    """Returns a log-probability as JSON can have it; None for one that is not known."""
    return None if logprob != logprob else max(logprob, LOWEST_LOGPROB)


def top_logprob(vocabulary: Vocabulary, token: int, logprob: float, *, as_id: bool = False) -> TopLogprob:
    spelled = vocabulary.spell(token)
    text = f"token_id:{token}" if as_id else spelled.decode("utf-8", "replace")
    return TopLogprob(token=text, logprob=finite(logprob), bytes=list(spelled))


def token_logprobs(vocabulary: Vocabulary, entry: TokenLogprob, *, as_ids: bool = False) -> TokenLogprobs:
    """Returns a token's log-probability with those of the likeliest in its place."""
    return {
        **top_logprob(vocabulary, entry.token, entry.logprob, as_id=as_ids),
        "top_logprobs": [top_logprob(vocabulary, *other, as_id=as_ids) for other in entry.top],
    }
