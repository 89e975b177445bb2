"""What the engine keeps of a request while it lives: a `Job` to prefill, a `Row` per choice to decode, its readers.

No MLX here: the scheduler and its tests use these too. A job is one prompt and the rows that fork from it; once
prefilled it is forgotten and its rows run on their own. A row that loses its place becomes a job again, with what it
has generated as part of the prompt. Several requests may read one row, when they are the same computation.
"""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_parallm.kv.block_pool import Chain, Match
from mlx_parallm.policy_spans import OPEN_END, Spans, spans_between
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.types import Delta, FinishReason, OnDelta, PromptImages, Request, TokenLogprob


@dataclass(slots=True, eq=False)
class Reader:
    """A request's interest in a row: which choice it is there, and how much has been handed over."""

    request: Request
    index: int
    arrival: float
    on_delta: OnDelta
    sent: int = 0
    started: bool = False  # it has had its first delta
    visible: int | None = None  # tokens that it saw, where a stop string has ended the choice for it

    @property
    def eager(self) -> bool:
        """Whether it reads along; the others get everything at the end."""
        return self.request.stream or bool(self.request.sampling.stop)


@dataclass(slots=True, eq=False)
class Row:
    """One choice under computation."""

    prompt: list[int]
    sampling: SamplingParams
    priority: int
    seed: int  # 32 bits; with the token's number, the key of its random number
    max_tokens: int
    stop_ids: frozenset[int]
    readers: list[Reader] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # generated and read
    logprobs: list[TokenLogprob] = field(default_factory=list)
    recorded: bool = False  # for those who learn from what was sampled
    sampled_logprobs: list[float] = field(default_factory=list)  # at their temperature, the last token's too
    launched: int = 0  # generated tokens asked of the device, read or not
    position: int | None = None  # in the running batch
    epoch: int = 0  # counts the places it has left: results asked for in an earlier one are void
    order: int = 0  # of admission: the newest loses its place first
    matcher: Any = None  # llguidance's, when a grammar binds this row
    end_ids: frozenset[int] = frozenset()  # tokens that the grammar allows at the end of its text
    forced: set[int] = field(default_factory=set)  # numbers of tokens that the grammar left no choice of, if recorded
    complete: bool = False  # the grammar's text is, and no end-of-sequence token can follow
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    stop_logprob: TokenLogprob | None = None
    chain: Chain | None = None  # the prefix cache's hashes of its blocks
    cached: int | None = None  # prompt tokens that were not computed; None before it began
    adapter: Any = None  # the registry's Version, which this row holds
    policies: list[tuple[int, Any]] = field(default_factory=list)  # adapters so far, each with its first token's number
    known_spans: tuple[Any, int, Spans] = (None, 0, ())  # of which policies, how many, and what they came to
    owner: str = ""  # the name of the key that it came with
    begun: float | None = None  # by time.perf_counter, when its first token was read
    rollout: bool = False  # gives way to requests: nobody but rollouts reads it
    follows: bool = False
    drafter: Any = None  # guesses its next tokens; None before the first time
    repeated: int = 0  # tokens that it has and that are computed again: so many are still to be read
    drafted: int = 0  # tokens
    accepted: int = 0  # of those
    images: PromptImages | None = None

    @property
    def length(self) -> int:
        """Tokens whose keys and values the cache holds before the next decode step."""
        return len(self.prompt) + self.launched - 1

    @property
    def streams(self) -> bool:
        return any(reader.request.stream for reader in self.readers)

    @property
    def wants_more(self) -> bool:
        return self.finish_reason is None and self.launched < self.max_tokens

    def content(self, text: list[int]) -> list[int]:
        """The prefix of its text as the prefix cache knows it: where it has images, by their pixels."""
        if self.images is None:
            return text
        return self.images.content[: len(text)] + text[len(self.images.content) :]

    def may_end_after(self, count: int) -> bool:
        """Returns whether an end-of-sequence token may come after so many tokens."""
        return not self.end_ids.isdisjoint(self.stop_ids) and count >= self.sampling.min_tokens

    def follow_grammar(self, token: int) -> str:
        """Moves the grammar on by a token just read; returns what is wrong, or an empty string.

        A text that is complete, and can't be ended by an end-of-sequence token, ends here.
        """
        if not self.matcher.is_error() and token in self.stop_ids and len(self.tokens) >= self.sampling.min_tokens:
            return ""  # the row ends with it
        if not self.matcher.consume_token(token) or self.matcher.is_error():
            return str(self.matcher.get_error()).split("\n")[0] or "a token does not fit it"
        self.complete = self.matcher.is_stopped() and not self.may_end_after(len(self.tokens) + 1)
        return ""

    def accept(self, token: int, logprob: TokenLogprob | None, sampled_logprob: float | None = None) -> None:
        """Takes one token that was read from the device, and decides whether it is the last."""
        if sampled_logprob is not None:
            self.sampled_logprobs.append(sampled_logprob)
        if not self.max_tokens:  # only the prompt was to be scored
            self.finish_reason = "length"
        elif token in self.stop_ids and len(self.tokens) >= self.sampling.min_tokens:
            self.finish_reason = "stop"
            self.stop_token = token
            self.stop_logprob = self._own(logprob)
        else:
            self.tokens.append(token)
            if (own := self._own(logprob)) is not None:
                self.logprobs.append(own)
            if self.complete:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_tokens:
                self.finish_reason = "length"

    def _own(self, logprob: TokenLogprob | None) -> TokenLogprob | None:
        """The batch's widest `top` was read: this row asked for so many."""
        return None if logprob is None else replace(logprob, top=logprob.top[: self.sampling.logprobs])

    def take_adapter(self, adapter: Any) -> None:
        """Has the row use this adapter from the next token asked for."""
        self.adapter = adapter
        self.policies = [policy for policy in self.policies if policy[0] < self.launched]
        if not self.policies or self.policies[-1][1] is not adapter:
            self.policies.append((self.launched, adapter))

    @property
    def policy_spans(self) -> Spans:
        """Says which version makes which tokens; the last span is open. Every delta carries it, so that it is made anew
        only when the adapter has changed."""
        known, count, spans = self.known_spans
        if known is not self.policies or count != len(self.policies):
            starts = [(first, 0 if adapter is None else adapter.number) for first, adapter in self.policies]
            spans = spans_between(starts, OPEN_END)
            self.known_spans = self.policies, len(self.policies), spans
        return spans

    def rewind(self) -> None:
        """Forgets the tokens that were asked for and not read: they are computed again."""
        self.launched = len(self.tokens)
        self.take_adapter(self.adapter)

    def start_over(self) -> None:
        """Has all its tokens computed again, from its prompt on, in the shapes that they were computed in."""
        self.repeated = len(self.tokens)
        self.launched = 0

    @property
    def next_known(self) -> int | None:
        """The token that is asked of the device next, where the row has it already."""
        return self.tokens[self.launched] if self.launched < len(self.tokens) else None

    def delta_for(self, reader: Reader) -> Delta:
        """All that `reader` has not been sent yet."""
        delta = Delta(
            reader.request.id,
            reader.index,
            self.tokens[reader.sent :],
            self.logprobs[reader.sent :] if self.sampling.logprobs is not None else None,
            self.finish_reason,
            self.stop_token,
            self.stop_logprob,
            self.policy_spans,
            prompt_logprobs=None if reader.started else self.prompt_logprobs,
            cached_tokens=0 if reader.started else self.cached or 0,
            begun=self.begun,
            drafted=self.drafted,
            accepted=self.accepted,
        )
        reader.sent = len(self.tokens)
        reader.started = True
        return delta


@dataclass(slots=True, eq=False)
class Job:
    """A prompt to compute, for one row or for several that fork from it."""

    rows: list[Row]
    tokens: list[int]
    priority: int
    arrival: float
    number: int = 0  # order of submission; of a requeued row, of its admission
    computed: int = 0
    staged: list[Any] | None = None  # the caches that its prompt is computed into
    chain: Chain | None = None
    fetching_until: float = 0.0  # the SSD is being read for it, and it waits so long: others may go first
    stops: list[int] | None = None  # where snapshots of its caches are taken; None before it began
    waited: bool = False  # for a prompt much like it, once
    match: Match | None = None  # what the prefix cache has of it, held from planning until it is read
    features: dict[int, Any] = field(default_factory=dict)  # of its images that are encoded, by their numbers

    @property
    def content(self) -> list[int]:
        return self.rows[0].content(self.tokens)

    @property
    def rollout(self) -> bool:
        return all(row.rollout for row in self.rows)

    @property
    def owner(self) -> str:
        return next((row.owner for row in self.rows), "")

    @property
    def has_images(self) -> bool:
        return self.rows[0].images is not None

    @property
    def next_image(self) -> int | None:
        """The first of its images that has to be encoded before the rest of it can be computed."""
        images = self.rows[0].images
        if images is None:
            return None
        waiting = (
            i for i, places in enumerate(images.places) if i not in self.features and places[-1] >= self.computed
        )
        return next(waiting, None)

    @property
    def known_length(self) -> int:
        """Tokens that it will have in any case: those computed again count, or it would lose its place again."""
        return len(self.tokens) + max((row.repeated for row in self.rows), default=0)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def key(self) -> tuple[int, int]:
        return self.priority, self.number


@dataclass(slots=True)
class Prefill:
    """Prompts to compute in one forward pass: whole short ones, or one piece of a long one; or an image to encode."""

    jobs: list[Job]
    count: int  # tokens of each, the padding of the shorter included
    image: int | None = None  # of the only job: is encoded, and no token is computed

    @property
    def padded(self) -> int:
        return len(self.jobs) * self.count


@dataclass(slots=True)
class Plan:
    prefills: list[Prefill]
    decode: list[Row]

    def __bool__(self) -> bool:
        return bool(self.prefills or self.decode)


def row_seed(seed: int, index: int) -> int:
    """A 32-bit seed for each choice, so that n choices of one seed differ."""
    digest = hashlib.blake2s(f"{seed}:{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
