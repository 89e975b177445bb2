"""Objects of network.json as pydantic models, whose errors say the place, what is expected there and what was found."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mlx_parallm.config import nearest
from mlx_parallm.errors import ModelLoadError

MAX_SIZE = 1 << 24  # of a layer's feature, channel or kernel count


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


# What a description says follows "must be" in errors.
Count = Annotated[int, Field(ge=1, le=MAX_SIZE, description=f"a whole number from 1 to {MAX_SIZE}")]
Integer = Annotated[int, Field(ge=-MAX_SIZE, le=MAX_SIZE, description=f"a whole number from -{MAX_SIZE} to {MAX_SIZE}")]
Number = Annotated[float, Field(description="a finite number")]
NotNegative = Annotated[float, Field(ge=0, description="a finite number of at least 0")]
Flag = Annotated[bool, Field(description="true or false")]
Name = Annotated[str, Field(min_length=1, description="a name")]
Integers = Annotated[
    tuple[Integer, ...], Field(strict=False, min_length=1, description=f"a list of whole numbers up to {MAX_SIZE}")
]
# One value, or one for each axis: always kept as a tuple.
Numbers = Annotated[
    tuple[Number, ...],
    BeforeValidator(_listed),
    Field(strict=False, min_length=1, description="a finite number, or a list of them"),
]
Sizes = Annotated[
    tuple[Count, ...],
    BeforeValidator(_listed),
    Field(strict=False, description=f"a whole number from 1 to {MAX_SIZE}, or a list of them"),
]
Paddings = Annotated[
    tuple[Annotated[int, Field(ge=0, le=MAX_SIZE)], ...],
    BeforeValidator(_listed),
    Field(strict=False, description=f"a whole number from 0 to {MAX_SIZE}, or a list of them"),
]


class Options(BaseModel):
    """One object of network.json. Its types are JSON's: nothing is converted."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)
    called: ClassVar[str] = "key"  # in errors


T = TypeVar("T", bound=Options)


def read_options(kind: type[T], values: Any, place: str) -> T:
    """An instance of `kind` from JSON; ModelLoadError about `place` where one of the values is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ModelLoadError(_told(kind, error.errors(include_url=False), place)) from None
    except ModelLoadError as error:
        raise ModelLoadError(f"{place}: {error.message}") from None


def _told(kind: type[Options], errors: Sequence[Any], place: str) -> str:
    fields = {field.alias or name: field for name, field in kind.model_fields.items()}
    error = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    if not error["loc"]:
        return f"{place} must be an object, not {error['input']!r:.60}"
    name = error["loc"][0]
    if error["type"] == "extra_forbidden":
        return f"{place} has an unknown {kind.called} {name!r}{nearest(name, fields)}"
    if error["type"] == "missing":
        return f"{place} needs {name!r}"
    expected = fields[name].description or error["msg"].removeprefix("Input should be ")
    return f"{place}: {name} must be {expected}, not {error['input']!r:.60}"
