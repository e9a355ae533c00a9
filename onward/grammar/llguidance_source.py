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
from onward.grammar.structural_format import format_to_lark, json_value, literal
from onward.proto.sampling_params import Grammar

JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT = {"type": "object"}


def to_llguidance(grammar: Grammar, is_special: Callable[[str], bool]) -> str:
    """Returns the grammar in the form that the library compiles. `is_special` returns whether a name is that of a
    special token of the model, which is not text. Raises `InvalidGrammar` for faults of form."""
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
    """Returns a grammar in the library's Lark syntax: any text, then a tag, repeated, then any text. XGrammar's form has a
    `format` instead."""
    if isinstance(source, dict):
        if source.get("type") == "structural_tag":  # vLLM's `structured_outputs` repeats it
            source = {name: value for name, value in source.items() if name != "type"}
        if "format" in source:
            return format_to_lark(source, json_style, is_special)
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
