"""`parallm adapters`: lists and changes the adapters of a running server. Called by `cli`."""

import argparse
import asyncio
import sys
from typing import Any

from mlx_parallm.arms import CONFIDENCE, MIN_REWARDS
from mlx_parallm.cli.remote_commands import DEFAULT_URL
from mlx_parallm.errors import ConfigError
from mlx_parallm.http_client import add_tls_flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="a running server (default: %(default)s)")
    parser.add_argument("--api-key", help="its admin key, where it has one")
    add_tls_flags(parser)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")
    _action(actions, "list", "the adapters there are (default)")
    load = _action(actions, "load", "publish what a folder on the server's machine holds", "name", "path")
    upload = _action(actions, "upload", "publish a folder or file of this machine", "name", "path")
    for command in (load, upload):
        command.add_argument("--version", dest="number", help="a newer number than the newest (default: the next)")
    _action(actions, "unload", "forget an adapter", "name")
    for name, purpose in (
        ("rollback", "back to an earlier version (default: the one before)"),
        ("pin", "keep a version (default: the current)"),
        ("unpin", "keep a version no longer"),
    ):
        _action(actions, name, purpose, "name").add_argument("number", nargs="?", type=int, metavar="VERSION")
    switch = _action(actions, "switch", "what the model's own name serves")
    switch.add_argument("to", nargs="+", metavar="NAME[@VERSION][=SHARE]", help="'base' is the model alone")
    switch.add_argument(
        "--auto",
        action="store_true",
        help=f"all requests go to the better arm once each has --min-rewards rewards (default: {MIN_REWARDS}) and its "
        f"mean is higher with --confidence (default: {CONFIDENCE}, one-sided, Welch's test)",
    )
    switch.add_argument("--confidence", type=float, default=CONFIDENCE, help="of --auto (default: %(default)s)")
    switch.add_argument("--min-rewards", type=int, default=MIN_REWARDS, help="of --auto (default: %(default)s)")


def _action(actions: Any, name: str, purpose: str, *arguments: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = actions.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
    for argument in arguments:
        command.add_argument(argument)
    for flag in ("--url", "--api-key"):  # behind the action, too
        command.add_argument(flag, default=argparse.SUPPRESS, help="as before the action")
    return command


def run(args: argparse.Namespace) -> int:
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from mlx_parallm.client import InferenceClient

    async with InferenceClient(args.url, api_key=args.api_key, ca=args.ca, insecure=args.insecure) as client:
        match args.action:
            case "load":
                version = await client.load_adapter(args.name, args.path, version=_number(args.number))
                _say(f"{args.name}@{version} is published")
            case "upload":
                number = _number(args.number)
                version = await client.upload_adapter(args.name, args.path, version=number or "next")
                _say(f"{args.name}@{version} is published")
            case "unload":
                await client.unload_adapter(args.name)
                _say(f"{args.name} is unloaded")
            case "rollback":
                _say(f"{args.name} means version {await client.rollback(args.name, args.number)} now")
            case "pin":
                await client.pin(args.name, args.number)
                _say(f"{args.name} is pinned")
            case "unpin":
                await client.unpin(args.name, args.number)
                _say(f"{args.name} is no longer pinned")
            case "switch":
                rule = {"auto": True, "confidence": args.confidence, "min_rewards": args.min_rewards}
                serves = await client.switch(_split(args.to), **(rule if args.auto else {}))
                _say(
                    "the model's own name serves " + ", ".join(f"{name} ({share:g})" for name, share in serves.items())
                )
            case _:
                _list(await client.adapters())
    return 0


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"--version is a number, not {text!r}")
    return int(text)


def _split(to: list[str]) -> str | dict[str, float]:
    if len(to) == 1 and "=" not in to[0]:
        return to[0]
    shares: dict[str, float] = {}
    for part in to:
        name, _, share = part.partition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            raise ConfigError(f"{part!r} has no share: write NAME=0.9") from None
    return shares


def _list(adapters: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not adapters:
        _say("no adapters are loaded")
        return
    table = Table("adapter", "version", "", "rank", "MiB", "requests", "tokens", "in use", "source")
    for one in adapters:
        marks = ", ".join(mark for mark in ("current", "pinned") if one[mark])
        numbers = (one["rank"], f"{one['bytes'] / (1 << 20):.1f}", one["requests"], one["generated_tokens"])
        table.add_row(
            one["name"], str(one["version"]), marks, *map(str, numbers), str(one["pinned_requests"]), one["source"]
        )
    Console().print(table)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
