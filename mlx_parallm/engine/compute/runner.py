"""Joins the model, its cache and the sampler: prefills, decodes, and reads what they gave. Engine thread only.

`prefill` and `decode` build one forward pass each and start it without waiting; `read` is the only place where the
host waits for the device. The batch's last tokens stay on the device, so a decode step can be started before the
one before it has been read.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.engine.compute.grammar_masks import grammar_masks
from mlx_parallm.engine.compute.pass_contexts import PassContexts
from mlx_parallm.engine.compute.prompt_passes import PromptPasses
from mlx_parallm.engine.compute.sampling import History, Sampled, Sampler, SamplingKernels, scores_of
from mlx_parallm.engine.compute.step import Step, Token, with_known
from mlx_parallm.engine.ranks import DeviceParts
from mlx_parallm.engine.rows import Job, Prefill, Row
from mlx_parallm.engine.scheduler import wants_prompt_logprobs
from mlx_parallm.engine.speculative.drafted import Drafted
from mlx_parallm.host import to_numpy
from mlx_parallm.kv.block_pool import Chain
from mlx_parallm.kv.merged import state_arrays
from mlx_parallm.lora.row_adapters import RowAdapters
from mlx_parallm.models.forward import RowInputs
from mlx_parallm.types import TokenLogprob

PROMPT_LOGPROB_PIECE = 256  # positions whose full logits are held at once


class Runner:
    """`before_wait` is called when a step is about to be started, which may block: the time for others to run."""

    def __init__(
        self,
        parts: DeviceParts,
        vocab_size: int,
        before_wait: Callable[[], None],
        round_prompts: bool = False,
        kernels: SamplingKernels | None = None,
        contexts: PassContexts | None = None,
    ) -> None:
        self._forward = parts.forward
        self.cache = parts.cache
        self._prefix = parts.prefix
        self._vocab = vocab_size
        self._before_wait = before_wait
        self._passes = PromptPasses(round_prompts and self.cache.stages_many, parts.tuned.profile.chunk)
        self._kernels = kernels
        self.contexts = contexts or PassContexts()
        self._context: RowAdapters | RowInputs | None = None  # of the current rows; None: tokens are all they have
        self._rows: list[Row | None] = []  # by position
        self._texts: dict[bytes, Row] = {}  # running rows by the hashes of their prompts' blocks
        self._last = mx.zeros((0,), mx.int32)  # (S,): each row's newest token
        self._sampler: Sampler | None = None  # of the current rows; None when they changed
        self._history: History | None = None
        self._history_rows: list[Row | None] = []

    def prefill(self, work: Prefill) -> Step:
        """Computes prompts, or a piece of one; rows whose prompt is complete get their first token and join."""
        step = Step("prefill", sum(min(work.count, job.remaining) for job in work.jobs))
        if work.jobs[0].staged is None:
            self._stage(work.jobs)
        if work.image is not None:
            self._forward.forget()  # the encoder may look tokens up, and nobody's adapter is to change that
            step.fence = [self.contexts.encode(work.jobs[0], work.image)]
            self._start(step.fence)
            return step
        self._take_snapshots(work)
        logits = self._prompt_logits(work, step) if work.count else None  # (B, V)
        if logits is None or any(job.remaining for job in work.jobs):
            step.fence = state_arrays(work.jobs[0].staged or [])
            self._start(step.fence)
            return step
        self._first_tokens(work, logits, step)
        return step

    def _stage(self, jobs: list[Job]) -> None:
        """Caches to compute prompts into, with what is known of the prompts already in them."""
        staged = self.cache.stage(len(jobs), max(self._passes.rounded(len(job.tokens)) for job in jobs))
        matches = [job.match for job in jobs if job.match is not None]
        assert len(matches) in (0, len(jobs)), "prompts that the prefix cache knows are grouped with others"
        if self._prefix is not None and matches:
            if matches[0].length:
                staged = self._prefix.fill(staged, matches + matches[:1] * (self._passes.height(len(jobs)) - len(jobs)))
            for job, match in zip(jobs, matches, strict=True):
                assert job.chain is not None
                self._prefix.admitted(job.chain, match)
                for row in job.rows:
                    row.cached = match.length if row.cached is None else row.cached
                self._prefix.release(match)
                job.match = None
        for job in jobs:
            job.staged = staged

    def _take_snapshots(self, work: Prefill) -> None:
        """Computes a prompt as far as the last of its boundaries where its caches are to be kept."""
        job = work.jobs[0]
        if self._prefix is None or job.chain is None or wants_prompt_logprobs(job):
            return
        assert job.staged is not None
        if job.stops is None:
            job.stops = self._prefix.stops(job.chain, job.tokens, job.computed)
        end = job.computed + work.count
        while job.stops and job.stops[0] <= end:
            stop = job.stops.pop(0)
            piece = mx.array([job.tokens[job.computed : stop]])
            last = mx.array([piece.shape[1] - 1])  # its logits are never computed
            self._forward.at(piece, job.staged, last, self.contexts.of_piece(job, job.computed, piece.shape[1]))
            self._prefix.take(job.chain, job.staged, stop, len(job.tokens))
            job.computed = stop
        work.count = end - job.computed

    def decode(self, rows: Sequence[Row], drafted: Drafted | None = None) -> Step:
        """One more token for `rows`, all of which have a place in the batch; more for those whose drafts are right.

        With drafts, all that was started has been read, and this is read before anything else is started.
        """
        begun = time.perf_counter()
        self._compact(max(row.length for row in self._rows if row) + 1 + (0 if drafted is None else drafted.longest))
        active = {row.position for row in rows}
        held = [row if row and row.position in active else None for row in self._rows]
        # A row that waits for its last token to be read is computed too: what it writes must go behind what it has.
        lengths = [row.length if row else 0 for row in self._rows]
        numbers = [row.launched if row else 0 for row in held]
        if drafted is None:
            sampler, sampled = self._next_tokens(lengths, numbers)
        else:
            sampler, sampled = self._verified_tokens(drafted, lengths, numbers)
        step = Step("decode", len(rows), sampler=sampler, sampled=sampled, drafted=drafted, launched_at=begun)
        for position, row in enumerate(held):
            if row:
                step.rows.append((position, row, row.epoch))
                step.repeated += row.next_known is not None
                row.launched += 1
        self._start([*sampled.arrays(), *self.cache.pending()])
        return step

    def _next_tokens(self, lengths: Sequence[int], numbers: Sequence[int]) -> tuple[Sampler, Sampled]:
        if self._sampler is None:
            self._renew_sampler()
        assert self._sampler is not None
        logits = self.cache.decode(self._forward, self._last, lengths, self._context)
        masks = grammar_masks(self._sampler, numbers, self._vocab)
        sampled = self._sampler(logits, numbers, self._history, masks)
        self._last = with_known(sampled.tokens, enumerate(self._rows))
        if self._history is not None:
            self._history.append(self._last)
        return self._sampler, sampled

    def _verified_tokens(
        self, drafted: Drafted, lengths: Sequence[int], numbers: Sequence[int]
    ) -> tuple[Sampler, Sampled]:
        """The same, and what is sampled behind each drafted token: in order, as if they were rows of their own."""
        assert self.cache.verify is not None
        if self._sampler is None:
            self._renew_sampler()
        rows = [*self._rows, *drafted.rows]
        numbers = [*numbers, *drafted.numbers]
        sampler = Sampler(rows, self._vocab, self._kernels)
        tokens = mx.concatenate([self._last, mx.array(drafted.tokens, mx.int32)])
        context = self.contexts.of_rows([*rows, *[None] * self.cache.padding(len(rows))])
        logits = self.cache.verify(self._forward, tokens, [*lengths, *drafted.lengths], drafted.slots, context)
        history = None if self._history is None else self._history.with_drafts(drafted.slots, drafted.texts())
        return sampler, sampler(logits, numbers, history, grammar_masks(sampler, numbers, self._vocab, drafted))

    def read(self, step: Step) -> list[Token]:
        """Waits for a step and brings its tokens to the host."""
        for scored, targets, scores in step.prompt_scores:
            scored += scores.on_host(targets)
        if step.sampled is None or step.sampler is None:
            mx.eval(step.fence)
            return []
        tokens: list[int] = to_numpy(step.sampled.tokens).tolist()
        if step.drafted is not None:
            self._keep_accepted(step, step.drafted, tokens)
        asked = step.sampler.logprob_rows
        found: dict[int, TokenLogprob] = {}
        if step.sampled.scores is not None:
            found = dict(zip(asked, step.sampled.scores.on_host([tokens[i] for i in asked]), strict=True))
        sampled = step.sampled.sampled_logprobs
        sampled_logprobs = None if sampled is None else to_numpy(sampled).tolist()
        read = [
            Token(row, tokens[i], found.get(i), sampled_logprobs[i] if sampled_logprobs and row.recorded else None)
            for i, row, epoch in step.rows
            if row.epoch == epoch
        ]
        if step.invalid is not None and (invalid := to_numpy(step.invalid)).any():
            rows = {id(row) for i, row, _ in step.rows if invalid[i]}
            for item in read:
                item.valid = id(item.row) not in rows
        return read

    def _keep_accepted(self, step: Step, drafted: Drafted, tokens: Sequence[int]) -> None:
        """Rows go on behind the last of their drafted tokens that were sampled."""
        assert step.sampled is not None
        kept = [[position] for position in range(len(self._rows))]  # indices among what was sampled
        own = step.rows
        step.rows = []
        for entries in drafted.accepted(own, tokens):
            position, row, _ = entries[0]
            kept[position] = [index for index, *_ in entries]
            row.launched += len(entries) - 1
            row.forced = {number for number in row.forced if number < row.launched}
            step.rows += entries
        if self._history is not None:
            self._history.extend(step.sampled.tokens, kept)
        self._last = step.sampled.tokens[mx.array([indices[-1] for indices in kept])]

    def leave(self, row: Row) -> None:
        """Frees a row's place; results still under way for it are ignored."""
        row.epoch += 1
        if row.position is not None:
            self._keep(row)
            self._unlist(row)
            self.cache.leave(row.position)
            self._rows[row.position] = None
            self._history_rows = [None if other is row else other for other in self._history_rows]
            row.position = None
            self._sampler = None

    def change_adapter(self, row: Row) -> None:
        """A row goes on with another adapter: what it has computed is no longer one adapter's alone."""
        self._unlist(row)
        row.chain = None
        self._sampler = None

    def _unlist(self, row: Row) -> None:
        for hash_ in row.chain.hashes if row.chain is not None else ():
            if self._texts.get(hash_) is row:
                del self._texts[hash_]

    def release_memory(self) -> None:
        """Nothing runs: gives the batch's memory back."""
        self._compact(0)
        self._history = self._context = None
        self._forward.forget()

    def reset(self) -> None:
        """Forgets all rows without keeping anything of theirs: what they computed may be damaged."""
        self.cache.reset()
        self._rows = []
        self._history_rows = []
        self._texts.clear()
        self._last = mx.zeros((0,), mx.int32)
        self._sampler = self._history = self._context = None
        self._forward.forget()
        self.contexts.forget_images()

    def check_integrity(self) -> None:
        assert len(self._rows) == self.cache.positions == self._last.shape[0], "positions have drifted apart"
        for position, row in enumerate(self._rows):
            assert row is None or row.position == position
        self.cache.check_integrity()

    def _prompt_logits(self, work: Prefill, step: Step) -> mx.array:
        counts = [min(work.count, job.remaining) for job in work.jobs]
        job = work.jobs[0]
        caches = work.jobs[0].staged
        assert caches is not None
        scored = wants_prompt_logprobs(job)
        width = work.count if scored and not self._passes.chunk else self._passes.width(work)
        table = np.zeros((self._passes.height(len(counts)), width), np.int32)
        step.shape = (*table.shape, job.computed)
        for line, other, count in zip(table, work.jobs, counts, strict=False):
            line[:count] = other.tokens[other.computed : other.computed + count]
        if scored:
            logits = self._scored_prompt(job, mx.array(table), counts[0], caches, step)
        else:
            index = [count - 1 for count in counts] + [0] * (len(table) - len(counts))
            context = self.contexts.of_piece(job, job.computed, width, work.jobs, len(table))
            logits = self._forward.at(mx.array(table), caches, mx.array(index), context)[: len(counts)]
        for job, count in zip(work.jobs, counts, strict=True):
            job.computed += count
        return logits

    def _start(self, arrays: list[mx.array]) -> None:
        self._before_wait()
        mx.async_eval(arrays)

    def _scored_prompt(self, job: Job, tokens: mx.array, count: int, caches: list[Any], step: Step) -> mx.array:
        """The same pass in smaller pieces, keeping the log-probability of each next prompt token; behind the first
        `count` tokens is padding."""
        row = job.rows[0]
        top = row.sampling.prompt_logprobs or 0
        if row.prompt_logprobs is None:
            shared: list[TokenLogprob | None] = [None]  # the first token has none
            for fork in job.rows:
                fork.prompt_logprobs = shared
        width = tokens.shape[1] if self._passes.chunk else PROMPT_LOGPROB_PIECE
        for start in range(0, tokens.shape[1], width):
            piece = tokens[:, start : start + width]
            context = self.contexts.of_piece(job, job.computed + start, piece.shape[1])
            logits = self._forward(piece, caches, context)[0].astype(mx.float32)  # (T, V)
            first = job.computed + start + 1
            targets = job.tokens[first : first + piece.shape[1]]
            if targets:
                scores = scores_of(logits[: len(targets)], mx.array(targets), top)
                mx.async_eval(scores.arrays())
                assert row.prompt_logprobs is not None
                step.prompt_scores.append((row.prompt_logprobs, targets, scores))
        return logits[count - 1 - start : count - start]

    def _first_tokens(self, work: Prefill, logits: mx.array, step: Step) -> None:
        rows = [row for job in work.jobs for row in job.rows]
        sources = [i for i, job in enumerate(work.jobs) for _ in job.rows]
        if len(rows) > logits.shape[0]:
            logits = logits[mx.array(sources)]
        step.sampler = Sampler(rows, self._vocab, self._kernels)
        history = History(rows) if step.sampler.penalized else None
        numbers = [row.launched for row in rows]
        step.sampled = step.sampler(logits, numbers, history, grammar_masks(step.sampler, numbers, self._vocab))
        step.invalid = mx.isnan(logits).any(axis=-1)
        self._start([*step.sampled.arrays(), step.invalid])
        self._compact(max(len(job.tokens) for job in work.jobs) + 1)
        self._join(rows, sources, work.jobs)
        first = with_known(step.sampled.tokens, enumerate(rows))
        for number, row in enumerate(rows):
            step.repeated += row.next_known is not None
            row.launched += 1
            step.rows.append((number, row, row.epoch))
        self._last[mx.array([row.position for row in rows])] = first
        for job in work.jobs:
            job.staged = None
        self._sampler = None

    def precompute(self, tokens: list[int]) -> None:
        """Computes the prefix of texts to come, for the prefix cache alone."""
        prefix = self._prefix
        if prefix is None or self._passes.chunk or not prefix.worth_keeping(tokens) or max(tokens) >= self._vocab:
            return
        chain = prefix.chain(tokens, "")
        staged = self.cache.stage(1, len(tokens) + chain.size)  # the last block may not be full
        self._forward.at(mx.array([tokens]), staged, mx.array([len(tokens) - 1]))
        prefix.commit(staged, 0, chain, tokens)

    def share(self, chain: Chain) -> None:
        """Hands what a running row has in common with a text to the prefix cache, where that is more than it has."""
        if self._prefix is None:
            return
        known = self._prefix.known(chain)
        row = self._texts.get(chain.hashes[known]) if known < len(chain.hashes) else None
        if row is not None:
            self._keep(row)

    def _keep(self, row: Row) -> None:
        """Hands a row's blocks to the prefix cache: of the tokens that are known, those that went through the model."""
        if self._prefix is not None and self._prefix.store is not None and row.chain is not None:
            assert row.position is not None
            text = row.prompt + row.tokens + ([row.stop_token] if row.stop_token is not None else [])
            kept = row.content(text[: self._passes.lasting(row)])
            self._prefix.commit(self.cache.layers, row.position, row.chain, kept)

    def _join(self, rows: Sequence[Row], sources: Sequence[int], jobs: Sequence[Job]) -> None:
        staged = jobs[0].staged
        assert staged is not None
        positions = self.cache.join(staged, [(source, len(jobs[source].tokens)) for source in sources])
        missing = self.cache.positions - len(self._rows)
        if missing:
            self._rows += [None] * missing
            self._last = mx.concatenate([self._last, mx.zeros((missing,), mx.int32)])
        for row, position in zip(rows, positions, strict=True):
            row.position = position
            self._rows[position] = row
            for hash_ in row.chain.hashes if row.chain is not None else ():
                self._texts.setdefault(hash_, row)

    def _compact(self, longest: int) -> None:
        keep = self.cache.compact(longest)
        if keep is None:
            return
        self._rows = [self._rows[position] for position in keep]
        self._last = self._last[mx.array(keep)] if keep else mx.zeros((0,), mx.int32)
        for position, row in enumerate(self._rows):
            if row:
                row.position = position
        self._sampler = None

    def _renew_sampler(self) -> None:
        self._sampler = Sampler(self._rows, self._vocab, self._kernels)
        self._context = self.contexts.of_rows([*self._rows, *[None] * self.cache.padding(len(self._rows))])
        if not self._sampler.penalized:
            self._history = None
            return
        # Tokens under way are only on the device: rows that stay bring their line along.
        history = History(self._rows)
        history.adopt(self._rows, self._history, self._history_rows, self._last)
        self._history = history
        self._history_rows = list(self._rows)
