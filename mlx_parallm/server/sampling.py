"""How tokens are drawn, as OpenAI's bodies ask for it: the fields that chat, completions and responses share."""

from typing import Any

from pydantic import Field

from mlx_parallm.server.schema import Body, LogitBias, Stop
from mlx_parallm.types import INT64, SamplingParams


class SamplingBody(Body):
    temperature: float = Field(1.0, ge=0, le=2, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=INT64, description="Sample from the k likeliest tokens; 0 or -1: off")
    min_p: float = Field(0.0, ge=0, le=1, description="Drop tokens less likely than this share of the likeliest")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10, description="On prompt and output tokens; 1: off")
    logit_bias: LogitBias = Field(default_factory=dict, description="Token id to a number added to its logit")
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64, description="Same seed and prompt: same tokens")
    stop: Stop = Field((), description="Text that ends the output and is not part of it")
    ignore_eos: bool = Field(False, description="Go on after the end-of-sequence token")

    def sampling_params(self, **more: Any) -> SamplingParams:
        """With `more`: what a route has beside these fields, or calls otherwise."""
        return SamplingParams(**{name: getattr(self, name) for name in SamplingBody.model_fields}, **more)
