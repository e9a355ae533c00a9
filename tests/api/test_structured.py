"""The fields that say what an answer must look like: the grammar they come to, or an error that names the field."""

import json
from typing import Any

import msgspec
import pytest

from onward.api.requests.structured_outputs import MAX_GUIDED_CHOICES, StructuredOutputFields, requested_grammar
from onward.errors import InvalidRequest
from onward.proto.sampling_params import MAX_GRAMMAR_BYTES, Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAGS = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA} | fields}}


FORMAT = {"type": "const_string", "value": "a"}


def fields_of(body: dict[str, Any]) -> StructuredOutputFields:
    return msgspec.json.decode(msgspec.json.encode(body), type=StructuredOutputFields)


@pytest.mark.parametrize(
    ("body", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (json_schema(strict=True, description="d"), "json_schema", SCHEMA),
        (json_schema(strict=None), "json_schema", SCHEMA),
        ({"response_format": {"type": "structural_tag"} | TAGS}, "structural_tag", TAGS),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_choice": ["yes", "no"]}, "choice", ["yes", "no"]),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, "structural_tag", TAGS),
        ({"response_format": {"type": "structural_tag", "format": FORMAT}}, "structural_tag", {"format": FORMAT}),
        ({"response_format": {"type": "text"}, "guided_choice": ["a"]}, "choice", ["a"]),
    ],
)
def test_every_way_to_ask_comes_to_one_grammar(body: dict[str, Any], kind: str, source: Any) -> None:
    wanted = requested_grammar(fields_of(body))
    assert wanted is not None
    assert wanted.grammar.kind == kind
    assert (json.loads(wanted.grammar.source) if source else wanted.grammar.source) == source


def test_the_schema_of_a_json_object_is_kept() -> None:
    wanted = requested_grammar(fields_of({"response_format": {"type": "json_object", "schema": SCHEMA}}))
    assert wanted is not None
    assert (wanted.grammar.kind, json.loads(wanted.grammar.source)) == ("json_schema", SCHEMA)
    assert wanted.field_path == "response_format.schema"


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"guided_regex": "[a-z]+"}, Grammar("regex", "[a-z]+")),
        ({"guided_grammar": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
        ({"structured_outputs": {"regex": "a|b"}}, Grammar("regex", "a|b")),
        ({"regex": "a|b"}, Grammar("regex", "a|b")),
        ({"ebnf": 'root ::= "a"'}, Grammar("grammar", 'root ::= "a"')),
        ({"grammar": 'root ::= "a"'}, Grammar("grammar", 'root ::= "a"')),
        ({"structured_outputs": {"grammar": "x", "disable_any_whitespace": False}}, Grammar("grammar", "x")),
    ],
)
def test_expressions_and_grammars_are_taken_as_they_are(body: dict[str, Any], grammar: Grammar) -> None:
    wanted = requested_grammar(fields_of(body))
    assert wanted is not None
    assert wanted.grammar == grammar


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"grammar": ""},
        {"response_format": {"type": "text"}},
        {"guided_json": None},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_most_requests_have_none(body: dict[str, Any]) -> None:
    assert requested_grammar(fields_of(body)) is None


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, "response_format.value"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema"),
        ({"regex": ""}, "regex"),
        ({"regex": "a", "guided_regex": "b"}, "regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (json_schema(name=None), "response_format.json_schema.name"),
        (json_schema(name="x" * 65), "response_format.json_schema.name"),
        (json_schema(strict="yes"), "response_format.json_schema.strict"),
        (json_schema(schema=None), "response_format.json_schema.schema"),
        (json_schema(schema=[1]), "response_format.json_schema.schema"),
        (json_schema(schema={"description": "x" * MAX_GRAMMAR_BYTES}), "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["x"] * (MAX_GUIDED_CHOICES + 1)}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}, "guided_grammar"),
        ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": 5}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(body: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        requested_grammar(fields_of(body))
    assert refused.value.param == path
    assert len(refused.value.message) < 500
