"""Fields of a body that nobody knows: ignored, told of in a header, or refused, as --unknown-fields says.

A body's class knows its own fields; those that its dialect's own API has and this server does not use are its
`api_fields`, and are nobody's mistake. `JSONRoute` looks.
"""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import AliasChoices, BaseModel

from mlx_parallm.errors import InvalidRequestError

HEADER = "X-Parallm-Warning"
MAX_BYTES = 512
MAX_NAMED = 5


def known_fields(annotation: Any) -> frozenset[str]:
    """Returns the names of the fields of a body's class, or of all members of a union of them."""
    return frozenset(name for kind in _classes(annotation) for name in _names(kind))


def warning(names: Iterable[str], known: frozenset[str]) -> str | None:
    """Returns what is said of fields that nobody knows, in ASCII; None where all are known."""
    unknown = [name for name in names if name not in known]
    if not unknown:
        return None
    told = "; ".join(_told(name, known) for name in unknown[:MAX_NAMED])
    more = f"; and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
    return f"ignored: {told}{more}"[:MAX_BYTES]


def refuse(names: Iterable[str], known: frozenset[str]) -> None:
    for name in names:
        if name not in known:
            raise InvalidRequestError(f"unknown field {_told(name, known)}", param=name[:100], code="unknown_field")


def _told(name: str, known: frozenset[str]) -> str:
    shown = name[:60].encode("unicode_escape").decode()
    shown = "".join(letter if letter.isprintable() else "?" for letter in shown)
    close = difflib.get_close_matches(name[:60], known, n=1, cutoff=0.6)
    return f"{shown!r} (did you mean {close[0]!r}?)" if close else repr(shown)


def _classes(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for member in get_args(annotation):
        if not isinstance(member, str):
            yield from _classes(member)


def _names(kind: type[BaseModel]) -> Iterator[str]:
    yield from getattr(kind, "api_fields", ())
    for name, field in kind.model_fields.items():
        yield name
        if field.alias is not None:
            yield field.alias
        alias = field.validation_alias
        if isinstance(alias, AliasChoices):
            yield from (choice for choice in alias.choices if isinstance(choice, str))
        elif isinstance(alias, str):
            yield alias
