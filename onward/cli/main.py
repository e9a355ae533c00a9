"""The `onward` command. Each subcommand is a module with `add_arguments` and `run`, imported only when it is asked for."""

import importlib
import sys
from typing import Any

from onward.cli.parser import CommandParser, did_you_mean
from onward.errors import OnwardError
from onward.version import __version__

COMMANDS = {
    "serve": "serve a model over HTTP",
    "router": "put one address in front of many instances, and carry their streams on",
    "up": "start a whole cluster on this machine: a router, prefill and decode instances",
    "status": "show the instances behind a router, or one instance",
    "drain": "let an instance take no more requests, and wait until it has none",
    "undrain": "let a drained instance take requests again",
    "chat": "talk to a server in the terminal",
    "run-batch": "answer a file of requests, as OpenAI's batches have them",
    "bench": "load a server with streams and measure it",
    "sim": "run whole clusters under faults in virtual time, and check what clients get",
    "replay": "run a recording of the engine again and compare its answers",
    "keys": "make and show the API keys that clients use",
    "keygen": "make the secret that instances on several machines share",
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


if __name__ == "__main__":
    main()
