"""The page of all commands and flags, from the parsers of `onward`."""

import argparse
import re
from collections.abc import Iterator

from onward.cli.main import COMMANDS, build_parser
from onward.version import __version__

from .markdown import NOTE, code, sentence, table

_VALUE = re.compile(r"\s*\[([^\[\]]*)\]$")
_WORDS = re.compile(r"\s*\(default: ([^()]*)\)")
"""How help texts give defaults: a value in brackets, or words."""
_SWITCH = {"True": "on", "False": "off", "False; on CUDA True": "off; on CUDA on"}


def render() -> str:
    _, parsers = build_parser(COMMANDS)
    parts = [
        "# Commands and flags\n",
        NOTE.format(version=__version__) + " `onward COMMAND --help` shows the same in a terminal.\n",
        "A flag may be written `--flag value` or `--flag=value`. A flag with a `--no-` form is a switch.\n",
    ]
    for name, parser in parsers.items():
        parts.extend(_sections(f"onward {name}", COMMANDS[name], parser, level=2))
    return "\n".join(parts)


def _sections(name: str, summary: str, parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield f"{'#' * level} {name}\n"
    described = (parser.description or summary).replace("%(prog)s", name)
    yield sentence(described.rstrip(".")) + ".\n"
    nested: list[argparse._SubParsersAction[argparse.ArgumentParser]] = []
    groups: list[tuple[str, list[argparse.Action]]] = []
    for group in parser._action_groups:
        shown: list[argparse.Action] = []
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                nested.append(action)
            elif not isinstance(action, argparse._HelpAction):
                shown.append(action)
        if shown:
            groups.append((group.title or "", shown))
    for title, actions in groups:
        if len(groups) > 1:
            yield f"**{sentence(title)}**\n"
        yield table(("flag", "default", "meaning"), (_row(action) for action in actions))
    for action in nested:
        summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for chosen, subparser in action.choices.items():
            yield from _sections(f"{name} {chosen}", summaries[chosen], subparser, level + 1)


def _row(action: argparse.Action) -> tuple[str, str, str]:
    meaning = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    default = ""
    if found := _VALUE.search(meaning):
        default, meaning = code(_SWITCH.get(found[1], found[1])), meaning[: found.start()]
    elif found := _WORDS.search(meaning):
        default, meaning = found[1], meaning[: found.start()] + meaning[found.end() :]
    if action.choices is not None and action.option_strings:
        meaning = f"{meaning} ({', '.join(code(str(choice)) for choice in action.choices)})"
    return _names(action), default, sentence(meaning.strip())


def _names(action: argparse.Action) -> str:
    metavar = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar
    if not action.option_strings:
        return code(str(metavar or action.dest))
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return ", ".join(code(name) for name in action.option_strings)
    value = metavar or ("NAME" if action.choices is not None else action.dest.upper())
    return ", ".join(code(f"{name} {value}") for name in action.option_strings)
