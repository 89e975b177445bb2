"""`LLM`: offline batches in Python, over the same engine that the server runs.

`from mlx_parallm import LLM` for users; `chat` uses it when no server runs. The engine thread hands each delta
to its call's queue, and the calling thread turns tokens into text: several threads may call at once.
"""

import sys
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.delivery import deliver
from mlx_parallm.errors import ContextLengthError, InvalidRequestError, UnavailableError
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.runtime.startup import start
from mlx_parallm.sampling_params import SamplingParams, check_sampling
from mlx_parallm.text.detokenize import TextStream, Vocabulary
from mlx_parallm.text.parsers.calls import Tool
from mlx_parallm.text.prompts import Conversation, Message, Prompts, check_template_kwargs
from mlx_parallm.types import Delta, FinishReason, Request, TokenLogprob
from mlx_parallm.validation import check_choices

Prompt = str | Sequence[int]
Messages = Sequence[Message]


@dataclass(slots=True)
class Output:
    """One of a prompt's `n` answers. `token_ids` holds no end-of-sequence token."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it


@dataclass(slots=True)
class Completion:
    prompt: str | None  # None when token ids were given
    prompt_ids: list[int]
    outputs: list[Output]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.outputs[0].text


@dataclass(slots=True)
class TextChunk:
    """News of a streamed completion."""

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: FinishReason | None = None


class LLM:
    """A model in this process. `path` is a hub id, a folder or a .gguf file; None is the embedded model.

    Other options are those of the server: `LLM(max_model_len=2048, kv_cache_memory=parse_bytes("2GiB"))`.
    """

    def __init__(
        self, path: str | None = None, *, max_batch_size: int = 32, dtype: str = "auto", **config: Any
    ) -> None:
        # Work is fed to the engine as it finishes, never more than its queue holds.
        config.setdefault("max_queue_size", 2 * max_batch_size)
        config.setdefault("ssd", False)  # a script leaves no files behind unless it asks to
        paths = (path,) if path else ()
        self.config = ServeConfig.of(model_path=paths, max_batch_size=max_batch_size, dtype=dtype, **config)
        runtime = start(self.config, deliver)
        self._engine = runtime.engine
        self._vocabulary = Vocabulary(self._engine.model.tokenizer)
        self._prompts = Prompts(self._engine.model.tokenizer)
        self._stop = weakref.finalize(self, runtime.close)

    @property
    def model(self) -> LanguageModel:
        return self._engine.model

    @property
    def name(self) -> str:
        return self._engine.model.name

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Completes each prompt, text or token ids; results come in the order of the prompts.

        A prompt that can't be served raises before any work begins. `progress` forces the bar on or off;
        by default it shows on a terminal.
        """
        batch = _prompts(prompts)
        jobs = [
            self._job(prompt, self._encode(prompt, number), params, number, chat=False)
            for number, (prompt, params) in enumerate(zip(batch, _spread(sampling, len(batch)), strict=True))
        ]
        return self._run(jobs, progress)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **template: Any,
    ) -> list[Completion]:
        """Answers each conversation, a list of {"role", "content"}. `template`: tools, continue_final_message, and what
        else goes to the chat template."""
        first = conversations[0] if conversations else None
        batch: list[Any] = [conversations] if isinstance(first, dict) else list(conversations)
        jobs = [
            self._job(None, self._render(conversation, **template), params, number, chat=True)
            for number, (conversation, params) in enumerate(zip(batch, _spread(sampling, len(batch)), strict=True))
        ]
        return self._run(jobs, progress)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[TextChunk]:
        """Completes one prompt, piece by piece; closing the iterator stops the work."""
        job = self._job(prompt, self._encode(prompt, 0), sampling or SamplingParams(), 0, chat=False)
        return self._pieces(job)

    def stream_chat(
        self, conversation: Messages, sampling: SamplingParams | None = None, **template: Any
    ) -> Iterator[TextChunk]:
        """Answers one conversation, piece by piece; closing the iterator stops the work."""
        job = self._job(None, self._render(conversation, **template), sampling or SamplingParams(), 0, chat=True)
        return self._pieces(job)

    def close(self) -> None:
        """Ends the engine thread; open calls in other threads raise."""
        self._stop()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt, number: int) -> list[int]:
        if isinstance(prompt, str):
            try:
                return self._prompts.encode(prompt, add_special_tokens=True)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {number}: {error.message}", param="prompt") from None
        tokens = list(prompt)
        if not all(isinstance(token, int) and 0 <= token < self.model.vocab_size for token in tokens):
            raise InvalidRequestError(f"prompt {number} holds a token that is not in the vocabulary", param="prompt")
        return tokens

    def _render(
        self,
        messages: Messages,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template: Any,
    ) -> list[int]:
        """Renders a chat as the server does, and returns its tokens."""
        check_template_kwargs(template)
        conversation = Conversation(
            [dict(message) for message in messages],
            tools,
            add_generation_prompt and not continue_final_message,
            continue_final_message,
            template,
        )
        return self._prompts.chat(conversation).tokens

    def _job(
        self, prompt: Prompt | None, tokens: list[int], sampling: SamplingParams, number: int, *, chat: bool
    ) -> "_Job":
        if not tokens:
            raise InvalidRequestError(f"prompt {number} is empty", param="prompt")
        if len(tokens) >= self.model.context_length:
            raise ContextLengthError.of(self.model.context_length, len(tokens), param=f"prompt.{number}")
        check_sampling(sampling, self.model.vocab_size)
        check_choices(sampling.n, self.config.batch.max_batch_size)
        streams = [TextStream.of(self._vocabulary, sampling, tokens, chat=chat) for _ in range(sampling.n)]
        return _Job(prompt if isinstance(prompt, str) else None, tokens, sampling, streams)

    def _run(self, jobs: "list[_Job]", progress: bool | None) -> list[Completion]:
        shown = sys.stderr.isatty() and len(jobs) > 1 if progress is None else progress
        with _progress(len(jobs), shown) as count:
            for job, piece in self._deltas(jobs):
                count(job, piece)
        return [job.completion for job in jobs]

    def _pieces(self, job: "_Job") -> Iterator[TextChunk]:
        job.streamed = True
        for _, piece in self._deltas([job]):
            if piece.text or piece.token_ids or piece.finish_reason:
                yield piece

    def _deltas(self, jobs: "list[_Job]") -> "Iterator[tuple[_Job, TextChunk]]":
        """Submits the jobs, no more at once than the queue holds, and yields what comes of them."""
        inbox: SimpleQueue[Delta] = SimpleQueue()
        waiting = deque(jobs)
        running = dict[str, _Job]()
        try:
            while waiting or running:
                while waiting and len(running) < self.config.batch.max_queue_size:
                    job = waiting.popleft()
                    self._engine.submit(job.request(), inbox.put)
                    running[job.id] = job
                delta = self._next(inbox)
                if delta.request_id not in running or running[delta.request_id].is_over(delta.index):
                    continue  # a choice that a stop string ended may still send a token
                job = running[delta.request_id]
                piece = job.take(delta)
                if piece.finish_reason == "stop" and delta.finish_reason is None:
                    self._engine.cancel(job.id, delta.index)
                if job.done:
                    del running[job.id]
                yield job, piece
        finally:
            for name in running:
                self._engine.cancel(name)

    def _next(self, inbox: "SimpleQueue[Delta]") -> Delta:
        while True:
            try:
                return inbox.get(timeout=1.0)
            except Empty:
                if self._engine.failure is not None:
                    raise UnavailableError(f"the engine has died: {self._engine.failure}") from None


@dataclass(slots=True, eq=False)
class _Job:
    """One prompt on its way: its completions so far, and the streams that turn their tokens into text."""

    prompt: str | None
    tokens: list[int]
    sampling: SamplingParams
    streams: list[TextStream]
    streamed: bool = False  # whether its tokens are wanted one by one
    id: str = field(default_factory=lambda: f"llm-{uuid.uuid4().hex}")
    completion: Completion = field(init=False)

    def __post_init__(self) -> None:
        logprobs = self.sampling.logprobs is not None
        outputs = [Output(index, logprobs=[] if logprobs else None) for index in range(self.sampling.n)]
        self.completion = Completion(self.prompt, self.tokens, outputs)

    @property
    def done(self) -> bool:
        return all(output.finish_reason for output in self.completion.outputs)

    def is_over(self, index: int) -> bool:
        return self.completion.outputs[index].finish_reason is not None

    def request(self) -> Request:
        return Request(self.id, self.tokens, self.sampling, stream=self.streamed)

    def take(self, delta: Delta) -> TextChunk:
        """Adds a delta to its completion."""
        if delta.error is not None:
            raise delta.error
        output = self.completion.outputs[delta.index]
        stream = self.streams[delta.index]
        self.completion.cached_tokens = delta.cached_tokens or self.completion.cached_tokens
        self.completion.prompt_logprobs = delta.prompt_logprobs or self.completion.prompt_logprobs
        texts = _push(stream, delta.tokens)
        tokens = delta.tokens[: len(texts)]
        if output.logprobs is not None and delta.logprobs:
            output.logprobs += delta.logprobs[: len(tokens)]
        if delta.finish_reason and stream.stopped is None:
            texts.append(stream.finish())
        output.finish_reason = "stop" if stream.stopped is not None else delta.finish_reason
        output.stop_reason = stream.stopped if stream.stopped is not None else delta.stop_token
        output.text += "".join(texts)
        output.token_ids += tokens
        return TextChunk("".join(texts), tokens, delta.index, output.finish_reason)


def _push(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    """The text of each token, up to the one that completes a stop string."""
    texts: list[str] = []
    for token in tokens:
        if stream.stopped is not None:
            break
        texts.append(stream.push([token]))
    return texts


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt, text or token ids, is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(f"prompts are texts or lists of token ids, not {type(prompts).__name__}")
    items: list[Any] = list(prompts)
    items = [items] if items and isinstance(items[0], int) else items
    for number, item in enumerate(items):
        if isinstance(item, bytes | bytearray | dict) or not isinstance(item, Iterable):
            raise InvalidRequestError(f"prompt {number} is a text or a list of token ids, not {type(item).__name__}")
    return items


def _spread(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if not isinstance(sampling, Sequence) or not all(isinstance(one, SamplingParams) for one in sampling):
        raise InvalidRequestError("sampling is SamplingParams(...), or a list of them, one for each prompt")
    if len(sampling) != count:
        raise InvalidRequestError(f"{len(sampling)} SamplingParams for {count} prompts: give one, or one for each")
    return sampling


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[_Job, TextChunk], None]]:
    """Yields a function that takes each job's chunks and moves the bar, where one is shown."""
    if not shown:
        yield lambda job, piece: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    speed = TextColumn("{task.fields[speed]}")
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), speed, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task("", total=total, speed="")
        begin = time.perf_counter()
        tokens = 0
        finished = 0

        def count(job: _Job, piece: TextChunk) -> None:
            nonlocal tokens, finished
            tokens = tokens + len(piece.token_ids)
            finished = finished + job.done
            if job.done:
                rate = tokens / (time.perf_counter() - begin)
                progress.update(task, completed=finished, speed=f"{rate:,.0f} tokens/s")

        yield count
