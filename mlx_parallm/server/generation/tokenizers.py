"""From a call's prompts or conversation to token ids: off the event loop, where a text is long enough to hold it up.

A conversation's images are read and put in their places here, too.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Semaphore
from typing import TypeVar

from mlx_parallm.errors import ContextLengthError, InvalidRequestError, QueueFullError
from mlx_parallm.server.generation.call import GenerationCall, ImageSource
from mlx_parallm.server.media.media_loader import MediaLoader
from mlx_parallm.server.model_table import ServedModel
from mlx_parallm.text.prompts import Conversation, Prompt
from mlx_parallm.types import ImageInput, PromptImages
from mlx_parallm.validation import check_ids

LONG_TEXT = 4_000  # characters; about a millisecond of tokenising
MAX_SLOW_GRAMMARS = 8  # that wait to be compiled, each for 1.5 seconds at most
VERY_LONG_TEXT = 400_000  # about half a second

T = TypeVar("T")


def _threads(purpose: str, count: int = 2) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix=purpose)


@dataclass(frozen=True, slots=True)
class TokenizedPrompts:
    tokens: list[list[int]]
    inside_thinking: bool = False  # the prompt ends where the model is reasoning already
    images: PromptImages | None = None  # of the only prompt


def own_images(prompts: TokenizedPrompts, tenant: str | None) -> TokenizedPrompts:
    """The same with images whose features are kept for one tenant alone: how fast others get theirs tells nothing."""
    if prompts.images is None or tenant is None:
        return prompts
    salt = hashlib.blake2b(tenant.encode(), digest_size=32).digest()
    images = [
        replace(image, digest=hashlib.blake2b(image.digest, digest_size=len(image.digest), key=salt).digest())
        for image in prompts.images.images
    ]
    return replace(prompts, images=replace(prompts.images, images=images))


@dataclass(frozen=True, slots=True)
class TokenizerPool:
    pool: ThreadPoolExecutor = field(default_factory=partial(_threads, "tokenise"))
    long_pool: ThreadPoolExecutor = field(default_factory=partial(_threads, "tokenise-long", 1))
    compilers: ThreadPoolExecutor = field(default_factory=partial(_threads, "grammar"))  # who hold up no others
    slow_compilers: ThreadPoolExecutor = field(default_factory=partial(_threads, "grammar-slow", 1))
    slow_places: Semaphore = field(default_factory=partial(Semaphore, MAX_SLOW_GRAMMARS + 1))  # one compiles
    media: MediaLoader = field(default_factory=MediaLoader.of)

    def close(self) -> None:
        """What runs ends by itself; what waits is dropped."""
        for pool in (self.pool, self.long_pool, self.compilers, self.slow_compilers, self.media.threads):
            pool.shutdown(wait=False, cancel_futures=True)

    async def prompts(self, call: GenerationCall, served: ServedModel) -> "TokenizedPrompts":
        """A call's prompts as token ids that the model knows, and that fit its context."""
        keep = call.truncate_prompt_tokens  # a prompt of which only the end is kept may be of any length
        limit = served.context_length if keep is None else None
        if call.chat is not None:
            images = await self._images(call.chat.images, served, keep) if call.chat.images else None
            prompt = await self.render(served, call.chat.conversation, call.add_special_tokens is True, limit)
            if images is not None:
                return await self.run(lambda: _placed(prompt, images, served))
            return TokenizedPrompts([prompt.tokens if keep is None else prompt.tokens[-keep:]], prompt.inside_thinking)
        work = partial(_tokens_of, call, served, limit)
        size = sum(len(text) if isinstance(text, str) else len(text) // 16 for text in call.prompts)
        return TokenizedPrompts(work() if size < LONG_TEXT else await self.run(work, size))

    async def _images(
        self, sources: Sequence[ImageSource], served: ServedModel, keep: int | None
    ) -> Sequence[ImageInput]:
        reader = served.client.image_reader
        if reader is None:
            raise InvalidRequestError(
                f"{sources[0].param}: {served.name} reads text only: image parts are not supported",
                param=sources[0].param,
                code="invalid_value",
            )
        if keep is not None:
            raise InvalidRequestError(
                "truncate_prompt_tokens: a prompt with images can't be cut",
                param="truncate_prompt_tokens",
                code="invalid_value",
            )
        return await self.media.read(sources, reader, served.context_length)

    async def run(self, work: Callable[[], T], size: int = 0) -> T:
        """`size`: characters. Very long texts wait for each other alone."""
        pool = self.pool if size < VERY_LONG_TEXT else self.long_pool
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def compile(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.compilers, work)

    async def compile_slowly(self, work: Callable[[], T]) -> T:
        """Compiles grammars whose first try took too long: these wait for each other alone, and not for long."""
        if not self.slow_places.acquire(blocking=False):
            raise QueueFullError(
                f"{MAX_SLOW_GRAMMARS} large schemas or patterns are waiting to be compiled: try again later"
            )
        try:
            return await asyncio.get_running_loop().run_in_executor(self.slow_compilers, work)
        finally:
            self.slow_places.release()

    async def encode(
        self, served: ServedModel, text: str, add_special_tokens: bool, limit: int | None = None
    ) -> list[int]:
        def work() -> list[int]:
            return served.prompts.encode(text, add_special_tokens=add_special_tokens, limit=limit)

        return work() if len(text) < LONG_TEXT else await self.run(work, len(text))

    async def render(
        self, served: ServedModel, conversation: Conversation, add_special_tokens: bool, limit: int | None = None
    ) -> Prompt:
        def work() -> Prompt:
            return served.prompts.chat(conversation, add_special_tokens=add_special_tokens, limit=limit)

        size = conversation.size()
        return work() if size < LONG_TEXT else await self.run(work, size)


def _tokens_of(call: GenerationCall, served: ServedModel, limit: int | None) -> list[list[int]]:
    prompts: list[list[int]] = []
    keep = call.truncate_prompt_tokens
    for text in call.prompts:
        if isinstance(text, str):
            special = call.add_special_tokens is not False
            tokens = served.prompts.encode(text, add_special_tokens=special, limit=limit) or served.first_tokens()
        else:
            tokens = text
        prompts.append(tokens if keep is None else tokens[-keep:])
    for number, prompt_ids in enumerate(prompts):
        if len(prompt_ids) >= served.context_length:
            raise ContextLengthError.of(served.context_length, len(prompt_ids))
        check_ids(prompt_ids, served.model.vocab_size, "prompt" if len(prompts) == 1 else f"prompt.{number}")
    return prompts


def _placed(prompt: Prompt, images: Sequence[ImageInput], served: ServedModel) -> TokenizedPrompts:
    reader = served.client.image_reader
    assert reader is not None
    tokens, placed = reader.place(prompt.tokens, images)
    return TokenizedPrompts([tokens], prompt.inside_thinking, placed)
