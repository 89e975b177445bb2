"""The commands: `parallm serve | train | chat | …`, and `mlx_parallm_serve` and `mlx_parallm_train` for the first two.

Nothing here imports MLX or FastAPI before a command needs it, so that help and remote work start at once.
A user's mistake (a bad flag, a model that can't be loaded) is one line on stderr: 2 for flags, 1 for the rest.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from mlx_parallm import __version__, config
from mlx_parallm.cli import adapters_command as adapters_cli
from mlx_parallm.cli import bench_command as bench_cli
from mlx_parallm.cli import chat_command as chat
from mlx_parallm.cli import completion, connect, pull, recommend, top
from mlx_parallm.cli import doctor_command as doctor
from mlx_parallm.cli import export_command as export_cli
from mlx_parallm.cli import keys_command as keys_cli
from mlx_parallm.cli import models_command as models
from mlx_parallm.cli import train_command as train_cli
from mlx_parallm.cluster.replicas.ray_setup import prepare as prepare_cluster
from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.platforms import check_python
from mlx_parallm.progress import progress, unknown

Command = Callable[[argparse.Namespace], int]


def command_parser() -> "CommandParser":
    """`parallm` with all of its commands."""
    parser = _parser("parallm", "LLM server for Apple Silicon with continuous batching.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, purpose, add_flags, run in (
        ("serve", "serve a model behind an OpenAI-compatible API", config.add_serve_flags, serve),
        ("train", "train an adapter, and serve it meanwhile", train_cli.add_flags, train_cli.run),
        ("chat", "talk to a model in the terminal", chat.add_flags, chat.run),
        ("bench", "measure any OpenAI-compatible server under load", bench_cli.add_flags, bench_cli.run),
        ("adapters", "list and change the adapters of a running server", adapters_cli.add_flags, adapters_cli.run),
        ("models", "list, load, unload and pin the models of a running server", models.add_flags, models.run),
        ("top", "watch a running server", top.add_flags, top.run),
        ("connect", "print what clients need to use a running server", connect.add_connect_flags, connect.connect),
        ("launch", "start a coding agent on a running server", connect.add_launch_flags, connect.launch),
        ("pull", "download a model from the Hugging Face hub", pull.add_flags, pull.run),
        ("recommend", "which models fit this machine, and how fast they are", recommend.add_flags, recommend.run),
        ("completion", "print the completion script of a shell", completion.add_flags, partial(completion.run, parser)),
        ("keys", "make, list and remove the keys of a server", keys_cli.add_flags, keys_cli.run),
        ("export", "write a network's folder from a torch state_dict", export_cli.add_flags, export_cli.run),
        ("doctor", "check this machine: is it set up, does it compute right, how fast", doctor.add_flags, doctor.run),
    ):
        command = commands.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        add_flags(command)
        command.set_defaults(run=run, known_flags=list(command._option_string_actions))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """`parallm`: returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    passed_on = []
    if given[:1] == ["launch"] and "--" in given:
        place = given.index("--")
        given, passed_on = given[:place], given[place + 1 :]
    args = command_parser().parse_args(given)
    if passed_on:
        args.passed_on = passed_on
    return _run(args)


def serve_main(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_serve`: returns the exit code."""
    parser = _parser("mlx_parallm_serve", "Serve a model behind an OpenAI-compatible API.")
    config.add_serve_flags(parser)
    parser.set_defaults(run=serve)
    return _run(parser.parse_args(argv))


def train_main(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_train`: returns the exit code."""
    parser = _parser("mlx_parallm_train", "Train an adapter by reinforcement, and serve it meanwhile.")
    train_cli.add_flags(parser)
    parser.set_defaults(run=train_cli.run)
    return _run(parser.parse_args(argv))


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest flag for one that does not exist."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        known = getattr(found, "known_flags", None) or list(self._option_string_actions)
        if hasattr(found, "known_flags"):
            del found.known_flags
        if unknown:
            self.unknown(unknown[0], known)
        return found

    def unknown(self, argument: str, known: Sequence[str]) -> NoReturn:
        flag = argument.partition("=")[0]
        near = config.nearest(flag, known) if flag.startswith("-") else ""
        self.error(f"there is no {'flag' if flag.startswith('-') else 'argument'} {flag}{near}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} ({self.prog} --help lists all)\n")


def _parser(name: str, description: str) -> CommandParser:
    parser = CommandParser(prog=name, description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{name} {__version__}")
    return parser


def serve(args: argparse.Namespace) -> int:
    settings = config.load_config(
        {name: value for name, value in vars(args).items() if name != "run"}, kind=config.ServeConfig
    )
    check_python()
    sys.stdout.write(f"MLX ParaLLM {__version__} is starting\n")
    sys.stdout.flush()
    if settings.cluster.several:
        settings = prepare_cluster(settings)
        from mlx_parallm.cluster.replicas.cluster_process import serve_replicas

        return serve_replicas(settings)
    from mlx_parallm.server.http import logs

    logs.set_up(settings.http, helper=True)
    with progress("importing MLX and what else is needed", unknown):  # seconds
        from mlx_parallm.cluster.parallel.rank_process import serve_rank

    return serve_rank(settings)


def _run(args: argparse.Namespace) -> int:
    command: Command = args.run
    try:
        return command(args)
    except ParallmError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`; spare the flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
