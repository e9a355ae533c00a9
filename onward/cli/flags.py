"""Command-line flags, generated from a config dataclass: each flag is declared once, with its help text."""

import argparse
import dataclasses
import types
import typing
from typing import Any

from onward.cli.flag_groups import OTHERS, Groups
from onward.config import with_defaults


def add_flags(
    parser: argparse._ActionsContainer, config: type[Any], skip: tuple[str, ...] = (), *, one_value_each: bool = False
) -> None:
    """Adds a flag for each field of `config`. With `one_value_each` no flag takes several values at once, so that
    positional arguments may follow any flag."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name in skip:
            continue
        default = field.default if field.default is not dataclasses.MISSING else None
        help_text = field.metadata["help"].replace("%", "%%")
        on_cuda = field.metadata.get("on_cuda")
        known = f"{_shown(default)}; on CUDA {_shown(on_cuda)}" if on_cuda is not None else _shown(default)
        shown = f"{help_text} [{known}]" if default not in (None, "") else help_text
        names = ["--" + field.name.replace("_", "-"), *filter(None, [field.metadata["alias"]])]
        kind = _kind_of(hints[field.name], field.name)
        if field.metadata["nargs"] is not None and not one_value_each:
            kind |= {"action": "extend", "nargs": field.metadata["nargs"]}
        parser.add_argument(*names, default=None, help=shown, dest=field.name, **kind)


def _shown(default: Any) -> str:
    """Returns a default as `--help` shows it."""
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


def add_grouped_flags(
    parser: argparse.ArgumentParser,
    config: type[Any],
    groups: Groups,
    skip: tuple[str, ...] = (),
    *,
    one_value_each: bool = False,
) -> None:
    """Adds flags like `add_flags`, in the order and under the titles of `groups`. Fields that are in no group follow
    under `OTHERS`."""
    names = [field.name for field in dataclasses.fields(config)]
    named = {name for group in groups.values() for name in group}
    for title, group in {**groups, OTHERS: tuple(name for name in names if name not in named)}.items():
        shown = [name for name in group if name not in skip]
        if shown:
            section = parser.add_argument_group(title)
            for name in shown:
                others = tuple(other for other in names if other != name)
                add_flags(section, config, skip=others, one_value_each=one_value_each)


def from_args(args: argparse.Namespace, config: type[Any]) -> Any:
    """Returns the config with the values given on the command line. Other fields have their defaults."""
    given = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(config)}
    return with_defaults(config, {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None})


def format_flags(args: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """Returns the given flags among `names`, as command-line arguments."""
    flags: list[str] = []
    for name in names:
        value, flag = getattr(args, name, None), name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            for item in value if isinstance(value, list) else [value]:
                flags += [f"--{flag}", str(item)]
    return flags


def _kind_of(hint: Any, name: str) -> dict[str, Any]:
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"choices": arguments}
    if origin is tuple:
        return {"action": "append", "metavar": "VALUE"}
    if origin in (types.UnionType, typing.Union):
        return _kind_of(next(a for a in arguments if a is not type(None)), name)
    if name.endswith("_s"):
        return {"type": hint, "metavar": "SECONDS"}
    return {"type": hint, "metavar": "N" if hint in (int, float) else "VALUE"}
