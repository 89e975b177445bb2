"""From trajectories to the arrays of bounded micro-batches. NumPy; `trainer` computes them.

Answers to one prompt go through the model together: the prompt once, then each answer behind it. A micro-batch is some
answers of one prompt, within a number of tokens; every token has its weight in the whole update before the first of
them is computed, so an update is the same however it is cut.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_parallm.training.objectives import Algorithm, Floats, Integers, advantages, token_weights
from mlx_parallm.training.trajectories import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Micro:
    """Some answers (n) to one prompt (P), padded to one length (C)."""

    prompt: Integers  # (P,)
    answers: Integers  # (n, C)
    mask: Floats  # (n, C): tokens to learn from
    old: Floats  # (n, C): log-probabilities when they were drawn
    known: Floats  # (n, 1): whether those are known
    advantage: Floats  # (n,)
    weight: Floats  # (n,): of one token
    temperature: Floats  # (n, 1, 1)

    @property
    def tokens(self) -> int:
        """That go through the model."""
        return len(self.prompt) - 1 + self.answers.size

    @property
    def learnt(self) -> int:
        return int(self.mask.sum())


@dataclass(slots=True, eq=False)
class Batch:
    """What one update learns from."""

    trajectories: list[Trajectory]
    advantage: Floats
    weight: Floats
    flat: int  # trajectories of groups that teach nothing

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], algorithm: Algorithm, max_length: int) -> "Batch":
        names = {name: number for number, name in enumerate(dict.fromkeys(one.group_id for one in trajectories))}
        groups = np.array([names[one.group_id] for one in trajectories], np.int64)
        rewards = np.array([one.reward for one in trajectories], np.float32)
        found = advantages(rewards, groups, algorithm)
        for place, one in enumerate(trajectories):
            if one.advantage is not None:
                found[place] = one.advantage
        kept = [
            place
            for place, one in enumerate(trajectories)
            if one.advantage is not None or np.ptp(rewards[groups == groups[place]]) > 0
        ]
        some = [trajectories[place] for place in kept]
        lengths = np.array([_learnt(one) for one in some], np.int64)
        weight = token_weights(lengths, algorithm, max_length) if some else np.zeros(0, np.float32)
        return cls(some, found[kept], weight, len(trajectories) - len(some))

    def micros(self, budget: Callable[[], int]) -> Iterator[Micro]:
        """`budget`: tokens that the next may have; one answer may have more."""
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for place, one in enumerate(self.trajectories):
            by_prompt.setdefault(tuple(one.prompt_ids), []).append(place)
        for prompt, places in by_prompt.items():
            left = sorted(places, key=lambda place: len(self.trajectories[place].completion_ids))
            while left:
                longest = len(self.trajectories[left[-1]].completion_ids)
                fitting = max(1, (budget() - len(prompt)) // longest)
                pieces = -(-len(left) // fitting)
                count = -(-len(left) // pieces)  # even ones: the prompt goes through the model with each
                yield self._micro(prompt, left[:count])
                left = left[count:]

    def _micro(self, prompt: Sequence[int], places: Sequence[int]) -> Micro:
        some = [self.trajectories[place] for place in places]
        shape = len(some), max(len(one.completion_ids) for one in some)
        answers, mask, old = np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for line, one in enumerate(some):
            length = len(one.completion_ids)
            answers[line, :length] = one.completion_ids
            mask[line, :length] = 1.0 if one.mask is None else np.array(one.mask, np.float32)
            if one.logprobs is not None:
                old[line, :length] = one.logprobs
        return Micro(
            np.array(prompt, np.int64),
            answers,
            mask,
            old,
            np.array([[one.logprobs is not None] for one in some], np.float32),
            self.advantage[list(places)],
            self.weight[list(places)],
            np.array([one.temperature for one in some], np.float32)[:, None, None],
        )


def _learnt(one: Trajectory) -> int:
    return len(one.completion_ids) if one.mask is None else int(np.sum(one.mask))
