"""Schemas whose instances are bounded, so that every output under them comes to an end, and a walk through a grammar."""

import functools
import json
import random
from typing import Any

from onward.grammar.grammar_compiler import GrammarCompiler
from onward.grammar.matcher import GrammarMatcher
from onward.proto.sampling_params import Grammar
from onward.text.tokenizer import Tokenizer
from tests.models.default_model import default_model

NAME = {"type": "string", "minLength": 1, "maxLength": 8}
BOUNDED: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {
            "name": NAME,
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "alive": {"type": "boolean"},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "where": {
                "type": "object",
                "properties": {"city": NAME, "at": {"type": "array", "items": {"enum": [0, 1, -1]}, "maxItems": 2}},
                "required": ["city", "at"],
                "additionalProperties": False,
            },
            "note": {"anyOf": [NAME, {"type": "null"}]},
        },
        "required": ["where", "note"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"const": "x y"}, {"type": "integer", "minimum": -5, "maximum": 5}],
        "items": False,
        "minItems": 3,
    },
    "reference": {
        "$defs": {"level": {"enum": ["low", "high"]}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/level"}, "b": {"$ref": "#/$defs/level"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
    "date": {"type": "string", "format": "date"},
    "number": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "constant": {"const": {"a": [1, 2, {"b": None}]}},
    "all": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 17}]},
}


def schema_grammar(name: str) -> Grammar:
    return Grammar("json_schema", json.dumps(BOUNDED[name]))


@functools.cache
def tokenizer() -> Tokenizer:
    model = default_model("int8")
    return Tokenizer.from_file(f"{model.folder}/{model.tokenizer}")


@functools.cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(tokenizer())


def walk(matcher: GrammarMatcher, seed: int, max_tokens: int = 400) -> tuple[list[int], bool]:
    """Any allowed token, each as likely as the others: a model that has no idea. Whether it has come to an end."""
    choose, token_ids = random.Random(seed), []
    while len(token_ids) < max_tokens:
        mask = matcher.mask()
        if mask.may_end and choose.random() < 0.3:
            return token_ids, True
        token_ids.append(choose.choice(mask.token_ids()))
        matcher.advance(token_ids[-1])
        if matcher.done:
            return token_ids, True
    return token_ids, False
