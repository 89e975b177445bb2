"""`parallm completion`: prints a script that completes commands and flags in a shell."""

import argparse
import sys

SHELLS = ("bash", "zsh", "tcsh")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help='bash: eval "$(parallm completion bash)" in ~/.bashrc')


def run(commands: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    import shtab

    sys.stdout.write(shtab.complete(commands, args.shell))
    return 0
