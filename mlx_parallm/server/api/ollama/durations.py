"""Durations as Ollama's clients write them: seconds, or text such as 5m, 1h30m or 300ms."""

import math
import re
from typing import Annotated, Any

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")
LONGEST = 1e9  # seconds; about 30 years, and for us the same as for ever


def read_keep_alive(value: Any) -> float:
    """Seconds; `math.inf` for what is negative, which means for ever."""
    seconds = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else _of_text(value)
    return math.inf if seconds < 0 or seconds > LONGEST else seconds


def _of_text(value: Any) -> float:
    if isinstance(value, str) and len(value) <= 64:
        text = value.strip()
        sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
        if _WHOLE.fullmatch(digits):
            return sign * sum(float(number) * UNITS[unit] for number, unit in _PART.findall(digits))
        if digits.isascii() and digits.isdecimal():
            return sign * float(digits)
    raise PydanticCustomError("duration", "Expected a number of seconds, or a duration such as 5m; negative: for ever")


KeepAlive = Annotated[float, PlainValidator(read_keep_alive, json_schema_input_type=float | str)]
