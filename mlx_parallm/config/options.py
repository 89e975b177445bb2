"""An option: a field of a config's dataclass that says all there is to know of it.

Configs are dataclasses composed of dataclasses, one per concern. `options_of` lists what stands in them; the readers of
flags, environment and files (`config.reading`) are made from that list alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, get_type_hints

from mlx_parallm.errors import ConfigError
from mlx_parallm.sampling_params import PARAMETERS

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Option:
    name: str  # as the environment and Python call it; its flag has dashes
    path: tuple[str, ...]  # where its value is in the config
    group: str  # its heading in --help
    section: str  # in a config file
    key: str  # there
    default: Any
    help: str
    parse: Any = str
    choices: Sequence[str] | None = None
    aliases: tuple[str | tuple[str, float], ...] = ()  # other flags; (flag, factor) scales a number
    other_keys: tuple[str, ...] = ()  # in the sections server and cache of a file: names of other programs for it

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def option(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    key: str | None = None,
    section: str | None = None,
    aliases: Sequence[str | tuple[str, float]] = (),
    other_keys: Sequence[str] = (),
    parse: Any = str,
    choices: Sequence[str] | None = None,
) -> Any:
    """A field with what the readers need. `name`: where it is not the field's own; `section`: where it is not the
    group's."""
    given = dict(help=help, name=name, key=key, section=section, aliases=tuple(aliases), parse=parse, choices=choices)
    given["other_keys"] = tuple(other_keys)
    return field(default=default, metadata={"option": given})


def group(kind: type, title: str, section: str) -> Any:
    """A field that holds a config of its own: a heading in --help, and a section of config files."""
    return field(default_factory=kind, metadata={"group": (title, section)})


def options_of(kind: type) -> tuple[Option, ...]:
    """All options of a config, those of the configs in it included."""
    return tuple(_options(kind, (), "mode", "server"))


def _options(kind: type, path: tuple[str, ...], title: str, section: str) -> list[Option]:
    found: list[Option] = []
    hints = get_type_hints(kind)
    for item in fields(kind):
        if "group" in item.metadata:
            found += _options(hints[item.name], (*path, item.name), *item.metadata["group"])
        elif "option" in item.metadata:
            given = dict(item.metadata["option"])
            name = given.pop("name") or item.name
            key = given.pop("key") or name
            its_section = given.pop("section") or section
            found.append(Option(name, (*path, item.name), title, its_section, key, item.default, **given))
    return found


def build(kind: type[C], values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> C:
    """A config from its options by name."""
    values = {**(defaults or {}), **values}
    known = {option.name: option.path for option in options_of(kind)}
    if unknown := sorted(values.keys() - known.keys()):
        raise TypeError(f"{kind.__name__} has no option {unknown[0]!r}")
    return _nested(kind, {known[name]: value for name, value in values.items()})


def _nested(kind: type[C], values: Mapping[tuple[str, ...], Any]) -> C:
    arguments: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for item in fields(kind):  # type: ignore[arg-type]
        if "group" in item.metadata:
            inner = {path[1:]: value for path, value in values.items() if path[0] == item.name}
            arguments[item.name] = _nested(hints[item.name], inner)
        elif (item.name,) in values:
            arguments[item.name] = values[(item.name,)]
    return kind(**arguments)


def changed(config: C, **values: Any) -> C:
    """The same config with other values of some options."""
    known = {option.name: option.path for option in options_of(type(config))}
    for name, value in values.items():
        if name not in known:
            raise TypeError(f"{type(config).__name__} has no option {name!r}")
        config = _changed(config, known[name], value)
    return config


def _changed(config: Any, path: tuple[str, ...], value: Any) -> Any:
    inner = value if len(path) == 1 else _changed(getattr(config, path[0]), path[1:], value)
    return replace(config, **{path[0]: inner})


def check_at_least(config: Any, least: float, *names: str) -> None:
    """Raises ConfigError unless each of these fields is at least `least`, or absent."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= least:
            wrong = "must not be negative, and is" if least == 0 else f"must be at least {least:g}, not"
            raise ConfigError(f"{_name_of(config, name)} {wrong} {value}")


def check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{_name_of(config, name)} must be above 0, and is {getattr(config, name)}")


def check_sampling_option(config: Any, name: str, parameter: str) -> None:
    """Checks a field that may be absent and is the default of a sampling parameter, against that parameter's bounds."""
    value = getattr(config, name)
    bounds = PARAMETERS[parameter].bounds
    if value is not None and bounds is not None and not bounds.allow(value):
        raise ConfigError(f"{_name_of(config, name)} must be {bounds}, not {value:g}")


def check_finite(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) == math.inf:
            raise ConfigError(f"{_name_of(config, name)} must be a number, not inf: give a large one, as 86400")


def _name_of(config: Any, field_name: str) -> str:
    """What an option is called, where its field is called otherwise."""
    for item in fields(config):
        if item.name == field_name and "option" in item.metadata:
            return str(item.metadata["option"]["name"] or field_name)
    return field_name


def parse_bytes(text: str | int) -> int:
    """'512MB', '8GiB', '20 GB' or a number of bytes."""
    if isinstance(text, int):
        return text
    units = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "t": 1_000_000_000_000}
    units |= {f"{unit}i": 1 << (10 * power) for power, unit in enumerate("kmgt", start=1)}
    number = text.strip().lower().removesuffix("b").strip()
    digits = number.rstrip("kmgti").strip()
    unit = number[len(digits) :].strip()
    try:
        return int(float(digits) * units[unit])
    except (ValueError, KeyError):
        raise ConfigError(f"{text!r} is not a size: write bytes, or a number with MB, GB, MiB or GiB") from None


def parse_bool(text: str | bool) -> bool:
    if isinstance(text, bool):
        return text
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ConfigError(f"{text!r} is not a boolean: write true or false")


def parse_number(value: Any, kind: type) -> Any:
    problem = f"{value!r} is not a {'whole ' if kind is int else ''}number"
    if isinstance(value, bool):  # YAML's true is no 1
        raise ConfigError(problem)
    try:
        return kind(str(value))
    except ValueError:
        raise ConfigError(problem) from None


def parse_list(value: str | Sequence[str]) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip())
