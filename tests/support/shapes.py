"""Holds what a server has answered against the types that /docs shows."""

from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_as(kind: type[T], value: Any) -> T:
    """Returns the value, which has the fields of its type and no other; else raises a ValidationError."""
    found: T = _adapter(kind).validate_python(value)
    return found
