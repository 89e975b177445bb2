"""From trajectories to the arrays of bounded micro-batches. NumPy; `trainer` computes them.

Answers to a prompt go through the model together: the prompt once, then each answer behind it. A micro-batch is some
answers to one prompt or all answers to several, within a number of tokens; every token has its weight in the whole
update before the first of them is computed, so an update is the same however it is cut.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_parallm.training.objectives import Algorithm, Floats, Integers, advantages, token_weights
from mlx_parallm.training.trajectories import Trajectory

MAX_PADDING = 0.25  # answers to several prompts go together while that adds at most this share of tokens


@dataclass(frozen=True, slots=True, eq=False)
class PaddedPrompts:
    """Some prompts (G), padded at their ends to one length (P), and the answers (n) behind each."""

    tokens: Integers  # (G, P)
    lengths: Integers  # (G,)
    behind: Integers  # (n,): an answer's prompt

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> "PaddedPrompts":
        """`counts`: of the answers to each, which follow one another."""
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        tokens = np.zeros((len(prompts), lengths.max()), np.int64)
        for line, prompt in enumerate(prompts):
            tokens[line, : len(prompt)] = prompt
        return cls(tokens, lengths, np.repeat(np.arange(len(prompts)), counts))

    def first(self, answers: int) -> "PaddedPrompts":
        """Those that some answers need."""
        behind = self.behind[:answers]
        lengths = self.lengths[: behind[-1] + 1]
        return PaddedPrompts(self.tokens[: len(lengths), : lengths.max()], lengths, behind)


@dataclass(frozen=True, slots=True, eq=False)
class Micro:
    """Some answers (n) behind their prompts, padded to one length (C)."""

    prompts: PaddedPrompts
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
        return self.prompts.tokens[:, 1:].size + self.answers.size

    @property
    def learnt(self) -> int:
        return int(self.mask.sum())

    def first(self, count: int) -> "Micro":
        """Some of its answers."""
        rows = (getattr(self, name)[:count] for name in self.__slots__[1:])
        return Micro(self.prompts.first(count), *rows)


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

    def micros(self, budget: Callable[[], int], several: bool = True) -> Iterator[Micro]:
        """`budget`: tokens that the next may have; one answer may have more. `several`: prompts in one."""
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for place, one in enumerate(self.trajectories):
            by_prompt.setdefault(tuple(one.prompt_ids), []).append(place)
        left = deque(
            sorted(places, key=lambda place: len(self.trajectories[place].completion_ids))
            for places in by_prompt.values()
        )
        while left:
            limit, places = budget(), left.popleft()
            prompt, longest = self._lengths(places)
            pieces = -(-len(places) // max(1, (limit - prompt) // longest))
            count = -(-len(places) // pieces)  # even ones: the prompt goes through the model with each
            parts = [places[:count]]
            if count < len(places):
                left.appendleft(places[count:])
            else:
                while several and left and self._together([*parts, left[0]], limit):
                    parts.append(left.popleft())
            yield self._micro(parts)

    def _lengths(self, places: Sequence[int]) -> tuple[int, int]:
        """Of the prompt and of the longest answer to it, which is the last."""
        last = self.trajectories[places[-1]]
        return len(last.prompt_ids), len(last.completion_ids)

    def _together(self, parts: Sequence[Sequence[int]], limit: int) -> bool:
        """Whether answers to several prompts may be one micro-batch: within the limit and with little padding."""
        lengths = [self._lengths(places) for places in parts]
        prompts = [prompt for prompt, _ in lengths]
        alone = sum(prompt + len(places) * answer for places, (prompt, answer) in zip(parts, lengths, strict=True))
        padded = len(parts) * max(prompts) + sum(map(len, parts)) * max(answer for _, answer in lengths)
        return max(prompts) <= 2 * min(prompts) and padded <= min(limit, (1 + MAX_PADDING) * alone)

    def _micro(self, parts: Sequence[Sequence[int]]) -> Micro:
        places = [place for part in parts for place in part]
        some = [self.trajectories[place] for place in places]
        prompts = PaddedPrompts.of(
            [self.trajectories[part[0]].prompt_ids for part in parts], [len(part) for part in parts]
        )
        shape = len(some), max(len(one.completion_ids) for one in some)
        answers, mask, old = np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for line, one in enumerate(some):
            length = len(one.completion_ids)
            answers[line, :length] = one.completion_ids
            mask[line, :length] = 1.0 if one.mask is None else np.array(one.mask, np.float32)
            if one.logprobs is not None:
                old[line, :length] = one.logprobs
        return Micro(
            prompts,
            answers,
            mask,
            old,
            np.array([[one.logprobs is not None] for one in some], np.float32),
            self.advantage[places],
            self.weight[places],
            np.array([one.temperature for one in some], np.float32)[:, None, None],
        )


def _learnt(one: Trajectory) -> int:
    return len(one.completion_ids) if one.mask is None else int(np.sum(one.mask))
