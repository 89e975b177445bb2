"""Recent groups of responses as the dashboard shows them: the text of each token with its log-probability and
version."""

import codecs
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from mlx_parallm.policy_spans import as_lists
from mlx_parallm.server.http.schema import response_body
from mlx_parallm.text.detokenize import Vocabulary
from mlx_parallm.types import RecentGroup, RecentSample


@response_body
class RolloutSampleNote(TypedDict):
    request_id: str | None
    reward: float
    length: Annotated[int, Field(description="Its tokens; the first 512 are shown")]
    tokens: Annotated[list[str], Field(description="The text of each")]
    logprobs: list[float] | None
    policy_spans: list[list[int]]


@response_body
class RolloutNote(TypedDict):
    group_id: str
    time: float
    state: Literal["waiting", "learnt", "refused"]
    updates: Annotated[int | None, Field(description="The number of the update that took it")]
    prompt: str
    samples: list[RolloutSampleNote]


def describe(groups: Sequence[RecentGroup], vocabulary: Vocabulary) -> list[RolloutNote]:
    return [
        {
            "group_id": group.group_id,
            "time": group.time,
            "state": group.state,
            "updates": group.updates,
            "prompt": vocabulary.decode(group.prompt_ids),
            "samples": [_sample(sample, vocabulary) for sample in group.samples],
        }
        for group in groups
    ]


def _sample(sample: RecentSample, vocabulary: Vocabulary) -> RolloutSampleNote:
    logprobs = sample.logprobs
    return {
        "request_id": sample.request_id,
        "reward": sample.reward,
        "length": sample.length,
        "tokens": token_texts(sample.completion_ids, vocabulary),
        "logprobs": None if logprobs is None else [round(value, 4) for value in logprobs],
        "policy_spans": as_lists(sample.policy_spans),
    }


def token_texts(tokens: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    """A character that several tokens share stands with the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(vocabulary.spell(token)) for token in tokens]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts
