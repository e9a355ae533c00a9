"""Structural tags: free text, but whatever follows a trigger must be one of the tags that begin with it.

{"structures": [{"begin": "<call=add>", "schema": {...}, "end": "</call>"}], "triggers": ["<call="]}
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from onward.grammar.grammar_errors import InvalidGrammar
from onward.grammar.lark import json_value, literal


class TagStructure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: dict[str, Any] | bool


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    structures: list[TagStructure]
    triggers: list[str]


def structural_tag_to_lark(source: Any, json_style: Mapping[str, Any], is_special: Callable[[str], bool]) -> str:
    """A grammar in the library's form of Lark: any text, then a tag, any number of times, then any text."""
    try:
        tag = msgspec.convert(source, StructuralTag)
    except msgspec.ValidationError as error:
        raise InvalidGrammar(str(error)) from error
    if not tag.structures:
        raise InvalidGrammar("structures: must not be empty")
    rules = [_rule(tag, index, json_style, is_special) for index in range(len(tag.structures))]
    names = " | ".join(f"tag_{index}" for index in range(len(rules)))
    return "\n".join([f"start: ({names})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules])


def _rule(tag: StructuralTag, index: int, json_style: Mapping[str, Any], is_special: Callable[[str], bool]) -> str:
    structure = tag.structures[index]
    trigger = next(
        (candidate for candidate in tag.triggers if candidate and structure.begin.startswith(candidate)), None
    )
    if trigger is None:
        raise InvalidGrammar(f"structures[{index}].begin: none of the triggers stands at its beginning")
    schema = structure.schema
    if isinstance(schema, dict):
        schema = {"x-guidance": dict(json_style)} | schema
    body = f"{_literal(structure.begin[len(trigger) :])} %json {json_value(schema)} {_literal(structure.end)}"
    if is_special(trigger):
        return f"tag_{index}: TEXT {trigger} {body}"
    return f"tag_{index}_trigger[lazy]: TEXT {_literal(trigger)}\ntag_{index}: tag_{index}_trigger {body}"


def _literal(text: str) -> str:
    return literal(text) if text else ""
