"""Structural tags in XGrammar's form: which outputs each format allows, and what is refused by name."""

import json
from typing import Any

import pytest

from onward.grammar.grammar_errors import InvalidGrammar
from onward.grammar.matcher import TokenNotAllowed
from onward.proto.sampling_params import Grammar
from tests.grammar.test_matcher import grammars, tokenizer, written

Part = dict[str, Any]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
NUMBER: Part = {"type": "json_schema", "json_schema": SCHEMA, "style": "json"}
ANY: Part = {"type": "any_text"}
ADD: Part = {"type": "tag", "begin": "<f=add>", "content": NUMBER, "end": "</f>"}
MUL: Part = {"begin": "<f=mul>", "content": {"type": "regex", "pattern": "[0-9/]+"}, "end": ["</f>", "<end>"]}
TRIGGERED: Part = {"type": "triggered_tags", "triggers": ["<f="], "tags": [ADD, MUL], "excludes": []}
SEPARATED: Part = {"type": "tags_with_separator", "tags": [ADD, MUL], "separator": ", "}
FIRST, ONCE = {"at_least_one": True}, {"stop_after_first": True}
ADDED, MULTIPLIED = '<f=add>{"a": 1}</f>', "<f=mul>1/2<end>"


def const(value: str) -> Part:
    return {"type": "const_string", "value": value}


def sequence(*elements: Part) -> Part:
    return {"type": "sequence", "elements": [*elements]}


def grammar(part: Part) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": part}))


def may_end(part: Part, text: str) -> bool:
    """Whether the format allows the text, and the output may end behind it. Raises if the text is not allowed."""
    matcher = grammars().matcher(grammar(part), written(text) if text else [])
    return matcher.done or matcher.mask().may_end


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (const('say "a/b"\\'), 'say "a/b"\\'),
        (NUMBER, '{"a": 5}'),
        ({"type": "or", "elements": [const("yes"), NUMBER]}, '{"a": 5}'),
        (sequence(const("a"), {"type": "regex", "pattern": "[0-9/]+\\."}, ANY), "a12/3. free"),
        (sequence({"type": "tag", "begin": "<t>", "content": ANY, "end": "</t>"}, TRIGGERED), f"<t>x y</t>hi {ADDED}"),
        ({"type": "tag", "begin": "<t>", "content": ANY, "end": ["</t>", "<u>"]}, "<t>x <u>"),
        ({"type": "regex", "pattern": "a\n\\\n/\\/\\\\b"}, "a\n\n//\\b"),
        (TRIGGERED, "no call"),
        (TRIGGERED, f"first {ADDED} then {MULTIPLIED} and so on"),
        (TRIGGERED | FIRST, f"{ADDED} and so on {MULTIPLIED}"),
        (TRIGGERED | ONCE, "no call"),
        (TRIGGERED | ONCE, f"first {MULTIPLIED}"),
        (sequence(TRIGGERED | FIRST | ONCE, const(".")), f"{MULTIPLIED}."),
        (SEPARATED, ""),
        (SEPARATED, f"{ADDED}, {MULTIPLIED}, {ADDED}"),
        (SEPARATED | FIRST | ONCE, ADDED),
    ],
)
def test_an_output_of_the_format_is_allowed(part: Part, text: str) -> None:
    assert may_end(part, text)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (NUMBER, '{"a": '),
        (TRIGGERED, f"first {ADDED[:-4]}"),
        (TRIGGERED | FIRST, ""),
        (SEPARATED | FIRST, ""),
        (SEPARATED, f"{ADDED}, "),
        ({"type": "tag", "begin": "<t>", "content": ANY, "end": "</t>"}, "<t>x"),
    ],
)
def test_an_output_that_is_not_complete_must_not_end(part: Part, text: str) -> None:
    assert not may_end(part, text)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (const("a"), "b"),
        (TRIGGERED, "first <f=sub>"),
        (TRIGGERED | FIRST, "first"),
        (TRIGGERED | ONCE, f"{ADDED} more"),
        (TRIGGERED | FIRST | ONCE, f"{ADDED}, {ADDED}"),
        (SEPARATED, f"{ADDED} {ADDED}"),
        (SEPARATED | ONCE, f"{ADDED}, {ADDED}"),
        ({"type": "tag", "begin": "<t>", "content": ANY, "end": "</t>"}, "<t>x</t>y"),
    ],
)
def test_another_output_is_not_allowed(part: Part, text: str) -> None:
    with pytest.raises(TokenNotAllowed):
        may_end(part, text)


def test_special_tokens_may_begin_and_end_a_tag() -> None:
    part = {"type": "tag", "begin": "<|im_start|>", "content": ANY, "end": "<|im_end|>"}
    start, text, end = (
        tokenizer().encode(value, add_special_tokens=False) for value in ("<|im_start|>", "x", "<|im_end|>")
    )
    assert not grammars().matcher(grammar(part), [*start, *text]).mask().may_end
    assert grammars().matcher(grammar(part), [*start, *text, *end]).done


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": SCHEMA}, "qwen_xml_parameter"),
        ({"type": "grammar", "grammar": "root ::= 'a'"}, "'grammar'"),
        (ANY | {"excludes": ["a"]}, "excludes"),
        (NUMBER | {"style": "qwen_xml"}, "qwen_xml"),
        (TRIGGERED | {"surprise": 1}, "surprise"),
        (TRIGGERED | {"triggers": ["<g"]}, r"format\.tags\[0\]\.begin"),
        (TRIGGERED | {"tags": []}, r"format\.tags"),
        (sequence(), r"format\.elements"),
        (sequence(ANY, const("a")), r"format\.elements\[0\]: any_text"),
        (sequence(TRIGGERED, const("a")), r"format\.elements\[0\]: triggered_tags"),
        ({"type": "regex", "pattern": ""}, r"format\.pattern"),
        ({"type": "regex", "pattern": "("}, "regex|group"),
        ({"type": "regex", "pattern": "a\\"}, r"format\.pattern"),
    ],
)
def test_what_is_not_supported_is_named(part: Part, word: str) -> None:
    with pytest.raises(InvalidGrammar, match=word):
        grammars().check(grammar(part))


def test_a_format_that_is_nested_too_deeply_is_refused() -> None:
    part = const("a")
    for _ in range(40):
        part = sequence(part)
    with pytest.raises(InvalidGrammar, match="deep"):
        grammars().check(grammar(part))
