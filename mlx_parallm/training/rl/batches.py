"""From trajectories to the arrays of bounded micro-batches. NumPy; `trainer` computes them.

Completions to a prompt go through the model together: the prompt once, then each completion behind it. A micro-batch is
some completions to one prompt or all completions to several, within a number of tokens; every token has its weight in
the whole update before the first of them is computed, so an update is the same however it is cut.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mlx_parallm.config.algorithms import RewardScaling
from mlx_parallm.training.rl.objectives import Floats, Integers, advantages, group_has_signal, token_weights
from mlx_parallm.training.rl.trajectories import Trajectory

BooleanArray = npt.NDArray[np.bool_]

MAX_PADDING = 0.25  # completions to several prompts go together while that adds at most this share of tokens
LAUNCH_TOKENS = 2048  # what starting a micro-batch costs, in tokens, where kernels are quick
# of which lengths and numbers are multiples at least, where they are rounded; …
ROUND_TOKENS = 32
ROUND_ANSWERS = 8
ROUND_UP_TO = 512  # … of fewer completions where so many would have more tokens than this


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a micro-batch: so many prompts of one length, and completions of one length."""

    prompts: int
    prompt: int
    completions: int
    completion: int

    @property
    def tokens(self) -> int:
        return self.prompts * self.prompt + self.completions * self.completion

    def rounded(self) -> "Shape":
        """One of few. Prompts are always padded, if by one token: that is another computation."""
        completion = round_up(self.completion, ROUND_TOKENS)
        rows = min(ROUND_ANSWERS, max(1, ROUND_UP_TO // completion))
        return Shape(
            prompts=round_up(self.prompts, 1),
            prompt=round_up(self.prompt + 1, ROUND_TOKENS),
            completions=round_up(self.completions, 1 << (rows.bit_length() - 1)),
            completion=completion,
        )


def round_up(number: int, least: int) -> int:
    """Up to a power of two or what is halfway between two, or a multiple of the least."""
    step = max(least, 1 << max(0, number.bit_length() - 2))
    return -(-number // step) * step


@dataclass(frozen=True, slots=True, eq=False)
class PaddedPrompts:
    """Some prompts (G), padded at their ends to one length (P), and the completions (n) behind each."""

    tokens: Integers  # (G, P)
    lengths: Integers  # (G,)
    behind: Integers  # (n,): a completion's prompt

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], counts: Sequence[int], shape: Shape | None = None) -> "PaddedPrompts":
        """`counts`: of the completions to each, which follow one another. `shape`: filled up with what nobody reads."""
        longest = max(map(len, prompts))
        shape = shape or Shape(prompts=len(prompts), prompt=longest, completions=sum(counts), completion=0)
        lengths = np.ones(shape.prompts, np.int64)
        tokens = np.zeros((shape.prompts, shape.prompt), np.int64)
        for row, prompt in enumerate(prompts):
            lengths[row] = len(prompt)
            tokens[row, : len(prompt)] = prompt
        behind = np.zeros(shape.completions, np.int64)
        behind[: sum(counts)] = np.repeat(np.arange(len(prompts)), counts)
        return cls(tokens, lengths, behind)

    def first(self, completions: int) -> "PaddedPrompts":
        """Those that some completions need."""
        behind = self.behind[:completions]
        lengths = self.lengths[: behind[-1] + 1]
        return PaddedPrompts(self.tokens[: len(lengths), : lengths.max()], lengths, behind)


@dataclass(frozen=True, slots=True, eq=False)
class Micro:
    """Some completions (n) behind their prompts, padded to one length (C)."""

    prompts: PaddedPrompts
    completions: Integers  # (n, C)
    mask: Floats  # (n, C): tokens to learn from
    old: Floats  # (n, C): log-probabilities when they were sampled
    known: Floats  # (n, 1): whether those are known
    advantage: Floats  # (n,)
    weight: Floats  # (n,): of one token
    temperature: Floats  # (n, 1, 1)
    places: Integers  # (n,): of its completions in the batch; -1 for what fills it up
    proximal: Floats | None = None  # (n, C): log-probabilities as the update began, where they are needed

    @property
    def tokens(self) -> int:
        """That go through the model."""
        return self.prompts.tokens[:, 1:].size + self.completions.size

    @property
    def learnt(self) -> int:
        return int(self.mask.sum())

    def first_tokens(self, tokens: int) -> "Micro":
        """Returns as few of its completions as have so many tokens to learn from; all where they have fewer."""
        learnt = np.cumsum(self.mask.sum(axis=1))
        return self.first(min(len(learnt), int(np.searchsorted(learnt, tokens)) + 1))

    def first(self, count: int) -> "Micro":
        """Some of its completions."""
        return Micro(
            prompts=self.prompts.first(count),
            completions=self.completions[:count],
            mask=self.mask[:count],
            old=self.old[:count],
            known=self.known[:count],
            advantage=self.advantage[:count],
            weight=self.weight[:count],
            temperature=self.temperature[:count],
            places=self.places[:count],
            proximal=None if self.proximal is None else self.proximal[:count],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """How trajectories become advantages and weights."""

    algorithm: str
    scaling: RewardScaling | None = None  # None: the algorithm's own
    max_length: int | None = None  # for Dr. GRPO's weights; None: what the longest completion was allowed
    keep_flat: bool = False  # groups without a difference stay, with an advantage of 0: for a term that is not theirs
    mask_truncated: bool = False  # completions that were cut off have no tokens to learn from


@dataclass(slots=True, eq=False)
class Batch:
    """What one step of the optimiser learns from."""

    trajectories: list[Trajectory]
    advantage: Floats
    weight: Floats
    flat: int  # trajectories of groups without a difference
    mask_truncated: bool = False
    proximal: dict[int, Floats] = field(default_factory=dict)  # log-probabilities as the update began, by place

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        algorithm: str,
        max_length: int | None = None,
        keep_flat: bool = False,
    ) -> "Batch":
        """All of these in one step."""
        rules = BatchRules(algorithm=algorithm, max_length=max_length, keep_flat=keep_flat)
        return cls.all_of(trajectories, rules, len(trajectories))[0]

    @classmethod
    def all_of(cls, trajectories: Sequence[Trajectory], rules: BatchRules, size: int) -> list["Batch"]:
        """The steps of an update: whole groups, about `size` trajectories each. Advantages are those among all."""
        names = {name: number for number, name in enumerate(dict.fromkeys(one.group_id for one in trajectories))}
        groups = np.array([names[one.group_id] for one in trajectories], np.int64)
        rewards = np.array([one.reward for one in trajectories], np.float32)
        advantage = advantages(rewards, groups, rules.algorithm, rules.scaling)
        for place, one in enumerate(trajectories):
            if one.advantage is not None:
                advantage[place] = one.advantage
        teaches = np.array(
            [
                one.advantage is not None or group_has_signal(rewards[groups == groups[place]])
                for place, one in enumerate(trajectories)
            ],
            bool,
        )
        longest = rules.max_length or max(map(_allowed, trajectories), default=1)
        return [
            cls._of_part([trajectories[place] for place in part], advantage[part], teaches[part], longest, rules)
            for part in _parts(groups, size)
        ]

    @classmethod
    def _of_part(
        cls, some: list[Trajectory], advantage: Floats, teaches: BooleanArray, longest: int, rules: BatchRules
    ) -> "Batch":
        """Whether groups without a difference stay or go, weights are those among all trajectories of the step."""
        lengths = np.array([int(_mask(one, rules.mask_truncated).sum()) for one in some], np.int64)
        weight = token_weights(lengths, rules.algorithm, longest)
        gone = [rules.mask_truncated and one.truncated for one in some]
        kept = [place for place in range(len(some)) if not gone[place] and (rules.keep_flat or teaches[place])]
        return cls(
            trajectories=[some[place] for place in kept],
            advantage=advantage[kept],
            weight=weight[kept],
            flat=len(some) - int(teaches.sum()),
            mask_truncated=rules.mask_truncated,
        )

    def micros(
        self,
        budget: Callable[[], int],
        several: bool = True,
        rounded: bool = False,
        room: Callable[[int], int] | None = None,
    ) -> Iterator[Micro]:
        """`budget`: tokens that the next may have; one completion may have more. `several`: prompts in one. `room`:
        tokens for which there is memory where the longest text has so many.

        `rounded`: filled up to few shapes, for devices where each new one costs as much as thousands of tokens.
        """
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for place, one in enumerate(self.trajectories):
            by_prompt.setdefault(tuple(one.prompt_ids), []).append(place)
        left = deque(
            sorted(places, key=lambda place: len(self.trajectories[place].completion_ids))
            for places in by_prompt.values()
        )
        if rounded:
            left = deque(sorted(left, key=self._lengths))
        while left:
            limit = budget()
            places = left.popleft()
            if room is not None:
                limit = min(limit, room(sum(self._lengths(places))))
            pieces = -(-len(places) // self._most(places, limit, rounded))
            count = -(-len(places) // pieces)  # even ones: the prompt goes through the model with each
            parts = [places[:count]]
            if count < len(places):
                left.appendleft(places[count:])
            else:
                while several and left and self._together([*parts, left[0]], limit, rounded):
                    parts.append(left.popleft())
            yield self._micro(parts, self._shape(parts, rounded))

    def _lengths(self, places: Sequence[int]) -> tuple[int, int]:
        """Returns the lengths of the prompt and of the longest completion to it, which is the last."""
        last = self.trajectories[places[-1]]
        return len(last.prompt_ids), len(last.completion_ids)

    def _shape(self, parts: Sequence[Sequence[int]], rounded: bool) -> Shape:
        """Returns the shape of completions to several prompts, together."""
        lengths = [self._lengths(places) for places in parts]
        prompt, completion = (max(sizes) for sizes in zip(*lengths, strict=True))
        shape = Shape(prompts=len(parts), prompt=prompt, completions=sum(map(len, parts)), completion=completion)
        return shape.rounded() if rounded else shape

    def _most(self, places: Sequence[int], limit: int, rounded: bool) -> int:
        """Returns how many completions to one prompt are within the limit; one at least."""
        prompt, completion = self._lengths(places)
        for count in range(len(places), 1, -1):
            shape = Shape(prompts=1, prompt=prompt, completions=count, completion=completion)
            if (shape.rounded() if rounded else shape).tokens <= limit:
                return count
        return 1

    def _together(self, parts: Sequence[Sequence[int]], limit: int, rounded: bool) -> bool:
        """Returns whether completions to several prompts may be one micro-batch: within the limit and with little
        padding."""
        together = self._shape(parts, rounded).tokens
        if rounded:
            apart = self._shape(parts[:-1], rounded).tokens + self._shape(parts[-1:], rounded).tokens + LAUNCH_TOKENS
            return together <= min(limit, (1 + MAX_PADDING) * apart)
        each = [self._shape([places], rounded) for places in parts]
        if max(shape.prompt for shape in each) > 2 * min(shape.prompt for shape in each):
            return False
        return together <= min(limit, (1 + MAX_PADDING) * sum(shape.tokens for shape in each))

    def _micro(self, parts: Sequence[Sequence[int]], shape: Shape) -> Micro:
        places = [place for part in parts for place in part]
        some = [self.trajectories[place] for place in places]
        prompts = PaddedPrompts.of(
            [self.trajectories[part[0]].prompt_ids for part in parts], [len(part) for part in parts], shape
        )
        size = shape.completions, shape.completion
        completions = np.zeros(size, np.int64)
        mask = np.zeros(size, np.float32)
        old = np.zeros(size, np.float32)
        known, advantage, weight = (np.zeros(shape.completions, np.float32) for _ in range(3))
        proximal = np.zeros(size, np.float32) if self.proximal else None
        own = np.full(shape.completions, -1, np.int64)
        own[: len(some)] = places
        advantage[: len(some)] = self.advantage[places]
        weight[: len(some)] = self.weight[places]
        temperature = np.full(shape.completions, some[0].temperature, np.float32)
        for row, one in enumerate(some):
            length = len(one.completion_ids)
            completions[row, :length] = one.completion_ids
            mask[row, :length] = _mask(one, self.mask_truncated)
            if proximal is not None:
                proximal[row, :length] = self.proximal[places[row]]
            if one.logprobs is not None:
                old[row, :length] = one.logprobs
            known[row] = one.logprobs is not None
            temperature[row] = one.temperature
        return Micro(
            prompts=prompts,
            completions=completions,
            mask=mask,
            old=old,
            known=known[:, None],
            advantage=advantage,
            weight=weight,
            temperature=temperature[:, None, None],
            places=own,
            proximal=proximal,
        )


def _parts(groups: Integers, size: int) -> list[list[int]]:
    """Places of whole groups, in parts of about one size, at least one."""
    members: dict[int, list[int]] = {}
    for place, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(place)
    share = len(groups) / max(1, -(-len(groups) // max(1, size)))
    parts: list[list[int]] = [[]]
    for places in members.values():
        if parts[-1] and len(parts[-1]) + len(places) / 2 > share:
            parts.append([])
        parts[-1] += places
    return parts


def _allowed(one: Trajectory) -> int:
    """Returns how many tokens the completion could have had, where that is known."""
    return one.max_tokens or len(one.completion_ids)


def _mask(one: Trajectory, mask_truncated: bool) -> Floats:
    """(T,): the tokens of a completion to learn from."""
    if mask_truncated and one.truncated:
        return np.zeros(len(one.completion_ids), np.float32)
    return np.ones(len(one.completion_ids), np.float32) if one.mask is None else np.array(one.mask, np.float32)
