"""A request's grammar in the library's own form. Finds only faults of form: whether it can be compiled shows later.

JSON is written in one way only, `{"a": 1, "b": [true, 2]}`: with free whitespace a model at temperature 1 may write blanks
until its tokens are used up. A schema that wants it otherwise can say so to the library, in its `x-guidance`.
"""

import json
from collections.abc import Callable
from typing import Any

import llguidance

from onward.grammar.grammar_errors import InvalidGrammar
from onward.grammar.lark import literal
from onward.grammar.structural_tag import structural_tag_to_lark
from onward.proto.sampling_params import Grammar

JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT = {"type": "object"}


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
