"""Sampling parameters in the bodies of all dialects: fields made of what `sampling_params` declares."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from mlx_parallm.sampling_params import PARAMETERS, SHARED, Parameter, SamplingParams
from mlx_parallm.server.http.schema import Body, LogitBias, Stop, TokenId

TYPES: Mapping[str, Any] = {"logit_bias": LogitBias, "stop": Stop, "stop_token_ids": list[TokenId], "ignore_eos": bool}


def sampling_field(name: str, **changed: Any) -> Any:
    """The field of a body for a parameter, with its default, bounds and meaning where the dialect has no others."""
    parameter = PARAMETERS[name]
    default = {"default_factory": dict} if parameter.default == {} else {"default": parameter.default}
    field: FieldInfo = Field(**(default | {"description": parameter.meaning} | _limits(parameter) | changed))
    return field


def _limits(parameter: Parameter) -> dict[str, float]:
    bounds = parameter.bounds
    if bounds is None:
        return {}
    return {"gt" if bounds.above else "ge": bounds.low, "lt" if bounds.below else "le": bounds.high}


def _type(name: str, field: FieldInfo) -> Any:
    parameter = PARAMETERS[name]
    if parameter.bounds is None:
        return TYPES[name]
    number = int if parameter.whole else float
    return number | None if parameter.optional and field.default is None else number


class SampledBody(Body):
    """A body that says how tokens are sampled. `samples` gives it the fields."""

    sampling_names: ClassVar[Mapping[str, str]] = {}  # what the body calls each parameter

    def sampling_params(self, **more: Any) -> SamplingParams:
        """Returns the body's sampling parameters. `more`: what a route has beside these fields, or means otherwise."""
        return SamplingParams(**({name: getattr(self, own) for name, own in self.sampling_names.items()} | more))


B = TypeVar("B", bound=type[SampledBody])


def samples(*parameters: str, **fields: tuple[str, Any]) -> Callable[[B], B]:
    """Gives a class of bodies fields for `parameters`, and others as {parameter: (field's name, the field)}."""
    named = {name: (name, sampling_field(name)) for name in parameters} | fields
    declared: dict[str, Any] = {own: (_type(name, field), field) for name, (own, field) in named.items()}

    def add(body: B) -> B:
        made: Any = create_model(
            body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **declared
        )
        made.sampling_names = {**body.sampling_names, **{name: own for name, (own, _) in named.items()}}
        return made  # type: ignore[no-any-return]

    return add


@samples(*SHARED)
class SamplingBody(SampledBody):
    """The fields that OpenAI's bodies share."""
