"""The `onward` command. Each subcommand is a module with `add_arguments` and `run`, imported only when it is used."""

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
    "router": "serve many instances under one address, and move streams between them",
    "up": "start a cluster on this machine: a router with prefill and decode instances",
    "status": "show the instances behind a router, or one instance",
    "top": "show the live state of a router or an instance in the terminal",
    "drain": "stop new requests to an instance, and wait until it is idle",
    "upgrade": "replace the instances of `onward up` one by one, and keep their KV caches",
    "scale": "change the number of instances of `onward up`",
    "undrain": "let a drained instance accept requests again",
    "chat": "talk to a server in the terminal",
    "run-batch": "process a file of requests in the format of OpenAI's batches",
    "bench": "measure the speed of a server",
    "sim": "simulate clusters with injected faults, and check every output",
    "replay": "replay a recording of `onward serve --record` and compare the outputs",
    "keys": "add, remove and list API keys for clients",
    "keygen": "create the shared secret of a cluster on several machines",
    "models": "list, show and remove cached models",
    "warm": "download, convert and compile in advance, so that the first start is fast",
    "doctor": "check this machine, and show the flags that suit it",
    "completion": "print a completion script for bash, zsh or fish",
}


def main(argv: list[str] | None = None) -> None:
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Runs a command and returns its exit status. An error that a user can fix is printed as one line, without a
    traceback."""
    chosen = next((word for word in argv if word in COMMANDS), None)
    parser, subparsers = build_parser([] if chosen is None else [chosen])
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.error(f"there is no command {argv[0]}{did_you_mean(argv[0], COMMANDS)}")
    if chosen is not None:
        subparsers[chosen].check_flags(argv[argv.index(chosen) :])
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        # The command's parser reports them, because it knows similar flags. argparse would let the outermost parser do
        # it.
        subparsers[args.command].refuse_unknown(unknown)
    try:
        return module_of(args.command).run(args)
    except OnwardError as error:
        print(f"onward {args.command}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser(commands: Iterable[str]) -> "tuple[CommandParser, dict[str, CommandParser]]":
    """Returns the parser of `onward` and the parsers of its subcommands. Only the subcommands in `commands` have
    arguments, because the modules that declare them take time to import."""
    parser = CommandParser(prog="onward", description="An LLM inference server with exact stream recovery.")
    parser.add_argument("--version", action="version", version=__version__)
    group = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    subparsers = {name: group.add_parser(name, help=help_text) for name, help_text in COMMANDS.items()}
    for name in commands:
        module_of(name).add_arguments(subparsers[name])
    _describe_subcommands(parser)
    return parser, subparsers


def _describe_subcommands(parser: argparse.ArgumentParser) -> None:
    """Shows a command's line in the list of commands also in the command's own help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                subparser = action.choices[listed.dest]
                if subparser.description is None and listed.help:
                    subparser.description = f"{listed.help[0].upper()}{listed.help[1:]}."
                _describe_subcommands(subparser)


def module_of(command: str) -> Any:
    return importlib.import_module(f"onward.cli.{command.replace('-', '_')}")


class CommandParser(argparse.ArgumentParser):
    """Reports a mistake in one line that suggests what was meant, instead of the usage of every flag."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(USAGE_ERROR)

    def known_flags(self) -> set[str]:
        """Returns the flags of this parser and of its subcommands."""
        known = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                known.update(*(parser.known_flags() for parser in action.choices.values()))
        return known

    def check_flags(self, arguments: list[str]) -> None:
        """Refuses unknown flags before arguments are parsed. The parser would take the value after an unknown flag for
        another argument, and report that instead of the flag."""
        known = self.known_flags()
        for argument in arguments[: arguments.index("--") if "--" in arguments else None]:
            # argparse accepts an unambiguous beginning of a flag.
            if argument.startswith("--") and not any(flag.startswith(argument.partition("=")[0]) for flag in known):
                self.refuse_unknown([argument])

    def refuse_unknown(self, arguments: list[str]) -> NoReturn:
        """Reports `arguments` that match no flag and no positional argument, and exits."""
        first = next((argument for argument in arguments if argument.startswith("-")), arguments[0])
        name = first.partition("=")[0]
        self.error(f"there is no flag {name}{did_you_mean(name, self.known_flags())}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a suggestion for a misspelled word, as the end of a sentence. Empty if no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


if __name__ == "__main__":
    main()
