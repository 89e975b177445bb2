"""How the engine works on each kind of device: choices that change speed, never answers. Read once at start.

Some are only what a start begins from: `tuning` has those that are measured.
"""

from dataclasses import dataclass, replace
from typing import Literal

DeviceKind = Literal["cpu", "metal", "cuda"]
SLOT_STEPS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
DRAFTS = 8
PROMPT_STEP = 128  # tokens: where prompts are computed in round shapes, all sizes are multiples of this
CHUNK = 512  # tokens of a piece of a prompt, where equal texts must be computed in equal shapes


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    steps_in_flight: int  # steps that are started before the first of them is read
    compiled: bool  # trace a decode step once per shape, instead of building its graph each time
    view_step: int  # attention reads whole multiples of so many tokens
    max_padding: float  # prompts are computed together while padding adds at most this share
    round_prompts: bool  # compute prompts in few, round shapes
    fused: bool = False  # decode with our own attention kernel
    match_step: int = 1  # a cached prefix is used to the last whole multiple of so many tokens
    pass_tokens: int = 0  # a pass takes as long as computing so many tokens, however few it computes
    min_match: int = 1  # a cached prefix of a prompt is used from so many tokens on
    slot_steps: tuple[int, ...] = SLOT_STEPS  # a step computes so many rows, free ones among them
    drafts: int = 0  # most tokens of a row that are drafted, and verified in one step; 0: none
    prefill_step: int | None = None  # tokens of a piece of a prompt; None: as many as --prefill-step-size allows
    # Numbers of rows that passes compute, which all give a row the same numbers; (): as many as there are.
    exact_rows: tuple[int, ...] = ()
    chunk: int = 0  # pieces of prompts, and cached prefixes, end at whole multiples of so many tokens; 0: anywhere

    def exactly(self, rows: tuple[int, ...], chunk: int) -> "DeviceProfile":
        """The same profile, by which a row's numbers do not depend on the rows beside it, or on what is cached."""
        if not rows:
            return self
        return replace(self, exact_rows=rows, chunk=chunk, match_step=chunk, min_match=chunk, pass_tokens=0, drafts=0)

    def speculating(self, way: str) -> "DeviceProfile":
        """`way`: of --speculation; auto leaves it to the device."""
        if way == "off":
            return replace(self, drafts=0)
        return self if way == "auto" else replace(self, drafts=self.drafts or DRAFTS)

    @classmethod
    def of(cls, kind: DeviceKind) -> "DeviceProfile":
        if kind == "cpu":
            # A step runs while it is being started: there is nothing to gain ahead. A pass costs some 24 tokens' time.
            return cls(
                steps_in_flight=0,
                compiled=False,
                view_step=32,
                max_padding=0.15,
                round_prompts=False,
                min_match=8,
                drafts=DRAFTS,
            )
        if kind == "metal":
            return cls(
                steps_in_flight=1, compiled=True, view_step=128, max_padding=0.2, round_prompts=False, min_match=32
            )
        # CUDA plans attention anew for every shape, which takes longer than to compute some padding.
        return cls(
            steps_in_flight=2,
            compiled=True,
            view_step=128,
            max_padding=0.5,
            round_prompts=True,
            fused=True,
            match_step=PROMPT_STEP,
            pass_tokens=4 * PROMPT_STEP,
            min_match=PROMPT_STEP,
        )
