"""Recent groups of answers as the dashboard shows them: the text of each token with its log-probability and version."""

import codecs
from collections.abc import Sequence
from typing import Any

from mlx_parallm.policy_spans import as_lists
from mlx_parallm.text.detokenize import Vocabulary
from mlx_parallm.types import RecentGroup, RecentSample


def describe(groups: Sequence[RecentGroup], vocabulary: Vocabulary) -> list[dict[str, Any]]:
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


def _sample(sample: RecentSample, vocabulary: Vocabulary) -> dict[str, Any]:
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
