"""`parallm models`: lists the models of a running server, loads, unloads and pins them."""

import argparse
import sys
from contextlib import closing
from typing import Any

from mlx_parallm.cli.remote_commands import Remote, add_server_flags

LOAD_SECONDS = 600.0  # to wait for a model to load


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_server_flags(parser)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")
    for name, purpose in (
        ("list", "the models there are, loaded or not (default)"),
        ("load", "load a model, or one at a path under a new name"),
        ("unload", "free a model's memory when its requests have ended"),
        ("pin", "load a model, and keep it in memory"),
        ("unpin", "let a model leave when memory is short"),
    ):
        action = actions.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        add_server_flags(action, again=True)
        if name != "list":
            action.add_argument("model", help="its name")
        if name == "load":
            action.add_argument("path", nargs="?", help="folder, .gguf file or hub id on the server's machine")


def run(args: argparse.Namespace) -> int:
    with closing(Remote.of(args, LOAD_SECONDS)) as remote:
        match args.action:
            case "load" | "pin" | "unpin":
                body = {"model": args.model}
                if args.action == "load" and args.path:
                    body["path"] = args.path
                if args.action != "load":
                    body["pin"] = args.action == "pin"
                found = remote.post("/v1/models/load", body)
                _say(f"{found['model']} is {found['status']}{', pinned' if found['pinned'] else ''}")
            case "unload":
                found = remote.post("/v1/models/unload", {"model": args.model})
                _say(f"{found['model']} is {found['status']}")
            case _:
                _list(remote.get("/v1/models")["data"])
    return 0


def _list(models: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "kind", "status", "context", "from")
    for one in models:
        status = f"{one['status']}{', pinned' if one.get('pinned') else ''}"
        if one["status"] == "loading":
            status += f" {one['progress']:.0%}"
        if one.get("error"):
            status += f": {one['error']}"
        origin = f"adapter of {one['parent']}" if one.get("parent") else one["root"]
        table.add_row(one["id"], one["kind"], status, str(one.get("max_model_len") or ""), origin)
    Console().print(table)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
