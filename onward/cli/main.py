"""The `onward` command. Each subcommand is a module with `add_arguments` and `run`, imported only when it is asked for."""

import argparse
import difflib
import importlib
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from onward.errors import OnwardError
from onward.version import __version__

USAGE_ERROR = 2
COMMANDS = {
    "serve": "serve a model over HTTP",
    "router": "put one address in front of many instances, and carry their streams on",
    "up": "start a whole cluster on this machine: a router, prefill and decode instances",
    "status": "show the instances behind a router, or one instance",
    "top": "watch what a router or an instance does, in the terminal",
    "drain": "let an instance take no more requests, and wait until it has none",
    "undrain": "let a drained instance take requests again",
    "chat": "talk to a server in the terminal",
    "run-batch": "answer a file of requests, as OpenAI's batches have them",
    "bench": "load a server with streams and measure it",
    "sim": "run whole clusters under faults in virtual time, and check what clients get",
    "replay": "run a recording of the engine again and compare its answers",
    "keys": "make and show the API keys that clients use",
    "keygen": "make the secret that instances on several machines share",
    "models": "list, show and remove cached models",
    "warm": "fetch, convert and compile now what a first start would",
}


def main(argv: list[str] | None = None) -> None:
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """The exit status. A fault that a person can mend is one line, without a traceback."""
    parser = CommandParser(prog="onward", description="An LLM inference server whose streams carry on.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.error(f"there is no command {argv[0]}{did_you_mean(argv[0], COMMANDS)}")
    chosen = next((word for word in argv if word in COMMANDS), None)
    subparsers = {name: commands.add_parser(name, help=help_text) for name, help_text in COMMANDS.items()}
    if chosen is not None:
        module_of(chosen).add_arguments(subparsers[chosen])
        subparsers[chosen].check_flags(argv[argv.index(chosen) :])
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        # By the command, whose flags they might be; argparse itself would have the outermost parser say it.
        subparsers[args.command].refuse_unknown(unknown)
    try:
        return module_of(args.command).run(args)
    except OnwardError as error:
        print(f"onward {args.command}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def module_of(command: str) -> Any:
    return importlib.import_module(f"onward.cli.{command.replace('-', '_')}")


class CommandParser(argparse.ArgumentParser):
    """A mistake is one line that names what was meant, instead of the usage of every flag."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(USAGE_ERROR)

    def known_flags(self) -> set[str]:
        """Its own, and those of its subcommands."""
        known = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                known.update(*(parser.known_flags() for parser in action.choices.values()))
        return known

    def check_flags(self, arguments: list[str]) -> None:
        """Before they are parsed: the value behind an unknown flag would be taken for something else, and blamed."""
        known = self.known_flags()
        for argument in arguments[: arguments.index("--") if "--" in arguments else None]:
            # An unambiguous beginning of a flag stands for it.
            if argument.startswith("--") and not any(flag.startswith(argument.partition("=")[0]) for flag in known):
                self.refuse_unknown([argument])

    def refuse_unknown(self, arguments: list[str]) -> NoReturn:
        """`arguments`: what no flag and no position takes."""
        first = next((argument for argument in arguments if argument.startswith("-")), arguments[0])
        name = first.partition("=")[0]
        self.error(f"there is no flag {name}{did_you_mean(name, self.known_flags())}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What somebody may have meant who has written this word, as the end of a sentence."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


if __name__ == "__main__":
    main()
