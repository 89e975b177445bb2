"""`parallm keys`: makes, lists and removes the keys of a file that `serve --keys-file` reads. Called by `cli`.

A key is printed once, alone on stdout; the file holds its salted hash. A server that runs reads the file anew.
"""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from mlx_parallm.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    add = actions.add_parser("add", help="make a key and print it, once", allow_abbrev=False)
    show = actions.add_parser("list", help="names, roles and limits", allow_abbrev=False)
    remove = actions.add_parser("remove", help="remove a key; it is refused within a second", allow_abbrev=False)
    for action in (add, show, remove):
        action.add_argument(
            "--file", type=Path, required=True, help="keys file: .json, .toml or .yaml; comments in it are not kept"
        )
    for action in (add, remove):
        action.add_argument("name", help="whose key it is: 1 to 128 printable characters")
    add.add_argument(
        "--role",
        choices=("user", "trainer", "admin"),
        default="user",
        help="user: answers; trainer: adapters, training and pauses too; admin: everything (default: %(default)s)",
    )
    limits = (
        ("--requests-per-minute", "most requests that begin within 60 seconds (default: no limit)"),
        ("--tokens-per-minute", "most tokens of prompts and responses within 60 seconds (default: no limit)"),
        ("--concurrency", "most requests at once (default: no limit)"),
    )
    for flag, meaning in limits:
        add.add_argument(flag, type=int, metavar="N", help=meaning)
    add.add_argument(
        "--model", action="append", dest="models", metavar="NAME", help="model it may use; repeatable (default: all)"
    )
    add.add_argument(
        "--adapter",
        action="append",
        dest="adapters",
        metavar="NAME",
        help="adapter it may use; repeatable (default: all)",
    )
    add.add_argument(
        "--shared-cache",
        action="store_true",
        help="share cached prompts with other such keys; how fast a response begins then tells what others have sent "
        "(default: off)",
    )


def run(args: argparse.Namespace) -> int:
    match args.action:
        case "add":
            return _add(args)
        case "remove":
            return _remove(args.file.expanduser(), args.name)
    return _list(args.file.expanduser())


def _add(args: argparse.Namespace) -> int:
    from mlx_parallm.server.auth.key_files import changing
    from mlx_parallm.server.auth.keys import NAMES, NUMBERS, KeyLimits, entry_of, new_key, parse_keys

    path = args.file.expanduser()
    created = datetime.now(UTC).isoformat(timespec="seconds")
    bounds = {name: None if (given := getattr(args, name)) is None else frozenset(given) for name in NAMES}
    limits = KeyLimits(**{name: getattr(args, name) for name in NUMBERS})
    secret, key = new_key(
        args.name, args.role, limits=limits, shared_cache=args.shared_cache, created=created, **bounds
    )
    entry = entry_of(key)
    parse_keys({args.name: entry}, "the key")  # what is wrong with it is known before anything is written
    with changing(path) as document:
        if args.name in document:
            raise ConfigError(
                f"keys file {path} has a key called {args.name!r}: remove it first, or choose another name"
            )
        parse_keys(document, f"keys file {path}")
        document[args.name] = entry
    sys.stderr.write(f"{args.name} ({args.role}) is in {path}. This is the only time that the key is shown:\n")
    sys.stdout.write(f"{secret}\n")
    return 0


def _remove(path: Path, name: str) -> int:
    from mlx_parallm.server.auth.key_files import changing, read_document

    read_document(path)  # one that is not there is not made
    with changing(path) as document:
        if name not in document:
            raise ConfigError(f"keys file {path} has no key called {name!r}")
        del document[name]
    sys.stdout.write(f"{name} is removed from {path}\n")
    return 0


def _list(path: Path) -> int:
    from rich.console import Console
    from rich.table import Table

    from mlx_parallm.server.auth.key_files import read_document
    from mlx_parallm.server.auth.keys import NAMES, NUMBERS, parse_keys

    keys = parse_keys(read_document(path), f"keys file {path}")
    if not keys:
        sys.stdout.write(f"{path} holds no keys\n")
        return 0
    table = Table("name", "role", "requests/min", "tokens/min", "at once", "models", "adapters", "cache", "created")
    for key in keys:
        numbers = [getattr(key.limits, name) for name in NUMBERS]
        bounds = [getattr(key, name) for name in NAMES]
        table.add_row(
            key.name,
            key.role,
            *("-" if number is None else str(number) for number in numbers),
            *("all" if names is None else ", ".join(sorted(names)) or "none" for names in bounds),
            "shared" if key.shared_cache else "its own",
            key.created or "-",
        )
    Console().print(table)
    return 0
