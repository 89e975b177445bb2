"""Options of layers and heads: fields of dataclasses, each with a reader that says what is wrong with a value."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mlx_parallm.config import nearest
from mlx_parallm.errors import ModelLoadError

T = TypeVar("T")
Read = Callable[[Any], Any]
MAX_SIZE = 1 << 24  # of a layer's feature, channel or kernel count


def read_options(kind: type[T], values: Mapping[str, Any], place: str) -> T:
    """An instance of a dataclass from a JSON object; ModelLoadError about `place` where one of the values is wrong."""
    known = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ModelLoadError(f"{place} has an unknown option {name!r}{nearest(name, known)}")
    found = {}
    for name, field in known.items():
        if name in values:
            try:
                found[name] = field.metadata["read"](values[name])
            except ValueError as error:
                raise ModelLoadError(f"{place}: {name} must be {error}, not {values[name]!r:.60}") from None
        elif field.default is dataclasses.MISSING:
            raise ModelLoadError(f"{place} needs {name!r}")
    return kind(**found)


def _option(read: Read, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"read": read})


def count(default: Any = dataclasses.MISSING, least: int = 1) -> Any:
    return _option(lambda value: _int(value, least, MAX_SIZE), default)


def integer(default: Any = dataclasses.MISSING) -> Any:
    return _option(lambda value: _int(value, -MAX_SIZE, MAX_SIZE), default)


def number(default: Any = dataclasses.MISSING, least: float = -math.inf) -> Any:
    return _option(lambda value: _float(value, least), default)


def flag(default: Any = dataclasses.MISSING) -> Any:
    return _option(_flag, default)


def text(default: Any = dataclasses.MISSING) -> Any:
    return _option(_text, default)


def choice(*values: str, default: Any = dataclasses.MISSING) -> Any:
    def read(value: Any) -> str:
        if value not in values:
            raise ValueError(" or ".join(map(repr, values)))
        return str(value)

    return _option(read, default)


def sizes(default: Any = dataclasses.MISSING, least: int = 1) -> Any:
    """A whole number, or one for each axis: always kept as a tuple."""

    def read(value: Any) -> tuple[int, ...]:
        return tuple(_int(one, least, MAX_SIZE) for one in (value if isinstance(value, list) else [value]))

    return _option(read, default)


def integers(default: Any = dataclasses.MISSING) -> Any:
    def read(value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or not value:
            raise ValueError("a list of whole numbers")
        return tuple(_int(one, -MAX_SIZE, MAX_SIZE) for one in value)

    return _option(read, default)


def numbers(default: Any = dataclasses.MISSING) -> Any:
    """A number, or a list of them: always kept as a tuple."""

    def read(value: Any) -> tuple[float, ...]:
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ValueError("a number or a list of numbers")
        return tuple(_float(one, -math.inf) for one in values)

    return _option(read, default)


def _int(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"a whole number from {least} to {most}")
    return value


def _float(value: Any, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise ValueError("a finite number" + (f" of at least {least:g}" if least > -math.inf else ""))
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a name")
    return value
