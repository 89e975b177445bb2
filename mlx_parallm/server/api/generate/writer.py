"""What the writers of `/generate` have in common."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from mlx_parallm.errors import ParallmError
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate, Collected
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.generation.responses import DONE, event


class GenerateWriter:
    """Collects what was said so far, for dialects whose chunks repeat it."""

    ending = DONE
    media_type = b"text/event-stream; charset=utf-8"

    def __init__(self, generation: Generation, request_id: str) -> None:
        self.served = generation.served
        self.generation = generation
        self.name = generation.call.request_id or request_id
        self._begun = time.perf_counter()
        self._so_far = [Collected() for _ in generation.choices]

    def opening(self) -> bytes:
        return b""

    def closing(self) -> bytes:
        return b""

    def chunk(self, choice: ChoiceStream, update: ChoiceUpdate) -> bytes:
        self._so_far[choice.index].add(update)
        return self._frame(self._part(choice, update))

    def failure(self, error: ParallmError) -> bytes:
        return self._frame(error.body())

    def _frame(self, part: Any) -> bytes:
        return event(part)

    @abstractmethod
    def _part(self, choice: ChoiceStream, update: ChoiceUpdate) -> Any: ...

    @abstractmethod
    def answer(self, results: Sequence[Collected]) -> Any: ...

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begun

    def _text(self, result: Collected) -> str:
        return "".join(result.content)
