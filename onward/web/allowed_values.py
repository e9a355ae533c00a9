"""Finds the values that a field may have, if they are a closed set, by the field's path in the decoded type."""

import enum
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

_STEP = re.compile(r"\.(\w+)|\[")


def allowed_values(kind: Any, path: str) -> list[str]:
    """Returns the allowed values of the field at `path`, or an empty list if they are not a closed set. `path` has the
    form of msgspec's errors and begins with `$`."""
    kinds = [*_members(kind)]
    for step in _STEP.finditer(path):
        kinds = [*_fields(kinds, step[1])] if step[1] is not None else [*_elements(kinds)]
    return list(dict.fromkeys(value for kind in kinds for value in _values(kind)))


def _members(kind: Any) -> Iterator[Any]:
    """Yields each member of a union, or `kind` itself if it is not a union."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        for member in typing.get_args(kind):
            yield from _members(member)
    else:
        yield kind


def _fields(kinds: Iterable[Any], name: str) -> Iterator[Any]:
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _members(typing.get_type_hints(kind).get(name))


def _elements(kinds: Iterable[Any]) -> Iterator[Any]:
    for kind in kinds:
        if typing.get_origin(kind) in (list, tuple):
            yield from _members(typing.get_args(kind)[0])


def _values(kind: Any) -> list[str]:
    if typing.get_origin(kind) is typing.Literal:
        return [str(value) for value in typing.get_args(kind)]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [str(member.value) for member in kind]
    return []
