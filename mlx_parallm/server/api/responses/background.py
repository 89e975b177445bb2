"""Responses that nobody waits for: they run to their end, or until they are cancelled, and are asked for by id."""

from collections.abc import Callable, Sequence

from mlx_parallm.errors import ParallmError
from mlx_parallm.server.api.responses.response_types import ResponseObject
from mlx_parallm.server.api.responses.writer import ResponsesWriter
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate, Collected
from mlx_parallm.server.generation.http_call import Generation


class BackgroundResponse:
    """Listens to a generation, and hands the writer what came of it. `release` lets go of the model."""

    def __init__(
        self, owner: str, generation: Generation, writer: ResponsesWriter, release: Sequence[Callable[[], None]]
    ) -> None:
        self.owner = owner
        self.writer = writer
        self._generation = generation
        self._release = release
        self._collected = Collected()

    def on_update(self, choice: ChoiceStream, update: ChoiceUpdate) -> None:
        self._collected.add(update)

    def on_end(self, error: ParallmError | None) -> None:
        self._generation.cancel()  # charges its tokens
        self._let_go()
        if error is not None:
            self.writer.failed(error)
        else:
            self.writer.answer([self._collected])

    def cancel(self) -> ResponseObject:
        self._generation.cancel()
        self._let_go()
        return self.writer.cancelled()

    def _let_go(self) -> None:
        for release in self._release:
            release()
        self._release = ()
