"""`onward completion SHELL`: prints a script that completes commands, flags and their values.

shtab generates the script from the parsers, so it has every flag of this version.
"""

import argparse
import sys

from onward.cli import main

SHELLS = ("bash", "zsh", "fish")
FILE_METAVARS = ("FILE", "MODEL", "PATH", "FOLDER")
"""Placeholders in the help of arguments that are files or folders."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="shell, for example: source <(onward completion bash)")


def run(args: argparse.Namespace) -> int:
    sys.stdout.write(completion_script(args.shell))
    return 0


def completion_script(shell: str) -> str:
    """Returns the script for one of `SHELLS`."""
    import shtab

    parser, subparsers = main.build_parser(main.COMMANDS)
    parsers: list[argparse.ArgumentParser] = list(subparsers.values())
    for subparser in parsers:
        for action in subparser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers.extend(action.choices.values())
            elif action.metavar in FILE_METAVARS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    return shtab.complete(parser, shell)
