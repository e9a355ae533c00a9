"""What a matcher allows: all that it should, nothing else, and the same after any replay."""

import json
import re

import jsonschema
import pytest

from onward.grammar.grammar_compiler import GrammarCompiler
from onward.grammar.grammar_errors import InvalidGrammar, TokenNotAllowed
from onward.proto.sampling_params import Grammar
from onward.sim import vocabulary
from onward.text.tokenizer import Tokenizer
from tests.grammar.schemas import BOUNDED, grammars, schema_grammar, tokenizer, walk


def text_of(token_ids: list[int]) -> str:
    return tokenizer().decode(token_ids)


def written(text: str) -> list[int]:
    """As single characters, which no tokenizer would write."""
    return [token_id for character in text for token_id in tokenizer().encode(character, add_special_tokens=False)]


@pytest.mark.parametrize("name", BOUNDED)
def test_whatever_is_sampled_comes_to_an_end_and_satisfies_its_schema(name: str) -> None:
    for seed in range(12):
        token_ids, ended = walk(grammars().matcher(schema_grammar(name)), seed)
        assert ended, text_of(token_ids)
        jsonschema.Draft202012Validator(BOUNDED[name]).validate(json.loads(text_of(token_ids)))


@pytest.mark.parametrize("name", BOUNDED)
def test_a_matcher_that_replays_any_part_of_an_output_stands_where_the_first_one_stood(name: str) -> None:
    token_ids, _ = walk(grammars().matcher(schema_grammar(name)), seed=3)
    first = grammars().matcher(schema_grammar(name))
    for cut, token_id in enumerate(token_ids):
        again = grammars().matcher(schema_grammar(name), token_ids[:cut])
        assert (again.mask(), again.done, again.position) == (first.mask(), first.done, cut)
        first.advance(token_id)
    assert grammars().matcher(schema_grammar(name), token_ids).done == first.done


def test_what_was_compiled_elsewhere_gives_the_same_masks() -> None:
    token_ids, _ = walk(grammars().matcher(schema_grammar("nested")), seed=5)
    other = GrammarCompiler(tokenizer()).matcher(schema_grammar("nested"), token_ids[:-1])
    assert other.mask() == grammars().matcher(schema_grammar("nested"), token_ids[:-1]).mask()


@pytest.mark.parametrize(
    ("grammar", "whole", "pattern"),
    [
        (Grammar("regex", "[0-9]{3}-[a-z]{2}"), "123-ab", "[0-9]{3}-[a-z]{2}"),
        (Grammar("choice", '["yes","no","caf\\u00e9 \\"x\\"\\n🌊"]'), 'café "x"\n🌊', 'yes|no|café "x"\n🌊'),
        (Grammar("choice", '["a\x7fb"]'), "a\x7fb", "a\x7fb"),
        (Grammar("grammar", 'start: "a" "b"* "c"'), "abbbc", "ab*c"),
        (Grammar("grammar", 'root ::= "x" [0-9] "y"'), "x7y", "x[0-9]y"),
        (Grammar("json_schema", '{"const": [1, {"a": "b"}]}'), '[1, {"a": "b"}]', r'\[1, \{"a": "b"\}\]'),
    ],
)
def test_each_kind_of_grammar_ends_where_nothing_can_follow(grammar: Grammar, whole: str, pattern: str) -> None:
    matcher = grammars().matcher(grammar)
    for token_id in written(whole):
        assert not matcher.done
        assert matcher.mask().allows(token_id) or len(matcher.mask().token_ids()) == 1, "or there is a longer token"
        matcher.advance(token_id)
    assert matcher.done
    for seed in range(8):
        token_ids, ended = walk(grammars().matcher(grammar), seed)
        assert ended
        assert re.fullmatch(pattern, text_of(token_ids))


def test_an_output_may_end_where_it_is_complete_and_go_on_where_it_can() -> None:
    matcher = grammars().matcher(Grammar("regex", "(ab)+"))
    ends = []
    for token_id in written("abab"):
        ends.append(matcher.mask().may_end)
        matcher.advance(token_id)
    assert [*ends, matcher.mask().may_end] == [False, False, True, False, True]
    assert not matcher.done


def test_any_json_object_is_one() -> None:
    num_ended = 0
    for seed in range(10):
        token_ids, ended = walk(grammars().matcher(Grammar("json_object")), seed, max_tokens=30)
        num_ended += ended
        assert text_of(token_ids).startswith("{")
        if ended:
            assert isinstance(json.loads(text_of(token_ids)), dict)
    assert num_ended


@pytest.mark.parametrize("trigger", ["<call=", "<|im_start|>"])
def test_text_is_free_until_a_trigger_and_bound_behind_it(trigger: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tag = {"structures": [{"begin": trigger + "add>", "schema": schema, "end": "</call>"}], "triggers": [trigger]}
    matcher = grammars().matcher(Grammar("structural_tag", json.dumps(tag)))
    matcher.replay(tokenizer().encode("Let me see. ", add_special_tokens=False))
    assert matcher.mask().may_end
    matcher.replay(tokenizer().encode(trigger, add_special_tokens=False))
    assert not matcher.mask().may_end
    with pytest.raises(TokenNotAllowed):
        grammars().matcher(Grammar("structural_tag", json.dumps(tag)), tokenizer().encode(trigger + "sub>"))
    matcher.replay(written('add>{"a": 1}</call>'))
    assert matcher.mask().may_end


@pytest.mark.parametrize(
    "character",
    ["\x00", "\n", "\x1f", "\\", '"', "\x7f", "\x80", "\x85", "\u2028", "\ufeff"],
    ids=lambda one: f"{ord(one):04x}",
)
def test_a_choice_or_a_tag_may_have_any_character(character: str) -> None:
    choices = Grammar("choice", json.dumps([f"{character}x", f"x{character}"]))
    assert grammars().matcher(choices, written(f"x{character}")).done
    schema = {"const": "a" + character}
    tag = {"structures": [{"begin": f"<{character}>", "schema": schema, "end": f"{character}."}], "triggers": ["<"]}
    matcher = grammars().matcher(Grammar("structural_tag", json.dumps(tag)), written(f'<{character}>"a'))
    assert not matcher.mask().may_end


def test_a_token_that_is_not_allowed_is_named_by_its_position() -> None:
    with pytest.raises(TokenNotAllowed) as refused:
        grammars().matcher(Grammar("regex", "abc"), written("abx"))
    assert refused.value.position == 2
    with pytest.raises(TokenNotAllowed):
        grammars().matcher(Grammar("regex", "abc"), written("abcd"))
    with pytest.raises(TokenNotAllowed):
        grammars().matcher(Grammar("regex", "abc"), [tokenizer().vocab_size])


def test_special_tokens_are_no_text() -> None:
    mask = grammars().matcher(Grammar("regex", "(.|\n)*")).mask()
    assert not [token_id for token_id in tokenizer().special_ids if mask.allows(token_id)]


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (Grammar("json_schema", '{"contains": {}}'), "contains"),
        (Grammar("json_schema", '{"type": "string", "format": "idn-email"}'), "idn-email"),
        (Grammar("json_schema", '{"if": {}, "then": {}}'), "then"),
        (Grammar("json_schema", '{"$ref": "http://example.com/x"}'), "example.com"),
        (Grammar("json_schema", '{"type": "string", "minLength": 5, "maxLength": 3}'), "minLength"),
        (Grammar("json_schema", "false"), "false"),
        (Grammar("json_schema", "[1]"), "object"),
        (Grammar("json_schema", "{"), "JSON"),
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("regex", ""), "empty"),
        (Grammar("grammar", "start: foo"), "foo"),
        (Grammar("structural_tag", '{"structures": [], "triggers": []}'), "structures"),
        (
            Grammar("structural_tag", '{"structures": [{"begin": "a", "end": "", "schema": {}}], "triggers": ["b"]}'),
            "begin",
        ),
        (Grammar("structural_tag", '{"structures": [{"begin": "a"}], "triggers": []}'), "end"),
    ],
)
def test_a_grammar_that_cannot_be_used_says_why(grammar: Grammar, word: str) -> None:
    with pytest.raises(InvalidGrammar, match=word):
        grammars().check(grammar)


def test_only_the_grammars_used_last_are_kept_compiled() -> None:
    few = GrammarCompiler(Tokenizer(vocabulary.model_text().tokenizer or ""), max_compiled=3)
    for index in range(10):
        few.matcher(Grammar("regex", f"a{{{index + 1}}}"))
        assert few.num_compiled == min(index + 1, 3)
