"""The shapes in which prompts are computed, and what of a row is as such a pass would compute it again.

Where a device takes long for each new shape, sizes are rounded up to few. Where equal texts must have equal numbers, a
prompt's passes depend on the prompt alone: it is computed by itself, in chunks that end at fixed places.
"""

from dataclasses import dataclass

from mlx_parallm.devices.profile import PROMPT_STEP
from mlx_parallm.engine.rows import Prefill, Row


@dataclass(frozen=True, slots=True)
class PromptPasses:
    rounds: bool  # up to few shapes
    chunk: int  # tokens; 0: pieces end anywhere

    def width(self, work: Prefill) -> int:
        """Returns how many tokens wide a pass is: the end of the longest prompt is padded to a round number."""
        longest = max(work.jobs, key=lambda job: job.remaining)
        if work.count < longest.remaining:
            return work.count
        return self.rounded(len(longest.tokens)) - longest.computed

    def height(self, prompts: int) -> int:
        return 1 << (prompts - 1).bit_length() if self.rounds else prompts

    def rounded(self, length: int) -> int:
        if not self.rounds:
            return length
        step = PROMPT_STEP if length <= 8 * PROMPT_STEP else 4 * PROMPT_STEP
        return -(-length // step) * step

    def lasting(self, row: Row) -> int:
        """Returns how many tokens of a row's text others may take its keys and values of: all that went through the
        model, or the whole chunks of its prompt, where steps give other numbers than passes over prompts."""
        return len(row.prompt) - len(row.prompt) % self.chunk if self.chunk else row.length
