"""Rendering and tokenising off the event loop, where a text is long enough to hold it up."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from mlx_parallm.server.models import ServedModel
from mlx_parallm.text.prompts import Conversation, Prompt

LONG_TEXT = 4_000  # characters; about a millisecond of tokenising

T = TypeVar("T")


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="tokenise")


@dataclass(frozen=True, slots=True)
class TokenizerPool:
    pool: ThreadPoolExecutor = field(default_factory=_threads)

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    async def encode(
        self, served: ServedModel, text: str, add_special_tokens: bool, limit: int | None = None
    ) -> list[int]:
        def work() -> list[int]:
            return served.prompts.encode(text, add_special_tokens=add_special_tokens, limit=limit)

        return work() if len(text) < LONG_TEXT else await self.run(work)

    async def render(
        self, served: ServedModel, conversation: Conversation, add_special_tokens: bool, limit: int | None = None
    ) -> Prompt:
        def work() -> Prompt:
            return served.prompts.chat(conversation, add_special_tokens=add_special_tokens, limit=limit)

        return work() if conversation.size() < LONG_TEXT else await self.run(work)
