"""The command line's parser: a mistake is one line that names what was meant, instead of the usage of every flag."""

import argparse
import difflib
import sys
from collections.abc import Iterable
from typing import NoReturn

USAGE_ERROR = 2


class CommandParser(argparse.ArgumentParser):
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
