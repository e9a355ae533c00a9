"""A request's grammar in the library's own form. Finds only faults of form: whether it can be compiled shows later.

JSON is written in one way only, `{"a": 1, "b": [true, 2]}`: with free whitespace a model at temperature 1 may write blanks
until its tokens are used up. A schema that wants it otherwise can say so to the library, in its `x-guidance`.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import llguidance
import msgspec

from onward.grammar.grammar_errors import InvalidGrammar
from onward.proto.sampling_params import Grammar

JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT = {"type": "object"}
_DELETE = "\x7f"


def to_llguidance(grammar: Grammar, is_special: Callable[[str], bool]) -> str:
    """`is_special` tells the names of the model's special tokens, which are no text."""
    match grammar.kind:
        case "json_object":
            return _of_schema(ANY_OBJECT)
        case "json_schema":
            return _of_schema(parse_json(grammar.source))
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            literals = [literal(choice) for choice in parse_json(grammar.source)]
            return llguidance.LLMatcher.grammar_from_lark(f"start: {' | '.join(literals)}")
        case "grammar":
            return _of_lark_or_gbnf(grammar.source)
        case "structural_tag":
            lark = structural_tag_to_lark(parse_json(grammar.source), JSON_STYLE, is_special)
            return llguidance.LLMatcher.grammar_from_lark(lark)


def parse_json(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"it is not JSON: {error}") from error


def _of_schema(schema: Any) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidGrammar(
            "a schema is a JSON object" if schema is not False else "nothing satisfies the schema false"
        )
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
    except ValueError as error:
        raise InvalidGrammar(str(error)) from error


def _of_lark_or_gbnf(source: str) -> str:
    try:
        return llguidance.grammar_from("grammar", source)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(str(error)) from error


class TagStructure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: dict[str, Any] | bool


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Free text, but whatever follows a trigger must be one of the tags that begin with it.

    {"structures": [{"begin": "<call=add>", "schema": {...}, "end": "</call>"}], "triggers": ["<call="]}
    """

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


def literal(text: str) -> str:
    """A string in a Lark grammar that stands for exactly this text."""
    return _without_delete(json.dumps(text, ensure_ascii=False))


def json_value(value: Any) -> str:
    """A value behind `%json`."""
    return _without_delete(json.dumps(value))


def _without_delete(source: str) -> str:
    # JSON lets U+007F stand as it is. The library's lexer takes it for no character of a string.
    return source.replace(_DELETE, "\\u007f")
