"""Reads a config from flags, the environment and a YAML file. A flag beats PARALLM_<FLAG>, which beats the file.

An unknown key, section or variable is an error that names the nearest known one.
"""

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mlx_parallm.config.options import Option, build, options_of, parse_bool, parse_bytes, parse_list, parse_number
from mlx_parallm.errors import ConfigError

C = TypeVar("C")

# Variables that are no options; Kubernetes sets the last kinds for a service called parallm.
_OTHER_VARIABLE = re.compile(r"PARALLM_(CONFIG|BLAS|NATIVE|SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)")


def add_flags(parser: argparse.ArgumentParser, kind: type, defaults: Mapping[str, Any] | None = None) -> None:
    """Gives `parser` every option of a config under its group's heading; absent ones are left out of the namespace."""
    parser.add_argument(
        "--config", type=Path, default=argparse.SUPPRESS, help="read options from this YAML file (default: none)"
    )
    groups: dict[str, Any] = {}
    for option in options_of(kind):
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add_flag(groups[option.group], option, {**(defaults or {})}.get(option.name, option.default))


def _add_flag(group: Any, option: Option, default: Any) -> None:
    common = dict(dest=option.name, default=argparse.SUPPRESS, help=_help(option, default))
    plain = [alias for alias in option.aliases if isinstance(alias, str)]
    if option.parse is parse_bool:
        group.add_argument(option.flag, *plain, action=argparse.BooleanOptionalAction, **common)
    elif option.parse is parse_list:
        group.add_argument(option.flag, *plain, action="append", **common)
    else:
        group.add_argument(option.flag, *plain, type=_argparse_type(option.parse), choices=option.choices, **common)
    for alias, factor in (alias for alias in option.aliases if not isinstance(alias, str)):
        group.add_argument(alias, type=_scaled(factor), **common)


def _scaled(factor: float) -> Any:
    return lambda text: float(text) * factor


def _help(option: Option, default: Any) -> str:
    """A default that the text does not tell is told behind it."""
    text = option.help.replace("%", "%%")
    return text if "(default:" in text else f"{text} (default: {_shown(option, default)})"


def _shown(option: Option, default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default == ():
        return "none"
    if isinstance(default, tuple):
        return ",".join(default)
    return _size(default) if option.parse is parse_bytes else str(default)


def _size(number: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("GB", 10**9), ("MB", 10**6)):
        if number and number % size == 0:
            return f"{number // size}{unit}"
    return str(number)


def _argparse_type(parse: Any) -> Any:
    def read(text: str) -> Any:
        try:
            return parse_number(text, parse) if parse in (int, float) else parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(error.message) from None

    read.__name__ = getattr(parse, "__name__", "value")
    return read


def read_config(
    kind: type[C],
    flags: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    other_kinds: Iterable[type] = (),
) -> C:
    """`defaults`: where they are not the config's own. `other_kinds`: whose variables are no errors."""
    environment = os.environ if environment is None else environment
    _check_variables(environment, (kind, *other_kinds))
    flags = dict(flags)
    config_file = flags.pop("config", None) or environment.get("PARALLM_CONFIG")
    values = _read_file(Path(config_file), kind) if config_file else {}
    for option in options_of(kind):
        variable = f"PARALLM_{option.name.upper()}"
        if (text := environment.get(variable)) is not None:
            values[option.name] = _convert(option, text, variable)
    for name, value in flags.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    return build(kind, values, defaults)


def _check_variables(environment: Mapping[str, str], kinds: Iterable[type]) -> None:
    """A misspelt variable is an error: a server must not come up without the key that somebody meant to set."""
    known = {f"PARALLM_{option.name.upper()}" for kind in kinds for option in options_of(kind)}
    for name in sorted(environment):
        if name.startswith("PARALLM_") and name not in known and not _OTHER_VARIABLE.fullmatch(name):
            raise ConfigError(f"the environment variable {name} is not an option{nearest(name, known)}")


def _read_file(path: Path, kind: type) -> dict[str, Any]:
    text, document = _parsed(path)
    sections: dict[str, dict[str, Option]] = {}
    for option in options_of(kind):
        sections.setdefault(option.section, {})[option.key] = option
        for key in option.other_keys:
            for section in ("server", "cache"):
                sections.setdefault(section, {}).setdefault(key, option)
    values: dict[str, Any] = {}
    for section, entries in document.items():
        if section not in sections:
            where = f"config file {path}{_line(text, section)}"
            raise ConfigError(f"{where}: unknown section {section!r}{nearest(section, sections)}")
        if not isinstance(entries, dict):
            raise ConfigError(f"config file {path}: section {section!r} must hold keys and values")
        for key, value in entries.items():
            where = f"config file {path}{_line(text, section, key)}"
            if key not in sections[section]:
                raise ConfigError(f"{where}: unknown key {section}.{key}{nearest(key, sections[section])}")
            if value is not None:
                option = sections[section][key]
                converted = _convert(option, value, f"{where}: {section}.{key}")
                if values.setdefault(option.name, converted) != converted:
                    raise ConfigError(
                        f"{where}: {section}.{key} is {option.name}, which the file sets to another value"
                    )
    return values


def _parsed(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text()
        document = yaml.safe_load(text) or {}
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"config file {path}{_place(error)}: {error.problem or error}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise ConfigError(f"config file {path}: {reason}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"config file {path}: expected sections such as 'server:', found {type(document).__name__}")
    return text, document


def _line(text: str, *keys: object) -> str:
    """Returns the line of a key in a file that was read already, for an error message; empty where it is not there."""
    node = yaml.compose(text)
    mark = None
    for name in keys:
        pairs = [pair for pair in getattr(node, "value", []) if isinstance(pair, tuple) and pair[0].value == str(name)]
        if not pairs:
            break
        mark = pairs[-1][0].start_mark
        node = pairs[-1][1]
    return "" if mark is None else f", line {mark.line + 1}"


def _place(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"


def nearest(name: object, valid: Iterable[str]) -> str:
    """The valid name that is most like an unknown one, as the end of an error message."""
    close = difflib.get_close_matches(str(name), list(valid), n=1, cutoff=0)
    return f"; did you mean {close[0]!r}?" if close else ""


def _convert(option: Option, value: Any, where: str) -> Any:
    parse = option.parse
    try:
        if parse in (int, float):
            result = parse_number(value, parse)
        else:
            result = parse(value) if parse in (parse_list, parse_bool, parse_bytes) else parse(str(value))
    except (ConfigError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    if option.choices and result not in option.choices:
        raise ConfigError(f"{where}: {value!r} is not one of {', '.join(option.choices)}")
    return result
